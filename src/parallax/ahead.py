"""Rows of the next batch, asked for and sent while a rank still trains with the batch before.

A rank that knows its next batch asks owners for the rows of it one step ahead (`foresight` tells which those are). An
owner sends at once what nobody has leased in this step, as the update is not likely to change that. The first round
after the update brings the rest, and once more what has changed after all, whatever has changed it: the owner compares.
So what is here after that round is what a lookup would have brought, and on lease like it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from parallax.mesh import Column

MOST_CHANGED = 0.25
"""If more of the rows that were sent ahead change than this, an owner sends none of the table ahead any more."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Brought:
    """Rows for those who asked for them ahead: `rows` of shape (n, width); `at` (int32) says which of those that a rank
    asked for they are. None: they are all of them."""

    rows: Column
    at: Column | None


class Foreseen:
    """What this rank has asked for ahead, of one table."""

    def __init__(self, ids: torch.Tensor, keys: torch.Tensor, inverse: torch.Tensor, positions: Column) -> None:
        """
        Args:
            ids: row numbers, as the lookups of a step are expected to have them, one after the other.
            keys: theirs, sorted, each once (`Partitioning.keys`); `keys[inverse]` are those of `ids`.
            positions: where each of `keys` is at its owner.
        """
        self.ids, self.keys, self.inverse, self.positions = ids, keys, inverse, positions
        self.rows: torch.Tensor | None = None
        """Shape (keys, width); filled little by little."""

    def fill(self, rows: torch.Tensor, num_rows: Sequence[int], at: Column) -> None:
        """Takes in rows that came, `num_rows[r]` of them from rank r.

        Args:
            at: which of those that rank r was asked for; a rank that has none here has brought all.
        """
        if self.rows is None:
            self.rows = rows.new_empty(len(self.keys), rows.shape[1])
        which = [
            (at.part(r).long() + a)
            if at is not None and at.num_bytes(r)
            else torch.arange(a, a + n, device=rows.device)
            for r, (n, (a, _)) in enumerate(zip(num_rows, self.positions.spans, strict=True))
        ]
        self.rows[torch.cat(which)] = rows


class Ordered:
    """What ranks have asked this one for ahead, of one table."""

    def __init__(self, positions: Column) -> None:
        """
        Args:
            positions: of the rows among those held here; of each rank its own.
        """
        self.positions = dataclasses.replace(positions, tensor=positions.tensor.long())
        self._sent: torch.Tensor | None = None
        """A mask over `positions`."""
        self._copies: torch.Tensor | None = None
        """What was sent."""

    def not_leased(
        self, leases: Sequence[Sequence[torch.Tensor]], held: torch.Tensor, num_bytes: int
    ) -> Brought | None:
        """Rows that nobody has leased, to be sent now; None if they have less than `num_bytes`.

        Args:
            held: the rows held here, shape (rows held, width).
        """
        leased = torch.zeros(len(held), dtype=torch.bool, device=held.device)
        for of_one in leases:
            for positions in of_one:
                leased[positions.long()] = True
        sent = ~leased[self.positions.tensor]
        copies = held.index_select(0, self.positions.tensor[sent])
        if copies.nbytes < max(1, num_bytes):
            return None
        self._sent, self._copies = sent, copies
        return self._brought(sent, copies)

    def rest(self, held: torch.Tensor) -> tuple[Brought, float]:
        """What was not sent yet, and what has changed since; and the part of it that has."""
        if self._sent is None or self._copies is None:
            return Brought(
                dataclasses.replace(self.positions, tensor=held.index_select(0, self.positions.tensor)), None
            ), 0.0
        now = held.index_select(0, self.positions.tensor[self._sent])
        dtype = _BITS[now.itemsize]  # zeros have signs, and NaN is no news
        changed = (now.view(dtype) != self._copies.view(dtype)).any(1)
        due = ~self._sent
        due[self._sent] = changed
        return self._brought(due, held.index_select(0, self.positions.tensor[due])), float(changed.float().mean())

    def _brought(self, which: torch.Tensor, rows: torch.Tensor) -> Brought:
        parts = [which[a:b].nonzero().squeeze(1) for a, b in self.positions.spans]
        sizes = list(map(len, parts))
        return Brought(Column.split(rows, sizes), Column.split(torch.cat(parts).to(torch.int32), sizes))
