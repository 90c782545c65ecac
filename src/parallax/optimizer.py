"""What parallax knows of an optimizer: whether it updates row by row, and which of its state has rows."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parallax.joint import JointUpdates
from parallax.table import Stack, Table


@dataclasses.dataclass(frozen=True)
class Rowwise:
    """How an optimizer treats a table, found by trying it (`probe`)."""

    by_rows: bool
    """Updating the rows in parts gives what updating them together gives."""
    keys: frozenset[str] = frozenset()
    """Entries of the state with one row per row of the parameter."""
    reason: str = ""
    dense_state: bool = False
    """None of these is a COO tensor."""


trials: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers made here to try something: their steps are none of the program's."""

_ROWS, _WIDTH, _STEPS = 5, 3, 3
_PARTS = (range(_ROWS), (0, 2, 3), (1, 4))
_LEARNING_RATE = 0.1


def probe(optimizer: torch.optim.Optimizer, table: Table) -> Rowwise:
    """Runs copies of `optimizer` on a small stand-in for a table, whole and in two parts, and compares.

    An optimizer whose update of a row looks at other rows (a norm of the parameter, factored moments, an
    orthogonalised matrix) cannot run where the rows live: its parts differ from the whole.
    """
    group = next(g for g in optimizer.param_groups if any(p is table.parameter for p in g["params"]))
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, *(_WIDTH for _ in table.row_shape))
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    start = torch.randn(shape, generator=generator, dtype=dtype) + 0.1
    grads = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(_STEPS)]
    touched = [[0, 1, 4], [1, 2, 3], [0, 3, 4]]  # different rows each step: momentum of untouched ones shows
    try:
        runs = [
            [_train(optimizer, group, start, [g * size for g in grads], touched, rows, table) for rows in _PARTS]
            for size in (1.0, 1e3)  # thresholds, as those of clipping, show for large gradients
        ]
    except Exception as error:  # a closure is needed, or an optimizer that cannot be copied: it stays whole
        return Rowwise(False, reason=f"{type(optimizer).__name__} could not be tried on parts of a table: {error}")
    if runs[0][0][2]:
        return Rowwise(False, reason=f"{type(optimizer).__name__} keeps state of rows outside of its `state`")
    states = [state for _, state, _ in runs[0]]
    keys = frozenset(
        key
        for key in states[0]
        if all(_num_rows(state.get(key)) == len(rows) for state, rows in zip(states, _PARTS, strict=True))
    )
    for (whole, *_), *parts in runs:
        updates = whole - start  # a small update would be lost in the parameter
        joined = torch.empty_like(updates)
        for rows, (part, *_) in zip(_PARTS[1:], parts, strict=True):
            joined[list(rows)] = part - start[list(rows)]
        if not torch.allclose(joined, updates, rtol=1e-4, atol=1e-6):
            return Rowwise(False, keys, f"{type(optimizer).__name__}'s update of a row depends on other rows")
    return Rowwise(True, keys, dense_state=all(states[0][key].layout == torch.strided for key in keys))


def _num_rows(value: Any) -> int | None:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None


def _train(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    start: torch.Tensor,
    grads: list[torch.Tensor],
    touched: list[list[int]],
    rows: Collection[int],
    table: Table,
) -> tuple[torch.Tensor, dict[str, Any], bool]:
    """(the stand-in trained, its state, whether something else in the optimizer has its rows)"""
    index = list(rows)
    p = torch.nn.Parameter(start[index].to(table.device))
    trial = _sibling(optimizer, group, p, _LEARNING_RATE)  # that of a warm-up may be too small to show differences
    for grad, now in zip(grads, touched, strict=True):
        part = torch.zeros_like(start)
        part[now] = grad[now]
        part = part[index].to(table.device)
        if table.sparse_grad:
            here = torch.tensor([i for i, r in enumerate(index) if r in now], device=table.device)
            p.grad = torch.sparse_coo_tensor(
                here[None], part[here], part.shape, is_coalesced=True, check_invariants=False
            )
        else:
            p.grad = part
        trial.step()
    others = tree_leaves([value for key, value in vars(trial).items() if key not in ("state", "param_groups")])
    hidden = any(_num_rows(value) == len(index) and value is not p for value in others)
    return p.detach().cpu(), dict(trial.state[p]), hidden


def _sibling(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.nn.Parameter, lr: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings for `p` alone."""
    settings = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
    settings["lr"] = lr
    accepted = inspect.signature(type(optimizer).__init__).parameters
    try:
        trial = type(optimizer)([p], **{k: v for k, v in settings.items() if k in accepted})
    except Exception:  # a constructor of another form: copy the object, with state still to be made
        trial = copy.copy(optimizer)
        trial.state = collections.defaultdict(dict)
        trial.param_groups = [{"params": [p]}]
    trial.param_groups[0].update(settings)
    trials.add(trial)
    return trial


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By group, the settings that decide on an update: numbers, flags and words."""

    def is_number(value: Any) -> bool:  # not on a GPU, where looking at it takes time
        return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return [
        {
            key: value.item() if is_number(value) else value
            for key, value in sorted(group.items())
            if key not in ("params", "param_names") and (is_plain(value) or is_number(value))
        }
        for group in optimizer.param_groups
    ]


def digest(settings: Any) -> int:
    """A number that is equal on ranks where `settings` are, and else most likely not."""
    return zlib.crc32(repr(settings).encode())


def state_summary(optimizer: torch.optim.Optimizer) -> Any:
    """Small, and different where settings or state differ."""
    numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}

    def brief(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dense = value.to_dense() if value.is_sparse else value
            held = dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return tuple(value.shape), zlib.crc32(held.numpy().data)
        return value if isinstance(value, (bool, int, float, str, type(None))) else None

    state = {
        numbers[p]: {k: brief(v) for k, v in entry.items()} for p, entry in optimizer.state.items() if p in numbers
    }
    return settings_of(optimizer), state


@dataclasses.dataclass(frozen=True)
class _Narrowed:
    """A table of which an optimizer sees some rows only, and what it is without that."""

    optimizer: torch.optim.Optimizer
    table: Table
    rows: torch.Tensor
    data: torch.Tensor
    grad: torch.Tensor
    held: dict[str, torch.Tensor]


class Optimizers:
    """The optimizers of a run: which parameters each of them updates, and how."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        """
        Args:
            tables: the tables of the run, by name; may change.
        """
        self._tables = tables
        self._known: list[torch.optim.Optimizer] = []
        self._members: dict[int, tuple[int, dict[int, int]]] = {}
        self._rowwise: dict[tuple[Any, ...], Rowwise] = {}
        self._narrowed: list[_Narrowed] = []
        self._joint = JointUpdates()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        self._known.append(optimizer)

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(o is optimizer for o in self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, number: int) -> torch.optim.Optimizer:
        return self._known[number]

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """The same on all ranks."""
        return next(i for i, o in enumerate(self._known) if o is optimizer)

    def of(self, table: Table) -> list[torch.optim.Optimizer]:
        """Those that update `table`."""
        return [o for o in self._known if id(table.parameter) in self.members(o)]

    def members(self, optimizer: torch.optim.Optimizer) -> Mapping[int, int]:
        """By id of a parameter of an optimizer, the number of its group; groups may be added to it."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._members.get(id(optimizer))
        if known is None or known[0] != count:
            groups = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
            known = self._members[id(optimizer)] = (count, groups)
        return known[1]

    def how(self, optimizer: torch.optim.Optimizer, table: Table) -> Rowwise:
        """How `optimizer` treats `table`; tried once for each kind of table."""
        group = self.members(optimizer)[id(table.parameter)]
        kind = (self.number(optimizer), group, len(table.shape), table.dtype, table.sparse_grad)
        if kind not in self._rowwise:
            self._rowwise[kind] = probe(optimizer, table)
        return self._rowwise[kind]

    def how_updated(self, table: Table) -> list[Rowwise]:
        return [self.how(optimizer, table) for optimizer in self.of(table)]

    # -- tables as an optimizer sees them while it steps ----------------------------------------------

    def join(self, optimizer: torch.optim.Optimizer, stacks: Sequence[Stack]) -> None:
        """Until `widen`, the tables of a stack are one parameter of `optimizer` where that makes no difference."""

        def keys_of(table: Table) -> Collection[str] | None:
            how = self.how(optimizer, table)
            return how.keys if how.dense_state else None

        self._joint.join(optimizer, stacks, keys_of)

    def narrow(self, optimizer: torch.optim.Optimizer) -> None:
        """Until `widen`, lazy tables are those of their rows that have a gradient, for `optimizer`."""
        for table in self._tables.values():
            grad = table.grad if self.is_lazy(optimizer, table) else None
            if grad is None or grad.layout != torch.strided:  # for COO gradients optimizers are lazy themselves
                continue
            rows = table.rows_with_gradient()
            state = optimizer.state.get(table.parameter, {})
            keys = self.how(optimizer, table).keys
            held = {key: value for key, value in state.items() if key in keys and isinstance(value, torch.Tensor)}
            self._narrowed.append(_Narrowed(optimizer, table, rows, table.data, grad, held))
            for key, value in held.items():
                state[key] = value[rows]
            table.grad = None
            table.set_data(table.data[rows])
            table.grad = grad[rows]

    def is_lazy(self, optimizer: torch.optim.Optimizer, table: Table) -> bool:
        """Whether `optimizer` updates `table`, and only its rows with a gradient."""
        return table.lazy and id(table.parameter) in self.members(optimizer)

    def widen(self) -> None:
        """Puts the rows that `narrow` took out back into their tables, and their state as well; undoes `join`."""
        self._joint.part()
        for n in self._narrowed:
            n.data.index_copy_(0, n.rows, n.table.data)
            n.table.grad = None
            n.table.set_data(n.data)
            n.table.grad = n.grad
            state = n.optimizer.state.get(n.table.parameter, {})
            for key in self.how(n.optimizer, n.table).keys:
                value = state.get(key)
                if isinstance(value, torch.Tensor):
                    held = n.held.get(key)
                    if held is None:  # made in this step
                        initial = self._initial_state(n.optimizer, n.table, key)
                        held = initial.expand(len(n.data), *value.shape[1:]).clone()
                    state[key] = held.index_copy_(0, n.rows, value)
        self._narrowed.clear()

    def _initial_state(self, optimizer: torch.optim.Optimizer, table: Table, key: str) -> torch.Tensor:
        """State of a row that was never touched, shape (1, ...): what a zero gradient for a zero row leaves it at."""
        p = torch.nn.Parameter(torch.zeros(1, *table.row_shape, dtype=table.dtype, device=table.device))
        group = next(g for g in optimizer.param_groups if any(q is table.parameter for q in g["params"]))
        trial = _sibling(optimizer, group, p, lr=group["lr"])
        p.grad = torch.zeros_like(p)
        trial.step()
        return trial.state[p][key]

    # -- state --------------------------------------------------------------------------------------

    def cut_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps this rank's rows of state that was made or loaded for whole tables."""
        for table in self.tables_of(optimizer):
            self.cut_state(optimizer, table)

    def cut_state(self, optimizer: torch.optim.Optimizer, table: Table) -> None:
        state = optimizer.state.get(table.parameter, {})
        for key in self.how(optimizer, table).keys if state else ():
            value = state.get(key)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] != table.num_held:
                state[key] = table.own_rows(value)

    def field(self, table: Table, number: int) -> torch.Tensor | None:
        """Entry number `number` of the state of `table` that has rows: this rank's rows of it."""
        optimizer, key = self.entries(table)[number]
        value = optimizer.state.get(table.parameter, {}).get(key)
        return value if isinstance(value, torch.Tensor) else None

    def whole_state(
        self,
        optimizer: torch.optim.Optimizer,
        state_dict: dict[str, Any],
        read_whole: Callable[[Table, int], torch.Tensor],
    ) -> dict[str, Any]:
        """`state_dict` with the state of tables as one device has it.

        Args:
            read_whole: fetches the whole tensor behind a field of a table (see `Rounds.fields`), shape (rows, width).
        """
        state = dict(state_dict["state"])
        tables: dict[torch.Tensor, Table] = {t.parameter: t for t in self.tables_of(optimizer)}
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if number not in state:
                continue
            entry = state[number] = dict(state[number])  # the optimizer's own entry may be cut later
            if p not in tables:
                continue
            for i, (o, key) in enumerate(self.entries(tables[p])):
                value = entry.get(key)
                if o is optimizer and isinstance(value, torch.Tensor):
                    whole = read_whole(tables[p], 2 + i).view(tables[p].num_rows, *value.shape[1:])
                    entry[key] = whole.to_sparse(1) if value.layout == torch.sparse_coo else whole
        return {**state_dict, "state": state}

    def tables_of(self, optimizer: torch.optim.Optimizer) -> list[Table]:
        """Those that are spread and that `optimizer` updates."""
        return [t for t in self._tables.values() if t.sharded and id(t.parameter) in self.members(optimizer)]

    def entries(self, table: Table) -> list[tuple[torch.optim.Optimizer, str]]:
        """The entries of state that have rows, in the order of their field numbers."""
        return [(o, key) for o in self.of(table) for key in sorted(self.how(o, table).keys)]
