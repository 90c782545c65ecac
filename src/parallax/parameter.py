"""What the user's parameter turns into: the same object, with a class that sees how it is used.

`WatchedParameter` is whole on each rank; its lookups are noticed and their gradients exchanged by rows.
`ShardedParameter` holds this rank's rows. Inside `optimizer.step()` it is those rows; everywhere else it
means the whole table: lookups become `Lookup`s, its gradient and `.data` are `Whole` tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from parallax.lookup import BagLookup, Lookup, Lookups
from parallax.plan import Use
from parallax.table import Table
from parallax.untraced import untraced
from parallax.whole import Whole, WholeReads


@untraced
class WatchedParameter(nn.Parameter):
    """A parameter of which every rank holds a copy."""

    _table: Table
    _lookups: Lookups

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for p in _parameters(args, kwargs):
            lookup = _as_lookup(func, p, args, kwargs)
            if lookup is not None:
                p._lookups.on_use(p._table, lookup=True)
                if type(p) is not cls:  # the plan was made just now
                    return func(*args, **kwargs)
                return lookup()
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in _ABOUT_THE_OBJECT and _has_graph(out):
            for p in _parameters(args, kwargs):
                p._lookups.on_use(p._table, lookup=False)
                p._table.seen |= Use.DENSE
        return out

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return _copied(self, self._table.data.clone(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._table.data, self.requires_grad).__reduce_ex__(protocol)


@untraced
class ShardedParameter(nn.Parameter):
    """A parameter of which this rank holds some rows."""

    _table: Table
    _lookups: Lookups
    _reads: WholeReads

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # the most usual, and nothing to look for
            return _attribute(func, name, args)
        found = _parameters(args, kwargs)
        if any(p._lookups.stepping for p in found) and func not in (F.embedding, F.embedding_bag):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for p in found:
            lookup = _as_lookup(func, p, args, kwargs)
            if lookup is not None:
                p._lookups.on_use(p._table, lookup=True)
                return lookup()
        if name == "tolist":
            return found[0]._reads.whole(found[0]._table, "data").tolist()
        if name in _ABOUT_THE_OBJECT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Written in place (under no_grad) or read without a graph: the whole table by its alias.
        graph = torch.is_grad_enabled() and any(p.requires_grad for p in found) and name not in _NO_GRAPH

        def stand_in(x: Any) -> Any:
            if not isinstance(x, ShardedParameter):
                return x
            return x._reads.differentiable(x._table) if graph else Whole(x._table, x._reads, "data")

        out = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        # An in-place operation returns the parameter that it was called on.
        if isinstance(out, Whole) and out._field == "data" and not out._views and name.endswith("_"):
            return args[0]
        return out

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return _copied(self, self._reads.whole(self._table, "data"), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self._reads.whole(self._table, "data")
        return nn.Parameter(whole, self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self._reads.whole(self._table, 'data')!r}"


_ABOUT_THE_OBJECT = {
    "__get__", "__set__", "requires_grad_", "is_floating_point", "is_complex", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad",  # see `hooks`
}  # fmt: skip
_ADOPTED = (WatchedParameter, ShardedParameter)
_NO_GRAPH = {"detach", "size", "dim", "numel", "nelement", "__len__", "stride", "is_contiguous", "ndimension", "type"}


def adopt(parameter: nn.Parameter, kind: type[nn.Parameter], table: Table, lookups: Lookups, reads: WholeReads) -> None:
    """Makes `parameter` one of the classes above, keeping the object."""
    parameter.__class__ = kind
    parameter._table, parameter._lookups, parameter._reads = table, lookups, reads  # type: ignore[attr-defined]


def release(parameter: nn.Parameter) -> None:
    """Gives a parameter its own class back."""
    parameter.__class__ = parameter._table.original_class  # type: ignore[attr-defined]
    del parameter._table, parameter._lookups, parameter._reads  # type: ignore[attr-defined]


def _copied(p: nn.Parameter, data: torch.Tensor, memo: Any) -> nn.Parameter:
    copy = nn.Parameter(data, p.requires_grad)
    memo[id(p)] = copy
    return copy


def _parameters(args: Any, kwargs: Any) -> list[Any]:
    """The adopted parameters among the arguments, each once."""
    found: dict[int, Any] = {}
    _find(args, found)
    if kwargs:
        _find(kwargs.values(), found)
    return list(found.values())


def _find(arguments: Any, found: dict[int, Any]) -> None:
    for x in arguments:
        if type(x) in _ADOPTED:  # isinstance() takes long for parameters
            found[id(x)] = x
        elif isinstance(x, (list, tuple)):
            _find(x, found)
        elif isinstance(x, dict):
            _find(x.values(), found)


def _has_graph(out: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in tree_flatten(out)[0])


def _attribute(func: Any, name: str, args: Any) -> Any:
    """Reading or setting an attribute of a sharded parameter."""
    p: ShardedParameter = args[0]
    if type(p) is not ShardedParameter:
        given: ShardedParameter = args[1]
        given._lookups.fail(
            NotImplementedError(
                f"{given._table.name!r}, whose rows live on their owners, cannot be an attribute of another tensor "
                f"(rank {given._table.rank}); give that a copy: parameter.detach().clone()"
            )
        )
    if p._lookups.stepping:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    table, which = p._table, getattr(func.__self__, "__name__", "")
    if name == "__set__":
        value = args[1]
        if which == "grad":
            _assign_grad(p, value)
            return None
        if which == "data":
            if value.dtype != table.dtype or value.device.type != table.device.type:
                p._lookups.fail(
                    NotImplementedError(
                        f"{table.name!r} cannot become {value.dtype} on {value.device} (rank {table.rank}); "
                        f"convert the model before parallax.distribute"
                    )
                )
            Whole(table, p._reads, "data").copy_(value)
            return None
    elif which == "grad":
        return None if table.grad is None else Whole(table, p._reads, "grad")
    elif which == "data":
        return Whole(table, p._reads, "data")
    elif which in ("shape", "ndim", "T", "mT", "H", "itemsize", "nbytes"):
        return func(torch.empty(table.shape, dtype=table.dtype, device="meta")) if which[0] in "sni" else p.t()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _assign_grad(p: ShardedParameter, value: Any) -> None:
    table = p._table
    if isinstance(value, Whole):
        if value._table is table and value._field == "grad" and not value._views:  # p.grad = p.grad
            return
        value = value._fetch()[1]
    if value is not None and tuple(value.shape) != table.shape:
        raise RuntimeError(
            f"assigned grad has data of a different size: {tuple(value.shape)} for {table.name!r} of {table.shape}"
        )
    table.grad = None if value is None else table.own_rows(value)
    if value is not None:
        p._reads.unrepeatable.add(table.name)


# -- recognising lookups ------------------------------------------------------------------------------


def _as_lookup(func: Any, p: Any, args: Any, kwargs: Any) -> Callable[[], torch.Tensor] | None:
    """What to do if `func(*args, **kwargs)` looks up rows of `p`; None if it does something else."""
    if func is F.embedding:
        return functools.partial(_embedding, p, *args, **kwargs) if _second(args, kwargs) is p else None
    if func is F.embedding_bag:
        return functools.partial(_embedding_bag, p, *args, **kwargs) if _second(args, kwargs) is p else None
    if func is torch.Tensor.__getitem__:
        index = args[1]
        is_ids = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() > 0
        return functools.partial(_pick, p, index) if args[0] is p and is_ids else None
    if func in (torch.index_select, torch.Tensor.index_select):
        values = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        if values.get("input") is p and values.get("dim") in (0, -len(p._table.shape)):
            return functools.partial(_index_select, p, values["index"])
    return None


def _second(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _embedding(
    p: Any,
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    table: Table = p._table
    renorm = _renorm(p, max_norm, norm_type)
    _check_frequency(p, scale_grad_by_freq)
    if input.dtype not in (torch.int64, torch.int32):  # torch's own error
        return F.embedding(input, table.data)
    if padding_idx is not None and not -table.num_rows <= padding_idx < table.num_rows:
        return F.embedding(input, table.data.new_empty(table.shape, device="meta"), padding_idx)
    table.note_layout(sparse)
    shape = (*input.shape, *table.row_shape)
    return _look_up(p, Lookup(table, input, shape, _padding(table, padding_idx), renorm), input)


def _embedding_bag(
    p: Any,
    input: torch.Tensor,
    weight: Any,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    table: Table = p._table
    renorm = _renorm(p, max_norm, norm_type)
    _check_frequency(p, scale_grad_by_freq)
    # torch's own checks of the arguments, on stand-ins of the same shapes
    with torch.no_grad():
        dummy = torch.zeros(1, *table.row_shape, dtype=table.dtype, device=table.device)
        F.embedding_bag(
            torch.zeros_like(input),
            dummy,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
        )
    if padding_idx is not None and not -table.num_rows <= padding_idx < table.num_rows:
        raise AssertionError(f"padding_idx must be within the number of embeddings, got {padding_idx}")
    table.note_layout(sparse)
    lookup = BagLookup(
        table,
        input,
        offsets if input.dim() == 1 else None,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=_padding(table, padding_idx),
        renorm=renorm,
    )
    return _look_up(p, lookup, torch.empty(lookup.shape[0], device="meta"), per_sample_weights)


def _pick(p: Any, index: torch.Tensor) -> torch.Tensor:
    """`weight[ids]`, negative ids counting from the end."""
    table: Table = p._table
    ids = index.long()
    if ids.numel() and bool((ids < -table.num_rows).any()):
        p._lookups.fail(
            IndexError(
                f"id {int(ids.min())} is out of range for {table.name!r}, which has {table.num_rows} rows: ids go from "
                f"-{table.num_rows} to {table.num_rows - 1} (rank {table.rank})"
            )
        )
    ids = torch.where(ids < 0, ids + table.num_rows, ids)
    _check_frequency(p, False)
    return _look_up(p, Lookup(table, ids, (*ids.shape, *table.row_shape)), index)


def _index_select(p: Any, index: torch.Tensor) -> torch.Tensor:
    table: Table = p._table
    if index.dim() > 1 or index.dtype not in (torch.int64, torch.int32):  # torch's own error
        return torch.index_select(table.data, 0, index)
    ids = index.reshape(-1)
    _check_frequency(p, False)
    return _look_up(p, Lookup(table, ids, (ids.numel(), *table.row_shape)), ids)


def _look_up(p: Any, lookup: Lookup, ids: torch.Tensor, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
    p._lookups.on_samples(ids.shape[0] if ids.dim() else 1)
    if lookup.trainable:
        p._table.seen |= Use.LOOKUP
    return p._lookups.apply(lookup, per_sample_weights)


def _padding(table: Table, padding_idx: int | None) -> int | None:
    return padding_idx % table.num_rows if padding_idx is not None else None


def _renorm(p: Any, max_norm: float | None, norm_type: float) -> tuple[float, float] | None:
    if max_norm is None:
        return None
    if not p._table.sharded:
        p._lookups.fail(
            NotImplementedError(
                f"{p._table.name!r}: lookups with max_norm change rows, which works for the weight of an nn.Embedding "
                f"or nn.EmbeddingBag that has max_norm when parallax.distribute is called (rank {p._table.rank})"
            )
        )
    return float(max_norm), float(norm_type)


def _check_frequency(p: Any, scale_grad_by_freq: bool) -> None:
    """Counts over all workers need the same kind of lookup everywhere: that of the module."""
    if scale_grad_by_freq != p._table.by_frequency and torch.is_grad_enabled() and p.requires_grad:
        p._lookups.fail(
            NotImplementedError(
                f"{p._table.name!r}: scale_grad_by_freq=True works for the weight of an nn.Embedding that has it when "
                f"parallax.distribute is called, and then for all its lookups (rank {p._table.rank})"
            )
        )
    if scale_grad_by_freq and p._table.dtype.itemsize < 4:
        p._lookups.fail(
            NotImplementedError(
                f"{p._table.name!r}: scale_grad_by_freq=True with {p._table.dtype}: its counts would be rounded; keep "
                f"the table in float32 (rank {p._table.rank})"
            )
        )
