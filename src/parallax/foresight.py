"""Which part of a batch is looked up where: learnt by watching, so that the ids of the next batch are known ahead.

A guess is what explains the ids of one step: they are a tensor of the batch, a column of it or all but its ends, or
several of these one after the other. It counts when it explains those of the next step as well. A guess that turns out
wrong costs messages, no more: rows that were not foreseen are asked for as ever.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

MOST_GUESSES = 4
"""For a table, after which it counts as one whose ids are not to be foreseen."""

MOST_COLUMNS = 256

NUM_TURNS, TURN_STEPS = 4, 4
"""Of a trial."""

_Index = int | slice
_ENDS = (slice(None), slice(None, -1), slice(1, None))


@dataclasses.dataclass(frozen=True)
class Piece:
    """`batch[leaf][..., last]`, and of that `[first]`, flattened."""

    leaf: int
    first: slice
    last: _Index

    def of(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """None: the batch has no such part."""
        if self.leaf >= len(batch):
            return None
        leaf = batch[self.leaf]
        if isinstance(self.last, int):
            if leaf.dim() < 2 or self.last >= leaf.shape[-1]:
                return None
        elif leaf.dim() < 2 and self.first != slice(None):
            return None
        return leaf[..., self.last][self.first].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Guess:
    """The ids of a table in a step are `front`, then perhaps some that are not in the batch, then `back`."""

    front: tuple[Piece, ...]
    back: tuple[Piece, ...]

    def ids(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        parts = [piece.of(batch) for piece in (*self.front, *self.back)]
        found = [part for part in parts if part is not None]
        return torch.cat([part.long() for part in found]) if len(found) == len(parts) else None

    def explains(self, ids: torch.Tensor, batch: Sequence[torch.Tensor]) -> bool:
        expected = self.ids(batch)
        if expected is None or len(expected) > len(ids):
            return False
        num_front = sum(len(part) for piece in self.front if (part := piece.of(batch)) is not None)
        num_back = len(expected) - num_front
        seen = torch.cat([ids[:num_front], ids[len(ids) - num_back :]]) if num_back else ids[:num_front]
        return torch.equal(seen, expected.to(seen.device))


def guess(ids: torch.Tensor, batch: Sequence[torch.Tensor]) -> Guess | None:
    """What explains `ids` (int64, one dimension); None if nothing does.

    Args:
        batch: its tensors of whole numbers.
    """
    parts = [(piece, part.to(device=ids.device, dtype=ids.dtype)) for piece, part in _pieces(batch)]
    parts.sort(key=lambda found: -len(found[1]))
    front, start = _walk(ids, parts)
    back, rest = _walk(ids[start:].flip(0), [(piece, part.flip(0)) for piece, part in parts])
    return Guess(tuple(front), tuple(reversed(back))) if start or rest else None


def _walk(ids: torch.Tensor, parts: Sequence[tuple[Piece, torch.Tensor]]) -> tuple[list[Piece], int]:
    found: list[Piece] = []
    at = 0
    while at < len(ids):
        for piece, part in parts:
            if at + len(part) <= len(ids) and torch.equal(ids[at : at + len(part)], part):
                found.append(piece)
                at += len(part)
                break
        else:
            break
    return found, at


def _pieces(batch: Sequence[torch.Tensor]) -> Iterator[tuple[Piece, torch.Tensor]]:
    for number, leaf in enumerate(batch):
        indices: Iterable[_Index] = _ENDS
        if leaf.dim() > 1 and leaf.shape[-1] <= MOST_COLUMNS:
            indices = (*_ENDS, *range(leaf.shape[-1]))
        for last in indices:
            for first in _ENDS if leaf.dim() > 1 else _ENDS[:1]:
                piece = Piece(number, first, last)
                part = piece.of(batch)
                if part is not None and part.numel():
                    yield piece, part


class Trial:
    """Whether something pays: steps with it and without it in turn, then what was faster stays."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = True
        self._clock = clock
        self._num_steps = 0
        self._started: float | None = None
        self._took: dict[bool, list[float]] = {True: [], False: []}

    @property
    def is_over(self) -> bool:
        return self._num_steps > NUM_TURNS * TURN_STEPS

    def step(self) -> None:
        """A step begins; after it, `on` says whether to do it in this step."""
        now = self._clock()
        started, self._started = self._started, now
        if self.is_over:
            return
        # A turn's first step has what the turn before has asked for.
        if started is not None and (self._num_steps - 1) % TURN_STEPS:
            self._took[self.on].append(now - started)
        if self._num_steps < NUM_TURNS * TURN_STEPS:
            self.on = self._num_steps // TURN_STEPS % 2 == 0
        elif NUM_TURNS:
            with_it, without = (statistics.median(self._took[on]) for on in (True, False))
            self.on = with_it <= without
        self._num_steps += 1


class Foresight:
    """What is known of the lookups that batches of one source feed."""

    def __init__(self) -> None:
        self._batch: Sequence[torch.Tensor] = ()
        self._next: Sequence[torch.Tensor] | None = None
        self._seen: dict[str, list[torch.Tensor]] = {}
        self._guesses: dict[str, Guess] = {}
        self._certain: set[str] = set()
        """Names of tables whose guess has held."""
        self._num_wrong: dict[str, int] = {}
        self._given_up = False

    def begin(self, batch: Sequence[torch.Tensor], following: Sequence[torch.Tensor] | None) -> None:
        """A batch is handed out, and `following` will be after it (None: not known).

        Args:
            batch: its tensors of whole numbers, in a fixed order.
        """
        for name, seen in self._seen.items():
            self._learn(name, torch.cat(seen))
        self._seen.clear()
        self._batch, self._next = batch, following

    def _learn(self, name: str, ids: torch.Tensor) -> None:
        known = self._guesses.get(name)
        if known is not None and known.explains(ids, self._batch):
            self._certain.add(name)
            return
        if known is not None:
            self.doubt([name])
        if self._num_wrong.get(name, 0) < MOST_GUESSES and self._batch:
            found = guess(ids, self._batch)
            if found is not None:
                self._guesses[name] = found
            else:
                self.doubt([name])

    def see(self, name: str, ids: torch.Tensor) -> None:
        """Table `name` is looked up with `ids` in the step of the batch that was handed out."""
        if name not in self._certain and self._num_wrong.get(name, 0) < MOST_GUESSES:
            self._seen.setdefault(name, []).append(ids)

    @property
    def is_certain(self) -> bool:
        """The ids of some tables are known ahead."""
        return bool(self._certain) and not self._given_up

    def doubt(self, names: Iterable[str]) -> None:
        """What was foreseen of these tables was wrong."""
        for name in names:
            self._certain.discard(name)
            self._guesses.pop(name, None)
            self._num_wrong[name] = self._num_wrong.get(name, 0) + 1

    def give_up(self) -> None:
        """To know more of these batches is of no use."""
        self._given_up = True

    def following(self) -> dict[str, torch.Tensor]:
        """By table, the ids (int64, one dimension) that are likely in the step after this one; each time anew."""
        batch, self._next = self._next, None
        if batch is None or self._given_up:
            return {}
        found = {name: self._guesses[name].ids(batch) for name in self._certain}
        return {name: ids for name, ids in found.items() if ids is not None and len(ids)}
