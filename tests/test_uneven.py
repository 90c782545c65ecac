"""Loops in which ranks run out of data at different times, against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parallax

WORLD_SIZE = 3
DTYPE = torch.float64


class Model(nn.Module):
    def __init__(self, table: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, dtype=DTYPE) if table else None
        self.dense = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([ids * 0.1, ids * 0.2, ids * 0.3], -1).to(DTYPE) if self.table is None else self.table(ids)
        return self.dense(rows).squeeze(-1)


def loss(model: Model, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(0, 11, (num_samples,), generator=generator),
        torch.randn(num_samples, generator=generator, dtype=DTYPE),
    )


def loader() -> Any:
    """13 samples: on three ranks, two batches of each and one of rank 0 alone."""
    if parallax.world_size() == 1:
        return DataLoader(data(13), batch_size=2 * WORLD_SIZE)
    return parallax.shard(DataLoader(data(13), batch_size=2))


Optimizer = torch.optim.Optimizer
Program = Callable[[Model, Optimizer, int, Iterable[Any]], None]


def skipped_steps(model: Model, optimizer: Optimizer, epoch: int, batches: Iterable[Any]) -> None:
    for number, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=epoch == 0)
        loss(model, batch).backward()
        if number != 1:
            optimizer.step()


def no_sync(model: Model, optimizer: Optimizer, epoch: int, batches: Iterable[Any]) -> None:
    for number, batch in enumerate(batches):
        with contextlib.nullcontext() if number % 2 else parallax.no_sync():
            loss(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()


def changed_and_read(model: Model, optimizer: Optimizer, epoch: int, batches: Iterable[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        for p in model.parameters():
            p.grad.mul_(2.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def clipped_without_a_step(model: Model, optimizer: Optimizer, epoch: int, batches: Iterable[Any]) -> None:
    for number, batch in enumerate(batches):
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def loss_scales(model: Model, optimizer: Optimizer, epoch: int, batches: Iterable[Any]) -> None:
    if epoch == 0:
        model.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        factor = float("inf") if number == epoch and parallax.rank() == 0 else 1.0
        model.scaler.scale(loss(model, batch) * factor).backward()
        model.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        model.scaler.step(optimizer)
        model.scaler.update()


def train(program: Program, table: bool) -> list[dict[str, torch.Tensor]]:
    """Weights, and gradients where there are some, after each of three loops."""
    torch.manual_seed(0)
    model = Model(table)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallax.distribute(model, optimizer, config=parallax.Config(timeout=8.0))
    seen = []
    for epoch in range(3):
        program(model, optimizer, epoch, loader())
        grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        now = {**model.state_dict(), **grads}
        seen.append({name: value.detach().clone() for name, value in now.items() if value is not None})
    parallax.shutdown()
    return seen


PROGRAMS = (skipped_steps, no_sync, changed_and_read, clipped_without_a_step, loss_scales)


def train_all() -> list[Any]:
    return [train(program, table) for program in PROGRAMS for table in (True, False)]


def test_ranks_without_data_do_what_the_others_do() -> None:
    expected = train_all()
    for found in ranks.run(WORLD_SIZE, train_all):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_loop_inside_a_loop_leaves_the_batch_of_the_outer() -> None:
    assert ranks.run(2, weight_after_an_inner_loop) == [[5.0, 2.0], [4.0, 1.0]]


def weight_after_an_inner_loop() -> list[float]:
    model = Model(True)
    parallax.distribute(model)
    seen = []
    run = parallax.runtime.current()
    for _ in parallax.shard(DataLoader(range(9), batch_size=5)):
        inner = parallax.shard(DataLoader(range(3), batch_size=2))
        for _ in inner:
            latest = run.samples.number
        seen += [run.samples.number, latest]
    return seen


@pytest.mark.parametrize("how", ["break", "next"])
def test_programs_that_count_batches(how: str) -> None:
    for outcome in ranks.run(2, count_batches, how, expect_errors=True):
        assert outcome.error == "DisagreementError", outcome
        assert "ranks [0] have left a loop over parallax.shard(...) early and ended, but ranks [1]" in outcome.text


def count_batches(how: str) -> None:
    model = Model(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    batches, number = parallax.shard(DataLoader(data(9), batch_size=2)), 0
    while number < 6:
        iterator = iter(batches)
        while number < 6 and (batch := next(iterator, None)) is not None:
            loss(model, batch).backward()
            optimizer.step()
            number += 1
        if how == "break":
            iterator.close()
    parallax.shutdown()


def test_lazy_rows_are_those_of_the_latest_step() -> None:
    expected = lazy_rows()
    for found in ranks.run(WORLD_SIZE, lazy_rows):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(expected[0], expected[1], rtol=0, atol=0)


def lazy_rows() -> list[Any]:
    return [lazy_weights(set_to_none) for set_to_none in (True, False)]


def lazy_weights(set_to_none: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallax.distribute(model, optimizer, config=parallax.Config(lazy_rows=True))
    for batch in loader():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(model, batch).backward()
        optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallax.shutdown()
    return weights


class Gated(nn.Module):
    """Of two tables, a batch uses the second one only if it has an id above 5."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.low, self.high = (nn.Embedding(11, 3, sparse=sparse, dtype=DTYPE) for _ in range(2))
        self.dense = nn.Linear(3, 1, dtype=DTYPE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.low(ids)
        is_high = ids > 5
        if bool(is_high.any()):
            rows = rows.index_put((is_high,), self.high(ids[is_high] - 5))
        return self.dense(rows).squeeze(-1)


def zeroed_gradients() -> list[Any]:
    return [weights_of_gated(sparse) for sparse in (True, False)]


def weights_of_gated(sparse: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Gated(sparse)
    tables = [model.low.weight, model.high.weight]
    first = torch.optim.SparseAdam(tables, lr=0.1) if sparse else torch.optim.Adam(tables, lr=0.1)
    optimizers = [first, torch.optim.Adam(model.dense.parameters(), lr=0.1)]
    parallax.distribute(model, optimizers)
    for _ in range(3):
        for batch in loader():  # the last one, of rank 0 alone, has a low id
            loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallax.shutdown()
    return weights


def test_gradients_that_were_zeroed_and_not_made_anew() -> None:
    """An optimizer steps with them, which changes its moments: on ranks without data, too."""
    ids = data(13).tensors[0]
    assert ids[-1] <= 5
    assert set((ids[ids > 5] - 5).tolist()) == {4}  # a row of rank 1
    expected = zeroed_gradients()
    for found in ranks.run(WORLD_SIZE, zeroed_gradients):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
