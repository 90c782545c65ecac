"""`parallax.verify` and `parallax verify`. Two tests start workers as users do; in the others the ranks of the test
session do what those workers do."""

from __future__ import annotations

import collections
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import nn

import parallax
from parallax import cli

ROOT = Path(__file__).parents[1]
engine = importlib.import_module("parallax.verification")

WORDS = 40


class Tagger(nn.Module):
    """A table that is looked up, an LSTM, and weights that no step uses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.lstm(self.words(x))[0][:, -1]))


def batches(num_samples: int) -> torch.utils.data.DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randint(WORDS, (4,), generator=g), "y": i % 3, "scale": torch.rand((), generator=g)}
        for i in range(num_samples)
    ]
    return torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]


def tagging_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    scale = batch.pop("scale")  # what is recorded is the batch as it came
    return (scale * F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")).mean()


def tagger() -> Any:
    """No seed: each worker makes weights of its own. Three steps: 2 + 2, 2 + 2 and 1 + 0 samples."""
    model = Tagger(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, [optimizer], batches(9), tagging_loss


def warm_tagger() -> Any:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tagging_loss(model, next(iter(batches(8)))).backward()
    optimizer.step()
    return model, optimizer, batches(8), tagging_loss


def pairs(num_samples: int = 8) -> list[Any]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(2, 3, generator=g), torch.randn(2, 1, generator=g)) for _ in range(num_samples)]


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def linear(*more: nn.Module, lr: float = 0.1, data: Any = None, loss: Any = squared_error) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *more, nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr), pairs() if data is None else data, loss


def odd_number_of_batches() -> Any:
    return linear(data=pairs(5))


def normalised() -> Any:
    return linear(nn.BatchNorm1d(4))


def summed() -> Any:
    return linear(lr=0.01, loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).sum())


def still() -> Any:
    return linear(lr=0.0)


def exploding() -> Any:
    return linear(loss=lambda model, batch: model(batch[0]).sum() * float("nan"))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def noisy() -> Any:
    return linear(Noise())


class Single(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


def in_float32_inside() -> Any:
    return linear(Single(4, 4, bias=False))


def drifting_on_rank_1() -> Any:
    model, optimizer, loader, loss = linear()

    def drift(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * parallax.rank()
        return loss(model, batch)

    return model, optimizer, loader, drift


def per_sample() -> Any:
    return linear(loss=lambda model, batch: (model(batch[0]) - batch[1]) ** 2)


def without_batches() -> Any:
    return linear(data=[])


def ragged() -> Any:
    g = torch.Generator().manual_seed(3)
    data = [torch.randint(WORDS, (2, n), generator=g) for n in (3, 4, 5, 5)]
    model = nn.EmbeddingBag(WORDS, 3, mode="sum", padding_idx=0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data, lambda model, batch: model(batch).square().mean()


def padded(batches: list[torch.Tensor]) -> torch.Tensor:
    longest = max(batch.shape[1] for batch in batches)
    return torch.cat([F.pad(batch, (0, longest - batch.shape[1])) for batch in batches])


def on_meta() -> Any:
    with torch.device("meta"):
        model = nn.Embedding(1000, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [], squared_error


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the test session are the workers."""
    monkeypatch.setattr(engine, "_run_workers", lambda job: ranks.run(job.nproc, engine.work, str(job.folder)))


def _by_name(report: parallax.Report) -> dict[str, Any]:
    return {p.name: p for p in report.parameters}


# -- what agrees -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers")
class TestEqual:
    def test_tables_dropout_unequal_batches_and_a_rank_without_one(self) -> None:
        before = torch.get_rng_state()
        report = parallax.verify(tagger)
        assert report.ok, str(report)
        assert (report.world_size, report.num_steps, report.tolerance) == (2, 3, 1e-7)
        found = _by_name(report)
        assert found["words.weight"].placement is parallax.Placement.SHARDED
        assert found["out.weight"].placement is parallax.Placement.ALLREDUCE
        assert found["words.weight"].shape == (WORDS, 6)
        assert 0.01 < found["words.weight"].moved < 0.1
        assert all(p.relative < 1e-12 and p.first_step is None for p in report.parameters)
        assert [len([x for x in loss.ranks if x is not None]) for loss in report.losses] == [2, 2, 1]
        assert report.notes == (
            "the loader ended after 3 of 5 steps",
            "dropout was set to 0 in 'lstm', 'drop': each worker draws its own masks",
            "not verified, for no step moved them by more than 1e-07: 'unused.weight'",
        )
        assert torch.equal(before, torch.get_rng_state())
        assert torch.get_default_dtype() is torch.float32

    @pytest.mark.parametrize("architecture", ["hybrid", "allreduce"])
    def test_an_optimizer_with_state_and_the_last_step_in_mid_loop(self, architecture: Any) -> None:
        report = parallax.verify(warm_tagger, steps=1, config=parallax.Config(architecture=architecture))
        assert report.ok, str(report)
        assert (report.num_steps, len(report.losses)) == (1, 1)
        sharded = architecture == "hybrid"
        assert (_by_name(report)["words.weight"].placement is parallax.Placement.SHARDED) is sharded

    @pytest.mark.parametrize("steps", [3, 5])
    def test_without_tables_a_rank_without_a_batch_waits_for_the_others(self, steps: int) -> None:
        report = parallax.verify(odd_number_of_batches, steps=steps)
        assert report.ok, str(report)
        assert (report.num_steps, report.losses[-1].ranks[1]) == (3, None)

    def test_one_worker(self) -> None:
        report = parallax.verify("test_verify:tagger", nproc=1, steps=2)
        assert report.ok, str(report)
        assert "1 worker against one device" in str(report)

    def test_in_the_models_own_dtype(self) -> None:
        report = parallax.verify(odd_number_of_batches, dtype="keep")
        assert report.ok, str(report)
        assert report.tolerance == 1e-4
        assert max(p.absolute for p in report.parameters) > 1e-10  # float32 it was

    def test_losses_that_are_sums(self) -> None:
        report = parallax.verify(summed, steps=2, config=parallax.Config(reduction="sum"))
        assert report.ok, str(report)

    def test_batches_that_only_the_user_can_join(self) -> None:
        assert parallax.verify(ragged, join=padded).ok
        assert parallax.verify(ragged, join="test_verify:padded").ok

    def test_the_report(self) -> None:
        lines = str(parallax.verify(tagger)).splitlines()
        assert lines[0] == (
            "3 steps on 2 workers against one device, in float64 (relative: to max(1, |value|); tolerance 1e-07)"
        )
        head = ["parameter", "shape", "placement", "difference", "relative", "moved by", "deviates after"]
        assert [cell.strip() for cell in lines[1].split("  ") if cell.strip()] == head
        assert next(line.split()[1:3] for line in lines if "words.weight" in line) == ["40x6", "sharded"]
        assert lines[-1].startswith("EQUAL: all of 12 parameters and the losses are those of one device (largest")
        assert [line.split()[:2] for line in lines if line.startswith("  step")] == [
            ["step", f"{i}"] for i in (1, 2, 3)
        ]


# -- what does not ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers")
class TestNotEqual:
    def test_batch_normalisation(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert cli.main(["verify", "test_verify:normalised", "--steps=3"]) == 1
        out = capsys.readouterr().out
        assert "NOT EQUAL: 5 of 6 parameters differ by more than 1e-07, the first of them after step 1: " in out
        assert "hint: '1': batch normalisation takes each worker's own statistics" in out
        first_row = out.splitlines()[2].split()
        assert (first_row[0], first_row[-2:]) == ("!", ["step", "1"])  # the worst comes first
        assert "already in step 1" not in out

    def test_a_loss_that_is_a_sum_where_a_mean_is_meant(self) -> None:
        report = parallax.verify(summed, steps=2)
        assert not report.ok
        assert all(p.first_step == 1 for p in report.parameters)
        assert report.losses[0].relative > 0.1
        (hint,) = report.hints
        assert "with Config(reduction='mean') the loss must be a mean over the samples of the batch" in hint
        assert hint.endswith("it looks like their sum: Config(reduction='sum'), --reduction sum")

    def test_random_numbers(self) -> None:
        report = parallax.verify(noisy, steps=1)
        assert not report.ok
        (hint,) = report.hints
        assert hint.startswith("random numbers were drawn from torch's generator in the steps")

    def test_float32_inside(self) -> None:
        report = parallax.verify(in_float32_inside, steps=2, tolerance=1e-12)
        assert not report.ok
        assert any(".float(), autocast" in hint and "--tolerance 1e-05" in hint for hint in report.hints)
        assert parallax.verify(in_float32_inside, steps=2, tolerance=engine.ROUNDING).ok

    def test_one_rank_that_goes_its_own_way(self) -> None:
        """Rank 0 is right: all ranks are looked at."""
        report = parallax.verify(drifting_on_rank_1, steps=1)
        assert not report.ok
        assert all(p.first_step == 1 for p in report.parameters)

    def test_nothing_is_trained(self) -> None:
        report = parallax.verify(still)
        assert not report.ok
        assert "NOTHING VERIFIED: no parameter has moved by more than 1e-07; raise the learning rate" in str(report)

    def test_not_a_number(self) -> None:
        report = parallax.verify(exploding, steps=1)
        assert not report.ok
        assert all(p.relative == float("inf") for p in report.parameters)
        assert any("not finite numbers" in hint for hint in report.hints)


# -- what is not compared --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (lambda: None, "which workers can import, or its name as 'module:function'"),
        ("tagger", "expected 'module:function' or 'path/to/file.py:function', got 'tagger'"),
        ("nowhere:factory", "no module 'nowhere' (for 'nowhere:factory')"),
        ("nowhere.py:factory", "no such file: "),
        ("test_verify:nothing", "there is no 'nothing' in test_verify"),
        ("test_verify:WORDS", "expected a function, got int"),
        (on_meta, "'weight' is on the meta device"),
    ],
)
def test_factories_that_are_not_there(factory: Any, text: str) -> None:
    with pytest.raises(parallax.ParallaxError) as caught:
        parallax.verify(factory)
    assert text in str(caught.value)


MODEL = nn.Linear(1, 1)
SGD = torch.optim.SGD(MODEL.parameters())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "expected a tuple (model, optimizer, loader, loss_fn), got NoneType"),
        ((MODEL, SGD, []), "expected a tuple (model, optimizer, loader, loss_fn), got 3 items"),
        ((1, SGD, [], squared_error), "expected an nn.Module as the first of four, got int"),
        (
            (MODEL, None, [], squared_error),
            "expected an optimizer or a list of optimizers as the second of four, got None",
        ),
        ((MODEL, SGD, [], None), "expected a function loss_fn(model, batch) as the last of four, got NoneType"),
        (
            (MODEL, SGD, 3, squared_error),
            "expected a DataLoader or other iterable of batches as the third of four, got int",
        ),
    ],
)
def test_factories_that_return_something_else(made: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "tagger", lambda: made)
    with pytest.raises(parallax.ParallaxError, match="the factory must return") as caught:
        parallax.verify(f"{__name__}:tagger")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nproc": 0}, "expected at least 1 worker and 1 step, got nproc=0, steps=5"),
        ({"dtype": "float16"}, "dtype: expected 'float64' | 'keep', got 'float16'"),
        ({"config": parallax.Config(lazy_rows=True)}, "Config.lazy_rows is other mathematics than one device's"),
        ({"tolerance": -1.0}, "tolerance: expected a number of at least 0, got -1.0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"^parallax\.verify: ") as caught:
        parallax.verify(tagger, **arguments)
    assert text in str(caught.value)


def test_a_script_that_verifies_while_workers_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "parallax-1")
    with pytest.raises(parallax.ParallaxError, match='under `if __name__ == "__main__":`'):
        parallax.verify(tagger)


@pytest.mark.usefixtures("workers")
def test_no_batch_at_all() -> None:
    with pytest.raises(parallax.ParallaxError, match="the loader gave no batch on any worker; nothing was verified"):
        parallax.verify(without_batches)


def test_a_worker_that_ends_early_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_run_workers", lambda job: None)
    with pytest.raises(parallax.ParallaxError, match="rank 0 ended before its steps were done, without an error"):
        parallax.verify(tagger)


@pytest.mark.usefixtures("workers")
def test_batches_that_cannot_be_joined() -> None:
    with pytest.raises(parallax.ParallaxError, match="batches of step 1 cannot be put together") as caught:
        parallax.verify(ragged)
    assert "Say how: join=function (--join module:function), which gets the list of the ranks' batches" in str(
        caught.value
    )


@pytest.mark.usefixtures("workers")
def test_a_loss_of_several_numbers() -> None:
    with pytest.raises(ranks.JobFailed, match=r"a tensor with one element; got shape \(2, 1\)"):
        parallax.verify(per_sample)


# -- joining ---------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([{"x": [1], "n": 7, "z": None}, {"x": [2, 3], "n": 7, "z": None}], {"x": [1, 2, 3], "n": 7, "z": None}),
        ([Pair([1], ["u"]), Pair([2], ["v"])], Pair([1, 2], ["u", "v"])),
        ([collections.OrderedDict(a=[1]), collections.OrderedDict(a=[2])], collections.OrderedDict(a=[1, 2])),
    ],
)
def test_joining_without_tensors(parts: list[Any], joined: Any) -> None:
    got = engine._joined(parts)
    assert (type(got), got) == (type(joined), joined)


def test_joining_tensors_and_arrays() -> None:
    first, second = torch.ones(2, 3), torch.zeros(1, 3)
    x, (y, names) = engine._joined([[a, (a.numpy(), ["n"])] for a in (first, second)])
    assert torch.equal(x, torch.cat([first, second]))
    assert isinstance(y, np.ndarray)
    assert y.shape == (3, 3)
    assert names == ["n", "n"]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "Sizes of tensors must match"),
        ([(torch.ones(5), torch.ones(2))] * 2, "batch[0] of shape (5,), batch[1] of shape (2,)"),  # ids and offsets
        ([torch.tensor(1.0)] * 2, "batch of shape ()"),
        ([{"x": [1]}, {"y": [1]}], "batch has different keys"),
        ([{"n": 1}, {"n": 2}], "batch['n'] is neither a tensor nor equal on all ranks: 1, 2"),
        ([(1,), (1, 1)], "batch has different lengths: 1, 2"),
        ([(1,), [1]], "batch has different types: list, tuple"),
        ([object(), object()], "batch is of type object"),
    ],
)
def test_what_cannot_be_joined(parts: list[Any], text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        engine._joined(parts)
    assert text in str(caught.value)


# -- the command -----------------------------------------------------------------------------------


def _main(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds the current folder
    return cli.main(["verify", *argv])


@pytest.mark.programs
def test_the_language_model_from_the_command_line() -> None:
    command = [sys.executable, "-m", "parallax.cli", "verify", "examples/lm/verify.py:factory", "--steps=3"]
    done = subprocess.run(command, cwd=ROOT, env=ranks.environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL: all of 8 parameters" in done.stdout
    assert done.stderr == ""


DOOMED = """
import os
from test_verify import tagger

def factory():
    if "RANK" in os.environ:
        raise KeyError("the cause")
    return tagger()
"""


@pytest.mark.programs
def test_a_worker_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "doomed.py").write_text(DOOMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "doomed", raising=False)
    assert _main(["doomed:factory", "--nproc=1"], monkeypatch) == cli.NOT_VERIFIED
    err = capsys.readouterr().err
    assert err.startswith("parallax.verify: training on 1 worker failed (in float64; dtype='keep', --keep-dtype, ")
    assert 'raise KeyError("the cause")' in err
    assert "parallax run: worker 0 failed with exit code 1" in err


def test_a_factory_that_fails_is_shown_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(["test_verify:padded"], monkeypatch) == cli.NOT_VERIFIED
    assert "TypeError: padded() missing 1 required positional argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: FACTORY"),
        (["a:b", "--steps=0"], "expected a whole number of steps, at least 1, got '0'"),
        (["a:b", "--nproc=0"], "expected a whole number of workers, at least 1, got '0'"),
        (["a:b", "--architecture=horovod"], "invalid choice: 'horovod'"),
    ],
)
def test_wrong_command_lines(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *argv])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_no_such_factory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["nowhere:factory"], monkeypatch) == cli.NOT_VERIFIED
    assert capsys.readouterr().err == "parallax.verify: no module 'nowhere' (for 'nowhere:factory')\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", "--help"])
    assert caught.value.code == 0
    assert "parallax verify check.py:factory" in capsys.readouterr().out
