"""Lookups: what `F.embedding`, `F.embedding_bag` and `weight[ids]` become on a table.

A lookup on rows that live elsewhere returns at once: a `Deferred` tensor of the right shape that gets its
value when a first operation needs it. All lookups that are pending then share one round. Its backward leaves
the row gradients with the table; they travel when the backward pass is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from parallax.ahead import Foreseen
from parallax.foresight import Foresight
from parallax.leases import Window
from parallax.mesh import Column
from parallax.message import Ask, Request
from parallax.partitioning import by_size
from parallax.plan import REDUCED
from parallax.rounds import Round
from parallax.table import SKIPPED, Fetched, Stack, Table, cat
from parallax.untraced import as_it_is, untraced

_FIRST = 2**62
"""Of what is ready, autograd takes the node with the highest number: row gradients are to leave as soon as they can."""

_NOTHING: Mapping[Stack, Foreseen] = {}


class Lookup:
    """One lookup on a table: ids in, a tensor of `shape` out. Subclasses say how rows become that tensor.

    Args:
        ids: row numbers (int64, any shape), each in range; moved to the table's device.
        shape: shape of the result.
        renorm: (max_norm, norm_type), or None.
        padding_idx: a row whose lookups have no gradient, in 0 .. rows - 1, or None.
    """

    def __init__(
        self,
        table: Table,
        ids: torch.Tensor,
        shape: Sequence[int],
        padding_idx: int | None = None,
        renorm: tuple[float, float] | None = None,
    ) -> None:
        self.table = table
        self.renorm = renorm
        # Copies: the user may change the tensors before the lookup gets its value.
        own = ids.to(table.device, torch.int64, copy=True, memory_format=torch.contiguous_format)
        self.ids = own.view(-1)
        self.shape = tuple(shape)
        self.is_padding = None if padding_idx is None else self.ids == padding_idx
        self.trainable = torch.is_grad_enabled() and table.requires_grad
        self.window: Window | None = None
        self.number = 0
        """Of the table in the stack of the window."""
        self.part: tuple[Fetched, int] | None = None
        """What it was fetched with, and its number among these, if all rows of these are trained."""
        self._rows: torch.Tensor | None = None
        self._index: torch.Tensor | None = None
        self._value: torch.Tensor | None = None

    def resolve(self, rows: torch.Tensor, index: torch.Tensor, window: Window | None) -> None:
        """Hands over the rows: `rows[index[i]]` is the row of `ids[i]`, and index is a slot of `window`."""
        self._rows, self._index, self.window = rows, index, window

    def take_picked(self, picked: torch.Tensor) -> None:
        """Hands over the rows of all ids, one after the other, shape (number of ids, width); after `resolve`."""
        self._value, self._rows = picked.view(self.shape), None

    @property
    def resolved(self) -> bool:
        return self._index is not None

    @property
    def index(self) -> torch.Tensor:
        assert self._index is not None, "resolve() comes first"
        return self._index

    def value(self) -> torch.Tensor:
        if self._value is None:
            assert self._rows is not None
            self._value = self._compute(self._rows, self.index)
            self._rows = None
        return self._value

    def slots(self) -> torch.Tensor:
        """Where the gradient of each id goes."""
        if self.is_padding is None:
            return self.index
        return torch.where(self.is_padding, torch.full_like(self.index, SKIPPED), self.index)

    def _compute(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The result from `rows` (n, width), of which `rows[index[i]]` is the row of the i-th id."""
        out = rows.new_empty(self.shape)  # not a view: an autograd Function's result may be changed in place
        torch.index_select(rows, 0, index, out=out.view(index.numel(), rows.shape[1]))
        return out

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gradient per id, shape (number of ids, width); gradient of the per-sample weights, if any)."""
        return grad.reshape(self.ids.numel(), self.table.width), None


class BagLookup(Lookup):
    """`F.embedding_bag`: torch's own function, applied to the rows that were looked up."""

    def __init__(
        self,
        table: Table,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        *,
        mode: str,
        per_sample_weights: torch.Tensor | None,
        include_last_offset: bool,
        padding_idx: int | None,
        renorm: tuple[float, float] | None,
    ) -> None:
        if offsets is None:
            self._offsets = torch.arange(ids.shape[0], device=table.device) * ids.shape[1]
        else:
            self._offsets = offsets.to(device=table.device, dtype=torch.int64, copy=True)
        num_bags = self._offsets.numel() - int(include_last_offset and offsets is not None)
        super().__init__(table, ids, (max(num_bags, 0), table.width), padding_idx, renorm)
        self._mode = mode
        self._include_last_offset = include_last_offset and offsets is not None
        self._weights = None if per_sample_weights is None else per_sample_weights.detach().reshape(-1).clone()
        self._weights_shape = None if per_sample_weights is None else per_sample_weights.shape
        self._weights_trainable = (
            per_sample_weights is not None and per_sample_weights.requires_grad and torch.is_grad_enabled()
        )
        self._picked: torch.Tensor | None = None

    def _compute(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        picked = rows[index]
        if self.trainable or self._weights_trainable:
            self._picked = picked
        return self._bag(picked, self._weights)

    def _bag(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        n = self.ids.numel()
        positions, padding = torch.arange(n, device=rows.device), None
        if self.is_padding is not None:  # padding ids point at one extra row, which the bag leaves out
            positions, padding = positions.masked_fill(self.is_padding, n), n
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return F.embedding_bag(
            positions,
            rows,
            self._offsets,
            mode=self._mode,
            per_sample_weights=weights,
            include_last_offset=self._include_last_offset,
            padding_idx=padding,
        )

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.value()
        assert self._picked is not None
        # The value is computed below autograd (inside a dispatch), so the graph is made here.
        with torch.enable_grad():
            inputs = [self._picked.detach().requires_grad_()]
            if self._weights is not None and self._weights_trainable:
                inputs.append(self._weights.detach().requires_grad_())
            out = self._bag(inputs[0], inputs[1] if len(inputs) == 2 else self._weights)
        grads = torch.autograd.grad(out, inputs, grad)
        weight_grad = grads[1].reshape(self._weights_shape) if len(grads) == 2 and self._weights_shape else None
        return grads[0], weight_grad


@untraced
class Deferred(torch.Tensor):
    """The result of a lookup that may still be pending: a tensor without storage that stands for its value.

    Every operation on it, from Python or C++, comes through `__torch_dispatch__` and gets the value.
    """

    _lookup: Lookup
    _lookups: Lookups

    @staticmethod
    def __new__(cls, lookup: Lookup, lookups: Lookups) -> Deferred:
        table = lookup.table
        self = torch.Tensor._make_wrapper_subclass(cls, lookup.shape, dtype=table.dtype, device=table.device)
        self._lookup, self._lookups = lookup, lookups
        return self

    def _value(self) -> torch.Tensor:
        if not self._lookup.resolved:
            self._lookups.flush()
        return self._lookup.value()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        out = func(*_values(args), **{name: _value(x) for name, x in (kwargs or {}).items()})
        for arg in args:  # an in-place operation returns the tensor that it was called on
            if isinstance(arg, Deferred) and out is arg._value():
                return arg
        return out

    def tolist(self) -> Any:
        return self.detach().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._value().detach().numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)


def _value(x: Any) -> Any:
    """`x`, an argument of an operation, with values for what is deferred."""
    return x._value() if isinstance(x, Deferred) else _values(x) if isinstance(x, (list, tuple)) else x


def _values(arguments: Sequence[Any]) -> list[Any]:
    return [_value(x) for x in arguments]


class _Apply(torch.autograd.Function):
    """A lookup in the autograd graph. `anchor` only makes the result require a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
        lookup: Lookup,
        lookups: Lookups,
    ) -> torch.Tensor:
        ctx.lookup, ctx.lookups = lookup, lookups
        ctx.set_materialize_grads(False)
        return lookups.submit(lookup)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        lookup: Lookup = ctx.lookup
        if grad is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            ctx.lookups.fail(
                NotImplementedError(
                    f"{lookup.table.name!r}: a backward pass with create_graph=True reaches the rows of a table; its "
                    f"gradient has no graph. Differentiate with respect to the looked-up values instead "
                    f"(torch.autograd.grad(..., inputs=looked_up, create_graph=True)) (rank {lookup.table.rank})"
                )
            )
        if not lookup.resolved:
            ctx.lookups.flush()
        grads, weight_grad = lookup.gradients(grad)
        if lookup.trainable:
            if lookup.table.placement in REDUCED:
                ctx.lookups.fail(
                    NotImplementedError(
                        f"{lookup.table.name!r}: backward through a graph that was made before the plan (rank "
                        f"{lookup.table.rank}); finish the first step before the next forward"
                    )
                )
            if lookup.table.by_frequency and lookup.table.stack.contributions:
                ctx.lookups.fail(
                    NotImplementedError(
                        f"{lookup.table.name!r}: with scale_grad_by_freq=True a table is looked up once in a "
                        f"step, because lookups are counted one by one (rank {lookup.table.rank})"
                    )
                )
            lookup.table.contribute(lookup.window, lookup.number, lookup.slots(), grads, lookup.part)
            lookup.table.num_open -= 1
            ctx.lookups.on_backward(lookup.table)
        return None, weight_grad, None, None


@dataclasses.dataclass
class _Wanted:
    """What a stack has to fetch in a flush."""

    stack: Stack
    lookups: list[Lookup]
    leased: torch.Tensor
    """Sorted keys that go on lease: a gradient may come back for them."""
    unleased: torch.Tensor
    """Sorted keys whose values alone are wanted."""
    keys: torch.Tensor
    inverse: torch.Tensor
    """`keys[inverse]` are the keys of all ids of `lookups`, one after the other."""


class Lookups:
    """The pending lookups of a run."""

    def __init__(
        self,
        run_round: Callable[[Request], Round],
        *,
        on_backward: Callable[[Table], None],
        on_samples: Callable[[int], None],
        on_use: Callable[..., None],
        before_read: Callable[[], None],
        is_due: Callable[[Stack], bool],
        fail: Callable[[BaseException], Any],
    ) -> None:
        """
        Args:
            run_round: one round with the other ranks.
            on_backward: told when a backward pass has reached a lookup, of which table.
            on_samples: told the leading dimension of each lookup's ids.
            on_use: told as `on_use(table, lookup=...)` before a table is looked up or after it was used otherwise.
            before_read: told before something of whole tables is read.
            is_due: whether what was asked for ahead of a stack comes with the next round.
            fail: tells the other ranks of an error, then raises it.
        """
        self._run_round = run_round
        self.on_backward = on_backward
        self.on_samples = on_samples
        self.on_use = on_use
        self.before_read = before_read
        self._is_due = is_due
        self.fail = fail
        self.foresight: Foresight | None = None
        """What is known of the lookups of the batches that the program reads now."""
        self.asks_ahead = True
        self.stepping = False
        """An optimizer is running: tables are this rank's rows."""
        self._anchor = torch.empty(0, requires_grad=True)
        self._pending: list[Lookup] = []
        self._sorted: list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = []
        """What was sorted in this flush."""

    def apply(self, lookup: Lookup, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """The lookup's result, with its place in the autograd graph."""
        self._check_range(lookup)
        result = _Apply.apply(self._anchor if lookup.trainable else None, per_sample_weights, lookup, self)
        assert isinstance(result, torch.Tensor)
        if result.grad_fn is not None:
            result.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
        return result

    def submit(self, lookup: Lookup) -> torch.Tensor:
        table = lookup.table
        if not table.sharded:
            lookup.resolve(table.flat(table.data), lookup.ids, None)
            return lookup.value()
        self._pending.append(lookup)
        table.num_open += lookup.trainable
        result = Deferred(lookup, self)
        if lookup.renorm is not None:  # it changes rows, whether or not its result is used
            self.flush()
        return result

    def read_whole(self, table: Table, field: int = 0) -> torch.Tensor:
        """The whole tensor behind a field of a sharded table (see `Rounds.fields`), fetched from the owners."""
        self.before_read()  # this may change where the rows live
        partitioning, stack = table.partitioning, table.stack
        assert partitioning is not None
        ranks = range(table.world_size)
        spans = [stack.positions_of(table, rank) for rank in ranks]
        positions = torch.cat([torch.arange(a, b, device=table.device) for a, b in spans]).to(stack.id_dtype)
        unleased = Column.split(positions, partitioning.num_held)
        ask = Ask(stack, Column.split(positions[:0], [0] * len(ranks)), unleased, table=table)
        _, rows = self._run_round(Request(asks=[ask], field=field)).rows[0]
        order = torch.cat([partitioning.rows_of(rank) for rank in ranks])
        whole = torch.empty_like(rows)
        whole[order] = rows
        return whole

    def flush(self) -> None:
        """Fetches in one round the rows of all pending lookups that are not here yet."""
        pending, self._pending = self._pending, []
        by_stack: dict[Stack, list[Lookup]] = {}
        for lookup in pending:
            by_stack.setdefault(lookup.table.stack, []).append(lookup)
        wanted = [self._want(stack, lookups) for stack, lookups in by_stack.items()]
        missing = [w for w in wanted if w.leased.numel() or w.unleased.numel()]
        rows = self.lease(missing, self._ahead(by_stack)) if missing or any(map(self._is_due, by_stack)) else []
        extra = {id(w): r for w, r in zip(missing, rows, strict=True)}
        for w in wanted:
            self._resolve(w, extra.get(id(w)))
        self._sorted.clear()

    def _ahead(self, by_stack: Mapping[Stack, Sequence[Lookup]]) -> dict[Stack, Foreseen]:
        """What is likely to be looked up in the step after this one, if it is known and not asked for yet."""
        if (
            self.foresight is None
            or not self.asks_ahead
            or not any(lookup.trainable for of in by_stack.values() for lookup in of)
        ):
            return {}
        found = {}
        following = self.foresight.following()
        for stack in by_stack:
            ids = {number: following[t.name] for number, t in enumerate(stack.tables) if t.name in following}
            if not ids or stack.places is None:
                continue
            if stack.foreseen is not None and not self._is_due(stack):
                self.foresight.give_up()  # gradients accumulate: what is asked for ahead is late, or for nothing
                return {}
            # An id out of range stands for some row here; its own lookup will say what is wrong with it.
            counts = [(number, len(of_one)) for number, of_one in ids.items()]
            raw = stack.places.keys(cat(list(ids.values())).to(stack.device), counts)
            keys, inverse = self._sort(raw)
            spans = stack.places.by_owner(stack.places.cuts(keys))
            found[stack] = Foreseen(raw, keys, inverse, Column(stack.places.positions(keys), spans))
        return found

    def lease_keys(self, stack: Stack, keys: torch.Tensor) -> None:
        """Puts sorted `keys` on lease that are not."""
        _, known = stack.window.find(keys)
        nothing = keys[:0]
        if not bool(known.all()):
            self.lease([_Wanted(stack, [], keys[~known], nothing, nothing, nothing)])

    def lease(self, wanted: Sequence[_Wanted], ahead: Mapping[Stack, Foreseen] = _NOTHING) -> list[torch.Tensor]:
        """One round for all of `wanted`; returns the rows of the unleased keys of each.

        Args:
            ahead: what to ask for ahead in it.
        """
        asks = [
            Ask.by_keys(w.stack, w.leased, w.unleased, w.stack.window.renorm, merged=w.stack.merged) for w in wanted
        ]
        answers = self._run_round(Request(asks=asks, ahead=ahead)).rows
        for w, ask, (rows, _) in zip(wanted, asks, answers, strict=True):
            if w.leased.numel():
                w.stack.window.add(w.leased, rows, ask.leased.spans)
        return [rows for _, rows in answers]

    def _want(self, stack: Stack, lookups: list[Lookup]) -> _Wanted:
        assert stack.places is not None
        if len(stack.tables) > 1:
            numbers = {table: number for number, table in enumerate(stack.tables)}
            for lookup in lookups:
                lookup.number = numbers[lookup.table]
            lookups.sort(key=lambda lookup: lookup.number)  # so that those of the next step can be foreseen
        ids = cat([lookup.ids for lookup in lookups])
        self._set_renorm(stack, lookups)
        if stack.device.type != "cpu":
            self._check_ranges(lookups, ids)
        if self.foresight is not None and stack.window.renorm is None and all(x.trainable for x in lookups):
            for lookup in lookups:
                self.foresight.see(lookup.table.name, lookup.ids)
        raw = stack.places.keys(ids, [(lookup.number, lookup.ids.numel()) for lookup in lookups])
        foreseen = stack.foreseen if self._is_due(stack) else None
        if foreseen is not None and torch.equal(raw, foreseen.raw):
            keys, inverse = foreseen.keys, foreseen.inverse
            known = torch.ones_like(keys, dtype=torch.bool)
        else:
            keys, inverse = self._sort(raw)
            _, known = stack.window.find(keys)
            if foreseen is not None:
                known |= torch.isin(keys, foreseen.keys)
        if all(lookup.trainable and lookup.is_padding is None for lookup in lookups):
            leased = keys[~known] if foreseen is not None or len(stack.window) else keys
            together = Fetched(len(lookups), len(keys))
            for number, lookup in enumerate(lookups):
                lookup.part = together, number
            return _Wanted(stack, lookups, leased, keys[:0], keys, inverse)
        trains = torch.cat(
            [
                torch.full_like(lookup.ids, lookup.trainable, dtype=torch.bool)
                if lookup.is_padding is None
                else ~lookup.is_padding & lookup.trainable
                for lookup in lookups
            ]
        )
        learnt = torch.zeros_like(known)
        learnt[inverse[trains]] = True
        return _Wanted(stack, lookups, keys[~known & learnt], keys[~known & ~learnt], keys, inverse)

    def _set_renorm(self, stack: Stack, lookups: Sequence[Lookup]) -> None:
        renorms = {lookup.renorm for lookup in lookups}
        if len(stack.window):
            renorms.add(stack.window.renorm)
        if len(renorms) > 1:
            self.fail(
                NotImplementedError(
                    f"{stack.name!r} is looked up in one step with different max_norm (max_norm, norm_type: "
                    f"{renorms}); use one for all lookups (rank {stack.rank})"
                )
            )
        [stack.window.renorm] = renorms

    def _sort(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys sorted, each once; and where each of `raw` is among them."""
        for known, found in self._sorted:  # a weight and its bias
            if torch.equal(known, raw):
                return found
        keys, inverse = torch.unique(raw, return_inverse=True)
        self._sorted.append((raw, (keys, inverse)))
        return keys, inverse

    def _resolve(self, w: _Wanted, unleased_rows: torch.Tensor | None) -> None:
        window = w.stack.window
        rows, index = window.rows, w.inverse
        if window.keys is not w.keys:  # else slots are in their order
            slots, known = window.find(w.keys)
            if unleased_rows is not None and unleased_rows.numel():
                behind = torch.arange(len(window), len(window) + len(unleased_rows))
                slots = slots.masked_scatter(~known, behind.to(slots))
                rows = torch.cat([rows, unleased_rows])
            index = slots[index]
        sizes = [lookup.ids.numel() for lookup in w.lookups]
        for lookup, of_one in zip(w.lookups, index.split(sizes), strict=True):
            lookup.resolve(rows, of_one, window)
        if len(w.lookups) > 1 and all(type(lookup) is Lookup for lookup in w.lookups):
            # Not views: the result of an autograd Function may be changed in place.
            picked = torch.unsafe_split_with_sizes(rows.index_select(0, index), sizes)
            for lookup, of_one in zip(w.lookups, picked, strict=True):
                lookup.take_picked(of_one)

    def _check_range(self, lookup: Lookup) -> None:
        """Raises IndexError on all ranks for an id out of range; on accelerators once per flush (`_check_ranges`)."""
        table, ids = lookup.table, lookup.ids
        if not ids.numel() or (table.sharded and table.device.type != "cpu"):
            return
        low, high = (int(extreme) for extreme in torch.aminmax(ids))
        if low < 0 or high >= table.num_rows:
            self._fail_range(table, low if low < 0 else high)

    def _check_ranges(self, lookups: Sequence[Lookup], ids: torch.Tensor) -> None:
        """The same for all lookups of a flush, with one look at what the device has found.

        Args:
            ids: theirs, one after the other.
        """
        limits, sizes = [lookup.table.num_rows for lookup in lookups], [lookup.ids.numel() for lookup in lookups]
        if bool(((ids < 0) | (ids >= by_size(limits, sizes, ids.device))).any()):
            for lookup in lookups:
                table = lookup.table
                found = lookup.ids[(lookup.ids < 0) | (lookup.ids >= table.num_rows)]
                if found.numel():
                    self._fail_range(table, int(found[0]))

    def _fail_range(self, table: Table, id: int) -> None:
        self.fail(
            IndexError(
                f"id {id} is out of range for {table.name!r}, which has {table.num_rows} rows: ids go from 0 to "
                f"{table.num_rows - 1} (rank {table.rank})"
            )
        )
