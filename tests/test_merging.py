"""Workers of one machine merge what they send to others: the numbers of one device all the same, and fewer bytes.

Ranks 0 and 1 are on one machine; rank 2 is alone on another, or with rank 3.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import oracle
import pytest
import ranks
import test_cases
import test_uneven
import torch
import torch.nn.functional as F
from oracle import Case
from test_exactness import OPTIMIZERS, Recommender, make_batch, squares
from test_semantics import by_frequency, renormed
from torch import nn

import parallax
from parallax.mesh import Kind, Mesh

three_and_four = pytest.mark.parametrize("world_size", [3, 4])
FLOAT = torch.float64


@pytest.fixture(autouse=True)
def _machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")


# -- exactness ----------------------------------------------------------------------------------------


def recommender(world_size: int, optimizer: str, sparse: bool, step: Any = None, **config: Any) -> Case:
    """Ranks have batches of different sizes, so that their gradients have different weights."""
    generator = torch.Generator().manual_seed(2)
    return Case(
        model=lambda: Recommender(sparse, FLOAT),
        optimizers=OPTIMIZERS[optimizer],
        batches=[
            [make_batch(1 + 3 * (rank % 2) + rank // 2, FLOAT, generator) for rank in range(world_size)]
            for _ in range(4)
        ],
        loss=squares,
        step=step,
        config=config,
        reads="parts" if step is None else "whole",
    )


def clipped(world_size: int) -> Case:
    case = recommender(world_size, "momentum", False)
    case.between = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return case


def evaluating_step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    """Lookups to evaluate before, in and behind a training forward, of rows that this or another rank trains."""
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    ids = (torch.arange(5) * 3 + parallax.rank()) % 7

    def look() -> bool:
        with torch.no_grad():
            return torch.equal(model.user(ids), whole["user.weight"][ids])

    for optimizer in optimizers:
        optimizer.zero_grad()
    right = [look()]
    loss = case.loss(model, batch)
    right.append(look())
    right.append(torch.equal(model.item.weight.detach(), whole["item.weight"]))  # all of it
    loss.backward()
    right.append(look())
    grads = oracle.read_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    return grads, right


def different_tables(world_size: int) -> Case:
    """Ranks of a machine look up different tables, in another order, and some none."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(9, 2, dtype=FLOAT) for _ in range(3))
            self.layer = nn.Linear(2, 1, dtype=FLOAT)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            first = self.tables[0](batch)
            total = self.layer(first).sum()
            for i in (1, 2):
                chosen = batch[batch % 3 == i]
                if len(chosen):
                    total = total + self.layer(self.tables[i](chosen + (first[0, 0] > 1e9))).square().sum()
            return total / max(1, len(batch))

    batches = [[(torch.arange(3) * (rank + step) + rank) % 9 for rank in range(world_size)] for step in range(4)]
    batches[2][1] = batches[2][1][:0]
    return Case(
        model=Some,
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        batches=batches,
        loss=lambda model, batch: model(batch),
    )


CASES: list[tuple[Any, ...]] = [
    *[(recommender, optimizer, False) for optimizer in ("Adam", "Adagrad", "momentum")],
    *[(recommender, optimizer, True) for optimizer in ("SparseAdam", "Adagrad", "momentum")],
    (clipped,),
    (recommender, "Adam", False, evaluating_step),
    (different_tables,),
    (test_cases.padding, True, True),
    (test_cases.accumulation, "twice", True, True),
    (test_cases.accumulation, "accumulate", False, True),
    (test_cases.weighted_tags,),
    (test_cases.tied_of_5,),
    (test_cases.small,),
    (test_cases.empty_batches, "Adam"),
    (test_cases.table_alone,),
    (renormed, True),
    (renormed, False),
    (by_frequency, {}),
]


def with_partitions(world_size: int, partitions: int, make_case: Any, *args: Any) -> Case:
    case = make_case(world_size, *args)
    case.config = {**case.config, "partitions": partitions}
    return case


@three_and_four
def test_training_is_that_of_one_device(world_size: int) -> None:
    oracle.check_all(world_size, CASES if world_size == 3 else CASES[::3])


def test_few_owners() -> None:
    """Machines that own no row."""
    cases = [(recommender, "Adam", False), (clipped,), (recommender, "Adam", False, evaluating_step), (renormed, True)]
    oracle.check_all(3, [(with_partitions, 1 + i % 2, *case) for i, case in enumerate(cases)])


def test_ranks_without_data() -> None:
    """With accumulation in `no_sync`, clipping and loss scales."""
    expected = train_unevenly()
    for found in ranks.run(test_uneven.WORLD_SIZE, train_unevenly):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def train_unevenly() -> list[Any]:
    return [test_uneven.train(program, True) for program in test_uneven.PROGRAMS]


def read_alone(world_size: int) -> list[dict[str, torch.Tensor] | None]:
    """After each step one rank reads everything, while the others begin the next."""
    case = recommender(world_size, "Adam", False)
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizers(model)
    parallax.distribute(model, optimizer)
    found: list[dict[str, torch.Tensor] | None] = []
    for number, batch in enumerate(case.batches):
        optimizer.zero_grad()
        case.loss(model, batch[parallax.rank()]).backward()
        optimizer.step()
        reads = parallax.rank() == number % world_size
        found.append({n: v.clone() for n, v in model.state_dict().items()} if reads else None)
    parallax.shutdown()
    return found


@three_and_four
def test_a_rank_that_reads_alone(world_size: int) -> None:
    weights = oracle.one_process(recommender(world_size, "Adam", False)).weights[1:]
    found = ranks.run(world_size, read_alone, world_size)
    for number, expected in enumerate(weights):
        torch.testing.assert_close(found[number % world_size][number], expected, rtol=1e-12, atol=1e-12)


# -- bytes --------------------------------------------------------------------------------------------

ROWS, WIDTH, SAMPLES = 20_000, 16, 4000


def bytes_between_machines(workers: int) -> tuple[int, int, parallax.Traffic]:
    """(sent to ranks on other machines, to those on this one, what `traffic` says) in a step of rounds."""
    counted: Counter[bool] = Counter()
    send, machine = Mesh.send, parallax.rank() // workers

    def counting(mesh: Mesh, peer: int, kind: Kind, pieces: Any) -> None:
        if kind in (Kind.ROUND, Kind.EARLY):
            counted[peer // workers == machine] += sum(map(len, pieces))
        send(mesh, peer, kind, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "send", counting)
        generator = torch.Generator().manual_seed(machine)
        # Skewed: workers of a machine have many rows in common.
        batch = (torch.rand(SAMPLES, generator=generator) ** 3 * ROWS).long().chunk(workers)[parallax.rank() % workers]
        model = nn.ModuleList([nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, 1)])
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        parallax.distribute(model, optimizer)
        for _ in range(4):
            before = parallax.traffic(model)
            counted.clear()
            optimizer.zero_grad()
            (model[0](batch) * model[1](batch)).square().mean().backward()
            optimizer.step()
        return counted[False], counted[True], parallax.traffic(model) - before


def test_two_workers_send_what_one_with_twice_the_batch_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ranks.run(4, bytes_between_machines, 2)
    monkeypatch.setenv("RANKS_PER_MACHINE", "1")
    one = ranks.run(2, bytes_between_machines, 1)
    for machine, (alone, _, _) in enumerate(one):
        assert sum(sent for sent, _, _ in two[2 * machine : 2 * machine + 2]) <= 1.1 * alone
    for between, inside, traffic in two:
        assert traffic.num_rounds == 2
        assert traffic.merging_bytes > 0
        assert traffic.table_bytes + traffic.round_header_bytes + traffic.merging_bytes == between + inside
    assert [traffic.merging_bytes for _, _, traffic in one] == [0, 0]


# -- failures -----------------------------------------------------------------------------------------


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(12, 2, max_norm=1.0)
        self.other = nn.Embedding(3, 2)

    def forward(self, ids: torch.Tensor, max_norm: float) -> torch.Tensor:
        return F.embedding(ids, self.items.weight, max_norm=max_norm).sum()


def mixed_max_norm(late: bool) -> None:
    """Rank 1 has another one than rank 0; if `late`, for rows that rank 0 has leased in an earlier round."""
    model = Renormed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        wrong = number == 2 and parallax.rank() == 1
        if wrong and late:
            model.other(torch.arange(2)).sum().item()  # a round in which rank 0 asks for all rows
        loss = model(torch.arange(12), 0.5 if wrong else 1.0) + model.other(torch.arange(2)).sum()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("world_size", "late"), [(3, False), (4, True)])
def test_different_max_norm_on_one_machine(world_size: int, late: bool) -> None:
    outcomes = ranks.run(world_size, mixed_max_norm, late, expect_errors=True)
    for outcome in outcomes:
        assert outcome.error in ("NotImplementedError", "PeerError"), str(outcome)
        assert "'items.weight' is looked up in one step with different max_norm by workers of one" in outcome.text
        assert outcome.seconds < 8
    assert any(outcome.error == "NotImplementedError" for outcome in outcomes[:2])


def stop(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[how]("no luck")


def fail(where: str, how: str, failing: int) -> None:
    model = Recommender(False, FLOAT)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parallax.distribute(model, optimizer, config=parallax.Config(timeout=20.0))
    for number in range(5):
        batch = make_batch(3, FLOAT, torch.Generator().manual_seed(number))
        fails = number == 3 and parallax.rank() == failing
        optimizer.zero_grad()
        rows = model.user(batch[0])
        loss = model(*batch).square().mean() + rows.sum()
        if fails and where == "backward":
            loss.register_hook(lambda grad: stop(how))
        if fails and where == "forward":
            stop(how)
        elif fails and where == "gather":  # inside the exchange of the workers of one machine
            parallax.runtime.current().comm.swap = lambda *args, **kwargs: stop(how)  # type: ignore[method-assign]
            model.item(torch.arange(7)).sum().item()
        loss.backward()
        if fails and where == "step":
            optimizer.register_step_pre_hook(lambda *args: stop(how))
        optimizer.step()
    parallax.shutdown()


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("forward", "ValueError"),
        ("backward", "KeyboardInterrupt"),
        ("gather", "ValueError"),
        ("gather", "killed"),
        ("step", "ValueError"),
    ],
)
def test_a_rank_that_fails(where: str, how: str) -> None:
    failing = 1 + (where in ("forward", "step"))
    outcomes = ranks.run(3, fail, where, how, failing, expect_errors=True)
    for outcome in outcomes:
        assert outcome.seconds < 10, str(outcome)
        if outcome.rank == failing:
            assert outcome.error == ("Died" if how == "killed" else how)
        else:
            assert outcome.error == "PeerError", str(outcome)
            assert f"rank {failing}" in outcome.text.lower(), str(outcome)
            if how == "ValueError":
                assert "failed with ValueError: no luck" in outcome.text
