"""What a step sends: rounds, bytes, and the memory that tables take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallax

several_ranks = pytest.mark.parametrize("world_size", [2, 3, 4])


class Tables(nn.Module):
    """Tables whose lookups do not depend on each other, and a layer over all of them."""

    def __init__(self, num_tables: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, dtype=dtype) for _ in range(num_tables))
        self.layer = nn.Linear(num_tables * width, 1, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([table(batch[:, i]) for i, table in enumerate(self.tables)], dim=1))


class Twice(nn.Module):
    """One table, looked up twice in a forward: side by side, or the second time depending on the first."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.chained = chained

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first = self.table(batch[:, 0])
        others = batch[:, 0] + 1
        if self.chained:
            others = others + (first[:, 0] > 1e9).long()  # needs the first result
        return first + self.table(others % 100)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def make_batch(rank: int, size: int, num_tables: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(rows, (size, num_tables), generator=generator)


def steps(model: nn.Module, batch: torch.Tensor, num_steps: int = 3, **options: Any) -> list[parallax.Traffic]:
    """Trains, and returns the traffic of each step; the first one makes the plan."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer, config=parallax.Config(**options))
    found = []
    for _ in range(num_steps):
        before = parallax.traffic(model)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        found.append(parallax.traffic(model) - before)
    return found


# -- rounds -------------------------------------------------------------------------------------------


def rounds_of_tables(num_tables: int) -> list[parallax.Traffic]:
    return steps(Tables(num_tables, 50, 4), make_batch(parallax.rank(), 8, num_tables, 50))


def rounds_of_two_lookups(chained: bool) -> list[parallax.Traffic]:
    return steps(Twice(chained), make_batch(parallax.rank(), 8, 1, 100))


@several_ranks
@pytest.mark.parametrize("num_tables", [1, 2, 26])
def test_a_step_has_two_rounds_however_many_tables(world_size: int, num_tables: int) -> None:
    for found in ranks.run(world_size, rounds_of_tables, num_tables):
        assert [t.num_rounds for t in found[1:]] == [2, 2]
        assert [t.num_steps for t in found] == [1, 1, 1]


@several_ranks
def test_a_table_looked_up_twice(world_size: int) -> None:
    for found in ranks.run(world_size, rounds_of_two_lookups, False):
        assert [t.num_rounds for t in found[1:]] == [2, 2]
    for found in ranks.run(world_size, rounds_of_two_lookups, True):
        assert [t.num_rounds for t in found[1:]] == [3, 3]  # the second lookup waits for the first


def test_one_worker_sends_nothing() -> None:
    for found in ranks.run(1, rounds_of_tables, 2):
        for traffic in found:
            sent = (traffic.round_header_bytes, traffic.table_bytes, traffic.dense_bytes, traffic.num_rounds)
            assert sent == (0, 0, 0, 0)


def rounds_of_evaluation() -> list[parallax.Traffic]:
    model = Tables(3, 50, 4)
    batch = make_batch(parallax.rank(), 8, 3, 50)
    steps(model, batch)
    found = []
    for no_grad in (True, False):
        before = parallax.traffic(model)
        with torch.set_grad_enabled(not no_grad):
            model(batch).sum().item()
        found.append(parallax.traffic(model) - before)
    return found


@several_ranks
def test_an_evaluation_is_one_round(world_size: int) -> None:
    for found in ranks.run(world_size, rounds_of_evaluation):
        assert [t.num_rounds for t in found] == [1, 1]
        assert [t.dense_bytes for t in found] == [0, 0]


def rounds_without_tables() -> list[parallax.Traffic]:
    return steps(nn.Linear(2, 3), make_batch(parallax.rank(), 4, 2, 5).float(), num_steps=4)


@several_ranks
def test_a_model_without_tables_needs_no_rounds(world_size: int) -> None:
    for found in ranks.run(world_size, rounds_without_tables):
        for traffic in found[2:]:
            assert (traffic.num_rounds, traffic.round_header_bytes, traffic.table_bytes) == (0, 0, 0)
            # a ring sends 2 (N-1)/N of the 9 gradients, and what a bucket has to say beside them
            assert traffic.dense_bytes <= 2 * (world_size - 1) / world_size * 4 * (9 + 8) + 8


# -- bytes --------------------------------------------------------------------------------------------

ROWS, WIDTH, SIZE = 500, 16, 256


def bytes_of_tables(num_tables: int, dtype: torch.dtype, size: int, width: int, rows: int) -> Any:
    """Traffic of a step, and by table the ranks that own the rows of its partitions."""
    model = Tables(num_tables, rows, width, dtype)
    traffic = steps(model, make_batch(parallax.rank(), size, num_tables, min(rows, ROWS)))[-1]
    return traffic, [parallax.explain(model)[f"tables.{i}.weight"].owners for i in range(num_tables)]


def remote_rows(world_size: int, owners: Any, num_tables: int, size: int) -> tuple[list[int], list[int]]:
    """How many distinct rows of others each rank asks for, and how many it is asked for."""
    asks, serves = [0] * world_size, [0] * world_size
    for rank in range(world_size):
        batch = make_batch(rank, size, num_tables, ROWS)
        for number in range(num_tables):
            for row in batch[:, number].unique().tolist():
                owner = owners[number][row % len(owners[number])]
                if owner != rank:
                    asks[rank] += 1
                    serves[owner] += 1
    return asks, serves


@several_ranks
@pytest.mark.parametrize(("num_tables", "dtype"), [(5, torch.float32), (1, torch.float64), (2, torch.bfloat16)])
def test_bytes_are_those_of_remote_rows(world_size: int, num_tables: int, dtype: torch.dtype) -> None:
    found = ranks.run(world_size, bytes_of_tables, num_tables, dtype, SIZE, WIDTH, ROWS)
    asks, serves = remote_rows(world_size, found[0][1], num_tables, SIZE)
    row = WIDTH * dtype.itemsize
    for rank, (traffic, _) in enumerate(found):
        # this rank's ids and row gradients, and the rows that it has for others
        least = asks[rank] * (4 + row) + serves[rank] * row
        assert least <= traffic.table_bytes <= 1.05 * least, f"rank {rank}"
    total = sum(traffic.table_bytes for traffic, _ in found)
    assert total <= 1.05 * sum(asks) * (2 * row + 4)


@several_ranks
def test_headers_do_not_depend_on_the_batch(world_size: int) -> None:
    small = ranks.run(world_size, bytes_of_tables, 3, torch.float32, 4, WIDTH, ROWS)
    large = ranks.run(world_size, bytes_of_tables, 3, torch.float32, 1000, WIDTH, ROWS)
    wide = ranks.run(world_size, bytes_of_tables, 3, torch.float32, 4, 4 * WIDTH, 20 * ROWS)
    headers = [[t.round_header_bytes for t, _ in found] for found in (small, large, wide)]
    assert headers[0] == headers[1] == headers[2]
    assert all(0 < h <= 2 * (world_size - 1) * 8 * (16 + 8 * 3) for h in headers[0])


@several_ranks
def test_bytes_do_not_depend_on_the_number_of_rows(world_size: int) -> None:
    small = ranks.run(world_size, bytes_of_tables, 2, torch.float32, SIZE, WIDTH, ROWS)
    large = ranks.run(world_size, bytes_of_tables, 2, torch.float32, SIZE, WIDTH, 100 * ROWS)
    for (one, _), (other, _) in zip(small, large, strict=True):
        assert other.table_bytes == pytest.approx(one.table_bytes, rel=0.05)
        assert other.dense_bytes == one.dense_bytes


def bytes_by_architecture() -> dict[str, int]:
    """Of the tables' gradients: "hybrid", rows gathered, and reduced as if they were dense."""
    batch = make_batch(parallax.rank(), 32, 1, 10_000)
    found = {}
    for name, options in {
        "hybrid": {},
        "gather": {"architecture": "allreduce", "sparse_allreduce": "gather"},
        "dense": {"architecture": "allreduce", "sparse_allreduce": "dense"},
    }.items():
        traffic = steps(Tables(1, 10_000, 8), batch, **options)[-1]
        found[name] = traffic.table_bytes + traffic.dense_bytes
        parallax.shutdown()
    return found


def test_bytes_of_the_architectures() -> None:
    """The order of design: for sparse rows the hybrid sends least, an AllReduce of whole tables most."""
    for found in ranks.run(4, bytes_by_architecture):
        assert found["hybrid"] < found["gather"] < found["dense"]
        assert found["dense"] >= 2 * 3 / 4 * 10_000 * 8 * 4


# -- memory -------------------------------------------------------------------------------------------


def rows_in_step(rows: int, optimizer: str) -> list[tuple[int, ...]]:
    """Inside an optimizer step: rows of the table, its gradient, its memory (tables may share it) and its state."""
    model = Tables(2, rows, 4)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    parallax.distribute(model, made)
    found: list[tuple[int, ...]] = []

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        storages = [table.weight.data.untyped_storage() for table in model.tables]
        num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        for table in model.tables:
            p = table.weight
            state = [s.shape[0] for s in optimizer.state[p].values() if isinstance(s, torch.Tensor) and s.dim()]
            found.append((p.shape[0], p.grad.shape[0], num_bytes // 16 // len(storages), *state))

    made.register_step_pre_hook(look)
    for _ in range(3):
        made.zero_grad()
        loss_of(model, make_batch(parallax.rank(), 8, 2, rows)).backward()
        made.step()
    return found[4:]  # two steps after the plan


@several_ranks
@pytest.mark.parametrize(("rows", "optimizer"), [(3, "Adam"), (10, "Adagrad"), (101, "Adam")])
def test_a_worker_holds_its_share_of_tables_and_state(world_size: int, rows: int, optimizer: str) -> None:
    found = ranks.run(world_size, rows_in_step, rows, optimizer)
    most = math.ceil(rows / world_size)
    for by_table in found:
        for sizes in by_table:
            assert len(sizes) >= (4 if optimizer == "Adagrad" else 5)
            assert max(sizes) <= most
    assert sum(by_table[0][0] for by_table in found) == rows
