"""Rows of the next batch, asked for and sent while a rank still trains with the batch before.

A rank that knows its next batch asks owners for the rows of it one step ahead (`foresight` tells which those are). An
owner sends at once what nobody has leased in this step, as the update is not likely to change that, and the rest when
it has made the update. The next round brings once more what has changed after all, whatever has changed it: the owner
compares. So what is here after that round is what a lookup would have brought, and on lease like it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from parallax.mesh import Column
from parallax.partitioning import by_size

MOST_CHANGED = 0.25
"""If more of what was sent before an update changes than this, or after it, an owner no longer sends it then."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Brought:
    """Rows for those who asked for them ahead: `rows` of shape (n, width); `at` (int32) says which of those that a rank
    asked for they are. None: they are all of them."""

    rows: Column
    at: Column | None


class Foreseen:
    """What this rank has asked for ahead, of one stack."""

    def __init__(self, raw: torch.Tensor, keys: torch.Tensor, inverse: torch.Tensor, positions: Column) -> None:
        """
        Args:
            raw: keys of rows (`Places.keys`), as the lookups of a step are expected to have them, table by table.
            keys: these, sorted, each once; `keys[inverse]` is `raw`.
            positions: where each of `keys` is at its owner.
        """
        self.raw, self.keys, self.inverse, self.positions = raw, keys, inverse, positions
        self.rows: torch.Tensor | None = None
        """Shape (keys, width); filled little by little."""

    def fill(self, rows: torch.Tensor, num_rows: Sequence[int], at: Column) -> None:
        """Takes in rows that came, `num_rows[r]` of them from rank r.

        Args:
            at: which of those that rank r was asked for; a rank that has none here has brought all.
        """
        if self.rows is None:
            self.rows = rows.new_empty(len(self.keys), rows.shape[1])
        starts = [a for a, _ in self.positions.spans]
        if len(at.tensor) == len(rows):
            which = at.tensor + by_size(starts, num_rows, rows.device)
        else:
            which = torch.cat(
                [
                    at.part(r).long() + a if at.num_bytes(r) else torch.arange(a, a + n, device=rows.device)
                    for r, (n, a) in enumerate(zip(num_rows, starts, strict=True))
                ]
            )
        self.rows.index_copy_(0, which, rows)


@dataclasses.dataclass
class _Sent:
    """Rows as they were sent, by their numbers in `Ordered.positions`."""

    numbers: torch.Tensor
    rows: torch.Tensor
    version: int
    """Of the weights (`Rounds.version`) that they are known to be up to date with, or else in `Ordered._missing`."""


class Ordered:
    """What ranks have asked this one for ahead, of one stack."""

    def __init__(self, positions: Column) -> None:
        """
        Args:
            positions: of the rows among those held here; of each rank its own.
        """
        self.positions = dataclasses.replace(positions, tensor=positions.tensor.long())
        device = positions.tensor.device
        self._ends = torch.tensor([end for _, end in positions.spans], device=device)
        starts = self._by_rank([start for start, _ in positions.spans])
        self._at = (torch.arange(len(starts), device=device) - starts).to(torch.int32)
        """Of each of `positions`, its number among those of its rank."""
        self._missing = torch.ones_like(self.positions.tensor, dtype=torch.bool)
        """What was not sent."""
        self._sent: list[_Sent] = []
        self.updated = False
        """There has been an update since."""

    def __len__(self) -> int:
        return len(self._missing)

    def _by_rank(self, values: Sequence[int]) -> torch.Tensor:
        """Of each of `positions`, the value for its rank."""
        return by_size(values, [b - a for a, b in self.positions.spans], self.positions.tensor.device)

    def and_earlier(self, earlier: Ordered) -> Ordered:
        """What ranks have asked for in both of two rounds with the same weights, each in one of them: not all need be
        at their lookups at the same time, as when one evaluates alone."""
        ranks = range(len(self.positions.spans))
        parts = [torch.cat([earlier.positions.part(r), self.positions.part(r)]) for r in ranks]
        both = Ordered(Column.split(torch.cat(parts), list(map(len, parts))))
        for one in (earlier, self):
            moved = [new - old for (new, _), (old, _) in zip(both.positions.spans, one.positions.spans, strict=True)]
            shift = one._by_rank(moved)
            both._missing[torch.arange(len(one), device=shift.device) + shift] = one._missing
            for sent in one._sent:
                both._sent.append(_Sent(sent.numbers + shift[sent.numbers], sent.rows, sent.version))
        return both

    def not_leased(self, leases: Sequence[torch.Tensor], num_held: int) -> torch.Tensor:
        """Numbers in `positions` (sorted) of rows that were not sent and are not in `leases`, which are positions."""
        leased = torch.zeros(num_held, dtype=torch.bool, device=self.positions.tensor.device)
        for positions in leases:
            leased.index_fill_(0, positions.long(), True)
        return (~leased[self.positions.tensor] & self._missing).nonzero().squeeze(1)

    def missing(self) -> torch.Tensor:
        """Numbers in `positions` (sorted) of what was not sent, or was found to have changed."""
        return self._missing.nonzero().squeeze(1)

    def find_changes(self, held: torch.Tensor, version: int) -> float:
        """Looks for rows that have changed since they were sent; returns the part of what it looked at that has.

        Args:
            held: the rows held here, shape (rows held, width), with weights of `version`.
        """
        dtype = _BITS[held.itemsize]  # zeros have signs, and NaN is no news
        num_sent = num_changed = 0
        for sent in self._sent:
            if sent.version == version:
                continue
            now = held.index_select(0, self.positions.tensor[sent.numbers])
            changed = sent.numbers[(now.view(dtype) != sent.rows.view(dtype)).any(1)]
            self._missing[changed] = True
            sent.version = version
            num_sent, num_changed = num_sent + len(sent.numbers), num_changed + len(changed)
        return num_changed / max(1, num_sent)

    def bring(self, numbers: torch.Tensor, held: torch.Tensor, version: int) -> Brought:
        """The rows with these numbers, as they are now."""
        rows = held.index_select(0, self.positions.tensor[numbers])
        everything = not self._sent and len(numbers) == len(self._missing)
        self._sent.append(_Sent(numbers, rows, version))
        self._missing[numbers] = False
        if everything:
            return Brought(dataclasses.replace(self.positions, tensor=rows), None)
        ends = torch.searchsorted(numbers, self._ends)
        spans = list(itertools.pairwise([0, *ends.tolist()]))
        return Brought(Column(rows, spans), Column(self._at[numbers], spans))
