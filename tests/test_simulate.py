"""`parallax plan`: predictions for machines that one does not have, and what is said of input that is none."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from parallax import cli
from parallax.config import Config
from parallax.plan import ParameterProfile, Placement, Use
from parallax.planner import make_plan
from parallax.simulate import ARCHITECTURES, load_model, model_names, parse_sweep, predict, simulate
from parallax.topology import Topology

CLUSTER = Topology.of(machines=8, workers=6, bandwidth="100Gbit", latency="20us")
DESCRIPTION: dict[str, Any] = {
    "name": "mine",
    "unit": "words",
    "units_per_worker": 100,
    "compute_seconds": 0.05,
    "parameters": [
        {"name": "lstm", "elements": 10_000},
        {"name": "embedding", "rows": 50_000, "row_elements": 256, "alpha": 0.01},
    ],
}


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1, "one line, no traceback"
    return err


class TestModels:
    def test_four_of_the_paper(self) -> None:
        assert model_names() == ["inception3", "lm", "nmt", "resnet50"]

    @pytest.mark.parametrize(
        ("name", "dense", "sparse", "alpha"),
        [("lm", 9.4, 813.3, 0.02), ("nmt", 94.1, 74.9, 0.65), ("resnet50", 25.6, 0, 1), ("inception3", 23.8, 0, 1)],
    )
    def test_have_the_papers_elements_and_alpha(self, name: str, dense: float, sparse: float, alpha: float) -> None:
        profiles = load_model(name).profiles
        tables = [p for p in profiles if p.use is Use.LOOKUP]
        assert sum(p.numel for p in profiles if p.use is Use.DENSE) == pytest.approx(dense * 1e6, rel=1e-3)
        assert sum(p.numel for p in tables) == pytest.approx(sparse * 1e6, rel=1e-3)
        mean = sum(p.alpha * p.numel for p in profiles) / sum(p.numel for p in profiles)
        assert mean == pytest.approx(alpha, rel=0.01)

    def test_a_description_is_a_model_of_ones_own(self, tmp_path: Path) -> None:
        (tmp_path / "mine.json").write_text(json.dumps(DESCRIPTION))
        model = load_model(tmp_path / "mine.json")
        assert (model.name, model.unit, model.compute_seconds) == ("mine", "words", 0.05)
        assert [(p.name, p.shape, p.alpha) for p in model.profiles] == [
            ("lstm", (10_000,), 1.0),
            ("embedding", (50_000, 256), 0.01),
        ]

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"unit": None}, "'unit' is missing; expected name, unit, units_per_worker, compute_seconds, parameters"),
            ({"speed": 3}, "'speed' is unknown"),
            ({"compute_seconds": 0}, "compute_seconds: expected a number greater than 0, got 0"),
            ({"parameters": []}, "parameters: expected a list of objects, got []"),
            ({"parameters": [{"name": "a"}]}, "parameters[0]: 'rows' is missing"),
            ({"parameters": [{"name": "a", "elements": 1.5}]}, "parameters[0].elements: expected a whole number"),
            (
                {"parameters": [{"name": "a", "rows": 2, "row_elements": 2, "alpha": 2}]},
                "parameters[0].alpha: expected a fraction between 0 and 1, got 2",
            ),
            ({"coefficients": {"speed": 1}}, "coefficients: 'speed' is unknown"),
            ({"coefficients": {"copy": 0}}, "Coefficients.copy: expected a number greater than 0, got 0"),
        ],
    )
    def test_a_description_that_is_none(
        self, changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = {k: v for k, v in {**DESCRIPTION, **changes}.items() if v is not None}
        (tmp_path / "mine.json").write_text(json.dumps(wrong))
        err = _refused(capsys, "--model", str(tmp_path / "mine.json"))
        assert "mine.json" in err
        assert text in err


class TestPredictions:
    def test_one_worker_computes_and_updates(self) -> None:
        found = simulate(load_model("lm"), Topology.of())
        assert len({p.step_seconds for p in found.values()}) == 1
        assert all(p.bytes_per_machine == 0 for p in found.values())

    def test_the_order_of_the_paper(self) -> None:
        lm = simulate(load_model("lm"), CLUSTER)
        assert lm["hybrid"].throughput > lm["ps"].throughput > lm["allreduce"].throughput
        images = simulate(load_model("resnet50"), CLUSTER)
        assert images["hybrid"] == images["allreduce"]
        assert images["hybrid"].throughput > images["ps"].throughput

    def test_throughput_is_of_all_workers(self) -> None:
        model = load_model("resnet50")
        for p in simulate(model, CLUSTER).values():
            assert p.throughput == pytest.approx(48 * 64 / p.step_seconds)

    def test_dense_gradients_hide_behind_computing(self) -> None:
        model, slow = load_model("resnet50"), Topology.of(machines=2, bandwidth="1Gbit", latency="1us")
        busy = dataclasses.replace(model, compute_seconds=10.0)
        placements = {"dense": Placement.ALLREDUCE}
        [a, b] = (predict(m, slow, placements).step_seconds - m.compute_seconds for m in (model, busy))
        wire = 25.6e6 * 4 / 125e6
        assert a == pytest.approx(wire - 0.5 * model.compute_seconds, rel=0.02)
        assert b == pytest.approx(0, abs=0.02)

    def test_the_hybrid_is_the_plan_of_a_run(self) -> None:
        model = load_model("lm")
        plan = make_plan(
            model.profiles, world_size=48, config=Config(), topology=CLUSTER, coefficients=model.coefficients
        )
        assert simulate(model, CLUSTER)["hybrid"].placements == {p.name: p.placement for p in plan}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("machines=1..64", ("machines", [1, 2, 4, 8, 16, 32, 64])),
        ("machines=3..10", ("machines", [3, 6, 10])),
        ("machines=5..5", ("machines", [5])),
        ("workers=1,2,6", ("workers", [1, 2, 6])),
    ],
)
def test_sweeps(text: str, expected: tuple[str, list[int]]) -> None:
    assert parse_sweep(text) == expected


class TestCommand:
    CLUSTER = ("--machines", "8", "--workers", "6", "--bandwidth", "100Gbit", "--latency", "20us")

    def test_a_table_and_the_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = _plan(capsys, "--model", "lm", *self.CLUSTER).splitlines()
        assert lines[0] == "lm on 8 x 6 workers, predicted"
        assert lines[1].split() == ["architecture", "step", "words/s", "bytes/machine"]
        assert [line.split()[0] for line in lines[2:5]] == list(ARCHITECTURES)
        assert lines[6].startswith("plan for 48 workers, architecture hybrid")
        assert "predicted" in lines[7]

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        data = json.loads(_plan(capsys, "--model", "lm", *self.CLUSTER, "--json"))
        assert set(data) == {"architectures", "placements"}
        assert set(data["architectures"]) == {"hybrid", "ps", "allreduce"}
        for figures in data["architectures"].values():
            assert set(figures) == {"step_seconds", "throughput", "bytes_per_machine"}
        assert data["placements"]["dense"] == "allreduce"
        assert data["placements"]["embedding.weight"] == "sharded"
        predicted = simulate(load_model("lm"), CLUSTER)["hybrid"].step_seconds
        assert data["architectures"]["hybrid"]["step_seconds"] == pytest.approx(predicted)

    def test_a_sweep(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = _plan(capsys, "--model", "nmt", "--sweep", "machines=1..4").splitlines()
        assert lines[1].split()[0] == "machines"
        assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4"]
        data = json.loads(_plan(capsys, "--model", "nmt", "--sweep", "workers=1,3", "--json"))
        assert [entry["workers"] for entry in data["sweep"]] == [1, 3]
        assert set(data["sweep"][0]) == {"workers", "architectures", "placements"}

    def test_a_profile_of_a_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        profiles = [
            ParameterProfile(name="table", shape=(1000, 64), itemsize=4, use=Use.LOOKUP, num_rows_touched=10),
            ParameterProfile(name="head", shape=(64, 10), itemsize=4, use=Use.DENSE),
        ]
        saved = make_plan(profiles, world_size=2, config=Config(), topology=Topology.of(machines=2))
        saved.save(tmp_path / "plan.json")
        path = str(tmp_path / "plan.json")
        data = json.loads(_plan(capsys, "--profile", path, "--compute", "20ms", "--json"))
        step = data["architectures"]["hybrid"]["step_seconds"]
        assert data["placements"].keys() == {"table", "head"}
        assert 0.02 < step < 0.03
        assert data["architectures"]["hybrid"]["throughput"] == pytest.approx(2 / step)  # the topology of the run
        more = ("--machines", "8", "--units", "32", "--json")
        data = json.loads(_plan(capsys, "--profile", path, "--compute", "20ms", *more))
        step = data["architectures"]["ps"]["step_seconds"]
        assert data["architectures"]["ps"]["throughput"] == pytest.approx(8 * 32 / step)
        assert "does not say how long a step computes; give --compute" in _refused(capsys, "--profile", path)

    def test_measured_links_but_other_counts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "links.json").write_text(CLUSTER.to_json())
        links = ("--topology", str(tmp_path / "links.json"))
        said = _plan(capsys, "--model", "lm", *self.CLUSTER, "--json")
        assert _plan(capsys, "--model", "lm", *links, "--json") == said
        slower = json.loads(_plan(capsys, "--model", "lm", *links, "--bandwidth", "1Gbit", "--json"))
        assert slower["architectures"]["ps"]["step_seconds"] > json.loads(said)["architectures"]["ps"]["step_seconds"]
        assert _plan(capsys, "--model", "lm", *links, "--machines", "3").startswith("lm on 3 x 6 workers")

    def test_a_placement_is_fixed(self, capsys: pytest.CaptureFixture[str]) -> None:
        data = json.loads(_plan(capsys, "--model", "lm", *self.CLUSTER, "--place", "soft*=gather", "--json"))
        assert data["placements"]["softmax.weight"] == "gather"
        assert data["placements"]["embedding.weight"] == "sharded"

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--model", "vgg"), "model: expected inception3 | lm | nmt | resnet50 or a file with a description, got"),
            (("--model", "lm", "--bandwidth", "fast"), "bandwidth: expected bits or bytes per second"),
            (("--model", "lm", "--latency", "3"), "latency: expected a time such as"),
            (("--model", "lm", "--compute", "3"), "--compute: expected a time such as"),
            (("--model", "lm", "--sweep", "racks=1..2"), "--sweep: expected e.g. machines=1..64"),
            (("--model", "lm", "--sweep", "machines=4..2"), "--sweep: expected e.g. machines=1..64"),
            (("--model", "lm", "--sweep", "machines=0,1"), "--sweep: expected e.g. machines=1..64"),
            (("--model", "lm", "--plot", "x.png"), "--plot shows a sweep; give --sweep too"),
            (("--model", "lm", "--place", "emb*"), "--place: expected PATTERN=PLACEMENT"),
            (("--model", "lm", "--place", "emb*=ps"), "expected 'allreduce' | 'gather' | 'sharded', got 'ps'"),
            (("--model", "lm", "--machines", "2", "--place", "emb=gather"), "no parameter matches 'emb'"),
            (("--model", "lm", "--machines", "2", "--place", "dense=sharded"), "'dense' cannot be 'sharded'"),
            (("--profile", "/does/not/exist"), "No such file or directory: '/does/not/exist'"),
        ],
    )
    def test_what_is_not_understood(
        self, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert text in _refused(capsys, *arguments)

    def test_files_that_are_something_else(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.json").write_text(json.dumps(DESCRIPTION))
        path = str(tmp_path / "x.json")
        assert f"{path}: not a saved plan: KeyError" in _refused(capsys, "--profile", path)
        assert f"{path}: topology: 'machines' is missing" in _refused(capsys, "--model", "lm", "--topology", path)

    def test_a_model_or_a_profile(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in ([], ["--model", "lm", "--profile", "x"]):
            with pytest.raises(SystemExit) as caught:
                cli.main(["plan", *arguments])
            assert caught.value.code == 2

    def test_a_plot_needs_matplotlib(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        err = _refused(capsys, "--model", "lm", "--sweep", "machines=1..2", "--plot", str(tmp_path / "x.png"))
        assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in err

    def test_a_plot(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        drawn: list[Any] = []
        axes = types.SimpleNamespace(
            plot=lambda x, y, **options: drawn.append((x, options["label"])),
            **dict.fromkeys(("set", "set_xticks", "legend"), lambda *_, **__: None),
        )
        figure = types.SimpleNamespace(savefig=drawn.append)
        pyplot = types.SimpleNamespace(subplots=lambda: (figure, axes), close=lambda f: None)
        monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(use=lambda backend: None))
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
        _plan(capsys, "--model", "lm", "--sweep", "machines=1..4", "--plot", "x.png")
        assert drawn == [*(([1, 2, 4], name) for name in ARCHITECTURES), "x.png"]

    def test_it_needs_no_torch(self) -> None:
        code = (
            "import sys, parallax.cli\nparallax.cli.main(['plan', '--model', 'lm'])\nassert 'torch' not in sys.modules"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout

    def test_a_terminal_gets_a_table(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert "┃" in _plan(capsys, "--model", "lm")


def test_the_page_about_the_paper_is_up_to_date() -> None:
    root = Path(__file__).parents[1]
    script = runpy.run_path(str(root / "benchmarks" / "paper.py"))
    assert (root / "docs" / "paper.md").read_text() == script["page"](), "run `make paper`"


def test_what_was_fitted_to_the_paper_fits() -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "paper.py"))
    for name, architecture in script["FITTED"]:
        ours = script["throughputs"](load_model(name))[architecture]
        assert ours == pytest.approx(script["PAPER"][name][architecture], rel=0.02)
