"""What ranks write to each other in a round: which rows are asked for, which gradients are brought, and flags.

A message is a header of numbers, whose length follows from the plan, and tensors: columns, of which each rank gets or
brings its part. `pack` makes a message, `Arrival` takes in what came of one table.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from parallax.ahead import Brought, Foreseen, Ordered
from parallax.config import WireDtype
from parallax.mesh import Column
from parallax.table import Incoming, Leases, Push, Table, cat, scaled
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
    """Rows of a table: of its weight, or of another field (`Request.field`)."""
    NORMS = 1
    """For each table, its part of a norm of the gradient."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """Rows of one table, some on lease, some just to be read: of each owner, by their positions there."""

    table: Table
    leased: Column
    unleased: Column
    renorm: tuple[float, float] | None = None
    """(max_norm, norm_type): the owner first scales down rows whose norm is larger."""
    merged: bool = False
    """Of the workers of this machine, by their keys: they ask the owners (`merging`)."""

    @classmethod
    def by_keys(
        cls,
        table: Table,
        leased: torch.Tensor,
        unleased: torch.Tensor,
        renorm: tuple[float, float] | None,
        merged: bool = False,
    ) -> Ask:
        """The rows with these keys, sorted."""
        partitioning = table.partitioning
        assert partitioning is not None
        own, others = (partitioning.columns(keys, merged=merged) for keys in (leased, unleased))
        return cls(table, own, others, renorm, merged)


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
    ahead: Mapping[Table, Foreseen] = dataclasses.field(default_factory=dict)
    """Rows of this rank's next step."""
    brought: Mapping[Table, Brought] = dataclasses.field(default_factory=dict)
    """Rows for those who asked for them ahead."""


FIXED = 10
VERSION, FLAGS, WEIGHT, LOOP, WANT, FIELD, ORDER, SETTINGS, BLOB, EARLY = range(FIXED)
PER_TABLE = 8
_ASKED, _LEASED, _PUSHED, _MARKS, _MAX_NORM, _NORM_TYPE, _AHEAD, _BROUGHT = range(PER_TABLE)
_SOME, _DROPPED, _PARTS = 1, 2, 4
"""Bits of _MARKS: gradients for some of the leases only; `Request.dropped`; `Brought.at` tells which rows they are."""
_NOT_PUSHED = -1
_NO_RENORM = -1.0


def nothing_of_a_table() -> tuple[int, ...]:
    """What a header says of a table that a rank has nothing to do with."""
    return 0, 0, _NOT_PUSHED, 0, bits(_NO_RENORM), bits(2.0), 0, 0


def of_tables(headers: Sequence[Sequence[int]], num_fixed: int) -> list[list[tuple[int, ...]]]:
    """For each table, what `headers` (that of each rank) say of it, behind `num_fixed` other numbers."""
    starts = range(num_fixed, len(headers[0]), PER_TABLE)
    return [[tuple(h[at : at + PER_TABLE]) for h in headers] for at in starts]


def pack(
    request: Request, tables: Sequence[Table], fixed: Sequence[int], world_size: int, wire: WireDtype = "float32"
) -> tuple[list[list[int]], list[Column]]:
    """For each rank a header, of `fixed` and what there is to say of each of `tables`; and what follows, gradients as
    `wire` says."""
    asks = {ask.table: ask for ask in request.asks}
    pushes = {push.table: push for push in request.pushes}
    columns: list[Column] = []
    nothing: Sequence[tuple[int, int]] = [(0, 0)] * world_size
    headers = [list(fixed) for _ in range(world_size)]
    for table in tables:
        ask, push = asks.get(table), pushes.get(table)
        marks = _DROPPED if table in request.dropped else 0
        renorm, leased, unleased = (_NO_RENORM, 2.0), nothing, nothing
        brought: Sequence[tuple[int, int]] | None = None
        if ask is not None:
            renorm, leased, unleased = ask.renorm or renorm, ask.leased.spans, ask.unleased.spans
            columns += (ask.leased, ask.unleased)
        if push is not None:
            marks |= _SOME if push.positions is not None else 0
            brought, unleased = push.grads.spans, push.ids.spans if push.ids is not None else unleased
            columns += (column for column in (push.ids, push.positions) if column is not None)
            grads, spans = push.grads.tensor, push.grads.spans
            columns += (Column(part, spans) for part in encode(grads, _wire_of_push(table, wire)))
        ahead, rows = nothing, nothing
        if (foreseen := request.ahead.get(table)) is not None:
            ahead = foreseen.positions.spans
            columns.append(foreseen.positions)
        if (bringing := request.brought.get(table)) is not None:
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
    """What the ranks bring for one table in a round, the first rank's first."""

    def __init__(
        self,
        table: Table,
        headers: Sequence[Sequence[int]],
        id_dtype: torch.dtype,
        wire: WireDtype = "float32",
        scales: Sequence[float] = (),
    ) -> None:
        """
        Args:
            headers: what each rank's header says of this table.
            id_dtype: of what names the rows that are asked for.
            wire: how gradients and rows on lease travel.
            scales: for each rank, what its gradients are to be multiplied with (`gradients`).
        """
        self.table = table
        self._headers, self._wire, self._scales = headers, wire, scales
        num_asked = [h[_ASKED] for h in headers]
        self._num_pushed = [max(0, h[_PUSHED]) for h in headers]
        num_some = [n if h[_MARKS] & _SOME else 0 for h, n in zip(headers, self._num_pushed, strict=True)]
        self.ids = self._room(num_asked, id_dtype)
        """Of each rank, those on lease first."""
        self._some = self._room(num_some, torch.int32)
        """Which of its leases a rank brings gradients for."""
        wire = _wire_of_push(table, wire)
        self._grads = new_encoded(sum(self._num_pushed), table.push_width, table.dtype, wire, table.device)
        """Encoded."""
        num_ahead = [h[_AHEAD] for h in headers]
        self._ahead = self._room(num_ahead, id_dtype)
        self._num_brought = [h[_BROUGHT] for h in headers]
        num_parts = [n if h[_MARKS] & _PARTS else 0 for h, n in zip(headers, self._num_brought, strict=True)]
        self._parts = self._room(num_parts, torch.int32)
        self._rows = new_encoded(sum(self._num_brought), table.width, table.dtype, self._wire, table.device)

    def _room(self, sizes: Sequence[int], dtype: torch.dtype) -> Column:
        return Column.split(new_rows(sum(sizes), (), dtype, self.table.device), sizes)

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
        """Keeps leases and gradients in the table, and does what a lookup with max_norm does to rows.

        Args:
            updated: what came are the first messages since the weights changed.
        """
        table = self.table
        # Gradients first: those of all leases are of the leases before this round.
        if self._is_pushed:
            table.pushed = True
            grads = decode(self._grads, table.dtype)
            table.receive(Incoming(self._rows_pushed(table.leases), grads, self._num_pushed))
        if table.foreseen is not None and any(self._num_brought):
            table.foreseen.fill(decode(self._rows, table.dtype), self._num_brought, self._parts)
        if updated:
            table.keep_promises()
        if len(self._ahead.tensor):
            table.ordered = Ordered(self._ahead)
        self.lease(self.ids.tensor, table.leases)
        for source, h in enumerate(self._headers):
            if h[_ASKED] and h[_MAX_NORM] != bits(_NO_RENORM):
                ids = self.ids.part(source).long()
                torch.embedding_renorm_(table.data, ids, number(h[_MAX_NORM]), number(h[_NORM_TYPE]))

    def lease(self, slots: torch.Tensor, leases: Leases) -> None:
        """Keeps in `leases` what each rank asked for on lease, as it is named in `slots` (like `ids`)."""
        spans = [(a, a + h[_LEASED]) for h, (a, _) in zip(self._headers, self.ids.spans, strict=True)]
        leases.add(Column(slots, spans))

    def leased(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids that were asked for on lease, others), of all ranks together."""
        cut = [(a, a + h[_LEASED], b) for h, (a, b) in zip(self._headers, self.ids.spans, strict=True)]
        ids = self.ids.tensor
        return torch.cat([ids[a:m] for a, m, _ in cut]), torch.cat([ids[m:b] for _, m, b in cut])

    def gradients(self, leases: Leases) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(what `leases` has for each row gradient that came, the row gradients times their rank's scale)."""
        if not self._is_pushed:
            return None
        grads = scaled(decode(self._grads, self.table.dtype), self._scales, self._num_pushed, self.table.width)
        return self._rows_pushed(leases), grads

    @property
    def _is_pushed(self) -> bool:
        return any(h[_PUSHED] != _NOT_PUSHED for h in self._headers)

    def _rows_pushed(self, leases: Leases) -> torch.Tensor:
        if not self.table.sharded:
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

    def rows(self, of: Sequence[bool], read: Callable[[Table, int], torch.Tensor], field: int) -> list[Column]:
        """For each rank that `of` names, the rows that it asked for, those on lease encoded; nothing if none of them
        did."""
        num_rows = [h[_ASKED] if wanted else 0 for h, wanted in zip(self._headers, of, strict=True)]
        if not self.table.sharded or not any(num_rows):
            return []
        num_leased = [h[_LEASED] if wanted else 0 for h, wanted in zip(self._headers, of, strict=True)]
        held = read(self.table, field)
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

    def dropped_by(self, done: Sequence[bool]) -> bool:
        """`Request.dropped` on all ranks that are done."""
        return all(h[_MARKS] & _DROPPED for h, d in zip(self._headers, done, strict=True) if d)


def _wire_of_push(table: Table, wire: WireDtype) -> WireDtype:
    """How row gradients travel: a count of lookups behind them must not be rounded."""
    return "float32" if table.by_frequency else wire


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
