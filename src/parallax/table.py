"""Looked-up parameters, and stacks of them, which share messages: what of them is here, and how row gradients add up.

Nothing here communicates: `rounds` moves what a stack asks for and brings. Rows are flattened to a `width`
(elements of one row), whatever the shape of a row is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from parallax.ahead import MOST_CHANGED, Brought, Foreseen, Ordered
from parallax.leases import Agent, Leases, Window
from parallax.mesh import Column
from parallax.partitioning import Partitioning, Places, by_size, id_dtype
from parallax.plan import Placement, Use

SKIPPED = -1
"""In the slots of a contribution: this gradient belongs to no row (padding)."""

USEFUL = 0.9
"""If less of the rows on lease gets a gradient, it was a wrong guess to ask for them ahead."""

EARLY_BYTES = 2**16
"""Gradients of this size need not wait for the end of the backward pass, nor rows for the next step."""

MOST_TABLES = 30
"""Of a stack: a header has a bit for each."""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Lookups that got their rows together and train all of them."""

    num_lookups: int
    num_rows: int
    """Distinct ones."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """Gradients of one lookup: row i of `grads` (shape (n, width)) belongs to slot `slots[i]` of `window`.

    For a table of which every rank holds a copy, `window` is None and `slots` are row numbers.
    """

    table: Table
    number: int
    """Of the table in the stack of the window."""
    window: Window | None
    slots: torch.Tensor
    grads: torch.Tensor
    part: tuple[Fetched, int] | None = None
    """What the lookup was fetched with, and its number among these."""


@dataclasses.dataclass(frozen=True)
class Push:
    """Row gradients on their way: to each that was asked for rows, its part of `grads`, shape (rows, width).

    `positions` (int32) picks leases of it; None means all of them, in order. For a table of which every rank
    holds a copy, `ids` names the rows instead.
    """

    stack: Stack
    tables: int
    """Which of its tables got gradients: bits, the first table's is the lowest."""
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
        self.seen_layouts: set[bool] = set()
        """Whether this rank's lookups asked for sparse=True."""
        self.layouts: set[bool] = set()
        """Whether those of ranks did, as far as they have told each other."""
        self.by_frequency = False
        """The lookups asked for scale_grad_by_freq: gradients travel with a count of lookups behind each row."""
        self.lazy = False
        """Optimizers update the rows with a gradient only."""
        self.seen = Use.NONE
        """How this rank has used it."""
        self.use = Use.NONE
        """How ranks have, as far as they have told each other: decisions come from this."""
        self.num_rows_touched = 0
        """Distinct rows with a gradient of this rank in the step that is being closed."""
        self.num_open = 0
        """Lookups whose gradient may still come in the next backward pass."""
        self.watch: Callable[[Table, Sequence[Incoming]], None] | None = None
        """Is told what arrived in a step."""
        self._sum: torch.Tensor | None = None
        """Of the row gradients of a step."""
        self.stack = Stack([self])
        """Itself, and tables that travel with it."""

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def sharded(self) -> bool:
        return self.partitioning is not None

    @property
    def sparse_grad(self) -> bool:
        """All lookups asked for sparse=True: the gradient is a COO tensor."""
        return self.layouts == {True}

    @property
    def requires_grad(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.requires_grad

    def note_layout(self, sparse: bool) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            self.seen_layouts.add(sparse)

    @property
    def num_held(self) -> int:
        return self.partitioning.num_held[self.rank] if self.partitioning else self.num_rows

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

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

    def contribute(
        self,
        window: Window | None,
        number: int,
        slots: torch.Tensor,
        grads: torch.Tensor,
        part: tuple[Fetched, int] | None = None,
    ) -> None:
        """Keeps what a lookup brings (see `Contribution`).

        Args:
            number: of this table in the stack of the window.
        """
        if self.by_frequency:
            grads = torch.cat([grads, grads.new_ones(grads.shape[0], 1)], dim=1)
        if window is not None and window.places is not None and not self.sharded:  # it was when it was looked up
            kept = slots != SKIPPED
            slots = slots.clone()
            slots[kept] = window.places.ids(window.keys_by_slot()[slots[kept]], number)
            window = None
        self.stack.contributions.append(Contribution(self, number, window, slots, grads, part))

    def take_sum(self, rows: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """The sum of a step's row gradients is there.

        Args:
            rows: shape (n, width), for all rows held here, or those at `positions` (sorted, each once).
        """
        size = (self.num_held, *self.row_shape)
        if positions is None:
            self._sum = rows.reshape(size)
        elif self.sparse_grad:
            values = rows.reshape(-1, *self.row_shape)
            self._sum = torch.sparse_coo_tensor(
                positions[None], values, size, is_coalesced=True, check_invariants=False
            )
        else:
            self._sum = rows.new_zeros(self.num_held, self.width).index_copy_(0, positions, rows).reshape(size)

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


def stacked(tables: Sequence[Table], num_rows: Mapping[str, float], agents: Sequence[int]) -> list[Stack]:
    """The stacks of a run, with every table in one; those that stay as they are keep their leases.

    Tables go together if what travels of each in a step is not worth a message of its own.

    Args:
        num_rows: by name, how many rows of a table a worker touches in a step; no name: it travels alone.
        agents: see `Places`.
    """
    groups: dict[object, list[Table]] = {}
    for t in tables:
        joins = t.sharded and not t.by_frequency and num_rows.get(t.name, EARLY_BYTES) * t.row_bytes < EARLY_BYTES
        groups.setdefault((t.dtype, t.width) if joins else t.name, []).append(t)
    stacks, left = [], []
    for group in groups.values():
        for first in range(0, len(group), MOST_TABLES):
            members = group[first : first + MOST_TABLES]
            stack = members[0].stack
            if not stack.consists_of(members):
                left += [t.stack for t in members]
                stack = Stack(members, agents)
            stacks.append(stack)
    for stack in stacks:
        for t in stack.tables:
            t.stack = stack
    for before in {id(stack): stack for stack in left}.values():
        contributions, before.contributions = before.contributions, []
        for c in contributions:
            c.table.stack.contributions.append(c)
    return stacks


class Stack:
    """Tables whose rows have the same width and dtype, as if they were one: they are asked for, sent, merged and added
    up together. All ranks have the same stacks in the same order; a table of which every rank has a copy is alone."""

    def __init__(self, tables: Sequence[Table], agents: Sequence[int] = ()) -> None:
        """
        Args:
            tables: all of them with owners, or one that has none.
            agents: see `Places`.
        """
        self.tables = tuple(tables)
        first = tables[0]
        self.name = first.name if len(tables) == 1 else f"{first.name}, ... ({len(tables)} tables)"
        self.rank, self.world_size = first.rank, first.world_size
        self.dtype, self.device, self.width = first.dtype, first.device, first.width
        self.partitionings = [t.partitioning for t in tables]
        parts = [p for p in self.partitionings if p is not None]
        self.places = Places(parts, self.world_size, self.device, agents) if parts else None
        self.firsts = self.places.firsts[self.rank] if self.places else [0, first.num_rows]
        """Of the rows held here, the first one of each table, and behind them their number."""
        self.num_rows_held = [b - a for a, b in itertools.pairwise(self.firsts)]
        self.foreseen: Foreseen | None = None
        """Rows of this rank's next step, which come by and by."""
        self.ordered: Ordered | None = None
        """Rows of the next steps of all ranks, which this one is to bring."""
        self.sends_before = self.sends_after = True
        """What is asked for ahead is sent before an update if nobody has leased it, and after it: it is not likely to
        change any more."""
        self.contributions: list[Contribution] = []
        self.num_touched = 0
        """Distinct rows with a gradient of this rank in the step that is being closed."""
        self._incoming: list[Incoming] = []
        self._pushed = 0
        """Tables that a rank has used in the step that is being closed: bits, as in `Push.tables`."""
        self.forget_leases()

    def consists_of(self, tables: Sequence[Table]) -> bool:
        """Nothing has changed in which these are, and where they live."""
        return self.tables == tuple(tables) and all(
            t.partitioning is known for t, known in zip(tables, self.partitionings, strict=True)
        )

    @property
    def sharded(self) -> bool:
        return self.places is not None

    @property
    def num_asked(self) -> int:
        """How many this rank asks for rows."""
        return self.places.num_asked if self.places else self.world_size

    @property
    def merged(self) -> bool:
        """Workers of one machine ask together, and add up their gradients before they send them."""
        return self.places is not None and self.places.merged

    @property
    def num_held(self) -> int:
        return self.firsts[-1]

    @property
    def by_frequency(self) -> bool:
        return self.tables[0].by_frequency

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
        return self.places.dtype if self.places else id_dtype(self.num_held)

    @property
    def num_open(self) -> int:
        return sum(t.num_open for t in self.tables)

    @property
    def data(self) -> torch.Tensor:
        """The elements this rank holds, shape (rows held, width): a plain tensor, of which each table's are a part."""
        if len(self.tables) == 1:
            return self.tables[0].flat(self.tables[0].data)
        parts = [t.flat(t.data) for t in self.tables]
        joint = as_one(parts)
        if joint is None:  # at first, and when somebody has given a parameter another tensor

            def put(number: int, rows: torch.Tensor) -> None:
                t = self.tables[number]
                t.set_data(rows.view(t.num_held, *t.row_shape))

            joint = make_one(parts, put)
        return joint

    def positions_of(self, table: Table, rank: int) -> tuple[int, int]:
        """The rows of `table` among those that `rank` holds: from, to."""
        assert self.places is not None
        number = self.tables.index(table)
        first, end = self.places.firsts[rank][number : number + 2]
        return first, end

    def table_at(self, position: int) -> tuple[Table, int]:
        """The table that has the row at `position` here, and the position of its first row."""
        return next(
            (t, a) for t, (a, b) in zip(self.tables, itertools.pairwise(self.firsts), strict=True) if a <= position < b
        )

    # -- leasing ------------------------------------------------------------------------------------

    def _new_window(self, num_asked: int) -> Window:
        return Window(self.places, num_asked, self.width, self.dtype, self.device)

    def forget_leases(self) -> None:
        """The weights changed, on all ranks: what was leased is out of date."""
        self.window = self._new_window(self.num_asked)
        self.agent = Agent(self._new_window(self.world_size)) if self.merged else None
        """If this worker may ask for others."""
        self.leases = Leases()
        """Positions of rows here, by rank."""

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
        return self.window.foreseen and self.num_touched < USEFUL * len(self.window)

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
            self.sends_before &= order.find_changes(self.data, version) <= MOST_CHANGED

    def bring_rest(self, version: int) -> Brought | None:
        """In the first round with the weights of `version`: what is still to be brought."""
        if self.ordered is None:
            return None
        changed = self.ordered.find_changes(self.data, version)
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
        return order.bring(numbers, self.data, version)

    # -- gradients ----------------------------------------------------------------------------------

    def stale_keys(self) -> torch.Tensor | None:
        """Keys that have to be leased again because the weights changed between forward and backward."""
        stale = [c for c in self.contributions if c.window is not self.window]
        if not stale or not self.sharded:
            return None
        return torch.unique(torch.cat([self._keys_now(c) for c in stale]))

    def _keys_now(self, c: Contribution) -> torch.Tensor:
        """The keys that the rows of an earlier window have now; before it was sharded, slots were row numbers."""
        assert self.places is not None
        ids = c.slots[c.slots != SKIPPED]
        if c.window is not None:
            keys = c.window.keys_by_slot()[ids]
            if c.window.places is self.places:
                return keys
            assert c.window.places is not None
            ids = c.window.places.ids(keys, c.number)
        return self.places.keys(ids, [(self.tables.index(c.table), len(ids))])

    @property
    def can_push_early(self) -> bool:
        """There are gradients worth a message of their own, for rows that were leased since the weights changed."""
        return self.sharded and self.is_large and all(c.window is self.window for c in self.contributions)

    @property
    def is_large(self) -> bool:
        """What is on lease is worth a message of its own."""
        return len(self.window) * self.row_bytes >= EARLY_BYTES

    def collect(self) -> Push | None:
        """Merges this rank's contributions into one gradient per row; None if no table was used."""
        contributions, self.contributions = self.contributions, []
        if not contributions:
            return None
        tables = 0
        for c in contributions:
            tables |= 1 << (c.number if c.window is self.window else self.tables.index(c.table))
        grads = cat([c.grads for c in contributions])
        if not self.sharded:
            slots = cat([c.slots for c in contributions])
            kept = slots != SKIPPED
            ids, slots = torch.unique(slots[kept], return_inverse=True)
            merged = add_rows(grads[kept], slots, ids.numel())
            self._touch([ids.numel()])
            ids = ids.to(self.id_dtype)
            return Push(self, tables, Column.same(merged, self.world_size), ids=Column.same(ids, self.world_size))
        slots = cat([self._current_slots(c) for c in contributions])
        merged = add_rows(grads, slots, len(self.window))
        if self._is_everything(contributions):
            self._touch(self._count(self.window, None))
            return self._push(self.window, tables, merged, None)
        touched = _marked(slots, len(self.window))
        num_touched = self._count(self.window, touched)
        self._touch(num_touched)
        return self._push(self.window, tables, merged, touched if sum(num_touched) < len(self.window) else None)

    def merge(self, window: Window, tables: int, slots: torch.Tensor, grads: torch.Tensor) -> Push:
        """Gradients for slots of `window`, added up by row."""
        merged = add_rows(grads, slots, len(window))
        touched = _marked(slots, len(window))
        return self._push(window, tables, merged, None if bool(touched.all()) else touched)

    def _is_everything(self, contributions: Iterable[Contribution]) -> bool:
        """They are known to be for all rows on lease."""
        numbers: dict[int, set[int]] = {}
        for c in contributions:
            if c.part is not None and c.window is self.window and c.part[0].num_rows == len(self.window):
                seen = numbers.setdefault(id(c.part[0]), set())
                seen.add(c.part[1])
                if len(seen) == c.part[0].num_lookups:
                    return True
        return False

    def _count(self, window: Window, touched: torch.Tensor | None) -> list[int]:
        """By table, how many of the slots of `window` are `touched`; None: all."""
        assert window.places is not None
        return window.places.count_by_table(window.keys, None if touched is None else touched[window.slots])

    def _touch(self, num_rows: Sequence[int]) -> None:
        self.num_touched += sum(num_rows)
        for table, n in zip(self.tables, num_rows, strict=True):
            table.num_rows_touched += n

    def _push(self, window: Window, tables: int, merged: torch.Tensor, touched: torch.Tensor | None) -> Push:
        """A gradient for each slot, or only for those that are `touched`."""
        merged, num_leased = window.by_asked(merged)
        if touched is None:
            return Push(self, tables, Column.split(merged, num_leased))
        touched, _ = window.by_asked(touched)
        parts = [part.nonzero().squeeze(1) for part in touched.split(num_leased)]
        sizes = list(map(len, parts))
        positions = torch.cat(parts).to(torch.int32)
        return Push(self, tables, Column.split(merged[touched], sizes), Column.split(positions, sizes))

    def _current_slots(self, c: Contribution) -> torch.Tensor:
        if c.window is self.window:
            return c.slots
        slots = c.slots.clone()
        slots[c.slots != SKIPPED], _ = self.window.find(self._keys_now(c))  # `stale_keys` were leased before
        return slots

    def receive(self, tables: int, incoming: Incoming) -> None:
        """Gradients have come of these tables (bits, as in `Push.tables`)."""
        self._pushed |= tables
        self._incoming.append(incoming)

    def add_up(self, scales: Sequence[float]) -> None:
        """Sums what was pushed, each rank's part times its scale, round by round in rank order; it is added to `.grad`
        by `Table.finish_gradient`."""
        incoming, self._incoming = self._incoming, []
        pushed, self._pushed = self._pushed, 0
        used = [number for number in range(len(self.tables)) if pushed >> number & 1]
        for number in used:
            if (watch := self.tables[number].watch) is not None:
                watch(self.tables[number], [self._part_of(number, i) for i in incoming])
        self.num_touched = 0
        for table in self.tables:
            table.num_rows_touched = 0
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
        if not any(self.tables[number].sparse_grad for number in used):
            summed = add_rows(grads, positions, self.num_held).mul_(scale)  # it has fewer rows
            for number in used:
                self.tables[number].take_sum(summed[self.firsts[number] : self.firsts[number + 1]])
            return
        touched, slots = torch.unique(positions, return_inverse=True)
        summed = add_rows(grads, slots, touched.numel()).mul_(scale)
        if len(self.tables) == 1:
            self.tables[0].take_sum(summed, touched)
            return
        ends = torch.searchsorted(touched, torch.tensor(self.firsts, device=touched.device)).tolist()
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        own = (touched - by_size(self.firsts[:-1], sizes, touched.device)).split(sizes)
        rows = summed.split(sizes)
        for number in used:
            self.tables[number].take_sum(rows[number], own[number])

    def _part_of(self, number: int, incoming: Incoming) -> Incoming:
        """What came for one of the tables."""
        if len(self.tables) == 1:
            return incoming
        first, end = self.firsts[number : number + 2]
        ours = (incoming.positions >= first) & (incoming.positions < end)
        sizes = [int(part.sum()) for part in ours.split(incoming.num_rows)]
        return Incoming(incoming.positions[ours] - first, incoming.grads[ours], sizes)


def _marked(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Which of so many slots are in `slots`."""
    touched = torch.zeros(num_slots + 1, dtype=torch.bool, device=slots.device)
    touched[slots] = True  # SKIPPED marks the last element, which is no slot
    return touched[:-1]


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


def as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of which `parts` (n, width) are the rows, one behind the other in memory; None if they are not."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return parts[0]
    first = filled[0]
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in filled:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return None
        at += part.nbytes
    return first.as_strided((sum(map(len, parts)), first.shape[1]), (first.shape[1], 1))


def make_one(parts: list[torch.Tensor], put: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
    """Puts `parts` (n, width) one behind the other in memory: `put` is given each with its number, as a part of what
    this returns. `parts` is emptied, so that what is large is not there twice."""
    joint = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    rows = joint.split([len(part) for part in parts])
    for number in reversed(range(len(parts))):
        put(number, rows[number].copy_(parts.pop()))
    return joint


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
