"""Optimizer steps that ranks without data repeat, so that their rows and copies stay those of the others."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallax.comm import ParallaxError
from parallax.optimizer import Optimizers
from parallax.table import Table
from parallax.whole import Change, WholeReads


def pack(value: Any) -> torch.Tensor:
    """`value` (picklable) as bytes (uint8, on the CPU), to be sent in a round."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> Any:
    """What was packed on another rank; tensors are on the CPU, as that rank's device may not be this one's."""
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)


class Repeats:
    """Writes down what an optimizer step is made of, and runs it from what another rank wrote down."""

    def __init__(
        self,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        tables: Mapping[str, Table],
        optimizers: Optimizers,
        reads: WholeReads,
    ) -> None:
        self._rank, self._parameters, self._tables = rank, parameters, tables
        self._optimizers, self._reads = optimizers, reads
        self._names = {p: name for name, p in parameters.items()}

    def check(self) -> None:
        """Raises ParallaxError if something was done to the gradient of a table that `Change` cannot say."""
        for table in self._tables.values():
            if table.sharded and table.name in self._reads.unrepeatable:
                raise ParallaxError(
                    f"rank {self._rank}: the gradient of {table.name!r} was changed in a way that ranks without "
                    f"data cannot repeat; use drop_last=True, or change gradients by numbers only"
                )

    def record(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The step that `optimizer` is about to run, as bytes (uint8, on the CPU): its settings, the dense gradients,
        and what was done to those of tables."""
        self.check()
        grads, changes = {}, {}
        for p in (p for group in optimizer.param_groups for p in group["params"] if p in self._names):
            name = self._names[p]
            if self._is_sharded(name):
                changes[name] = None if p.grad is None else self._reads.changes.get(name, [])
            else:
                grads[name] = p.grad
        step = {
            "optimizer": self._optimizers.number(optimizer),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "grads": grads,
            "changes": changes,
        }
        return pack(step)

    def repeat(self, recorded: torch.Tensor) -> None:
        """Runs a step that `record` wrote down on another rank."""
        step = unpack(recorded)
        if step["optimizer"] >= len(self._optimizers):
            raise ParallaxError(
                f"rank {self._rank} ran out of data before its first optimizer step and does not know the "
                f"optimizer; pass it to parallax.distribute(model, optimizer)"
            )
        optimizer = self._optimizers[step["optimizer"]]
        for group, settings in zip(optimizer.param_groups, step["groups"], strict=True):
            for key, value in settings.items():
                own = group.get(key)
                both = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
                group[key] = value.to(own.device) if both and own is not None else value
        for name, grad in step["grads"].items():
            p = self._parameters[name]
            p.grad = None if grad is None else grad.to(p.device)
        for name, changes in step["changes"].items():
            table = self._tables[name]
            if changes is None:
                table.grad = None
                continue
            if table.grad is None:
                table.grad = table.zero_gradient()
        self.redo({name: changes for name, changes in step["changes"].items() if changes is not None})
        optimizer.step()

    def redo(self, changes: Mapping[str, list[Change]]) -> None:
        """Does to the gradients of tables, by name, what was done to them on another rank."""
        for name, made in changes.items():
            if (grad := self._tables[name].grad) is not None:
                for change in made:
                    change.repeat(grad)

    def _is_sharded(self, name: str) -> bool:
        return name in self._tables and self._tables[name].sharded
