"""One update for a stack: torch's optimizers see its tables as one parameter while they step.

An update row by row is the same whichever rows it is run for together. What an optimizer does for each parameter
(Python, operations on small tensors) is so done once for all tables of a stack.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from parallax.partitioning import by_size
from parallax.table import Stack, Table, as_one, make_one

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Joint:
    """The tables of a stack while they are one parameter."""

    optimizer: torch.optim.Optimizer
    stack: Stack
    group: dict[str, Any]
    """Of the optimizer."""
    params: list[nn.Parameter]
    """Those of the group, as they are else."""
    parameter: nn.Parameter
    keys: Collection[str]
    """Entries of the state with a row per row."""


class JointUpdates:
    """Puts the tables of stacks together for the time of an optimizer's step."""

    def __init__(self) -> None:
        self._joints: list[_Joint] = []
        self._parameters: weakref.WeakKeyDictionary[Stack, nn.Parameter] = weakref.WeakKeyDictionary()

    def join(
        self,
        optimizer: torch.optim.Optimizer,
        stacks: Sequence[Stack],
        keys_of: Callable[[Table], Collection[str] | None],
    ) -> None:
        """Until `part`, the tables of a stack are one parameter of `optimizer`, if it treats them alike.

        Args:
            keys_of: the entries of the state of a table that have a row per row; None if some are not dense.
        """
        # Others may know their parameters from elsewhere, and hooks of users look at theirs.
        if not type(optimizer).__module__.startswith("torch.optim.") or _is_watched(optimizer):
            return
        for stack in stacks:
            if len(stack.tables) > 1 and not any(t.lazy or len(t.shape) != 2 for t in stack.tables):
                group = _group_of(optimizer, stack)
                keys = None if group is None else keys_of(stack.tables[0])
                if group is not None and keys is not None:
                    self._join(optimizer, group, stack, keys)

    def _join(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], stack: Stack, keys: Collection[str]
    ) -> None:
        grads = [grad for table in stack.tables if (grad := table.grad) is not None]
        states = [optimizer.state.get(table.parameter, {}) for table in stack.tables]
        kinds = {(grad.layout, grad.dtype) for grad in grads}
        if len(grads) < len(stack.tables) or len(kinds) > 1 or not _are_alike(states, keys):
            return
        parameter = self._parameters.get(stack)
        if parameter is None:
            parameter = self._parameters[stack] = nn.Parameter(stack.data)
        parameter.data = stack.data
        parameter.grad = _joint_grad(stack, grads)
        if states[0]:
            optimizer.state[parameter] = {
                key: _joint_rows(states, key) if _has_rows(key, value, keys) else value
                for key, value in states[0].items()
            }
        params = list(group["params"])
        ours = {id(table.parameter) for table in stack.tables}
        others = [p for p in params if id(p) not in ours]
        place = next(i for i, p in enumerate(params) if id(p) in ours)
        group["params"][:] = [*others[:place], parameter, *others[place:]]
        self._joints.append(_Joint(optimizer, stack, group, params, parameter, keys))

    def part(self) -> None:
        """Tables are parameters of their own again, with their parts of what the step has made."""
        while self._joints:
            joint = self._joints.pop()
            joint.group["params"][:] = joint.params
            joint.parameter.grad = None
            state = joint.optimizer.state.pop(joint.parameter, {})
            for key, value in state.items():
                rows = value.split(joint.stack.num_rows_held) if _has_rows(key, value, joint.keys) else None
                for number, table in enumerate(joint.stack.tables):
                    entry = joint.optimizer.state[table.parameter]
                    if rows is not None:
                        entry[key] = rows[number]
                    else:  # one each: they may be updated alone some day
                        entry[key] = value.clone() if number and isinstance(value, torch.Tensor) else value


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Somebody but us has hooks on its steps."""
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    )
    return len(hooks) > 2


def _group_of(optimizer: torch.optim.Optimizer, stack: Stack) -> dict[str, Any] | None:
    """The parameter group that has all tables of `stack`."""
    ours = {id(table.parameter) for table in stack.tables}
    return next((g for g in optimizer.param_groups if ours <= {id(p) for p in g["params"]}), None)


def _has_rows(key: str, value: Any, keys: Collection[str]) -> bool:
    return key in keys and isinstance(value, torch.Tensor)


def _are_alike(states: Sequence[State], keys: Collection[str]) -> bool:
    """Whether an optimizer goes on with all of them in the same way."""
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        return False
    for key, value in first.items():
        values = [state[key] for state in states]
        if not isinstance(value, torch.Tensor):
            if any(isinstance(v, torch.Tensor) or v != value for v in values):
                return False
            continue
        if not all(isinstance(v, torch.Tensor) and v.dtype == value.dtype for v in values):
            return False
        if key in keys:
            if any(v.dim() != 2 or v.shape[1] != value.shape[1] for v in values):
                return False
        elif len({v.shape for v in values}) > 1 or not bool((torch.stack(values) == value).all()):
            return False
    return True


def _joint_rows(states: Sequence[State], key: str) -> torch.Tensor:
    """The rows of an entry, of which each state has a part from now on."""
    parts = [state[key] for state in states]
    rows = as_one(parts)
    return make_one(parts, lambda number, part: states[number].update({key: part})) if rows is None else rows


def _joint_grad(stack: Stack, grads: Sequence[torch.Tensor]) -> torch.Tensor:
    if grads[0].layout != torch.sparse_coo:
        rows = as_one(grads)
        return torch.cat(list(grads)) if rows is None else rows
    parts = [grad.coalesce() for grad in grads]
    sizes = [part._nnz() for part in parts]
    firsts = by_size(stack.firsts[:-1], sizes, stack.device)
    indices = torch.cat([part._indices() for part in parts], 1) + firsts
    values = [part._values() for part in parts]
    rows = as_one(values)
    rows = torch.cat(values) if rows is None else rows
    size = (stack.num_held, stack.width)
    return torch.sparse_coo_tensor(indices, rows, size, is_coalesced=True, check_invariants=False)
