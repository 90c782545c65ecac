"""What a run changes while it trains: the weights become what they would have become without."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
import ranks
import torch
from test_exactness import recommender
from torch import nn

import parallax
from parallax import tuning
from parallax.plan import ParameterProfile
from parallax.planner import make_plan
from parallax.search import SearchResult
from parallax.table import Table


def train(world_size: int, folder: str, optimizer: str, sparse: bool, config: dict[str, Any]) -> Any:
    """(the model's weights at the end, the plan)"""
    case = recommender(world_size, "hybrid", optimizer, sparse, torch.float64, num_steps=NUM_STEPS)
    torch.manual_seed(0)
    model = case.model()
    optimizers = case.optimizers(model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    parallax.distribute(model, optimizers, config=parallax.Config(**config))
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder), mock.patch.object(tuning, "TRIAL_STEPS", (1, 1)):
        for batches in case.batches:
            for o in optimizers:
                o.zero_grad()
            case.loss(model, batches[parallax.rank()]).backward()
            for o in optimizers:
                o.step()
    weights, plan = oracle.read_weights(model), parallax.explain(model)
    parallax.shutdown()
    return weights, plan


NUM_STEPS = 56
SEARCH = {"partitions": "search", "search_share": 1.0, "min_partitions": 2}


@pytest.mark.parametrize(("world_size", "optimizer", "sparse"), [(2, "Adam", False), (3, "Adagrad", True)])
def test_a_search_does_not_change_what_is_learnt(world_size: int, optimizer: str, sparse: bool, tmp_path: Path) -> None:
    arguments = world_size, str(tmp_path), optimizer, sparse
    usual = ranks.run(world_size, train, *arguments, {})
    searched = ranks.run(world_size, train, *arguments, SEARCH)
    again = ranks.run(world_size, train, *arguments, SEARCH) if world_size == 2 else searched
    case = recommender(world_size, "hybrid", optimizer, sparse, torch.float64, num_steps=NUM_STEPS)
    expected = oracle.one_process(case).weights[-1]
    for rank in range(world_size):
        for name, weight in expected.items():
            assert torch.allclose(weight, usual[rank][0][name], rtol=1e-9, atol=1e-9), name
            assert torch.equal(usual[rank][0][name], searched[rank][0][name]), name
            assert torch.equal(usual[rank][0][name], again[rank][0][name]), name
    found = {
        result.best: result
        for path in (tmp_path / "parallax").iterdir()
        if (result := SearchResult.from_json(path.read_text()))
    }
    for name in ("user.weight", "item.weight", "tags.weight"):
        first, second = searched[0][1][name], again[0][1][name]
        assert first == searched[-1][1][name]
        result = found[len(first.owners)]
        assert len(result.samples) <= 8
        assert min(p for p, _ in result.samples) >= 2
        assert "partitions, best of " in first.reason
        assert second.owners == first.owners
        if world_size == 2:
            assert second.reason.endswith(f"; partitions: {len(first.owners)} partitions, found before")


class OneRank:
    """Stands for what a `Tuning` needs of a run, to drive a search by hand."""

    def __init__(self) -> None:
        table = Table("w", nn.Parameter(torch.zeros(64, 2)), rank=0, world_size=4, device=torch.device("cpu"))
        comm = SimpleNamespace(rank=0, world_size=4, gather=lambda value: [value])
        profile = ParameterProfile(name="w", shape=(64, 2), itemsize=4, use=parallax.Use.LOOKUP, num_rows_touched=8)
        self.config = parallax.Config(partitions="search", search_share=0.1)
        self.plan = make_plan([profile], world_size=4, config=self.config)
        self.tuning: Any = tuning.Tuning(
            comm,  # type: ignore[arg-type]
            self.config,
            SimpleNamespace(tables={"w": table}),  # type: ignore[arg-type]
            {"w": profile},
            plan=lambda: self.plan,
            make_plan=lambda: self.plan,
            put=lambda plan: vars(self).update(plan=plan),
            units=lambda: 1.0,
        )

    def search(self, move_seconds: float) -> tuple[list[tuple[int, int]], float]:
        """Steps of 1 s, more with few partitions: (partitions, steps trained with them) in turn, cost of the search."""
        process, trained = self.tuning._search(["w"], 1), []
        num_steps, before, cost = next(process, 0), 4, 0.0
        while num_steps:
            now = len(self.plan["w"].owners)
            step = 1 + 1 / now
            moved = move_seconds if now != before else 0.0
            trained.append((now, num_steps))
            cost += moved + max(0.0, step - 1.25) * num_steps
            self.tuning._elapsed += num_steps * step + moved
            before = now
            try:
                num_steps = process.send(tuning.Agreed(step, num_steps * step + moved))
            except StopIteration:
                break
        return trained, cost


def test_trials_wait_until_they_may_cost_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = OneRank()
    trained, cost = run.search(move_seconds=3.0)
    tried = list(dict.fromkeys(p for p, _ in trained))
    assert tried[:4] == [4, 1, 2, 8]
    assert len(run.plan["w"].owners) == 64  # the more the better, and there are so many rows
    assert len(tried) <= 8
    waits = [n for _, n in trained if n > tuning.TRIAL_STEPS[0]]
    assert len(waits) >= 3
    assert cost < 0.2 * run.tuning._elapsed  # what the last trial and the last move cost has not been waited for
    again = OneRank()
    assert again.search(move_seconds=3.0)[0] == []
    assert again.plan["w"].reason.endswith("partitions: 64 partitions, found before")


def differing(field: str, value: Any) -> None:
    config = parallax.Config(**{field: value}) if parallax.rank() else parallax.Config()
    parallax.distribute(nn.Embedding(4, 2), config=config)


@pytest.mark.parametrize(
    ("field", "value", "usual"), [("partitions", "search", None), ("min_partitions", 2, 1), ("topology", None, "auto")]
)
def test_ranks_with_different_settings(field: str, value: Any, usual: Any) -> None:
    first, second = ranks.run(2, differing, field, value, expect_errors=True)
    assert (first.error, second.error) == ("DisagreementError", "DisagreementError")
    assert f"Config.{field} differs from that of rank 1: {usual!r} here, {value!r} there." in first.text
    assert f"Config.{field} differs from that of rank 0: {value!r} here, {usual!r} there." in second.text


def failing_while_others_agree() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(9, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    broken = mock.patch.object(tuning, "_Watched", side_effect=RuntimeError("broken"))
    with broken if parallax.rank() == 1 else contextlib.nullcontext():
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()


def test_a_rank_that_fails_while_others_agree() -> None:
    first, second = ranks.run(2, failing_while_others_agree, expect_errors=True)
    assert (second.error, second.text) == ("RuntimeError", "broken")
    assert first.error == "PeerError"
    assert first.text == "rank 0 stops because rank 1 failed with RuntimeError: broken"
    assert first.seconds < 10
