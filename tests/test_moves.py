"""Tables move between steps, to other owners, partitions and placements: training goes on exactly (`oracle`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.nn.functional as F
from test_exactness import recommender
from torch import nn

import parallax
from parallax import runtime
from parallax.partitioning import Partitioning, Places
from parallax.plan import Placement

PLACES: list[Any] = [(0,), "gather", "last", "allreduce", (1, 0), "three", "allreduce", "many", "each"]
"""Where tables go, one after the other: owners of the partitions, or a placement."""


def put(place: Any, name: str = "") -> None:
    """Moves the tables whose names begin with `name`."""
    active = runtime.current()
    if active is None or active.comm.world_size == 1:
        return
    n = active.comm.world_size
    owners = {"last": (n - 1,), "three": (0, n - 1, 0), "many": tuple(p * p % n for p in range(17)), "each": range(n)}
    parameters = []
    for decided in active.plan:
        if decided.use is parallax.Use.LOOKUP and decided.name.startswith(name):
            spread = place if isinstance(place, tuple) else tuple(owners.get(place, ()))
            placement = Placement.SHARDED if spread else Placement(place)
            decided = dataclasses.replace(decided, placement=placement, owners=spread)
        parameters.append(decided)
    active.put(dataclasses.replace(active.plan, parameters=tuple(parameters)))
    for decided in parameters:
        partitioning = active.tables[decided.name].partitioning if decided.name in active.tables else None
        assert decided.owners == (partitioning.owners if partitioning else ())


def moving_step(case: oracle.Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    """Two backward passes add up, and rows move after each of them, with the gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    case.loss(model, batch).backward()
    if number:
        put(PLACES[(2 * number) % len(PLACES)])
    case.loss(model, batch).backward()
    if number:
        put(PLACES[(2 * number + 1) % len(PLACES)])
    grads = oracle.read_parts(model, gradients=True)
    for optimizer in optimizers:
        optimizer.step()
    return grads


def moving(world_size: int, optimizer: str, sparse: bool) -> oracle.Case:
    case = recommender(world_size, "hybrid", optimizer, sparse, torch.float64)
    return dataclasses.replace(case, step=moving_step)


@pytest.mark.parametrize(
    ("world_size", "combinations"),
    [
        (1, [("Adam", False)]),
        (2, [("Adagrad", False), ("Adagrad", True), ("SparseAdam", True)]),
        (3, [("momentum", False), ("momentum", True), ("Adam", False)]),
        (4, [("Adagrad", False), ("momentum", True)]),
    ],
)
def test_with_optimizers(world_size: int, combinations: list[Any]) -> None:
    oracle.check_all(world_size, [(moving, *c) for c in combinations])


class Two(nn.Module):
    """A table with padding, looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, padding_idx=2, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square() + self.table(ids + 1)


def late_backward(case: oracle.Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    """Both losses are made first; rows move between their backward passes."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    first, second = case.loss(model, batch), case.loss(model, batch.flip(0) % 7)
    first.backward()
    if number:
        put([(0,), "gather", "many", "last", "each"][number - 1])
    second.backward()
    for optimizer in optimizers:
        optimizer.step()


def two(world_size: int) -> oracle.Case:
    generator = torch.Generator().manual_seed(3)
    return oracle.Case(
        model=Two,
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
        batches=[[torch.randint(0, 10, (5,), generator=generator) for _ in range(world_size)] for _ in range(6)],
        loss=lambda model, batch: model(batch).mean(),
        step=late_backward,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_graphs_that_were_made_before_a_move(world_size: int) -> None:
    oracle.check(world_size, two)


CUTS: list[tuple[int, tuple[int, ...]]] = [
    (1, (0,)), (7, (0, 1, 2)), (7, (2, 0)), (3, (1, 1, 0, 2, 2)), (20, (0, 2, 0, 1, 2, 2, 1))
]  # fmt: skip


@pytest.mark.parametrize("agents", [(), (0, 0, 1), (1, 0, 1)])
def test_keys_say_which_rows_they_are(agents: tuple[int, ...]) -> None:
    parts = [Partitioning(num_rows, owners, 3, torch.device("cpu")) for num_rows, owners in CUTS]
    for tables in ([part] for part in parts), [parts], [parts[::-1]]:
        for some in tables:
            places = Places(some, 3, torch.device("cpu"), agents)
            ids = [torch.arange(part.num_rows) for part in some]
            keys = places.keys(torch.cat(ids), [(n, len(rows)) for n, rows in enumerate(ids)])
            assert len(keys.unique()) == len(keys)
            for n, (rows, its) in enumerate(zip(ids, keys.split(list(map(len, ids))), strict=True)):
                assert torch.equal(places.ids(its, n), rows)
            found, order = keys.sort()
            assert places.count_by_table(found) == list(map(len, ids))
            odd = torch.cat(ids)[order] % 2 == 1
            assert places.count_by_table(found, odd) == [int((rows % 2).sum()) for rows in ids]
            owners = torch.cat([part.owner_of(rows) for part, rows in zip(some, ids, strict=True)])[order]
            for rank, (a, b) in enumerate(places.by_owner(places.cuts(found))):
                assert bool((owners[a:b] == rank).all())
                assert b - a == places.firsts[rank][-1]
                assert sorted(places.positions(found[a:b]).tolist()) == list(range(b - a))
            asked = torch.tensor(agents or (0, 1, 2))[owners]
            for number, (a, b) in enumerate(places.by_asked(places.cuts(found))):
                assert bool((asked[a:b] == number).all())
                assert b - a == int((asked == number).sum())


def moved_on_one_rank() -> None:
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    parallax.distribute(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    if parallax.rank() == 1:
        model.table.weight.grad = None
    with runtime.current()._failing():  # type: ignore[union-attr]
        put((0,))


def test_ranks_that_hold_different_of_a_table() -> None:
    for outcome in ranks.run(2, moved_on_one_rank, expect_errors=True):
        assert outcome.error == "DisagreementError"
        assert outcome.text.startswith(
            f"rank {outcome.rank}: the rows of 'table.weight' are about to move, but this rank"
        )
        assert outcome.text.endswith("drop gradients and load optimizer state on all ranks alike")


def plain_graph_after_a_move() -> None:
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    parallax.distribute(model, optimizer, config=parallax.Config(placements={"table*": "allreduce"}))
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.relu(model(torch.tensor([1, 2]))).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    put((0,))
    loss.backward()


def test_graphs_of_a_table_that_was_whole() -> None:
    for outcome in ranks.run(2, plain_graph_after_a_move, expect_errors=True):
        assert outcome.error in ("NotImplementedError", "PeerError")
        assert "'table.weight': backward through a graph that was made before its rows moved to owners" in outcome.text
