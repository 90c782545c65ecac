"""A looked-up parameter: where its rows live, which rows this rank has leased, how row gradients add up.

Nothing here communicates: `rounds` moves what a table asks for and brings. Rows are flattened to a `width`
(elements of one row), whatever the shape of a row is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from parallax.ahead import MOST_CHANGED, Brought, Foreseen, Ordered
from parallax.mesh import Column
from parallax.plan import Placement, Use

SKIPPED = -1
"""In the slots of a contribution: this gradient belongs to no row (padding)."""


USEFUL = 0.9
"""If less of the rows on lease gets a gradient, it was a wrong guess to ask for them ahead."""

EARLY_BYTES = 2**16
"""Gradients of this size need not wait for the end of the backward pass, nor rows for the next step."""


class Partitioning:
    """Row r lives in partition r mod P, and partition p on rank `owners[p]`: plain arithmetic, no table of rows.

    A row's *key* is place * stride + its position among its owner's rows, where places number the owners such that
    sorting keys groups rows by whom this rank asks for them, and then by owner.
    """

    def __init__(
        self,
        num_rows: int,
        owners: Sequence[int],
        world_size: int,
        device: torch.device,
        agents: Sequence[int] = (),
    ) -> None:
        """
        Args:
            owners: per partition.
            agents: for each rank, which worker of this machine talks to it for all of them (`merging`), by its number
                among them. (): every worker talks to every rank itself.
        """
        self.num_rows = num_rows
        self.num_partitions = len(owners)
        self.owners = tuple(owners)
        self.asked = list(agents or range(world_size))
        """Whom this rank asks for the rows of each rank."""
        self.num_asked = max(self.asked) + 1
        self.merged = bool(agents)
        order = sorted(range(world_size), key=lambda rank: (self.asked[rank], rank))
        self._place = [order.index(rank) for rank in range(world_size)]
        ends = [sum(a <= n for a in self.asked) for n in range(self.num_asked)]
        self._places_asked = list(itertools.pairwise([0, *ends]))
        sizes = [max(0, -(-(num_rows - p) // self.num_partitions)) for p in range(self.num_partitions)]
        self.num_held = [0] * world_size
        starts = []
        for owner, size in zip(owners, sizes, strict=True):
            starts.append(self.num_held[owner])
            self.num_held[owner] += size
        self.stride = max(1, *self.num_held)
        self._sizes = sizes
        self._starts = torch.tensor(
            [self._place[owner] * self.stride + start for owner, start in zip(owners, starts, strict=True)],
            device=device,
        )
        self._bounds = torch.arange(1, world_size, device=device) * self.stride

    def is_like(self, other: Partitioning) -> bool:
        """Rows have the same keys."""
        return (self.num_rows, self.owners, self.asked) == (other.num_rows, other.owners, other.asked)

    def keys(self, ids: torch.Tensor) -> torch.Tensor:
        """Keys (int64) of rows `ids` (int64, each in range), same shape."""
        return self._starts[ids % self.num_partitions] + ids // self.num_partitions

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that holds each of rows `ids`."""
        return torch.tensor(self.owners, device=ids.device)[ids % self.num_partitions]

    def ids(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows (int64) that have `keys`."""
        filled = torch.tensor([p for p, size in enumerate(self._sizes) if size], device=keys.device)
        starts, order = self._starts[filled].sort()
        at = torch.searchsorted(starts, keys, right=True) - 1
        return (keys - starts[at]) * self.num_partitions + filled[order[at]]

    def rows_of(self, rank: int) -> torch.Tensor:
        """The rows (int64) that `rank` holds, in the order in which it holds them."""
        pieces = [
            torch.arange(size, device=self._starts.device) * self.num_partitions + p
            for p, (owner, size) in enumerate(zip(self.owners, self._sizes, strict=True))
            if owner == rank
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=self._starts.device)

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

    def positions(self, keys: torch.Tensor) -> torch.Tensor:
        """Positions among the owners' rows, in the smallest dtype that holds them (they travel)."""
        dtype = torch.int32 if self.stride <= torch.iinfo(torch.int32).max else torch.int64
        return (keys % self.stride).to(dtype)


class Window:
    """The rows that this rank has leased since the weights last changed: no row is asked for twice.

    Slots number the leased rows in the order of their arrival; that order is also that of those who were asked
    (`leases`), so a gradient can travel without its ids.
    """

    def __init__(self, table: Table, num_asked: int) -> None:
        self.table = table
        self.partitioning = table.partitioning
        """That of the keys; the table may have another one later."""
        self.keys = torch.empty(0, dtype=torch.int64, device=table.device)
        """Sorted keys of the leased rows."""
        self.slots = torch.empty(0, dtype=torch.int64, device=table.device)
        """Slot of each of `keys`."""
        self.rows = torch.empty(0, table.width, dtype=table.dtype, device=table.device)
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

    def __init__(self, table: Table) -> None:
        self.window = Window(table, table.world_size)
        self.leases = Leases()
        """Slots of `window`, by worker."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """Gradients of one lookup: row i of `grads` (shape (n, width)) belongs to slot `slots[i]` of `window`.

    For a table of which every rank holds a copy, `window` is None and `slots` are row numbers.
    """

    window: Window | None
    slots: torch.Tensor
    grads: torch.Tensor
    num_rows: int | None = None
    """Distinct rows of it, if that is known."""


@dataclasses.dataclass(frozen=True)
class Push:
    """Row gradients on their way: to each that was asked for rows, its part of `grads`, shape (rows, width).

    `positions` (int32) picks leases of it; None means all of them, in order. For a table of which every rank
    holds a copy, `ids` names the rows instead.
    """

    table: Table
    grads: Column
    positions: Column | None = None
    ids: Column | None = None


@dataclasses.dataclass(frozen=True)
class Incoming:
    """Row gradients that arrived in a round: `grads[i]` belongs to the row at `positions[i]` here.

    The first `num_rows[0]` of them came from rank 0, and so on.
    """

    positions: torch.Tensor
    grads: torch.Tensor
    num_rows: list[int]


class Table:
    """One looked-up parameter during a run. All ranks have the same tables in the same order."""

    def __init__(self, name: str, parameter: nn.Parameter, *, rank: int, world_size: int, device: torch.device) -> None:
        self.name = name
        self.parameter = parameter
        self.original_class: type[nn.Parameter] = type(parameter)
        self.rank, self.world_size = rank, world_size
        self.shape = tuple(parameter.shape)
        self.dtype, self.device = parameter.dtype, device
        self.row_shape = self.shape[1:]
        self.width = 1
        for size in self.row_shape:
            self.width *= size
        self.placement = Placement.WATCHED
        self.partitioning: Partitioning | None = None
        self.layouts: set[bool] = set()
        """Whether lookups asked for sparse=True."""
        self.by_frequency = False
        """The lookups asked for scale_grad_by_freq: gradients travel with a count of lookups behind each row."""
        self.lazy = False
        """Optimizers update the rows with a gradient only."""
        self.use = Use.NONE
        self.num_rows_touched = 0
        """Distinct rows with a gradient of this rank in the step that is being closed."""
        self.window = Window(self, world_size)
        self.agent: Agent | None = None
        """If this worker may ask for others."""
        self.leases = Leases()
        """Positions of rows here, by rank."""
        self.foreseen: Foreseen | None = None
        """Rows of this rank's next step, which come by and by."""
        self.ordered: Ordered | None = None
        """Rows of the next steps of all ranks, which this one is to bring."""
        self.sends_before = self.sends_after = True
        """What is asked for ahead is sent before an update if nobody has leased it, and after it: it is not likely to
        change any more."""
        self.contributions: list[Contribution] = []
        self.incoming: list[Incoming] = []
        self._sum: torch.Tensor | None = None
        """Of the row gradients of a step."""
        self.num_open = 0
        """Lookups whose gradient may still come in the next backward pass."""
        self.pushed = False
        """A rank used this table in the step that is being closed."""
        self.watch: Callable[[Table, Sequence[Incoming]], None] | None = None
        """Is told what arrived in a step."""

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def sharded(self) -> bool:
        return self.partitioning is not None

    @property
    def num_asked(self) -> int:
        """How many this rank asks for rows."""
        return self.partitioning.num_asked if self.partitioning else self.world_size

    @property
    def merged(self) -> bool:
        """Workers of one machine ask together, and add up their gradients before they send them."""
        return self.partitioning is not None and self.partitioning.merged

    @property
    def sparse_grad(self) -> bool:
        """All lookups asked for sparse=True: the gradient is a COO tensor."""
        return self.layouts == {True}

    def note_layout(self, sparse: bool) -> None:
        if torch.is_grad_enabled() and self.parameter.requires_grad:
            self.layouts.add(sparse)

    @property
    def num_held(self) -> int:
        return self.partitioning.num_held[self.rank] if self.partitioning else self.num_rows

    @property
    def push_width(self) -> int:
        """Elements that travel for the gradient of a row."""
        return self.width + self.by_frequency

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def id_dtype(self) -> torch.dtype:
        """Of positions on the wire: those of the owner's rows."""
        largest = self.partitioning.stride if self.partitioning else self.num_rows
        return torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64

    @property
    def data(self) -> torch.Tensor:
        """The elements this rank holds, shape (rows held, *row shape): a plain tensor, sharing storage."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.data

    def set_data(self, held: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.data = held

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the rows this rank holds, dense or COO."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.grad = value

    def zero_gradient(self) -> torch.Tensor:
        """As it is after `zero_grad(set_to_none=False)`."""
        layout = torch.sparse_coo if self.sparse_grad else torch.strided
        return torch.zeros_like(self.data, layout=layout)

    def flat(self, held: torch.Tensor) -> torch.Tensor:
        """`held` (rows held, ...) as (rows held, elements of one row)."""
        return held.reshape(held.shape[0], -1) if held.numel() else held.new_empty(held.shape[0], self.width)

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor with a row per row of the table: a copy."""
        if self.partitioning is None:
            return whole.clone()
        rows = self.partitioning.rows_of(self.rank).to(whole.device)
        return whole.index_select(0, rows).to(self.device)

    # -- leasing ------------------------------------------------------------------------------------

    def forget_leases(self) -> None:
        """The weights changed, on all ranks: what was leased is out of date."""
        self.window = Window(self, self.num_asked)
        self.agent = Agent(self) if self.merged else None
        self.leases = Leases()

    def keep_promises(self) -> None:
        """Rows that were asked for ahead are all here: they are on lease now, at both ends."""
        if self.foreseen is not None:
            assert self.foreseen.rows is not None
            self.window.add(self.foreseen.keys, self.foreseen.rows, self.foreseen.positions.spans)
            self.window.foreseen = True
        if self.ordered is not None:
            self.leases.add(self.ordered.positions)
        self.foreseen = self.ordered = None

    @property
    def is_wasteful(self) -> bool:
        """At the end of a backward pass: many rows that were asked for ahead have got no gradient."""
        return self.window.foreseen and self.num_rows_touched < USEFUL * len(self.window)

    def bring_unleased(self, version: int) -> Brought | None:
        """What is to be sent at once of what was asked for ahead; the weights are those of `version`."""
        order = self._large_order
        if order is None or not self.sends_before:
            return None
        leased = self.leases.all_of(range(self.world_size))
        return self._bring(order, order.not_leased(leased, self.num_held), version, EARLY_BYTES)

    def bring_updated(self, version: int) -> Brought | None:
        """After an update, which makes the weights those of `version`: what is to be sent of the rest."""
        order = self._large_order
        if order is None or not self.sends_after:
            return None
        return self._bring(order, order.missing(), version, EARLY_BYTES)

    def see_update(self, version: int) -> None:
        """After that: looks what has changed of what was sent before; this goes with the rest."""
        if (order := self._large_order) is not None:
            order.updated = True
            self.sends_before &= order.find_changes(self.flat(self.data), version) <= MOST_CHANGED

    def bring_rest(self, version: int) -> Brought | None:
        """In the first round with the weights of `version`: what is still to be brought."""
        if self.ordered is None:
            return None
        changed = self.ordered.find_changes(self.flat(self.data), version)
        self.sends_after &= changed <= MOST_CHANGED or not self.ordered.updated
        return self._bring(self.ordered, self.ordered.missing(), version, 1)

    @property
    def _large_order(self) -> Ordered | None:
        """What was asked for ahead, if it is worth a message of its own."""
        order = self.ordered
        return order if order is not None and len(order) * self.row_bytes >= EARLY_BYTES else None

    def _bring(self, order: Ordered, numbers: torch.Tensor, version: int, least_bytes: int) -> Brought | None:
        if len(numbers) * self.row_bytes < least_bytes:
            return None
        return order.bring(numbers, self.flat(self.data), version)

    def move(self, partitioning: Partitioning | None) -> None:
        """Its rows live elsewhere from now on, on all ranks."""
        self.partitioning = partitioning
        self.foreseen = self.ordered = None
        self.forget_leases()

    # -- gradients ----------------------------------------------------------------------------------

    def contribute(
        self, window: Window | None, slots: torch.Tensor, grads: torch.Tensor, num_rows: int | None = None
    ) -> None:
        """Keeps what a lookup brings (see `Contribution`)."""
        if self.by_frequency:
            grads = torch.cat([grads, grads.new_ones(grads.shape[0], 1)], dim=1)
        if window is not None and window.partitioning is not None and not self.sharded:  # it was when it was looked up
            kept = slots != SKIPPED
            slots = slots.clone()
            slots[kept] = window.partitioning.ids(window.keys_by_slot())[slots[kept]]
            window = None
        self.contributions.append(Contribution(window, slots, grads, num_rows))

    def stale_keys(self) -> torch.Tensor | None:
        """Keys that have to be leased again because the weights changed between forward and backward."""
        stale = [c for c in self.contributions if c.window is not self.window]
        if not stale or not self.sharded:
            return None
        return torch.unique(torch.cat([self._slot_keys(c)[c.slots[c.slots != SKIPPED]] for c in stale]))

    def _slot_keys(self, c: Contribution) -> torch.Tensor:
        """The key that each slot of an earlier window has now; before it was sharded, slots were row numbers."""
        assert self.partitioning is not None
        if c.window is None:
            return self.partitioning.keys(torch.arange(self.num_rows, device=self.device))
        keys = c.window.keys_by_slot()
        earlier = c.window.partitioning
        return keys if earlier in (self.partitioning, None) else self.partitioning.keys(earlier.ids(keys))

    @property
    def can_push_early(self) -> bool:
        """There are gradients worth a message of their own, for rows that were leased since the weights changed."""
        return self.sharded and self.is_large and all(c.window is self.window for c in self.contributions)

    @property
    def is_large(self) -> bool:
        """What is on lease is worth a message of its own."""
        return len(self.window) * self.row_bytes >= EARLY_BYTES

    def collect(self) -> Push | None:
        """Merges this rank's contributions into one gradient per row; None if the table was not used."""
        contributions, self.contributions = self.contributions, []
        if not contributions:
            return None
        if not self.sharded:
            slots = cat([c.slots for c in contributions])
            grads = cat([c.grads for c in contributions])
            kept = slots != SKIPPED
            ids, slots = torch.unique(slots[kept], return_inverse=True)
            merged = add_rows(grads[kept], slots, ids.numel())
            self.num_rows_touched += ids.numel()
            ids = ids.to(self.id_dtype)
            return Push(self, Column.same(merged, self.world_size), ids=Column.same(ids, self.world_size))
        slots = cat([self._current_slots(c) for c in contributions])
        everything = any(c.window is self.window and c.num_rows == len(self.window) for c in contributions)
        push, num_touched = self.merge(self.window, slots, cat([c.grads for c in contributions]), everything)
        self.num_rows_touched += num_touched
        return push

    def merge(
        self, window: Window, slots: torch.Tensor, grads: torch.Tensor, everything: bool = False
    ) -> tuple[Push, int]:
        """Gradients for slots of `window` (SKIPPED ones are left out), added up by row; and how many rows these are.

        Args:
            everything: it is known that they are for all of them.
        """
        merged = add_rows(grads, slots, len(window))
        if everything:
            merged, num_leased = window.by_asked(merged)
            return Push(self, Column.split(merged, num_leased)), len(window)
        touched = torch.zeros(len(window) + 1, dtype=torch.bool, device=self.device)
        touched[slots] = True  # SKIPPED marks the last element, which is no slot
        num_touched = int(touched[:-1].sum())
        merged, num_leased = window.by_asked(merged)
        if num_touched == len(window):
            return Push(self, Column.split(merged, num_leased)), num_touched
        touched, _ = window.by_asked(touched[:-1])
        parts = [part.nonzero().squeeze(1) for part in touched.split(num_leased)]
        sizes = list(map(len, parts))
        positions = torch.cat(parts).to(torch.int32)
        return Push(self, Column.split(merged[touched], sizes), Column.split(positions, sizes)), num_touched

    def _current_slots(self, c: Contribution) -> torch.Tensor:
        if c.window is self.window:
            return c.slots
        kept = c.slots != SKIPPED
        slots = c.slots.clone()
        slots[kept], _ = self.window.find(self._slot_keys(c)[c.slots[kept]])  # `stale_keys` were leased before
        return slots

    def receive(self, incoming: Incoming) -> None:
        self.incoming.append(incoming)

    def add_up(self, scales: Sequence[float]) -> None:
        """Sums what was pushed, each rank's part times its scale, round by round in rank order; it is added to `.grad`
        by `finish_gradient`."""
        incoming, self.incoming = self.incoming, []
        used, self.pushed = self.pushed, False
        if used and self.watch is not None:
            self.watch(self, incoming)
        self.num_rows_touched = 0
        if not used:
            return
        positions = cat([i.positions for i in incoming]).long()
        brought = cat([i.grads for i in incoming])
        sources = [n for i in incoming for n in i.num_rows]
        grads, scale = brought, scales[0]
        if len(set(scales)) > 1 or not scale or brought.itemsize < 4 or self.by_frequency:
            grads = scaled(brought, [scales[n % self.world_size] for n in range(len(sources))], sources, self.width)
            scale = 1.0
        if self.by_frequency:
            counts = add_rows(brought[:, self.width :], positions, self.num_held)
            grads = grads[:, : self.width] / counts[positions]
        if self.sparse_grad:
            touched, slots = torch.unique(positions, return_inverse=True)
            values = add_rows(grads, slots, touched.numel()).mul_(scale).reshape(-1, *self.row_shape)
            size = (self.num_held, *self.row_shape)
            self._sum = torch.sparse_coo_tensor(touched[None], values, size, is_coalesced=True, check_invariants=False)
        else:
            summed = add_rows(grads, positions, self.num_held).mul_(scale)  # it has fewer rows
            self._sum = summed.reshape(self.num_held, *self.row_shape)

    def finish_gradient(self, hook: Callable[[torch.Tensor], torch.Tensor] | None) -> bool:
        """Adds the sum of a step to `.grad`.

        Args:
            hook: what to make of the sum before.

        Returns:
            Whether a rank used the table.
        """
        grad, self._sum = self._sum, None
        if grad is None:
            return False
        if hook is not None:
            grad = hook(grad)
        before = self.grad
        if before is None:
            self.grad = grad
        elif before.layout == grad.layout == torch.strided:
            before.add_(grad)
        else:
            total = before + grad
            self.grad = total.coalesce() if total.layout == torch.sparse_coo else total
        return True

    def rows_with_gradient(self) -> torch.Tensor:
        """Positions (int64) of the rows held here whose gradient is not zero."""
        grad = self.grad
        assert grad is not None
        return self.flat(grad).ne(0).any(1).nonzero().squeeze(1)


def add_rows(grads: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sums `grads` (n, width) by their `rows` (n,) into (num_rows, width); SKIPPED rows are left out.

    Half-precision gradients are summed in float32, like one device's matrix products.
    """
    wide = grads.float() if grads.dtype in (torch.bfloat16, torch.float16) else grads
    if not grads.numel():
        return grads.new_zeros(num_rows, grads.shape[1])
    summed = torch.ops.aten.embedding_dense_backward(wide, rows, num_rows, SKIPPED, False)
    return summed.to(grads.dtype)


def scaled(grads: torch.Tensor, scales: Sequence[float], num_rows: Sequence[int], width: int) -> torch.Tensor:
    """`grads`, of which the first `num_rows[0]` rows are multiplied with `scales[0]`, and so on; elements of a row
    behind `width` are not."""
    if len(set(scales)) == 1 and scales[0]:
        if scales[0] == 1:
            return grads
        if grads.shape[1] == width:
            return grads * scales[0]
    # of a rank without samples: what it brings may be NaN and does not count
    parts = [
        part[:, :width] * scale if scale else torch.zeros_like(part[:, :width])
        for part, scale in zip(grads.split(list(num_rows)), scales, strict=True)
    ]
    return torch.cat([torch.cat(parts), grads[:, width:]], 1) if grads.shape[1] > width else torch.cat(parts)


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
