"""What ranks write to each other in a round: which rows are asked for, which gradients are brought, and flags.

A message is a header of numbers, whose length follows from the plan, and tensors: columns, of which each rank gets or
brings its part. `pack` makes a message, `Arrival` takes in what came of one stack.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from parallax.ahead import Brought, Foreseen, Ordered
from parallax.config import WireDtype
from parallax.leases import Leases
from parallax.mesh import Column
from parallax.table import MOST_TABLES, Incoming, Push, Stack, Table, cat, scaled
from parallax.wire import decode, encode, new_encoded, new_rows


class Flag:
    """What a rank says of itself in a header: bits of an int."""

    DONE = 1
    """This rank has pushed all gradients of its backward."""
    OUT = 2**1
    """This rank has no more data; it serves."""
    LEFT = 2**2
    """This rank's program has ended; it serves until all have ended."""
    FAILED = 2**3
    """This rank has failed; its error is in the store."""
    NEWS = 2**4
    """This rank saw a parameter used in a way that the plan does not know."""
    ACTIVE = 2**5
    """This rank, which is out of data, had some in the latest step."""
    CLEAN = 2**6
    """This rank has no gradients."""
    STEP = 2**7
    """This rank is about to run an optimizer and brings what ranks without data need to do the same."""
    LOCAL = 2**8
    """This rank keeps its dense gradients to itself for now."""
    REDUCE = 2**9
    """This rank brings a number for `parallax.reduce`, and waits for those of the others."""
    CHANGED = 2**10
    """This rank is about to read gradients and brings what was done to them, for ranks without data."""


class Want(enum.IntEnum):
    """What the asked ranks answer with."""

    ROWS = 0
    """Rows of a stack: of the weights; or of one of its tables another field (`Request.field`)."""
    NORMS = 1
    """For each table, its part of a norm of the gradient."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """Rows of a stack, some on lease, some just to be read: of each owner, by their positions there."""

    stack: Stack
    leased: Column
    unleased: Column
    renorm: tuple[float, float] | None = None
    """(max_norm, norm_type): the owner first scales down rows whose norm is larger."""
    merged: bool = False
    """Of the workers of this machine, by their keys: they ask the owners (`merging`)."""
    table: Table | None = None
    """If they are all rows of this one."""

    @classmethod
    def by_keys(
        cls,
        stack: Stack,
        leased: torch.Tensor,
        unleased: torch.Tensor,
        renorm: tuple[float, float] | None,
        merged: bool = False,
    ) -> Ask:
        """The rows with these keys, sorted."""
        places = stack.places
        assert places is not None
        own, others = (places.columns(keys, merged=merged) for keys in (leased, unleased))
        return cls(stack, own, others, renorm, merged)


@dataclasses.dataclass(frozen=True)
class Request:
    """What this rank brings to a round."""

    flags: int = 0
    """Of `Flag`."""
    asks: Sequence[Ask] = ()
    pushes: Sequence[Push] = ()
    want: Want = Want.ROWS
    field: int = 0
    """Which tensor of a table rows are read from: 0 is the weight; see `Rounds.fields`."""
    order: float = 2.0
    """Order of the norm that is wanted."""
    weight: float = 1.0
    """How much this rank's gradients count in the mean."""
    blob: torch.Tensor | None = None
    """Bytes (uint8) for ranks that are out of data."""
    dropped: Collection[Table] = ()
    """Tables whose gradient, as it was before these pushes, has been dropped or zeroed here."""
    ahead: Mapping[Stack, Foreseen] = dataclasses.field(default_factory=dict)
    """Rows of this rank's next step."""
    brought: Mapping[Stack, Brought] = dataclasses.field(default_factory=dict)
    """Rows for those who asked for them ahead."""


FIXED = 10
VERSION, FLAGS, WEIGHT, LOOP, WANT, FIELD, ORDER, SETTINGS, BLOB, EARLY = range(FIXED)
PER_STACK = 8
_ASKED, _LEASED, _PUSHED, _MARKS, _MAX_NORM, _NORM_TYPE, _AHEAD, _BROUGHT = range(PER_STACK)
_SOME, _PARTS = 1, 2
"""Bits of _MARKS: gradients for some of the leases only; `Brought.at` tells which rows they are."""
_TABLES, _DROPPED = 2, 2 + MOST_TABLES
"""The first bits of _MARKS that say something of each table: `Push.tables`; `Request.dropped`."""
_NOT_PUSHED = -1
_NO_RENORM = -1.0


def nothing_of_a_stack() -> tuple[int, ...]:
    """What a header says of a stack that a rank has nothing to do with."""
    return 0, 0, _NOT_PUSHED, 0, bits(_NO_RENORM), bits(2.0), 0, 0


def of_stacks(headers: Sequence[Sequence[int]], num_fixed: int) -> list[list[tuple[int, ...]]]:
    """For each stack, what `headers` (that of each rank) say of it, behind `num_fixed` other numbers."""
    starts = range(num_fixed, len(headers[0]), PER_STACK)
    return [[tuple(h[at : at + PER_STACK]) for h in headers] for at in starts]


def pack(
    request: Request, stacks: Sequence[Stack], fixed: Sequence[int], world_size: int, wire: WireDtype = "float32"
) -> tuple[list[list[int]], list[Column]]:
    """For each rank a header, of `fixed` and what there is to say of each of `stacks`; and what follows, gradients as
    `wire` says."""
    asks = {ask.stack: ask for ask in request.asks}
    pushes = {push.stack: push for push in request.pushes}
    columns: list[Column] = []
    nothing: Sequence[tuple[int, int]] = [(0, 0)] * world_size
    headers = [list(fixed) for _ in range(world_size)]
    for stack in stacks:
        ask, push = asks.get(stack), pushes.get(stack)
        marks = 0
        if request.dropped:
            marks = sum(1 << n for n, t in enumerate(stack.tables) if t in request.dropped) << _DROPPED
        renorm, leased, unleased = (_NO_RENORM, 2.0), nothing, nothing
        brought: Sequence[tuple[int, int]] | None = None
        if ask is not None:
            renorm, leased, unleased = ask.renorm or renorm, ask.leased.spans, ask.unleased.spans
            columns += (ask.leased, ask.unleased)
        if push is not None:
            marks |= push.tables << _TABLES | (_SOME if push.positions is not None else 0)
            brought, unleased = push.grads.spans, push.ids.spans if push.ids is not None else unleased
            columns += (column for column in (push.ids, push.positions) if column is not None)
            grads, spans = push.grads.tensor, push.grads.spans
            columns += (Column(part, spans) for part in encode(grads, _wire_of_push(stack, wire)))
        ahead, rows = nothing, nothing
        if (foreseen := request.ahead.get(stack)) is not None:
            ahead = foreseen.positions.spans
            columns.append(foreseen.positions)
        if (bringing := request.brought.get(stack)) is not None:
            rows = bringing.rows.spans
            if bringing.at is not None:
                marks |= _PARTS
                columns.append(bringing.at)
            columns += (Column(part, rows) for part in encode(bringing.rows.tensor, wire))
        tail = (marks, bits(renorm[0]), bits(renorm[1]))
        for r, header in enumerate(headers):
            num_leased = leased[r][1] - leased[r][0]
            num_asked = num_leased + unleased[r][1] - unleased[r][0]
            num_brought = _NOT_PUSHED if brought is None else brought[r][1] - brought[r][0]
            more = ahead[r][1] - ahead[r][0], rows[r][1] - rows[r][0]
            header += (num_asked, num_leased, num_brought, *tail, *more)
    if request.blob is not None:
        columns.append(Column.same(request.blob, world_size))
    return headers, columns


class Arrival:
    """What the ranks bring for one stack in a round, the first rank's first."""

    def __init__(
        self,
        stack: Stack,
        headers: Sequence[Sequence[int]],
        id_dtype: torch.dtype,
        wire: WireDtype = "float32",
        scales: Sequence[float] = (),
    ) -> None:
        """
        Args:
            headers: what each rank's header says of this stack.
            id_dtype: of what names the rows that are asked for.
            wire: how gradients and rows on lease travel.
            scales: for each rank, what its gradients are to be multiplied with (`gradients`).
        """
        self.stack = stack
        self._headers, self._wire, self._scales = headers, wire, scales
        num_asked = [h[_ASKED] for h in headers]
        self._num_pushed = [max(0, h[_PUSHED]) for h in headers]
        num_some = [n if h[_MARKS] & _SOME else 0 for h, n in zip(headers, self._num_pushed, strict=True)]
        self.ids = self._room(num_asked, id_dtype)
        """Of each rank, those on lease first."""
        self._some = self._room(num_some, torch.int32)
        """Which of its leases a rank brings gradients for."""
        wire = _wire_of_push(stack, wire)
        self._grads = new_encoded(sum(self._num_pushed), stack.push_width, stack.dtype, wire, stack.device)
        """Encoded."""
        num_ahead = [h[_AHEAD] for h in headers]
        self._ahead = self._room(num_ahead, id_dtype)
        self._num_brought = [h[_BROUGHT] for h in headers]
        num_parts = [n if h[_MARKS] & _PARTS else 0 for h, n in zip(headers, self._num_brought, strict=True)]
        self._parts = self._room(num_parts, torch.int32)
        self._rows = new_encoded(sum(self._num_brought), stack.width, stack.dtype, self._wire, stack.device)

    def _room(self, sizes: Sequence[int], dtype: torch.dtype) -> Column:
        return Column.split(new_rows(sum(sizes), (), dtype, self.stack.device), sizes)

    @property
    def columns(self) -> list[Column]:
        """What is filled with what follows the headers."""
        grads = [Column.split(part, self._num_pushed) for part in self._grads if len(part)]
        rows = [Column.split(part, self._num_brought) for part in self._rows if len(part)]
        return [c for c in (self.ids, self._some, *grads, self._ahead, self._parts, *rows) if len(c.tensor)]

    @property
    def orders(self) -> bool:
        """Rows are asked for ahead."""
        return len(self._ahead.tensor) > 0

    @property
    def renorms(self) -> set[tuple[float, float] | None]:
        """The (max_norm, norm_type) of the ranks that ask for rows."""
        return {
            None if h[_MAX_NORM] == bits(_NO_RENORM) else (number(h[_MAX_NORM]), number(h[_NORM_TYPE]))
            for h in self._headers
            if h[_ASKED]
        }

    def note(self, updated: bool = False) -> None:
        """Keeps leases and gradients in the stack, and does what a lookup with max_norm does to rows.

        Args:
            updated: what came are the first messages since the weights changed.
        """
        stack = self.stack
        # Gradients first: those of all leases are of the leases before this round.
        if self._is_pushed:
            grads = decode(self._grads, stack.dtype)
            stack.receive(self._tables, Incoming(self._rows_pushed(stack.leases), grads, self._num_pushed))
        if stack.foreseen is not None and any(self._num_brought):
            stack.foreseen.fill(decode(self._rows, stack.dtype), self._num_brought, self._parts)
        if updated:
            stack.keep_promises()
        if len(self._ahead.tensor):
            order = Ordered(self._ahead)
            stack.ordered = order if stack.ordered is None else order.and_earlier(stack.ordered)
        self.lease(self.ids.tensor, stack.leases)
        for source, h in enumerate(self._headers):
            if h[_ASKED] and h[_MAX_NORM] != bits(_NO_RENORM):
                ids = self.ids.part(source).long()
                torch.embedding_renorm_(stack.data, ids, number(h[_MAX_NORM]), number(h[_NORM_TYPE]))

    def lease(self, slots: torch.Tensor, leases: Leases) -> None:
        """Keeps in `leases` what each rank asked for on lease, as it is named in `slots` (like `ids`)."""
        spans = [(a, a + h[_LEASED]) for h, (a, _) in zip(self._headers, self.ids.spans, strict=True)]
        leases.add(Column(slots, spans))

    def leased(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids that were asked for on lease, others), of all ranks together."""
        cut = [(a, a + h[_LEASED], b) for h, (a, b) in zip(self._headers, self.ids.spans, strict=True)]
        ids = self.ids.tensor
        return torch.cat([ids[a:m] for a, m, _ in cut]), torch.cat([ids[m:b] for _, m, b in cut])

    def gradients(self, leases: Leases) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """(of which tables gradients came, as in `Push.tables`; what `leases` has for each row gradient; the row
        gradients times their rank's scale)."""
        if not self._is_pushed:
            return None
        grads = scaled(decode(self._grads, self.stack.dtype), self._scales, self._num_pushed, self.stack.width)
        return self._tables, self._rows_pushed(leases), grads

    @property
    def _tables(self) -> int:
        """Of which tables gradients came."""
        found = 0
        for h in self._headers:
            found |= h[_MARKS] >> _TABLES
        return found & (1 << MOST_TABLES) - 1

    @property
    def _is_pushed(self) -> bool:
        return any(h[_PUSHED] != _NOT_PUSHED for h in self._headers)

    def _rows_pushed(self, leases: Leases) -> torch.Tensor:
        if not self.stack.sharded:
            return self.ids.tensor  # of nothing else
        sources = [source for source, h in enumerate(self._headers) if h[_PUSHED] != _NOT_PUSHED]
        if not any(self._headers[source][_MARKS] & _SOME for source in sources):
            return cat(leases.all_of(sources) or [self.ids.tensor[:0]])
        positions: list[torch.Tensor] = []
        for source in sources:
            named = leases.of(source)
            if self._headers[source][_MARKS] & _SOME and named:
                named = [torch.cat(named)[self._some.part(source).long()]]
            positions += named
        return cat(positions or [self.ids.tensor[:0]])

    def rows(self, of: Sequence[bool]) -> list[Column]:
        """For each rank that `of` names, the rows that it asked for, those on lease encoded; nothing if none of them
        did."""
        num_rows = [h[_ASKED] if wanted else 0 for h, wanted in zip(self._headers, of, strict=True)]
        if not self.stack.sharded or not any(num_rows):
            return []
        num_leased = [h[_LEASED] if wanted else 0 for h, wanted in zip(self._headers, of, strict=True)]
        held = self.stack.data
        if sum(num_leased) == len(self.ids.tensor):
            encoded = encode(held.index_select(0, self.ids.tensor), self._wire)
            return [Column(part, self.ids.spans) for part in encoded]
        columns: list[Column] = []
        kinds: list[tuple[WireDtype, list[int], list[int]]] = [
            (self._wire, [0] * len(of), num_leased),
            ("float32", num_leased, num_rows),
        ]
        for wire, starts, ends in kinds:
            ids = [self.ids.part(source)[a:b] for source, (a, b) in enumerate(zip(starts, ends, strict=True))]
            if any(map(len, ids)):
                encoded = encode(held.index_select(0, torch.cat(ids)), wire)
                columns += (Column.split(part, map(len, ids)) for part in encoded)
        return columns

    def fields(self, source: int, read: Callable[[Table], torch.Tensor]) -> list[Column]:
        """For rank `source`, the rows that it asked for of another tensor of a table, which `read` gives (shape (rows
        held, n))."""
        ids = self.ids.part(source)
        if not len(ids):
            return []
        table, first = self.stack.table_at(int(ids[0]))
        rows = read(table).index_select(0, ids - first)
        return [Column.split(rows, [len(rows) if rank == source else 0 for rank in range(len(self._headers))])]

    def dropped_by(self, done: Sequence[bool]) -> list[Table]:
        """`Request.dropped` on all ranks that are done."""
        marks = [h[_MARKS] for h, d in zip(self._headers, done, strict=True) if d]
        return [t for n, t in enumerate(self.stack.tables) if all(m >> _DROPPED + n & 1 for m in marks)]


def _wire_of_push(stack: Stack, wire: WireDtype) -> WireDtype:
    """How row gradients travel: a count of lookups behind them must not be rounded."""
    return "float32" if stack.by_frequency else wire


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
