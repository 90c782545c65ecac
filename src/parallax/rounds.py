"""Rounds: how ranks that may do different things exchange rows and row gradients without ever hanging.

All ranks run the same sequence of rounds. In a round each rank sends to each other rank one header of fixed
size (what follows, and flags) and back to back its body: ids of rows that it asks for, gradients of rows that
it brings. Then whoever was asked answers. A rank with nothing to ask still takes part and serves.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
from collections.abc import Callable, Collection, Sequence

import torch

from parallax.comm import Comm, DisagreementError, ParallaxError
from parallax.mesh import Column
from parallax.table import Incoming, Push, Table


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
    """Rows of one table wanted from each owner, by their positions there: some on lease, some just to be read."""

    table: Table
    leased: Column
    unleased: Column
    renorm: tuple[float, float] | None = None
    """(max_norm, norm_type): the owner first scales down rows whose norm is larger."""


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


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round brought; flags and weights are equal on all ranks."""

    flags: list[int]
    weights: list[float]
    rows: list[tuple[torch.Tensor, torch.Tensor]]
    """Per ask, the rows on lease and the others, each from all owners in turn, shape (n, width)."""
    norms: torch.Tensor | None
    """Float64, shape (world size, tables): each rank's part of each table's norm, if they were wanted."""
    blobs: list[torch.Tensor]
    dropped: set[Table]
    """Those of `Request.dropped` on every rank that has pushed all its gradients."""

    @property
    def closes_step(self) -> bool:
        """Every rank has either pushed all its gradients or has no data, and not all are without data."""
        return all(f & (Flag.DONE | Flag.OUT) for f in self.flags) and any(f & Flag.DONE for f in self.flags)


_FIXED = 9
_VERSION, _FLAGS, _WEIGHT, _LOOP, _WANT, _FIELD, _ORDER, _SETTINGS, _BLOB = range(_FIXED)
_PER_TABLE = 6
_ASKED, _LEASED, _PUSHED, _MARKS, _MAX_NORM, _NORM_TYPE = range(_PER_TABLE)
_SOME, _DROPPED = 1, 2
"""Bits of _MARKS: gradients for some of the leases only; `Request.dropped`."""
_NOT_PUSHED = -1
_NO_RENORM = -1.0


class Rounds:
    """Runs rounds over the tables of a run."""

    def __init__(self, comm: Comm, fields: Callable[[Table, int], torch.Tensor | None]) -> None:
        """
        Args:
            fields: the tensors of a table that can be read by rows, by number: 0 is the weight, 1 the gradient, then
                come entries of optimizer state; shape (rows held, ...). The same on all ranks.
        """
        self.comm = comm
        self.describe_settings: Callable[[], str] = lambda: "no step"
        self.tables: list[Table] = []
        self.fields = fields
        self.num_rounds = 0
        self.version = 0
        """Number of optimizer steps and other changes; ranks that differ in it are not training the same model."""
        self.settings = 0
        """A digest of the settings of the optimizer that stepped last (`settings_of`)."""
        self.loop = 0
        """Twice the number of loops over sharded data started here; plus 1 if it left the latest early."""

    def run(self, request: Request) -> Round:
        """One round: every rank calls this once."""
        arrivals: list[_Arrival] = []
        blobs: list[torch.Tensor] = []

        def make_room(headers: Sequence[Sequence[int]]) -> list[Column]:
            if any(h[_FLAGS] & Flag.FAILED for h in headers):  # nothing follows
                return []
            for i, table in enumerate(self.tables):
                at = _FIXED + _PER_TABLE * i
                arrivals.append(_Arrival(table, [h[at : at + _PER_TABLE] for h in headers]))
            sizes = [h[_BLOB] for h in headers]
            blob = Column.split(torch.empty(sum(sizes), dtype=torch.uint8, device=self.comm.device), sizes)
            blobs.extend(map(blob.part, range(len(headers))))
            return [column for arrival in arrivals for column in arrival.columns] + [blob]

        received = self.comm.exchange(*self._pack(request), make_room)
        self.num_rounds += 1
        flags = [h[_FLAGS] for h in received]
        self._check(received, flags)
        for arrival in arrivals:
            arrival.note()
        rows, norms = self._swap(request, received, arrivals)
        return Round(
            flags=flags,
            weights=[_float(h[_WEIGHT]) for h in received],
            rows=rows,
            norms=norms,
            blobs=blobs,
            dropped={a.table for a in arrivals if a.dropped_by([bool(f & Flag.DONE) for f in flags])},
        )

    def fail(self, seconds: float) -> None:
        """In place of a round: the other ranks, wherever they are, get to know that this rank has failed."""
        if self.comm.can_tell:
            self.comm.tell_failure(seconds)
        else:
            self.run(Request(flags=Flag.FAILED))

    # -- outgoing -----------------------------------------------------------------------------------

    def _pack(self, request: Request) -> tuple[list[list[int]], list[Column]]:
        """For each rank a header; and what follows it."""
        asks = {ask.table: ask for ask in request.asks}
        pushes = {push.table: push for push in request.pushes}
        fixed = self._fixed(request, 0 if request.blob is None else request.blob.numel())
        world_size = self.comm.world_size
        columns: list[Column] = []
        nothing: Sequence[tuple[int, int]] = [(0, 0)] * world_size
        headers = [list(fixed) for _ in range(world_size)]
        for table in self.tables:
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
                columns += (column for column in (push.ids, push.positions, push.grads) if column is not None)
            tail = (marks, _bits(renorm[0]), _bits(renorm[1]))
            for r, header in enumerate(headers):
                num_leased = leased[r][1] - leased[r][0]
                num_asked = num_leased + unleased[r][1] - unleased[r][0]
                num_brought = _NOT_PUSHED if brought is None else brought[r][1] - brought[r][0]
                header += (num_asked, num_leased, num_brought, *tail)
        if request.blob is not None:
            columns.append(Column.same(request.blob, world_size))
        return headers, columns

    def _fixed(self, request: Request, num_blob_bytes: int) -> list[int]:
        """The part of a header that does not depend on the tables."""
        return [
            self.version,
            request.flags,
            _bits(request.weight),
            self.loop,
            int(request.want),
            request.field,
            _bits(request.order),
            self.settings,
            num_blob_bytes,
        ]

    # -- incoming -----------------------------------------------------------------------------------

    def _check(self, headers: Sequence[Sequence[int]], flags: Sequence[int]) -> None:
        if any(f & Flag.FAILED for f in flags):
            raise self.comm.peer_error("another rank failed", patience=2.0)
        reducing = [rank for rank, f in enumerate(flags) if f & Flag.REDUCE]
        done = [rank for rank, f in enumerate(flags) if f & Flag.DONE]
        if reducing and done:  # neither would ever see what it waits for
            raise DisagreementError(
                f"rank {self.comm.rank}: ranks {reducing} are in parallax.reduce, but ranks {done} at the end of a "
                f"backward pass; every rank must call parallax.reduce the same number of times between steps"
            )
        versions = [h[_VERSION] for h in headers]
        if len(set(versions)) > 1:
            raise DisagreementError(
                f"rank {self.comm.rank}: every rank must call optimizer.step(), edit tables and change gradients in "
                f"hooks the same number of times, but the ranks have done so {versions} times"
            )
        settings = [h[_SETTINGS] for h in headers]
        if len(set(settings)) > 1:
            others = [rank for rank, s in enumerate(settings) if s != settings[self.comm.rank]]
            raise DisagreementError(
                f"rank {self.comm.rank}: the optimizer's settings differ from those of ranks {others} in the latest "
                f"step ({self.describe_settings()} here); a learning rate that follows a metric needs the same metric "
                f"everywhere (parallax.reduce)"
            )
        early = [rank for rank, (h, f) in enumerate(zip(headers, flags, strict=True)) if f & Flag.LEFT and h[_LOOP] % 2]
        if early and done and any(headers[r][_LOOP] != headers[early[0]][_LOOP] for r in done):
            raise DisagreementError(
                f"rank {self.comm.rank}: ranks {early} have left a loop over parallax.shard(...) early and ended, but "
                f"ranks {done} train on; batches that are counted are fewer on a rank that runs out of data first: use "
                f"drop_last=True, or end all ranks alike"
            )
        loops = [h[_LOOP] // 2 for h in headers]
        if len(set(loops)) > 1 and any(f & Flag.OUT and not f & Flag.LEFT for f in flags):
            raise DisagreementError(
                f"rank {self.comm.rank}: a rank waits at the end of a loop over parallax.shard(...) that others have "
                f"not entered or have left early; loops started by rank: {loops}. Every rank must run every loop "
                f"over sharded data to its end"
            )

    def _swap(
        self, request: Request, headers: Sequence[Sequence[int]], arrivals: Sequence[_Arrival]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Answers what was asked here, and takes in the answers to what this rank asks: `Round.rows` and `.norms`."""
        answers: list[Column] = []
        for arrival in arrivals:
            for field in {h[_FIELD] for h in headers}:
                of = [h[_FIELD] == field and h[_WANT] == Want.ROWS for h in headers]
                answers += arrival.rows(of, self._field, field)
        for order in {h[_ORDER] for h in headers if h[_WANT] == Want.NORMS}:
            parts = torch.stack([norm_part(table, _float(order)) for table in self.tables])
            wants = [h[_WANT] == Want.NORMS and h[_ORDER] == order for h in headers]
            answers.append(Column(parts, [(0, len(parts) if wanted else 0) for wanted in wants]))
        room: list[Column] = []
        norms = None
        if request.want is Want.NORMS:
            norms = torch.empty(len(headers), len(self.tables), dtype=torch.float64, device=self.comm.device)
            room.append(Column.split(norms, [1] * len(headers)))
        rows = {}
        for ask in sorted(request.asks, key=lambda ask: self.tables.index(ask.table)):  # as owners answer
            like = self._field(ask.table, request.field)
            both = [
                Column(like.new_empty(column.spans[-1][1], like.shape[1]), column.spans)
                for column in (ask.leased, ask.unleased)
            ]
            rows[ask.table] = both[0].tensor, both[1].tensor
            room += both
        self.comm.swap(answers, room)
        return [rows[ask.table] for ask in request.asks], norms

    def _field(self, table: Table, field: int) -> torch.Tensor:
        """Field number `field` of the rows held here, shape (rows held, elements of a row)."""
        value = self.fields(table, field)
        if value is None:
            raise ParallaxError(
                f"rank {self.comm.rank}: {table.name!r} has no {'gradient' if field == 1 else 'optimizer state'} "
                f"here, but another rank reads it; drop and read it on all ranks alike"
            )
        dense = value.to_dense() if value.layout == torch.sparse_coo else value
        return table.flat(dense) if dense.shape[1:] == table.row_shape else dense.reshape(dense.shape[0], -1)


def norm_part(table: Table, order: float) -> torch.Tensor:
    """This rank's part of the norm of a table's gradient: a float64 scalar; `join_norms` joins the parts."""
    grad = table.grad
    if grad is None:
        return torch.zeros((), dtype=torch.float64, device=table.device)
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    if not grad.numel():
        empty = float("inf") if order == -float("inf") else 0.0
        return torch.full((), empty, dtype=torch.float64, device=table.device)
    norm = torch.linalg.vector_norm(grad, order, dtype=torch.promote_types(grad.dtype, torch.float32)).double()
    return norm if order in (0.0, float("inf"), -float("inf")) else norm**order


def join_norms(parts: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of a whole gradient from the parts of all ranks, shape (world size,)."""
    if order == float("inf"):
        return parts.max()
    if order == -float("inf"):
        return parts.min()
    return parts.sum() if order == 0 else parts.sum() ** (1.0 / order)


class _Arrival:
    """What the ranks bring for one table in a round, the first rank's first."""

    def __init__(self, table: Table, headers: Sequence[Sequence[int]]) -> None:
        """
        Args:
            headers: what each rank's header says of this table.
        """
        self.table = table
        self._headers = headers
        num_asked = [h[_ASKED] for h in headers]
        self._num_pushed = [max(0, h[_PUSHED]) for h in headers]
        num_some = [n if h[_MARKS] & _SOME else 0 for h, n in zip(headers, self._num_pushed, strict=True)]
        new = functools.partial(torch.empty, device=table.device)
        self._ids = Column.split(new(sum(num_asked), dtype=table.id_dtype), num_asked)
        self._some = Column.split(new(sum(num_some), dtype=torch.int32), num_some)
        """Which of its leases a rank brings gradients for."""
        grads = new(sum(self._num_pushed), table.push_width, dtype=table.dtype)
        self._grads = Column.split(grads, self._num_pushed)

    @property
    def columns(self) -> list[Column]:
        """What is filled with what follows the headers."""
        return [self._ids, self._some, self._grads]

    def note(self) -> None:
        """Keeps leases and gradients in the table, and does what a lookup with max_norm does to rows."""
        table = self.table
        for source, h in enumerate(self._headers):
            if h[_LEASED]:
                table.leases[source].append(self._ids.part(source)[: h[_LEASED]])
            if h[_ASKED] and h[_MAX_NORM] != _bits(_NO_RENORM):
                ids = self._ids.part(source).long()
                torch.embedding_renorm_(table.data, ids, _float(h[_MAX_NORM]), _float(h[_NORM_TYPE]))
        pushing = [source for source, h in enumerate(self._headers) if h[_PUSHED] != _NOT_PUSHED]
        if not pushing:
            return
        table.pushed = True
        positions: list[torch.Tensor] = []
        for source in pushing:
            named = table.leases[source] if table.sharded else [self._ids.part(source)]
            if self._headers[source][_MARKS] & _SOME and named:
                named = [torch.cat(named)[self._some.part(source).long()]]
            positions += named
        at = torch.cat(positions) if positions else self._ids.tensor[:0]
        table.receive(Incoming(at, self._grads.tensor, self._num_pushed))

    def rows(self, of: Sequence[bool], read: Callable[[Table, int], torch.Tensor], field: int) -> list[Column]:
        """For each rank that `of` names, the rows that it asked for; nothing if none of them did."""
        num_rows = [h[_ASKED] if wanted else 0 for h, wanted in zip(self._headers, of, strict=True)]
        if not self.table.sharded or not any(num_rows):
            return []
        ids = self._ids.tensor
        if not all(of):
            ids = torch.cat([self._ids.part(source) for source, wanted in enumerate(of) if wanted])
        return [Column.split(read(self.table, field).index_select(0, ids), num_rows)]

    def dropped_by(self, done: Sequence[bool]) -> bool:
        """`Request.dropped` on all ranks that are done."""
        return all(h[_MARKS] & _DROPPED for h, d in zip(self._headers, done, strict=True) if d)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
