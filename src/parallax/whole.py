"""Tables as one tensor: what stands for a whole weight or gradient whose rows are held by all ranks.

A parameter's `.data` and `.grad` are such tensors outside of optimizer steps (`parameter`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from parallax.lookup import Lookup, Lookups
from parallax.message import Request, Want
from parallax.plan import Use
from parallax.rounds import Round, join_norms
from parallax.table import Table
from parallax.untraced import untraced

WARN_BYTES = 2**20
"""Whole reads of tables from this size on are worth a warning."""


class WholeReads:
    """Reads of whole tables and joint norms, on behalf of the tensors that stand for them."""

    def __init__(
        self,
        lookups: Lookups,
        run_round: Callable[[Request], Round],
        tables: Callable[[], Sequence[Table]],
        on_change: Callable[[Table], None],
    ) -> None:
        """
        Args:
            tables: the tables of the run, in the order of `Round.norms`.
            on_change: told when the rows of a table were written outside an optimizer.
        """
        self._lookups, self._run_round, self._tables = lookups, run_round, tables
        self.on_change = on_change
        self._warned: set[str] = set()
        self._norms: dict[float, tuple[list[tuple[Any, int]], list[torch.Tensor]]] = {}
        self.changes: dict[str, list[Change]] = {}
        """By table, what was done to its gradient since the latest backward."""
        self.unrepeatable: set[str] = set()
        """Tables to whose gradient something was done that `Change` cannot say."""

    def differentiable(self, table: Table) -> torch.Tensor:
        """The whole table as one lookup of all rows, with its gradient."""
        self.warn(table)
        ids = torch.arange(table.num_rows, device=table.device)
        lookup = Lookup(table, ids, table.shape)
        table.seen |= Use.DENSE
        return self._lookups.apply(lookup)

    def warn(self, table: Table) -> None:
        """Says once what reading a large table whole costs."""
        num_bytes = table.num_rows * table.row_bytes
        if num_bytes >= WARN_BYTES and table.name not in self._warned:
            self._warned.add(table.name)
            warnings.warn(
                f"parallax: {table.name!r} is read as a whole: its {num_bytes / 2**20:,.0f} MiB travel to rank "
                f"{table.rank} each time",
                stacklevel=2,
            )

    def whole(self, table: Table, field: str) -> torch.Tensor:
        """A copy of the whole weight ("data") or gradient ("grad"); the gradient of a sparse table is COO."""
        dense = self._lookups.read_whole(table, 0 if field == "data" else 1).view(table.shape)
        is_coo = field == "grad" and table.grad is not None and table.grad.layout == torch.sparse_coo
        return dense.to_sparse(1) if is_coo else dense

    def norm(self, table: Table, order: float) -> torch.Tensor:
        """The norm of a table's whole gradient, equal on all ranks. One round serves all tables."""
        self._lookups.before_read()
        tables = list(self._tables())
        now = [(t.grad, -1 if t.grad is None else t.grad._version) for t in tables]
        cached = self._norms.get(order)
        if cached is None or any(a[0] is not b[0] or a[1] != b[1] for a, b in zip(cached[0], now, strict=True)):
            parts = self._run_round(Request(want=Want.NORMS, order=order)).norms
            assert parts is not None
            cached = self._norms[order] = (now, [join_norms(parts[:, i], order) for i in range(len(tables))])
        return cached[1][tables.index(table)].to(table.dtype)

    def flush(self) -> None:
        """Gives pending lookups their values."""
        self._lookups.flush()

    def forget_norms(self) -> None:
        """A gradient changed."""
        self._norms.clear()

    def dropped(self, table: Table) -> bool:
        """Nothing is left of the gradient that the latest backward pass made."""
        zeroed = any(change.operation in ("zero_", "_foreach_zero_") for change in self.changes.get(table.name, ()))
        return table.grad is None or zeroed

    def changed(self, table: Table) -> bool:
        """The gradient that the latest backward pass made was changed, and is still there."""
        return not self.dropped(table) and (table.name in self.changes or table.name in self.unrepeatable)

    def take_changes(self) -> dict[str, list[Change]]:
        """`changes`, which are then no more to be repeated."""
        changes, self.changes = self.changes, {}
        return changes

    def forget(self) -> None:
        """Gradients are about to be new tensors."""
        self.forget_norms()
        self.changes.clear()
        self.unrepeatable.clear()


@dataclasses.dataclass(frozen=True)
class Change:
    """An in-place operation by numbers on a gradient, to be repeated where the same was not run."""

    operation: str
    overload: str
    in_list: bool
    args: tuple[Any, ...]

    def repeat(self, grad: torch.Tensor) -> None:
        func = getattr(getattr(torch.ops.aten, self.operation), self.overload)
        func([grad] if self.in_list else grad, *self.args)


@untraced
class Whole(torch.Tensor):
    """A tensor of a whole table's shape that stands for rows held by all ranks: its weight or its gradient.

    Reading it fetches the whole; element-wise changes by numbers happen where the rows live; any other change
    is made to a fetched whole, of which each rank keeps its own rows. Views remember how they were made.
    """

    _table: Table
    _reads: WholeReads
    _field: str
    _views: tuple[tuple[Any, Any, Any], ...]

    @staticmethod
    def __new__(
        cls, table: Table, reads: WholeReads, field: str, views: Any = (), like: torch.Tensor | None = None
    ) -> Whole:
        held = table.grad if field == "grad" else None
        layout = torch.sparse_coo if held is not None and held.layout == torch.sparse_coo else torch.strided
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            table.shape if like is None else like.shape,
            strides=None if like is None or layout != torch.strided else like.stride(),
            dtype=table.dtype if like is None else like.dtype,
            device=table.device,
            layout=layout,
        )
        self._table, self._reads, self._field, self._views = table, reads, field, views
        return self

    def _held(self) -> torch.Tensor:
        """This rank's part."""
        held = self._table.data if self._field == "data" else self._table.grad
        assert held is not None, f"the gradient of {self._table.name!r} was dropped"
        return held

    def _fetch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the whole, the view of it that this tensor is)."""
        if self._field == "data":
            self._reads.warn(self._table)
        whole = self._reads.whole(self._table, self._field)
        view = whole
        for func, args, kwargs in self._views:
            view = func(view, *args, **kwargs)
        return whole, view

    def _keep(self, whole: torch.Tensor) -> None:
        self._held().copy_(self._table.own_rows(whole))
        self._changed()

    def _changed(self, change: Change | None = None) -> None:
        if self._field == "data":
            self._reads.on_change(self._table)
            return
        self._reads.forget_norms()  # below autograd, where this runs, tensors do not count their versions
        if change is not None:
            self._reads.changes.setdefault(self._table.name, []).append(change)
        else:
            self._reads.unrepeatable.add(self._table.name)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        schema = func._schema
        if schema.is_mutable:
            return _mutate(func, name, args, kwargs)
        if name == "linalg_vector_norm" and len(args) < 3 and not kwargs.get("dim") and not args[0]._views:
            if args[0]._field == "grad":
                norm = args[0]._reads.norm(args[0]._table, float(args[1] if len(args) > 1 else 2))
                return norm.to(kwargs["dtype"]) if kwargs.get("dtype") else norm
        elif name == "_foreach_norm" and all(isinstance(t, Whole) and t._field == "grad" for t in args[0]):
            return [t._reads.norm(t._table, float(args[1] if len(args) > 1 else 2)) for t in args[0]]
        if name == "detach" and isinstance(args[0], Whole):
            t = args[0]
            return Whole(t._table, t._reads, t._field, t._views, t if t._views else None)
        aliases = any(r.alias_info is not None for r in schema.returns)
        if aliases and len(schema.returns) == 1 and args and isinstance(args[0], Whole):
            t = args[0]
            if t.layout == torch.strided and not isinstance(args[0], (list, tuple)):
                meta = func(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), *args[1:], **kwargs)
                if isinstance(meta, torch.Tensor):
                    return Whole(t._table, t._reads, t._field, (*t._views, (func, args[1:], kwargs)), meta)
        fetched = tree_map(lambda x: x._fetch()[1] if isinstance(x, Whole) else x, (args, kwargs))
        return func(*fetched[0], **fetched[1])

    @property
    def data(self) -> Whole:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.copy_(value)

    def tolist(self) -> Any:
        return self._fetch()[1].tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._fetch()[1].numpy(force=force)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._fetch()[1].clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._fetch()[1].clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._fetch()[1])


_ELEMENTWISE = {
    "mul_", "div_", "add_", "sub_", "zero_", "fill_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_",
    "sign_", "copy_", "addcmul_", "addcdiv_", "lerp_", "sqrt_", "pow_", "abs_",
    "_foreach_mul_", "_foreach_div_", "_foreach_add_", "_foreach_sub_", "_foreach_zero_", "_foreach_neg_",
    "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_copy_",
}  # fmt: skip
"""Operations that change each element by itself (and by numbers, or the same element of like tensors)."""


def _mutate(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An operation that writes to its arguments, some of which are `Whole`."""
    flat = tree_flatten((args, kwargs))[0]
    wholes = [x for x in flat if isinstance(x, Whole)]
    others = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Whole) and x.dim() > 0]
    alike = all(w._table is wholes[0]._table for w in wholes)
    by_lists = name.startswith("_foreach_")
    written = _written(func, args, kwargs)
    if any(w._field == "data" for w in wholes):
        wholes[0]._reads.flush()  # lookups made before see the rows as they were
    on_owners = _partners_are_alike(args) if by_lists else alike and not others
    if name in _ELEMENTWISE and on_owners and all(not w._views for w in wholes):
        held = tree_map(lambda x: x._held() if isinstance(x, Whole) else x, (args, kwargs))
        func(*held[0], **held[1])
        numbers = not kwargs and not any(isinstance(x, (Whole, list)) for x in args[1:])
        for w in _whole_among(written):
            w._changed(Change(name, func._overloadname, by_lists, tuple(args[1:])) if numbers else None)
    elif name == "_amp_foreach_non_finite_check_and_unscale_":
        _unscale(func, wholes, *args)
    elif name == "copy_" and isinstance(args[0], Whole) and not args[0]._views and not isinstance(args[1], Whole):
        value = torch.as_tensor(args[1]).expand(args[0].shape)
        args[0]._held().copy_(args[0]._table.own_rows(value))
        args[0]._changed()
    else:
        fetched = {id(w): w._fetch() for w in wholes}
        real = tree_map(lambda x: fetched[id(x)][1] if isinstance(x, Whole) else x, (args, kwargs))
        out = func(*real[0], **real[1])
        for w in _whole_among(written):
            w._keep(fetched[id(w)][0])
        return next((w for w in wholes if out is fetched[id(w)][1]), out)
    return None if not func._schema.returns else args[0]


def _unscale(
    func: Any, wholes: list[Whole], grads: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """GradScaler's check, with one answer for all ranks: a gradient is not finite if its norm is not."""
    finite = [torch.isfinite(w._reads.norm(w._table, float("inf"))) for w in wholes]
    func([g._held() if isinstance(g, Whole) else g for g in grads], found_inf, inv_scale)
    found_inf.masked_fill_(~torch.stack(finite).all(), 1.0)
    for w in wholes:
        w._changed(Change("mul_", "Tensor", False, (inv_scale,)))


def _whole_among(values: list[Any]) -> list[Whole]:
    return [x for x in values if isinstance(x, Whole)]


def _partners_are_alike(args: Any) -> bool:
    """In a foreach, what stands beside a table in other lists are the same table's tensors, or numbers."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in a)]
    for partners in zip(*lists, strict=False):
        tables = {id(x._table) if isinstance(x, Whole) else 0 for x in partners if isinstance(x, torch.Tensor)}
        if len(tables) > 1:
            return False
    return True


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that `func` writes to, out=... too."""
    written: list[Any] = []
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += value if isinstance(value, (list, tuple)) else [value]
    return written
