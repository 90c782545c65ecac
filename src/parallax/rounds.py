"""Rounds: how ranks that may do different things exchange rows and row gradients without ever hanging.

All ranks run the same sequence of rounds. In a round each rank sends to each other rank one header of fixed
size (what follows, and flags) and back to back its body: ids of rows that it asks for, gradients of rows that
it brings. Then whoever was asked answers. A rank with nothing to ask still takes part and serves.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Collection, Sequence

import torch

from parallax.comm import Comm, DisagreementError, ParallaxError
from parallax.table import Incoming, Push, Table


class Flag(enum.IntFlag):
    """What a rank says of itself in a header."""

    DONE = enum.auto()
    """This rank has pushed all gradients of its backward."""
    OUT = enum.auto()
    """This rank has no more data; it serves."""
    LEFT = enum.auto()
    """This rank's program has ended; it serves until all have ended."""
    FAILED = enum.auto()
    """This rank has failed; its error is in the store."""
    NEWS = enum.auto()
    """This rank saw a parameter used in a way that the plan does not know."""
    ACTIVE = enum.auto()
    """This rank, which is out of data, had some in the latest step."""
    CLEAN = enum.auto()
    """This rank has no gradients."""
    STEP = enum.auto()
    """This rank is about to run an optimizer and brings what ranks without data need to do the same."""
    LOCAL = enum.auto()
    """This rank keeps its dense gradients to itself for now."""
    REDUCE = enum.auto()
    """This rank brings a number for `parallax.reduce`, and waits for those of the others."""
    CHANGED = enum.auto()
    """This rank is about to read gradients and brings what was done to them, for ranks without data."""


NO_FLAG = Flag(0)


class Want(enum.IntEnum):
    """What the asked ranks answer with."""

    ROWS = 0
    """Rows of a table: of its weight, or of another field (`Request.field`)."""
    NORMS = 1
    """For each table, its part of a norm of the gradient."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """Rows of one table wanted from each owner: positions there, the first `num_leased` of them on lease."""

    table: Table
    positions: list[torch.Tensor]
    num_leased: list[int]
    renorm: tuple[float, float] | None = None
    """(max_norm, norm_type): the owner first scales down rows whose norm is larger."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What this rank brings to a round."""

    flags: Flag = NO_FLAG
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

    flags: list[Flag]
    weights: list[float]
    rows: list[list[torch.Tensor]]
    """Per ask, per owner, the rows asked for, shape (n, width)."""
    norms: list[torch.Tensor]
    """Per rank, float64, one part per table; empty if none were wanted."""
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
_ASKED, _LEASED, _PUSHED, _PARTIAL, _MAX_NORM, _NORM_TYPE = range(_PER_TABLE)
_DROPPED = 2
"""Added to _PARTIAL (0 or 1) for `Request.dropped`."""
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
        headers, bodies = self._pack(request)
        received, bodies = self.comm.exchange(headers, bodies, self._body_size)
        self.num_rounds += 1
        flags = [Flag(h[_FLAGS]) for h in received]
        self._check(received, flags)
        unpacked = [self._unpack(source, received[source], bodies[source]) for source in range(len(received))]
        for header, (asked, _) in zip(received, unpacked, strict=True):
            self._renorm(header, asked)
        answers = [self._answer(h, asked) for h, (asked, _) in zip(received, unpacked, strict=True)]
        sizes = self._answer_sizes(request)
        got = self.comm.swap(answers, sizes)
        rows: list[list[torch.Tensor]] = []
        norms: list[torch.Tensor] = []
        if request.want is Want.NORMS:
            norms = [b.view(torch.float64) for b in got]
        elif request.asks:
            rows = self._split_answers(request, got)
        return Round(
            flags=flags,
            weights=[_float(h[_WEIGHT]) for h in received],
            rows=rows,
            norms=norms,
            blobs=[blob for _, blob in unpacked],
            dropped={
                table
                for i, table in enumerate(self.tables)
                if all(
                    header[_FIXED + _PER_TABLE * i + _PARTIAL] & _DROPPED
                    for header, f in zip(received, flags, strict=True)
                    if f & Flag.DONE
                )
            },
        )

    def fail(self, seconds: float) -> None:
        """In place of a round: the other ranks, wherever they are, get to know that this rank has failed."""
        if self.comm.can_tell:
            self.comm.tell_failure(seconds)
        else:
            self.run(Request(flags=Flag.FAILED))

    # -- outgoing -----------------------------------------------------------------------------------

    def _pack(self, request: Request) -> tuple[torch.Tensor, list[torch.Tensor]]:
        asks = {ask.table: ask for ask in request.asks}
        pushes = {push.table: push for push in request.pushes}
        blob = request.blob if request.blob is not None else _no_bytes(self.comm.device)
        fixed = self._fixed(request, blob.numel())
        headers, bodies = [], []
        for owner in range(self.comm.world_size):
            header, pieces = list(fixed), []
            for table in self.tables:
                ask, push = asks.get(table), pushes.get(table)
                asked, leased, pushed, partial = 0, 0, _NOT_PUSHED, 0
                max_norm, norm_type = ask.renorm if ask is not None and ask.renorm else (_NO_RENORM, 2.0)
                if ask is not None:
                    asked, leased = ask.positions[owner].numel(), ask.num_leased[owner]
                    pieces.append(ask.positions[owner])
                if push is not None:
                    positions, grads = push.positions[owner], push.grads[owner]
                    if push.ids is not None:
                        asked = push.ids[owner].numel()
                        pieces.append(push.ids[owner])
                    pushed, partial = grads.shape[0], int(positions is not None)
                    if positions is not None:
                        pieces.append(positions)
                    pieces.append(grads)
                partial |= _DROPPED if table in request.dropped else 0
                header += [asked, leased, pushed, partial, _bits(max_norm), _bits(norm_type)]
            headers.append(header)
            bodies.append(_join_bytes([*pieces, blob], self.comm.device))
        return torch.tensor(headers, dtype=torch.int64), bodies

    def _fixed(self, request: Request, num_blob_bytes: int) -> list[int]:
        """The part of a header that does not depend on the tables."""
        return [
            self.version,
            int(request.flags),
            _bits(request.weight),
            self.loop,
            int(request.want),
            request.field,
            _bits(request.order),
            self.settings,
            num_blob_bytes,
        ]

    def _answer_sizes(self, request: Request) -> list[int]:
        """Bytes that each rank answers with."""
        if request.want is Want.NORMS:
            return [8 * len(self.tables)] * self.comm.world_size
        sizes = [0] * self.comm.world_size
        for ask in request.asks:
            field = self._field(ask.table, request.field)
            for owner, positions in enumerate(ask.positions):
                sizes[owner] += _padded(positions.numel() * field.shape[1] * field.dtype.itemsize)
        return sizes

    def _split_answers(self, request: Request, got: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        cursors = [_Cursor(buffer) for buffer in got]
        rows = {}
        for ask in sorted(request.asks, key=lambda ask: self.tables.index(ask.table)):  # as owners answer
            field = self._field(ask.table, request.field)
            width = field.shape[1]
            per_owner = []
            for owner, cursor in enumerate(cursors):
                n = ask.positions[owner].numel()
                per_owner.append(cursor.take(n * width, field.dtype).view(n, width))
            rows[ask.table] = per_owner
        return [rows[ask.table] for ask in request.asks]

    # -- incoming -----------------------------------------------------------------------------------

    def _check(self, headers: list[list[int]], flags: list[Flag]) -> None:
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

    def _body_size(self, header: list[int]) -> int:
        if Flag(header[_FLAGS]) & Flag.FAILED:  # nothing follows
            return 0
        size = 0
        for i, table in enumerate(self.tables):
            asked, _, pushed, partial, _, _ = header[_FIXED + _PER_TABLE * i :][:_PER_TABLE]
            size += _padded(asked * table.id_dtype.itemsize)
            if pushed != _NOT_PUSHED:
                size += _padded(4 * pushed) * (partial & 1) + _padded(pushed * table.push_width * table.dtype.itemsize)
        return size + _padded(header[_BLOB])

    def _unpack(self, source: int, header: list[int], body: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Notes leases and gradients from `source`; returns the positions asked for per table, and its blob."""
        cursor = _Cursor(body)
        asked_positions = []
        for i, table in enumerate(self.tables):
            asked, leased, pushed, partial, _, _ = header[_FIXED + _PER_TABLE * i :][:_PER_TABLE]
            ids = cursor.take(asked, table.id_dtype)
            if leased:
                table.leases[source].append(ids[:leased])
            if pushed != _NOT_PUSHED:
                leases = table.leases[source]
                positions = ids if not table.sharded else torch.cat(leases) if leases else ids[:0]
                if partial & 1:
                    positions = positions[cursor.take(pushed, torch.int32).long()]
                width = table.push_width
                grads = cursor.take(pushed * width, table.dtype).view(pushed, width)
                table.receive(Incoming(source, positions, grads))
                table.pushed = True
            asked_positions.append(ids if table.sharded else ids[:0])
        return asked_positions, cursor.take(header[_BLOB], torch.uint8)

    def _renorm(self, header: list[int], asked: list[torch.Tensor]) -> None:
        """Looking a row up with max_norm changes the row, before anyone reads it."""
        for i, (table, positions) in enumerate(zip(self.tables, asked, strict=True)):
            *_, max_norm, norm_type = header[_FIXED + _PER_TABLE * i :][:_PER_TABLE]
            if positions.numel() and _float(max_norm) != _NO_RENORM:
                torch.embedding_renorm_(table.data, positions.long(), _float(max_norm), _float(norm_type))

    def _answer(self, header: list[int], asked: list[torch.Tensor]) -> torch.Tensor:
        if header[_WANT] == Want.NORMS:
            order = _float(header[_ORDER])
            parts = [norm_part(table, order) for table in self.tables]
            return torch.stack(parts).view(torch.uint8) if parts else _no_bytes(self.comm.device)
        pieces = [
            self._field(table, header[_FIELD])[positions.long()]
            for table, positions in zip(self.tables, asked, strict=True)
            if positions.numel()
        ]
        return _join_bytes(pieces, self.comm.device)

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


class _Cursor:
    """Reads a body piece by piece; pieces start at multiples of 8 bytes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        piece = self._buffer[self._at : self._at + num_bytes].view(dtype)
        self._at += _padded(num_bytes)
        return piece


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _no_bytes(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _join_bytes(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    flat: list[torch.Tensor] = []
    for piece in pieces:
        if piece.numel():
            flat.append(piece.contiguous().reshape(-1).view(torch.uint8))
            missing = -flat[-1].numel() % 8
            if missing:
                flat.append(torch.zeros(missing, dtype=torch.uint8, device=device))
    if not flat:
        return _no_bytes(device)
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
