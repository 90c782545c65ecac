"""Rows on lease: which a rank has fetched since the weights last changed, and which it has given out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from parallax.mesh import Column
from parallax.partitioning import Places


class Window:
    """The rows of a stack that this rank has leased since the weights last changed: no row is asked for twice.

    Slots number the leased rows in the order of their arrival; that order is also that of those who were asked
    (`leases`), so a gradient can travel without its ids.
    """

    def __init__(
        self, places: Places | None, num_asked: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            places: those of the keys; a table may live elsewhere later.
        """
        self.places = places
        self.keys = torch.empty(0, dtype=torch.int64, device=device)
        """Sorted keys of the leased rows."""
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        """Slot of each of `keys`."""
        self.rows = torch.empty(0, width, dtype=dtype, device=device)
        """The leased rows by slot, shape (slots, width)."""
        self.renorm: tuple[float, float] | None = None
        """(max_norm, norm_type) of the lookups that leased the rows."""
        self.spans: list[list[tuple[int, int]]] = [[] for _ in range(num_asked)]
        """For each that was asked, the spans of slots leased from it, oldest first."""
        self.foreseen = False
        """Rows have come that were asked for ahead."""

    def __len__(self) -> int:
        return self.keys.numel()

    def keys_by_slot(self) -> torch.Tensor:
        keys = torch.empty_like(self.keys)
        keys[self.slots] = self.keys
        return keys

    def by_asked(self, values: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """`values`, one per slot, those leased from the first that was asked first; and how many each has."""
        num_leased = [sum(b - a for a, b in spans) for spans in self.spans]
        in_order = [span for spans in self.spans for span in spans]
        if in_order == sorted(in_order):
            return values, num_leased
        return torch.cat([values[a:b] for a, b in in_order]), num_leased

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, known): where sorted `keys` are leased already, and a mask that says which are."""
        if not len(self):
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self) - 1)
        return self.slots[at], self.keys[at] == keys

    def add(self, keys: torch.Tensor, rows: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Takes up newly leased rows: sorted `keys`, their `rows`, and which of them each that was asked has given."""
        first = self.rows.shape[0]
        slots = torch.arange(first, first + keys.numel(), device=keys.device)
        if first:
            self.rows = torch.cat([self.rows, rows])
            self.keys, order = torch.cat([self.keys, keys]).sort()
            self.slots = torch.cat([self.slots, slots])[order]
        else:
            self.keys, self.slots, self.rows = keys, slots, rows
        for of_one, (a, b) in zip(self.spans, spans, strict=True):
            if a < b:
                of_one.append((first + a, first + b))


class Leases:
    """What ranks (or workers of a machine) have leased here since the weights last changed."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        """Oldest first."""

    def add(self, column: Column) -> None:
        """Each rank has leased its part, too."""
        if any(a < b for a, b in column.spans):
            self._columns.append(column)

    def of(self, source: int) -> list[torch.Tensor]:
        return [part for column in self._columns if len(part := column.part(source))]

    def all_of(self, sources: Collection[int]) -> list[torch.Tensor]:
        """The leases of `sources`, those of the first one first."""
        if len(self._columns) == 1:
            [column] = self._columns
            num_rows = sum(b - a for source in sources for a, b in (column.spans[source],))
            if num_rows == len(column.tensor):
                return [column.tensor]
        return [part for source in sources for part in self.of(source)]


class Agent:
    """What a worker has leased for all workers of its machine, and leased on to them (see `merging`)."""

    def __init__(self, window: Window) -> None:
        """
        Args:
            window: an empty one.
        """
        self.window = window
        self.leases = Leases()
        """Slots of `window`, by worker."""
