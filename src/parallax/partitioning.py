"""Where the rows of tables live: plain arithmetic, no lists of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from parallax.mesh import Column


class Partitioning:
    """Row r of a table lives in partition r mod P, and partition p on rank `owners[p]`."""

    def __init__(self, num_rows: int, owners: Sequence[int], world_size: int, device: torch.device) -> None:
        """
        Args:
            owners: per partition.
        """
        self.num_rows, self.device = num_rows, device
        self.num_partitions = len(owners)
        self.owners = tuple(owners)
        self.sizes = [max(0, -(-(num_rows - p) // self.num_partitions)) for p in range(self.num_partitions)]
        self.num_held = [0] * world_size
        self.starts: list[int] = []
        """Of each partition, the position of its first row among those of its owner."""
        for owner, size in zip(owners, self.sizes, strict=True):
            self.starts.append(self.num_held[owner])
            self.num_held[owner] += size

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that holds each of rows `ids`."""
        return torch.tensor(self.owners, device=ids.device)[ids % self.num_partitions]

    def rows_of(self, rank: int) -> torch.Tensor:
        """The rows (int64) that `rank` holds, in the order in which it holds them."""
        pieces = [
            torch.arange(size, device=self.device) * self.num_partitions + p
            for p, (owner, size) in enumerate(zip(self.owners, self.sizes, strict=True))
            if owner == rank
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=self.device)


class Places:
    """Where the rows of several tables are: a rank holds those of the first table, then those of the second, and so on.

    A row's *key* is place * stride + its position among all these rows of its owner, where places number the owners
    such that sorting keys groups rows by whom this rank asks for them, then by owner, then by table.
    """

    def __init__(
        self, tables: Sequence[Partitioning], world_size: int, device: torch.device, agents: Sequence[int] = ()
    ) -> None:
        """
        Args:
            tables: at least one.
            agents: for each rank, which worker of this machine talks to it for all of them (`merging`), by its number
                among them. (): every worker talks to every rank itself.
        """
        self.tables = tuple(tables)
        self.merged = bool(agents)
        asked = list(agents or range(world_size))
        self.num_asked = max(asked) + 1
        """How many this rank asks for rows."""
        order = sorted(range(world_size), key=lambda rank: (asked[rank], rank))
        self._place = [order.index(rank) for rank in range(world_size)]
        ends = [sum(a <= n for a in asked) for n in range(self.num_asked)]
        self._places_asked = list(itertools.pairwise([0, *ends]))
        self.firsts = [
            list(itertools.accumulate((t.num_held[rank] for t in tables), initial=0)) for rank in range(world_size)
        ]
        """For each rank, the position of the first row of each table, and behind them how many rows it holds."""
        self.stride = max(1, *(firsts[-1] for firsts in self.firsts))
        self._starts = [
            [
                self._place[owner] * self.stride + self.firsts[owner][number] + start
                for owner, start in zip(t.owners, t.starts, strict=True)
            ]
            for number, t in enumerate(tables)
        ]
        """Of each table, the key of the first row of each partition."""
        self._all_starts = torch.tensor(list(itertools.chain(*self._starts)), device=device)
        counts = [t.num_partitions for t in tables]
        self._num_partitions = counts[0] if len(set(counts)) == 1 else torch.tensor(counts, device=device)
        self._first_starts = torch.tensor([0, *itertools.accumulate(counts[:-1])], device=device)
        self._bounds = torch.arange(1, world_size, device=device) * self.stride
        self._table_bounds = torch.tensor(
            [place * self.stride + first for place, rank in enumerate(order) for first in self.firsts[rank][:-1]],
            device=device,
        )

    def keys(self, ids: torch.Tensor, counts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Keys (int64) of rows `ids` (int64, one dimension, each in range).

        Args:
            counts: (number of a table, how many of `ids` are rows of it), one after the other.
        """
        parts = self._num_partitions
        if len(self.tables) == 1:
            return self._all_starts[ids % parts] + ids // parts
        numbers, sizes = zip(*counts, strict=True)
        of = by_size(numbers, sizes, ids.device)
        if isinstance(parts, torch.Tensor):
            parts = parts[of]
        return self._all_starts[self._first_starts[of] + ids % parts] + ids // parts

    def ids(self, keys: torch.Tensor, number: int) -> torch.Tensor:
        """The rows (int64) of table `number` that have `keys`."""
        table = self.tables[number]
        filled = torch.tensor([p for p, size in enumerate(table.sizes) if size], device=keys.device)
        starts, order = torch.tensor(self._starts[number], device=keys.device)[filled].sort()
        at = torch.searchsorted(starts, keys, right=True) - 1
        return (keys - starts[at]) * table.num_partitions + filled[order[at]]

    def count_by_table(self, keys: torch.Tensor, among: torch.Tensor | None = None) -> list[int]:
        """How many of sorted `keys` are of each table.

        Args:
            among: for each key whether it counts; None: all do.
        """
        if len(self.tables) == 1:
            return [len(keys) if among is None else int(among.sum())]
        ends = torch.cat([torch.searchsorted(keys, self._table_bounds), self._bounds.new_tensor([len(keys)])])
        if among is not None:
            ends = torch.cat([self._bounds.new_zeros(1), among.cumsum(0)])[ends]
        return ends.diff().view(-1, len(self.tables)).sum(0).tolist()

    def cuts(self, keys: torch.Tensor) -> list[int]:
        """Where sorted `keys` change their owner: world size + 1 numbers, from 0 to len(keys), in order of places."""
        if not len(keys):
            return [0] * (len(self._bounds) + 2)
        return [0, *torch.searchsorted(keys, self._bounds).tolist(), keys.numel()]

    def by_owner(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """For each rank, its part of sorted keys that are cut so."""
        return [(cuts[place], cuts[place + 1]) for place in self._place]

    def by_asked(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """For each that this rank asks, its part of sorted keys that are cut so."""
        return [(cuts[first], cuts[end]) for first, end in self._places_asked]

    def columns(self, keys: torch.Tensor, *, merged: bool) -> Column:
        """Of sorted `keys`, what to ask each owner for: positions; or (merged) each agent: the keys."""
        cuts = self.cuts(keys)
        if merged:
            return Column(keys, self.by_asked(cuts))
        return Column(self.positions(keys), self.by_owner(cuts))

    @property
    def dtype(self) -> torch.dtype:
        """Of positions on the wire: the smallest that holds them."""
        return id_dtype(self.stride)

    def positions(self, keys: torch.Tensor) -> torch.Tensor:
        """Positions among the owners' rows, in `dtype`."""
        return (keys % self.stride).to(self.dtype)


def id_dtype(num_rows: int) -> torch.dtype:
    """The smallest dtype that numbers so many rows."""
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def by_size(values: Sequence[int], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """`values[0]` as often as `sizes[0]` says, and so on (int64)."""
    of_one, counts = torch.tensor([values, sizes], device=device)
    return of_one.repeat_interleave(counts, output_size=sum(sizes))
