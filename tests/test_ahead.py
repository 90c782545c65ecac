"""Rows of the next batch, asked for and sent ahead (`Config.overlap`): the same numbers, and they do come ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parallax
from parallax import foresight
from parallax import table as tables
from parallax.ahead import Ordered
from parallax.mesh import Column
from parallax.table import Stack

NUM_STEPS, BATCH, WORDS, CLASSES = 9, 6, 300, 200


class Model(nn.Module):
    """Ids as they come, columns of them, several tensors of them one after the other."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=sparse)
        self.classes = nn.Embedding(CLASSES, 4, sparse=sparse)
        self.layer = nn.Linear(4, 4)
        self.double()

    def forward(self, tokens: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        embedded = torch.tanh(self.layer(self.words(tokens[:, :-1]))).sum(1)
        both = self.classes(torch.cat([tokens[:, -1] % CLASSES, classes]))
        return (embedded * both[: len(tokens)] + both[len(tokens) :]).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "Adagrad, sparse": (True, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "SGD": (False, lambda p: torch.optim.SGD(p, lr=0.5)),
    "Adam, which changes all rows": (False, lambda p: torch.optim.Adam(p, lr=0.1)),
}


def data(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    size = NUM_STEPS * BATCH * 4
    tokens = torch.randint(CLASSES, (size, 4), generator=generator)
    tokens[:, 0] = torch.randint(8, (size,), generator=generator)  # frequent ones, in every batch
    return TensorDataset(tokens, torch.randint(CLASSES, (size,), generator=generator))


def train(how: str, overlap: bool, between: str = "") -> tuple[list[torch.Tensor], dict[str, int]]:
    """Returns the model's state after it was trained, and how often rows came ahead."""
    counted = {"before": 0, "after": 0, "at last": 0, "rounds": 0}
    plain = {name: getattr(Stack, name) for name in ("bring_unleased", "bring_updated", "bring_rest")}

    def counting(what: str, bring: Any) -> Any:
        def bring_and_count(self: Stack, *args: Any) -> Any:
            brought = bring(self, *args)
            counted[what] += brought is not None
            return brought

        return bring_and_count

    tables.EARLY_BYTES, foresight.NUM_TURNS = 1, 0
    for (name, function), what in zip(plain.items(), counted, strict=False):
        setattr(Stack, name, counting(what, function))
    try:
        sparse, make = OPTIMIZERS[how]
        torch.manual_seed(0)
        model = Model(sparse)
        optimizer = make(model.parameters())
        parallax.distribute(model, optimizer, config=parallax.Config(overlap=overlap))
        before = parallax.traffic(model)
        for step, batch in enumerate(parallax.shard(DataLoader(data(), batch_size=BATCH))):
            if between != "accumulate" or step % 2 == 0:
                optimizer.zero_grad()
            if between == "unforeseen" and step % 3 == 2:
                batch = [t.flip(0) + 0 for t in batch]
                batch[0] = (batch[0] + 1) % CLASSES
            model(*batch).backward()
            if between == "accumulate" and step % 2 == 0:
                continue
            optimizer.step()
            if between == "edit":
                with torch.no_grad():
                    model.words.weight.mul_(0.9)
            if between == "evaluate" and step % 2:
                with torch.no_grad():
                    for other in parallax.shard(DataLoader(data(1), batch_size=BATCH * 12)):
                        model(*other)
            if between == "evaluate alone" and parallax.rank() == step % 2:
                with torch.no_grad():
                    for other in DataLoader(data(1), batch_size=BATCH * 12):
                        model(*other)
            if between == "read alone" and parallax.rank() == step % 2:
                model.words.weight.sum(), model.classes.weight.sum()
        counted["rounds"] = (parallax.traffic(model) - before).num_rounds
        return [p.detach().clone() for p in model.state_dict().values()], counted
    finally:
        tables.EARLY_BYTES, foresight.NUM_TURNS = 2**16, 4
        for name, function in plain.items():
            setattr(Stack, name, function)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_rows_come_ahead_and_change_nothing(how: str) -> None:
    for (weights, with_it), (expected, without) in zip(
        ranks.run(3, train, how, True), ranks.run(3, train, how, False), strict=True
    ):
        same(weights, expected)
        assert without == {"before": 0, "after": 0, "at last": 0, "rounds": with_it["rounds"]}
        assert with_it["after"] >= 8, with_it
        assert (with_it["before"] >= 8) == ("all rows" not in how), with_it
        # In the first step it turns out that rows change that nobody has leased.
        assert (with_it["at last"] > 0) == ("all rows" in how), with_it


@pytest.mark.parametrize("between", ["unforeseen", "accumulate", "edit", "evaluate", "evaluate alone", "read alone"])
def test_whatever_happens_between_steps(between: str) -> None:
    for how in list(OPTIMIZERS)[:2]:
        for (weights, _), (expected, _) in zip(
            ranks.run(3, train, how, True, between), ranks.run(3, train, how, False, between), strict=True
        ):
            same(weights, expected)


def test_what_ranks_ask_for_in_two_rounds_is_put_together() -> None:
    held = torch.arange(10.0).view(5, 2)
    earlier = Ordered(Column.split(torch.tensor([0, 2, 4]), [0, 3]))  # rank 1 asks first
    earlier.bring(torch.tensor([1]), held, 0)
    both = Ordered(Column.split(torch.tensor([3, 1]), [2, 0])).and_earlier(earlier)
    assert both.positions.tensor.tolist() == [3, 1, 0, 2, 4]
    assert both.missing().tolist() == [0, 1, 2, 4], "row 2 was sent"
    free = both.not_leased([torch.tensor([0, 3])], len(held))
    assert free.tolist() == [1, 4], "nor is it sent again"
    brought = both.bring(free, held, 0)
    assert (brought.rows.tensor.tolist(), brought.rows.spans) == ([[2, 3], [8, 9]], [(0, 1), (1, 2)])
    assert brought.at is not None
    assert brought.at.tensor.tolist() == [1, 2], "of what each rank has asked for"
    held[2] += 1
    assert both.find_changes(held, 1) == 1 / 3
    assert both.missing().tolist() == [0, 2, 3]


def bad_id_at_last(folder: str, bad: int) -> None:
    tables.EARLY_BYTES, foresight.NUM_TURNS = 1, 0
    try:
        model = Model(sparse=True)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        parallax.distribute(model, optimizer)
        last = data()
        last.tensors[0][-BATCH * 2 :, 1] = bad
        for step, batch in enumerate(parallax.shard(DataLoader(last, batch_size=BATCH))):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
            Path(folder, str(parallax.rank())).write_text(str(step + 1))
    finally:
        tables.EARLY_BYTES, foresight.NUM_TURNS = 2**16, 4


@pytest.mark.parametrize("bad", [WORDS, 10**6, 2**40, -1, -(2**40)])
def test_a_bad_id_is_an_error_in_its_own_step(tmp_path: Path, bad: int) -> None:
    outcomes = ranks.run(2, bad_id_at_last, str(tmp_path), bad, expect_errors=True)
    num_batches = NUM_STEPS * 4 // 2
    for outcome in outcomes:
        assert outcome.error in ("IndexError", "PeerError")
        assert f"id {bad} is out of range for 'words.weight'" in outcome.text
        assert (tmp_path / str(outcome.rank)).read_text() == str(num_batches - 1), "the steps before"
    assert "IndexError" in [outcome.error for outcome in outcomes]
