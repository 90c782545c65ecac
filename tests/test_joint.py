"""Stacks: tables that travel together, and are one parameter of the optimizer while it steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallax
from parallax import joint, table
from parallax.runtime import current

ROWS = (23, 5, 2, 40)


class Towers(nn.Module):
    """Tables of one width, some looked up twice or with padding, and one of another width."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 3, sparse=sparse) for rows in ROWS)
        self.padded = nn.Embedding(11, 3, padding_idx=2, sparse=sparse)
        self.wide = nn.Embedding(7, 5, sparse=sparse)
        self.layer = nn.Linear(5, 3)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [t(ids[:, k] % t.num_embeddings) for k, t in enumerate(self.tables)]
        again = self.tables[0](ids[:, 1] % ROWS[0])
        total = sum(found) + again * self.padded(ids[:, 2] % 11) + self.layer(self.wide(ids[:, 3] % 7))
        return total.sin().square().sum(1).mean()  # type: ignore[union-attr]


def rows_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1000, (4 * 12, 4), generator=generator).chunk(world_size)[rank]


class Replacing(torch.optim.SGD):
    """Counts its steps in a new tensor each time."""

    __module__ = "torch.optim.replacing"

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["count"] = self.state[p].get("count", torch.zeros(())) + 1
                        p -= group["lr"] / self.state[p]["count"] * p.grad


class Assigning(torch.optim.SGD):
    """Gives its parameters new tensors."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


OPTIMIZERS: dict[str, tuple[bool, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]] = {
    "Adagrad, sparse": (True, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "SparseAdam": (True, lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    "SGD, sparse": (True, lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD with momentum, sparse": (True, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "SGD with momentum": (False, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "Adam": (False, lambda p: torch.optim.Adam(p, lr=0.01)),
    "AdamW, foreach": (False, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True)),
    "RMSprop": (False, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
    "new weights each step": (False, lambda p: Assigning(p, lr=0.1)),
    "new state each step": (False, lambda p: Replacing(p, lr=0.1)),
    "NAdam": (False, lambda p: torch.optim.NAdam(p, lr=0.01)),
}


def made(how: str, model: Towers) -> list[torch.optim.Optimizer]:
    sparse, make = OPTIMIZERS[how]
    if not sparse or how.startswith("SGD"):
        return [make(model.parameters())]
    tables = [p for name, p in model.named_parameters() if not name.startswith("layer")]
    return [make(tables), torch.optim.SGD(model.layer.parameters(), lr=0.1)]


def train(how: str, change: str, alone: bool) -> tuple[dict[str, Any], list[Any], int, list[int]]:
    """(weights, states, how many updates were joint, sizes of stacks)"""
    rank, size = (0, 1) if alone else (parallax.rank(), parallax.world_size())
    torch.manual_seed(0)
    model = Towers(OPTIMIZERS[how][0])
    optimizers = made(how, model)
    num_joint = 0
    plain = joint.JointUpdates._join

    def counting(self: joint.JointUpdates, *args: Any) -> None:
        nonlocal num_joint
        before = len(self._joints)
        plain(self, *args)
        num_joint += len(self._joints) - before

    joint.JointUpdates._join = counting  # type: ignore[method-assign]
    try:
        if not alone:
            parallax.distribute(model, optimizers, config=parallax.Config(topology=None))
        seen: list[Any] = []
        if change == "hook":
            optimizers[0].register_step_pre_hook(lambda o, a, k: seen.append(len(o.param_groups[0]["params"])))
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            batch = rows_of(step, rank, size)
            model(batch).backward()
            edit(change, step, model, optimizers)
            for optimizer in optimizers:
                optimizer.step()
        assert not seen or len(set(seen)) == 1
        run = current()
        stacks = [] if alone or run is None else [len(s.tables) for s in run.rounds.stacks]
        return (
            {name: p.detach().clone() for name, p in model.state_dict().items()},
            [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
            num_joint,
            stacks,
        )
    finally:
        joint.JointUpdates._join = plain  # type: ignore[method-assign]
        if not alone:
            parallax.shutdown()


def edit(change: str, step: int, model: Towers, optimizers: list[torch.optim.Optimizer]) -> None:
    """What programs do between backward and step."""
    with torch.no_grad():
        if change == "clip":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif change == "scale":
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.3)
        elif change == "weights" and step == 4:
            model.tables[1].weight.data = model.tables[1].weight.data * 2
            model.tables[3].weight.mul_(0.5)
        elif change == "drop" and step in (3, 5):
            model.tables[2].weight.grad = None
        elif change == "load" and step == 4:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif change == "rates":
            optimizers[0].param_groups[0]["lr"] *= 0.9


def agree(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        found, expected = (t.to_dense() if t.is_sparse else t for t in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, check_stride=False)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            agree(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            agree(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_a_joint_update_is_that_of_each_table(how: str) -> None:
    weights, states, _, _ = train(how, "", alone=True)
    for found, held, num_joint, stacks in ranks.run(3, train, how, "", False):
        assert sorted(stacks) == [1, 5]
        # The first step finds out which tables there are; momentum of COO gradients is a COO tensor; optimizers that
        # are not torch's own are left alone.
        assert num_joint == (0 if how in ("SGD with momentum, sparse", "new weights each step") else 7)
        agree(found, weights)
        agree(held, states)


@pytest.mark.parametrize(
    ("change", "how", "num_joint"),
    [
        ("clip", "Adam", 7),
        ("scale", "Adagrad, sparse", 7),
        ("weights", "SGD with momentum", 7),
        ("drop", "Adam", 2),  # from then on, counts of steps differ
        ("drop", "SGD, sparse", 5),
        ("load", "Adagrad, sparse", 7),
        ("load", "AdamW, foreach", 7),
        ("rates", "RMSprop", 7),
        ("hook", "Adam", 0),
    ],
)
def test_what_programs_do_between_steps(change: str, how: str, num_joint: int) -> None:
    weights, states, _, _ = train(how, change, alone=True)
    for found, held, joined, _ in ranks.run(2, train, how, change, False):
        assert joined == num_joint
        agree(found, weights)
        agree(held, states)


def test_memory_of_a_stack_is_that_of_its_tables() -> None:
    parts = [torch.rand(n, 3) for n in (4, 0, 2)]
    assert table.as_one(parts) is None
    put: dict[int, torch.Tensor] = {}
    kept = [part.clone() for part in parts]
    whole = table.make_one(parts, put.__setitem__)
    assert not parts
    for number, part in put.items():
        assert torch.equal(part, kept[number])
    again = table.as_one([put[n] for n in range(3)])
    assert again is not None
    assert again.data_ptr() == whole.data_ptr()
    assert torch.equal(again, torch.cat(kept))
    assert table.as_one([put[2], put[1], put[0]]) is None
    assert table.as_one([put[0].T.contiguous().T, put[2]]) is None
    assert table.as_one([put[0], put[2].clone()]) is None
    assert table.as_one([kept[1], kept[1]]) is not None


def rows_by_table(world_size: int) -> None:
    """Whole reads of one table of a stack while other ranks read others."""
    torch.manual_seed(0)
    model = Towers(sparse=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parallax.distribute(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(rows_of(step, parallax.rank(), world_size)).backward()
        optimizer.step()
    grads = [t.weight.grad.clone() for t in model.tables]
    own = parallax.rank() % len(ROWS)
    alone = model.tables[own].weight.grad + 0
    torch.testing.assert_close(alone, grads[own])
    state = optimizer.state_dict()["state"]
    for k, rows in enumerate(ROWS):
        assert state[k]["exp_avg"].shape == (rows, 3)
    parallax.shutdown()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_different_tables_of_a_stack(world_size: int) -> None:
    ranks.run(world_size, rows_by_table, world_size)


def not_used(rows: int) -> Any:
    """A table of a stack that no rank uses in some steps, and one that a single rank does not."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(rows, 2) for _ in range(3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallax.distribute(model, optimizer)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        ids = some_ids(step, rows)
        total = model[0](ids).square().mean()
        if step % 2 or step == 0:
            total = total + model[1](ids).sin().mean()
        if parallax.rank() == 0:
            total = total + model[2](ids).cos().mean()
        total.backward()
        found.append([p.grad is None for p in model.parameters()])
        optimizer.step()
    parallax.shutdown()
    return found


def some_ids(step: int, rows: int) -> torch.Tensor:
    return torch.arange(step, step + 4) % rows


def test_a_table_that_was_not_used_has_no_gradient() -> None:
    for found in ranks.run(2, not_used, 9):
        assert found == [[False, step % 2 == 0 and step > 0, False] for step in range(6)]
