"""Rounds: how ranks that may do different things exchange rows and row gradients without ever hanging.

All ranks run the same sequence of rounds. In a round each rank sends to each other rank one header of fixed
size (what follows, and flags) and back to back its body: ids of rows that it asks for, gradients of rows that
it brings. Then whoever was asked answers. A rank with nothing to ask still takes part and serves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from parallax.ahead import Brought
from parallax.comm import Comm, DisagreementError, ParallaxError
from parallax.config import WireDtype
from parallax.merging import Merging
from parallax.mesh import Column
from parallax.message import (
    BLOB,
    EARLY,
    FIELD,
    FIXED,
    FLAGS,
    LOOP,
    ORDER,
    PER_STACK,
    SETTINGS,
    VERSION,
    WANT,
    WEIGHT,
    Arrival,
    Flag,
    Request,
    Want,
    bits,
    nothing_of_a_stack,
    number,
    of_stacks,
    pack,
)
from parallax.table import Push, Stack, Table
from parallax.wire import decode, new_encoded


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


class Rounds:
    """Runs rounds over the tables of a run."""

    def __init__(
        self, comm: Comm, fields: Callable[[Table, int], torch.Tensor | None], wire: WireDtype = "float32"
    ) -> None:
        """
        Args:
            fields: the tensors of a table that can be read by rows besides the weight, whose number is 0: 1 is the
                gradient, then come entries of optimizer state; shape (rows held, ...). The same on all ranks.
            wire: how rows on lease and gradients travel; the same on all ranks. What is just read is exact.
        """
        self.comm = comm
        self.merging = Merging(comm)
        self.describe_settings: Callable[[], str] = lambda: "no step"
        self.stacks: list[Stack] = []
        self.fields = fields
        self.wire = wire
        self.num_rounds = 0
        self._num_early = 0
        """Messages that this rank has posted, and no round has told of."""
        self._latest_version = 0
        """That of the latest round."""
        self.version = 0
        """Number of optimizer steps and other changes; ranks that differ in it are not training the same model."""
        self.settings = 0
        """A digest of the settings of the optimizer that stepped last (`settings_of`)."""
        self.loop = 0
        """Twice the number of loops over sharded data started here; plus 1 if it left the latest early."""

    def run(self, request: Request) -> Round:
        """One round: every rank calls this once."""
        if not self.comm.merges:
            return self._run(request)
        latest: list[Round] = []

        def exchange(merged: Request) -> list[tuple[torch.Tensor, torch.Tensor]]:
            latest.append(self._run(merged))
            return latest[-1].rows

        rows = self.merging.run(request, self.stacks, exchange)
        return dataclasses.replace(latest[-1], rows=rows)

    def _run(self, request: Request) -> Round:
        arrivals: list[Arrival] = []
        blobs: list[torch.Tensor] = []

        def make_room(headers: Sequence[Sequence[int]]) -> list[Column]:
            if any(h[FLAGS] & Flag.FAILED for h in headers):  # nothing follows
                return []
            for stack, parts in zip(self.stacks, of_stacks(headers, FIXED), strict=True):
                arrivals.append(Arrival(stack, parts, stack.id_dtype, self.wire))
            sizes = [h[BLOB] for h in headers]
            blob = Column.split(torch.empty(sum(sizes), dtype=torch.uint8, device=self.comm.device), sizes)
            blobs.extend(map(blob.part, range(len(headers))))
            return [column for arrival in arrivals for column in arrival.columns] + [blob]

        updated = self.version != self._latest_version
        self._latest_version = self.version
        if updated:
            rest = {stack: brought for stack in self.stacks if (brought := stack.bring_rest(self.version)) is not None}
            request = dataclasses.replace(request, brought=rest)
        message, self._num_early = self._pack(request), 0
        received = self.comm.exchange(*message, make_room)
        self.num_rounds += 1
        flags = [h[FLAGS] for h in received]
        self._check(received, flags)
        self._collect([h[EARLY] for h in received])
        for arrival in arrivals:
            arrival.note(updated)
        for stack, foreseen in request.ahead.items():
            stack.foreseen = foreseen
        rows, norms = self._swap(request, received, arrivals)
        return Round(
            flags=flags,
            weights=[number(h[WEIGHT]) for h in received],
            rows=rows,
            norms=norms,
            blobs=blobs,
            dropped={t for a in arrivals for t in a.dropped_by([bool(f & Flag.DONE) for f in flags])},
        )

    @property
    def tables(self) -> list[Table]:
        """Those of all stacks."""
        return [table for stack in self.stacks for table in stack.tables]

    @property
    def can_post(self) -> bool:
        """Messages may leave between rounds."""
        return self.comm.can_tell and not self.comm.merges  # workers of one machine first add up

    def push_early(self, push: Push) -> None:
        """Sends gradients at once; they count from the next round on, which tells the others of them."""
        self._post(Request(pushes=[push]))

    def bring_updated(self, tables: Collection[Table]) -> None:
        """These tables were updated: sends what was asked for ahead."""
        stacks = dict.fromkeys(table.stack for table in tables)
        self._bring_early({stack: stack.bring_updated(self.version) for stack in stacks})
        for stack in stacks:
            stack.see_update(self.version)

    def _bring_early(self, found: Mapping[Stack, Brought | None]) -> None:
        brought = {stack: rows for stack, rows in found.items() if rows is not None}
        if brought:
            self._post(Request(brought=brought))

    def is_due(self, stack: Stack) -> bool:
        """What this rank has asked for ahead comes with the next round."""
        return stack.foreseen is not None and self.version != self._latest_version

    def _post(self, request: Request) -> None:
        self.comm.post(*pack(request, self.stacks, [], self.comm.world_size, self.wire))
        self._num_early += 1

    def _collect(self, num_early: Sequence[int]) -> None:
        """Takes in what each rank has posted since its latest round."""
        for i in range(max(num_early)):
            self._collect_from([rank for rank, n in enumerate(num_early) if n > i])

    def _collect_from(self, sources: Sequence[int]) -> None:
        arrivals: list[Arrival] = []

        def make_room(headers: Sequence[Sequence[int]]) -> list[Column]:
            nothing = nothing_of_a_stack()
            for stack, parts in zip(self.stacks, of_stacks(headers, 0), strict=True):
                if any(part != nothing for part in parts):
                    by_source = dict(zip(sources, parts, strict=True))
                    everyone = [by_source.get(rank, nothing) for rank in range(self.comm.world_size)]
                    arrivals.append(Arrival(stack, everyone, stack.id_dtype, self.wire))
            columns = [column for arrival in arrivals for column in arrival.columns]
            return [Column(c.tensor, [c.spans[source] for source in sources]) for c in columns]

        self.comm.collect(sources, PER_STACK * len(self.stacks), make_room)
        for arrival in arrivals:
            arrival.note()

    def fail(self, seconds: float) -> None:
        """In place of a round: the other ranks, wherever they are, get to know that this rank has failed."""
        if self.comm.can_tell:
            self.comm.tell_failure(seconds)
        else:
            self.run(Request(flags=Flag.FAILED))

    def _pack(self, request: Request) -> tuple[list[list[int]], list[Column]]:
        fixed = self._fixed(request, 0 if request.blob is None else request.blob.numel())
        return pack(request, self.stacks, fixed, self.comm.world_size, self.wire)

    def _fixed(self, request: Request, num_blob_bytes: int) -> list[int]:
        """The part of a header that does not depend on the stacks."""
        return [
            self.version,
            request.flags,
            bits(request.weight),
            self.loop,
            int(request.want),
            request.field,
            bits(request.order),
            self.settings,
            num_blob_bytes,
            self._num_early,
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
        versions = [h[VERSION] for h in headers]
        if len(set(versions)) > 1:
            raise DisagreementError(
                f"rank {self.comm.rank}: every rank must call optimizer.step(), edit tables and change gradients in "
                f"hooks the same number of times, but the ranks have done so {versions} times"
            )
        settings = [h[SETTINGS] for h in headers]
        if len(set(settings)) > 1:
            others = [rank for rank, s in enumerate(settings) if s != settings[self.comm.rank]]
            raise DisagreementError(
                f"rank {self.comm.rank}: the optimizer's settings differ from those of ranks {others} in the latest "
                f"step ({self.describe_settings()} here); a learning rate that follows a metric needs the same metric "
                f"everywhere (parallax.reduce)"
            )
        early = [rank for rank, (h, f) in enumerate(zip(headers, flags, strict=True)) if f & Flag.LEFT and h[LOOP] % 2]
        if early and done and any(headers[r][LOOP] != headers[early[0]][LOOP] for r in done):
            raise DisagreementError(
                f"rank {self.comm.rank}: ranks {early} have left a loop over parallax.shard(...) early and ended, but "
                f"ranks {done} train on; batches that are counted are fewer on a rank that runs out of data first: use "
                f"drop_last=True, or end all ranks alike"
            )
        loops = [h[LOOP] // 2 for h in headers]
        if len(set(loops)) > 1 and any(f & Flag.OUT and not f & Flag.LEFT for f in flags):
            raise DisagreementError(
                f"rank {self.comm.rank}: a rank waits at the end of a loop over parallax.shard(...) that others have "
                f"not entered or have left early; loops started by rank: {loops}. Every rank must run every loop "
                f"over sharded data to its end"
            )

    def _swap(
        self, request: Request, headers: Sequence[Sequence[int]], arrivals: Sequence[Arrival]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Answers what was asked here, and takes in the answers to what this rank asks: `Round.rows` and `.norms`."""
        answers: list[Column] = []
        for arrival in arrivals:
            answers += arrival.rows([h[FIELD] == 0 and h[WANT] == Want.ROWS for h in headers])
            for source, h in enumerate(headers):
                if h[FIELD] and h[WANT] == Want.ROWS:
                    answers += arrival.fields(source, functools.partial(self._field, field=h[FIELD]))
        for order in {h[ORDER] for h in headers if h[WANT] == Want.NORMS}:
            parts = torch.stack([norm_part(table, number(order)) for table in self.tables])
            wants = [h[WANT] == Want.NORMS and h[ORDER] == order for h in headers]
            answers.append(Column(parts, [(0, len(parts) if wanted else 0) for wanted in wants]))
        room: list[Column] = []
        norms = None
        if request.want is Want.NORMS:
            norms = torch.empty(len(headers), len(self.tables), dtype=torch.float64, device=self.comm.device)
            room.append(Column.split(norms, [1] * len(headers)))
        rows: dict[Stack, tuple[list[torch.Tensor], torch.Tensor]] = {}
        for ask in sorted(request.asks, key=lambda ask: self.stacks.index(ask.stack)):  # as owners answer
            width, dtype = ask.stack.width, ask.stack.dtype
            if request.field:
                assert ask.table is not None
                like = self._field(ask.table, request.field)
                width, dtype = like.shape[1], like.dtype
            leased = new_encoded(len(ask.leased.tensor), width, dtype, self.wire, self.comm.device)
            others = torch.empty(len(ask.unleased.tensor), width, dtype=dtype, device=self.comm.device)
            room += [*(Column(part, ask.leased.spans) for part in leased), Column(others, ask.unleased.spans)]
            rows[ask.stack] = leased, others
        orders = [arrival.stack for arrival in arrivals if arrival.orders]
        meanwhile = (lambda: self._bring_early({t: t.bring_unleased(self.version) for t in orders})) if orders else None
        self.comm.swap(answers, room, meanwhile=meanwhile)
        return [(decode(rows[a.stack][0], a.stack.dtype), rows[a.stack][1]) for a in request.asks], norms

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
