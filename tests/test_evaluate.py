"""What `benchmarks/evaluate.py` makes of what workers tell; needs neither root nor the peers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import evaluate
import least
import models
import report
import turns
from models import MODELS

SMALL = ["--words", "50", "--dim", "4", "--hidden", "3", "--samples", "5", "--time", "3", "--width", "8"]


def fact(arm: str, repeat: int, seconds: float, rank: int = 0, **more: Any) -> dict[str, Any]:
    common = {"arm": arm, "repeat": repeat, "rank": rank, "steps": 10, "seconds": seconds, "loss": 8.0 + rank}
    return {**common, "sent_mb": 1.0 + rank, "received_mb": 2.0 + rank, **more}


def options(*argv: str) -> argparse.Namespace:
    args, _ = evaluate.parse([*SMALL, *argv])
    return argparse.Namespace(
        **{**vars(args), **evaluate.locals_of_run(args.machines[0], args.bandwidth[0], args.alpha[0])}
    )


def test_ranks_of_a_turn_are_one() -> None:
    (turn,) = report.merged([fact("hybrid", 0, 2.0), fact("hybrid", 0, 2.5, rank=1)], samples_per_step=100)
    assert turn["samples_per_second"] == 100 * 10 / 2.5
    assert (turn["sent_mb"], turn["most_received_mb"], turn["loss"]) == (1.5, 3.0, 8.5)


def test_ratios_are_of_one_repeat() -> None:
    """Of a machine that is ten times as slow in the second repeat and twenty times in the third."""
    told = [fact(arm, n, s * f) for n, f in enumerate((1, 10, 20)) for arm, s in (("hybrid", 1.0), ("torchrec", 1.5))]
    told[1]["seconds"] = 1.2
    arms = report.summary(report.merged(told, 100), {"total": 5e5}, 1000.0)
    assert arms["torchrec"]["hybrid_by_this"] == pytest.approx(1.5)
    assert arms["hybrid"]["samples_per_second"] == pytest.approx(100)
    assert arms["hybrid"]["sent_by_least"] == pytest.approx(2.0)
    assert arms["hybrid"]["of_wire"] == pytest.approx(0.1)
    assert "of_compute" not in arms["hybrid"], "nothing only computed"


def test_the_fastest_way_of_a_peer_counts() -> None:
    told = [fact("hybrid", 0, 1.0), fact("torchrec", 0, 3.0, way="plain"), fact("torchrec", 0, 2.0, way="pipelined")]
    told.append(fact("compute-only", 0, 0.5))
    peer = report.summary(report.merged(told, 100), {"total": 1.0}, 1.0)["torchrec"]
    assert (peer["way"], peer["hybrid_by_this"], peer["of_compute"]) == ("pipelined", 2.0, 0.25)
    assert peer["ways"]["plain"]["hybrid_by_this"] == pytest.approx(3.0)


def test_an_arm_that_failed_in_a_repeat_is_compared_in_the_others() -> None:
    told = [fact("hybrid", 0, 1.0), fact("hybrid", 1, 1.0), fact("horovod", 1, 4.0)]
    assert report.summary(report.merged(told, 1), {"total": 1.0}, 1.0)["horovod"]["hybrid_by_this"] == 4.0


def test_a_table_says_what_is_missing_and_what_failed() -> None:
    told = [fact("hybrid", 0, 1.0), fact("torchrec", 0, 2.0, way="plain"), fact("torchrec", 0, 4.0, way="pipelined")]
    run = {
        "unit": "words",
        "arms": report.summary(report.merged(told, 100), {"total": 1e6}, None),
        "missing": {"horovod": "no horovod in peers/horovod; benchmarks/peers/setup.sh horovod"},
        "failed": [{"arm": "tf-servers", "repeat": 2, "error": "exit codes: [1]\nValueError: no"}],
        "least_bytes": {"dense": 1e6, "total": 1e6},
    }
    lines = report.as_table(run).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["hybrid", "1,000"],
        ["torchrec,", "plain"],
        ["torchrec,", "pipelined"],
    ]
    assert "plain *" in lines[2]
    assert "pipelined *" not in lines[3]
    assert lines[4].split(maxsplit=1) == [
        "horovod",
        "missing: no horovod in peers/horovod; benchmarks/peers/setup.sh horovod",
    ]
    assert lines[5].split(maxsplit=1) == ["tf-servers", "failed in repeat 2: ValueError: no"]


def test_missing_peers_are_told_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PEERS_FOLDER", tmp_path)
    (tmp_path / "tf/lib/python3.11/site-packages/tensorflow_cpu-2.21.0.dist-info").mkdir(parents=True)
    missing = evaluate.missing_peers(["hybrid", "torchrec", "tf-servers"])
    assert missing == {"torchrec": f"no torchrec in {tmp_path}/torchrec; benchmarks/peers/setup.sh torchrec"}
    assert evaluate.PEERS["tf-servers"].version == "2.21.0"


def test_peers_are_there_for_models_that_they_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(evaluate.PEERS) <= set(options().arms)
    assert set(options("--model", "dense").arms) == set(evaluate.ARMS) - set(evaluate.ONLY_NAMED)
    with pytest.raises(SystemExit):
        options("--model", "dense", "--arms", "hybrid", "torchrec")
    assert "--arms: torchrec cannot train --model dense" in capsys.readouterr().err


def test_what_workers_tell_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    turns.tell(rank=1, loss=0.5)
    assert turns.told("a warning\n" + capsys.readouterr().out) == [{"rank": 1, "loss": 0.5}]


def test_least_bytes_of_rows() -> None:
    """Of 2 ranks: row r is on rank r mod 2, so rank 0 needs 1 and 3 of the other, and rank 1 needs 4."""
    ids = [[torch.tensor([[0, 1], [1, 3]])], [torch.tensor([3, 4, 4, 5])]]
    assert least.row_bytes(ids, [8], workers=1) == {"ids": 3 * 4 / 2, "rows": 3 * 32 / 2, "gradients": 3 * 32 / 2}


def test_workers_of_a_machine_need_a_row_once() -> None:
    """Rows 2 and 3 (mod 4) lie on machine 1; its workers look up nothing, those of machine 0 both look up 6."""
    ids = [[torch.tensor([6, 0, 1])], [torch.tensor([6, 7])], [torch.tensor([2])], [torch.tensor([3])]]
    assert least.row_bytes(ids, [1], workers=2) == {"ids": 2 * 4 / 2, "rows": 2 * 4 / 2, "gradients": 2 * 4 / 2}


def test_least_bytes_of_a_model_without_tables() -> None:
    found = least.least_bytes(options("--model", "dense", "--machines", "4"))
    num_elements = 4 * (8 * 8 + 8) + 8 * 10 + 10
    assert found == {"ids": 0, "rows": 0, "gradients": 0, "dense": 1.5 * 4 * num_elements, "total": 6 * num_elements}


@pytest.mark.parametrize("name", MODELS)
def test_lookups_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `least.py` counts is where the gradients are, for every model."""
    monkeypatch.setattr(models, "TABLE_ROWS", [5, 7, *[3] * 24])
    args = options("--model", name, "--batch", "4", "--alpha", "0.2")
    model, batch = MODELS[name].make(args, True), MODELS[name].batches(args, 0)[0]
    model(*batch).backward()
    touched = [p.grad.coalesce() for p in model.parameters() if p.grad.is_sparse]
    lookups, elements = MODELS[name].lookups(batch), MODELS[name].row_elements(args)
    looked_up = sum(len(ids.unique()) * size for ids, size in zip(lookups, elements, strict=True))
    assert looked_up == sum(gradient.values().numel() for gradient in touched)
    assert least.num_dense_elements(args) == sum(p.numel() for p in model.parameters() if not p.grad.is_sparse)


def test_the_sweep_touches_its_fraction() -> None:
    args = options("--model", "one-table", "--alpha", "0.32", "--batch", "4")
    ids, classes = MODELS["one-table"].batches(args, 0)[0]
    assert len(ids.unique()) == 16 == 0.32 * 50
    assert len(ids) == len(classes) == 4


def test_time_is_split_without_what_is_hidden() -> None:
    run = {
        "arms": {
            "hybrid": {"step_ms": 12.0, "sent_mb": 1.0},
            "torchrec": {"step_ms": 30.0, "sent_mb": 1.0},
            "compute-only": {"step_ms": 10.0, "sent_mb": 0.0},
        },
        "bits_per_second": 1e9,
    }
    assert report.time_split(run, "hybrid") == {"computing": 10.0, "wire": 2.0, "waiting": 0.0}
    assert report.time_split(run, "torchrec") == {"computing": 10.0, "wire": 8.0, "waiting": 12.0}
    del run["arms"]["compute-only"]
    assert report.time_split(run, "hybrid") is None


def test_arrays_are_the_model_and_the_batches() -> None:
    arrays = models.lm_arrays(options(), num_ranks=2)
    assert arrays["tokens"].shape == (2 * models.NUM_BATCHES, 16, 4)
    assert (arrays["tokens"][models.NUM_BATCHES] == models.lm_batches(options(), 1)[0][0].numpy()).all()
    torch.manual_seed(0)
    assert (arrays["embedding.weight"] == models.LM(options(), True).embedding.weight.detach().numpy()).all()
