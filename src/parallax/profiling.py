"""What a run learns of itself: how parameters are used, and where its time and its bytes go."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from parallax.plan import ParameterProfile, Use
from parallax.table import Incoming, Table


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counters of this rank since `distribute`; the difference of two is what happened in between."""

    num_steps: int = 0
    """Backward passes that were exchanged."""
    num_rounds: int = 0
    round_header_bytes: int = 0
    """Bytes sent in headers of rounds; per round they depend on the number of tables and ranks alone."""
    table_bytes: int = 0
    """Bytes sent for tables: ids, rows and row gradients, and rows that move to other owners."""
    dense_bytes: int = 0
    """Bytes sent for dense gradients, reckoned as by a ring AllReduce, or to and from a server."""
    merging_bytes: int = 0
    """Bytes sent to workers of the same machine to merge what goes to others; 0 where workers do not merge."""

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank saw of one parameter in a step."""

    use: Use
    num_rows_touched: int
    dense_gradient: bool
    layouts: frozenset[bool]


def note_uses(table: Table, seen: Sequence[Seen], lazy_rows: bool) -> None:
    """Puts together in a table what all ranks saw of it."""
    for s in seen:
        table.use |= s.use
        table.layouts |= s.layouts
        if s.dense_gradient:
            table.use |= Use.DENSE
    table.lazy = lazy_rows and Use.DENSE not in table.use


@dataclasses.dataclass(frozen=True)
class Lap:
    """Where the time of a step went, in seconds."""

    seconds: float
    """From the end of a backward pass to the end of the next."""
    exchange: float
    """Of these, in calls that send, or wait for others."""
    update: float
    """Of these, in optimizers' steps."""


class Clock:
    """Takes the time of steps that follow each other."""

    def __init__(self, exchanging: Callable[[], float]) -> None:
        """
        Args:
            exchanging: seconds that went into exchanges, since the run began.
        """
        self._exchanging = exchanging
        self._start: tuple[float, float] | None = None
        self._update, self._update_start = 0.0, 0.0

    def lap(self) -> Lap | None:
        """The step that ends now; None if no step was seen to begin."""
        if self._start is None:
            return None
        start, exchanged = self._start
        return Lap(time.monotonic() - start, self._exchanging() - exchanged, self._update)

    def start(self) -> None:
        self._start, self._update = (time.monotonic(), self._exchanging()), 0.0

    def stop(self) -> None:
        """What comes is no usual step."""
        self._start = None

    def begin_update(self) -> None:
        self._update_start = time.monotonic()

    def end_update(self) -> None:
        self._update += time.monotonic() - self._update_start


class RowCounts:
    """Counts the rows of a table that a step has gradients for: here, on an owner, and by the worker that has them."""

    def __init__(self, machine_of: Sequence[int]) -> None:
        """
        Args:
            machine_of: for each rank the number of its machine.
        """
        self._ranks = [[r for r, m in enumerate(machine_of) if m == number] for number in range(max(machine_of) + 1)]
        self.touched = 0
        """By this rank."""
        self.served = 0
        """What came here, to be added up."""
        self.by_machine = [0] * len(self._ranks)
        """Of the rows here, those that each machine has touched."""

    def see(self, table: Table, incoming: Sequence[Incoming]) -> None:
        """What arrived in one step."""
        parts: list[list[torch.Tensor]] = [[] for ranks in self._ranks for _ in ranks]
        for i in incoming:
            for source, part in enumerate(i.positions.split(i.num_rows)):
                parts[source].append(part)
                self.served += len(part)
        self.touched += table.num_rows_touched
        for number, ranks in enumerate(self._ranks):
            brought = [part for rank in ranks for part in parts[rank]]
            self.by_machine[number] += torch.unique(torch.cat(brought)).numel() if brought else 0


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one rank has counted of one table (`RowCounts`), in all steps that were watched."""

    touched: int
    served: int
    by_machine: list[int]
    sparse_gradient: bool


def profile_of(before: ParameterProfile, table: Table, counted: Sequence[Counted], num_steps: int) -> ParameterProfile:
    """The profile of a table after `num_steps` steps that were watched.

    Args:
        counted: by rank. Of a table that every rank has a copy of, each was served the whole.
    """
    parts = counted if table.sharded else counted[:1]
    by_machine = [sum(numbers) for numbers in zip(*(c.by_machine for c in parts), strict=True)]
    skew, served = 1.0, sum(c.served for c in parts)
    if table.partitioning is not None and served:
        held = [n / table.num_rows for n in table.partitioning.num_held]
        skew = max(1.0, *(c.served / served / share for c, share in zip(parts, held, strict=True) if share))
    return dataclasses.replace(
        before,
        num_rows_touched=sum(c.touched for c in counted) / len(counted) / num_steps,
        num_rows_by_machine=sum(by_machine) / len(by_machine) / num_steps,
        skew=skew,
        sparse_gradient=all(c.sparse_gradient for c in counted),
    )
