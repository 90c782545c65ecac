"""What a run sees of itself, and plans that are made from it, also while it trains."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import oracle
import pytest
import ranks
import torch
from torch import nn

import parallax
from parallax import links, tuning
from parallax.comm import Comm
from parallax.partitioning import Partitioning
from parallax.plan import ParameterProfile, Use
from parallax.profiling import Clock, Counted, RowCounts, profile_of
from parallax.table import Incoming, Table
from parallax.topology import Link, Links, Topology

PROFILE = ParameterProfile(name="w", shape=(10, 2), itemsize=4, use=Use.LOOKUP)


TABLE = Table("w", nn.Parameter(torch.zeros(10, 2)), rank=0, world_size=3, device=torch.device("cpu"))


def _arrived(*positions: list[int]) -> Incoming:
    rows = torch.tensor([p for some in positions for p in some])
    return Incoming(rows, torch.zeros(len(rows), 2), [len(some) for some in positions])


def test_rows_are_counted_once_for_a_machine() -> None:
    counts = RowCounts([0, 0, 1])
    counts.see(TABLE, [_arrived([1, 2], [2, 3], [3])])
    counts.see(TABLE, [_arrived([0], [], []), _arrived([0], [1], [])])
    assert (counts.touched, counts.served, counts.by_machine) == (0, 8, [3 + 2, 1])


def test_owners_put_their_counts_together() -> None:
    copies = profile_of(PROFILE, TABLE, [Counted(4, 6, [5], True), Counted(2, 6, [5], True)], num_steps=2)
    assert (copies.num_rows_touched, copies.num_rows_by_machine, copies.skew) == (1.5, 2.5, 1.0)
    table = Table("w", nn.Parameter(torch.zeros(10, 2)), rank=0, world_size=2, device=torch.device("cpu"))
    table.partitioning = Partitioning(10, (0, 1, 1), 2, torch.device("cpu"))  # 4 and 6 rows
    spread = profile_of(PROFILE, table, [Counted(7, 6, [5], True), Counted(5, 6, [4], False)], num_steps=2)
    assert (spread.num_rows_touched, spread.num_rows_by_machine) == (3.0, 4.5)
    assert spread.skew == pytest.approx((6 / 12) / (4 / 10))
    assert (copies.sparse_gradient, spread.sparse_gradient) == (True, False), "of all ranks"


def test_the_time_of_a_step_is_divided() -> None:
    clock = Clock(lambda: 0.0)
    assert clock.lap() is None
    clock.start()
    clock.begin_update()
    clock.end_update()
    lap = clock.lap()
    assert lap is not None
    assert 0 < lap.update < lap.seconds
    clock.stop()
    assert clock.lap() is None


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


def squares(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - 1).square().mean()


def ids_of(step: int, rank: int, many: bool) -> torch.Tensor:
    return torch.arange(150) + rank if many else torch.tensor([step % 200, 7 * rank + 1, 3])


def watched() -> Any:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    parallax.distribute(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        squares(model, ids_of(step, parallax.rank(), False)).backward()
        optimizer.step()
    plan = parallax.explain(model)
    parallax.shutdown()
    return plan


def test_a_plan_has_what_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")
    plans = ranks.run(3, watched)
    plan = plans[0]
    assert plans == [plan] * 3
    steps = [[set(ids_of(step, rank, False).tolist()) for rank in range(3)] for step in (2, 3, 4)]
    embed = plan.profiles[0]
    assert embed.num_rows_touched == pytest.approx(sum(len(ids) for step in steps for ids in step) / 9)
    assert embed.num_rows_by_machine == pytest.approx(sum(len(a | b) + len(c) for a, b, c in steps) / 6)
    assert plan["embed.weight"].alpha == embed.alpha
    assert embed.skew >= 1
    assert plan.units_per_worker == 3
    assert plan.measured.bytes_per_step > plan["embed.weight"].bytes_per_step  # and headers, and dense gradients
    assert 0 <= plan.compute_seconds < plan.measured.step_seconds
    assert str(plan).splitlines()[-1].startswith("a step: ")


# -- plans from links -----------------------------------------------------------------------------------

ROUNDS = Link(latency=0.0, bandwidth=3e5)
SLOW_ROUNDS = Links(allreduce=Link(latency=0.0, bandwidth=1e6), rounds=ROUNDS, gathers=Link(latency=0.0, bandwidth=1e4))
"""Many rows cost more than a whole gradient, few less."""


def drifting(world_size: int, path: str, many: list[bool], sparse: bool) -> oracle.Case:
    def make() -> nn.Module:
        model = Words()
        model.embed.sparse = sparse
        return model

    return oracle.Case(
        model=make,
        optimizers=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
        batches=[[ids_of(step, rank, m) for rank in range(world_size)] for step, m in enumerate(many)],
        loss=squares,
        reads="parts",
        config={"topology": path},
    )


def trained(world_size: int, path: str, *arguments: Any, step: Any = None) -> Any:
    """(the trace of this rank, where the table was after each step)"""
    places = []

    def noting(case: oracle.Case, *others: Any) -> Any:
        found = (step or oracle.train_step)(case, *others)
        places.append(parallax.explain(others[0])["embed.weight"].placement.value[0])
        return found

    case = dataclasses.replace(drifting(world_size, path, *arguments), step=noting)
    with mock.patch.multiple(tuning, WATCH_EVERY=1, PROFILE_STEPS=1):
        return oracle.on_a_rank(case), places


def check_drifting(
    world_size: int,
    folder: Path,
    many: list[bool],
    sparse: bool = False,
    gathers: bool = False,
    job: Any = trained,
    step: Any = None,
) -> str:
    """Compares with one device; returns where the table was, one after the other."""
    slow = dataclasses.replace(SLOW_ROUNDS, gathers=ROUNDS) if gathers else SLOW_ROUNDS
    path = folder / "links.json"
    path.write_text(Topology(machines=1, workers=world_size, between=slow, inside=slow).to_json())
    found = ranks.run(world_size, job, world_size, str(path), many, sparse)
    case = drifting(world_size, str(path), many, sparse)
    expected = oracle.one_process(dataclasses.replace(case, step=step or case.step))
    assert not oracle.compare(expected, [trace for trace, _ in found])
    places = found[0][1]
    assert all(theirs == places for _, theirs in found)
    return "".join(place for place, before in zip(places, ["", *places], strict=False) if place != before)


@pytest.mark.parametrize(
    ("world_size", "sparse", "gathers", "expected"),
    [(2, False, False, "wsas"), (3, True, False, "wsas"), (2, True, True, "wgag")],
)
def test_tables_move_when_alpha_drifts(
    world_size: int, sparse: bool, gathers: bool, expected: str, tmp_path: Path
) -> None:
    """They are watched, then sharded or gathered, reduced while a step touches most rows, and back."""
    many = [False] * 5 + [True] * 6 + [False] * 6
    assert check_drifting(world_size, tmp_path, many, sparse, gathers) == expected


def test_a_nearly_dense_table_is_reduced_from_the_start(tmp_path: Path) -> None:
    assert check_drifting(2, tmp_path, [True] * 3) == "wa"


def compiled_step(case: oracle.Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    compiled = torch.compile(model, backend="eager")  # of the same code each time: its graphs are kept
    optimizers[0].zero_grad()
    case.loss(compiled, batch).backward()
    optimizers[0].step()


def compiled(*arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        return trained(*arguments, step=compiled_step)


def test_tables_move_under_compiled_graphs(tmp_path: Path) -> None:
    many = [False] * 5 + [True] * 4
    warnings.simplefilter("ignore")
    assert check_drifting(2, tmp_path, many, job=compiled, step=compiled_step) == "wsa"


def two_losses(case: oracle.Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    """Both graphs are made first: a table that moved between their backward passes would break the second."""
    optimizers[0].zero_grad()
    losses = [case.loss(model, batch), case.loss(model, batch + 1)]
    for loss in losses:
        loss.backward()
    optimizers[0].step()


def accumulating(*arguments: Any) -> Any:
    return trained(*arguments, step=two_losses)


def test_tables_stay_while_graphs_may_be_older(tmp_path: Path) -> None:
    many = [False] * 4 + [True] * 6
    assert check_drifting(2, tmp_path, many, job=accumulating, step=two_losses) == "ws"


# -- links ----------------------------------------------------------------------------------------------


def found(folder: str, machines: list[int], wanted: str = "auto") -> Any:
    os.environ["PARALLAX_MACHINE"] = str(machines[parallax.rank()])
    comm = Comm(torch.device("cpu"), 60.0)
    sent = dataclasses.replace(comm.sent)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        topology = links.find_topology(comm, wanted)
    assert comm.sent == sent
    comm.close()
    return topology


def test_links_are_measured_once(tmp_path: Path) -> None:
    first, second = ranks.run(2, found, str(tmp_path), [0, 0])
    assert first == second
    assert (first.machines, first.workers) == (1, 2)
    assert 1e6 < first.inside.rounds.bandwidth < 1e12
    assert 1e6 < first.inside.allreduce.bandwidth < 1e12
    assert ranks.run(2, found, str(tmp_path), [0, 0]) == [first] * 2  # from the cache
    (kept,) = (tmp_path / "parallax").iterdir()
    os.utime(kept, (0, 0))
    again = ranks.run(2, found, str(tmp_path), [0, 0])[0]
    assert again != first  # measured anew: it was long ago
    assert ranks.run(2, found, str(tmp_path), [0, 0])[0] == again
    kept.write_text("nothing")
    assert ranks.run(2, found, str(tmp_path), [0, 0])[0] is not None


def test_links_of_several_machines(tmp_path: Path) -> None:
    topology = ranks.run(4, found, str(tmp_path), [0, 0, 1, 1], "measure")[3]
    assert (topology.machines, topology.workers) == (2, 2)
    assert topology.inside.rounds != topology.between.rounds
    assert ranks.run(3, found, str(tmp_path), [0, 0, 1]) == [None] * 3
    assert ranks.run(4, found, str(tmp_path), [0, 1, 0, 1]) == [None] * 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "Config.topology: cannot read '{path}': [Errno 2] No such file or directory: '{path}'"),
        ("{}", "topology: 'machines' is missing; expected machines, workers, between, inside"),
        (Topology.of(workers=3).to_json(), "topology: 1 machines with 3 workers each are 3 workers, but there are 2; "),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, text: str | None, error: str) -> None:
    path = str(tmp_path / "links.json")
    if text is not None:
        Path(path).write_text(text)
    for outcome in ranks.run(2, distributed_with, path, expect_errors=True):
        assert outcome.error == "ValueError"
        assert outcome.text.startswith(error.format(path=path))


def distributed_with(path: str) -> None:
    parallax.distribute(Words(), config=parallax.Config(topology=path))


def first_plan(sparse: bool) -> list[bool]:
    """Whether it is known, before any step was watched, that the gradients of a table are COO tensors."""
    model = nn.Embedding(20, 3, sparse=sparse)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        found.append(parallax.explain(model).profiles[0].sparse_gradient)
    parallax.shutdown()
    return found


@pytest.mark.parametrize("sparse", [True, False])
def test_the_first_plan_knows_which_gradients_are_sparse(sparse: bool) -> None:
    for found in ranks.run(2, first_plan, sparse):
        assert found[-1] == sparse
