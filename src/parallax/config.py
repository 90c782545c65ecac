"""What a user may set."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:  # plans are also made where nobody waits for PyTorch: `parallax plan`
    import torch

Architecture = Literal["hybrid", "allreduce", "ps"]
Reduction = Literal["mean", "sum"]
SparseAllreduce = Literal["gather", "dense"]
WireDtype = Literal["float32", "bfloat16", "float16", "int8"]
FixedPlacement = Literal["allreduce", "gather", "sharded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `parallax.distribute`. All have defaults that are right for exact synchronous training."""

    architecture: Architecture = "hybrid"
    """"hybrid": dense parameters by AllReduce, looked-up ones row by row on their owners. What it is measured against:
    "allreduce": every worker keeps every parameter (see `sparse_allreduce`); "ps": as a parameter server does,
    the gradient of a dense parameter is added up by one worker, too, which hands out the sum."""

    sparse_allreduce: SparseAllreduce = "gather"
    """With architecture "allreduce": the touched rows of looked-up parameters are gathered ("gather"), or
    their whole gradients are reduced like dense ones ("dense")."""

    reduction: Reduction = "mean"
    """"mean": gradients are averaged over the samples of all workers' batches, which is what one device
    computes on the batches put together. "sum": gradients of the workers are added. The rule is the same
    for dense and sparse parameters."""

    wire_dtype: WireDtype = "float32"
    """How the rows that training looks up, their gradients, and gradients of dense parameters travel between workers.
    "float32": as they are in memory, whatever their dtype, so nothing is lost. **The others round, so the result is no
    longer that of one device.** "bfloat16" and "float16": cast to 16 bits, where that is smaller; float16 has the finer
    steps, but gradients below 6e-8 vanish in it and those above 65504 become infinite. "int8": a row is a scale
    (max|row| / 127 in float32) and a byte for each element; rows of up to 4 elements, and gradients of dense
    parameters, travel as bfloat16. A row is rounded wherever it is used, on its owner too; sums, weights, optimizer
    state and all that is read outside of training (evaluation, whole tables, norms, checkpoints) are not."""

    lazy_rows: bool = False
    """Optimizers update only those rows of a looked-up parameter whose gradient is not zero, and only these rows'
    state decays. **This is other mathematics than one device's** for optimizers that move rows without a gradient
    (momentum, Adam, weight decay); it is what `sparse=True` does with SGD or SparseAdam, for every optimizer that
    updates row by row. Counters such as Adam's `step` are the table's, not a row's. Tables that are also used whole
    are updated as ever. On one worker it means the same."""

    overlap: bool = True
    """Row gradients of a table leave as soon as backward has them all, while it goes on with what comes before; rows of
    the next batch of `parallax.shard` are asked for, and sent, while this one is trained with, if a trial shows that it
    pays. `shard` then reads one batch ahead. The numbers are the same either way."""

    timeout: float = 600.0
    """Seconds to wait for a silent worker before all workers stop with an error; more than 0."""

    bucket_mb: float = 25.0
    """Size of a bucket of dense gradients in MiB (2**20 bytes); more than 0."""

    placements: Mapping[str, FixedPlacement] = dataclasses.field(default_factory=dict)
    """Placements that you choose: {"encoder.embed*": "gather"}. Keys are patterns of parameter names (as of
    `fnmatch`); of several that match a parameter, the first counts. "allreduce": a copy on each worker, the whole
    gradient is reduced. "gather": a copy on each worker, the touched rows of the gradient are gathered. "sharded":
    rows live on their owners. A pattern that no parameter matches, or a placement that is not possible for a
    parameter, is an error."""

    partitions: int | Literal["search"] | None = None
    """Number of parts that the rows of a sharded parameter are dealt out to, at least 1; the workers hold them in
    turn. Default: one for each worker. "search": what is fastest is found while training goes on, for tables of the
    same shape together, by moving rows between steps; weights become what they would have become without."""

    min_partitions: int = 1
    """The smallest number of parts, for tables that are too large for fewer; at least 1."""

    search_share: float = 0.05
    """The part of the time of training that trials of `partitions="search"` may cost; more than 0, at most 1."""

    topology: str | os.PathLike[str] | None = "auto"
    """The machines and their links, by which placements are chosen. "auto": measured on the first step if there are
    tables of 16 MiB or more, or read from the user's cache if it was measured on these machines before. "measure":
    measured now. A path: read from that file (JSON, as `Topology.to_json` writes). None: placements go by the kind of
    use alone."""

    init: Callable[[str, torch.Tensor], Any] | None = None
    """Fills the rows of a table that was built on the meta device: called on each worker as
    `init(name, rows)` with that worker's own rows, shape (rows held, *row shape). Default: standard normal
    for the weight of an `nn.Embedding` or `nn.EmbeddingBag`, an error for any other."""

    def __post_init__(self) -> None:
        _check_choice("architecture", self.architecture, get_args(Architecture))
        _check_choice("sparse_allreduce", self.sparse_allreduce, get_args(SparseAllreduce))
        _check_choice("reduction", self.reduction, get_args(Reduction))
        _check_choice("wire_dtype", self.wire_dtype, get_args(WireDtype))
        if not isinstance(self.lazy_rows, bool):
            raise ValueError(f"Config.lazy_rows: expected True or False, got {self.lazy_rows!r}")
        if self.lazy_rows and (self.architecture, self.sparse_allreduce) == ("allreduce", "dense"):
            raise ValueError(
                "Config.lazy_rows: with architecture='allreduce' and sparse_allreduce='dense' it is not known which "
                "rows were looked up; use sparse_allreduce='gather', or architecture='hybrid'"
            )
        _check_positive("timeout", self.timeout)
        _check_positive("bucket_mb", self.bucket_mb)
        if not isinstance(self.placements, Mapping):
            raise ValueError(f"Config.placements: expected a dict of name patterns, got {self.placements!r}")
        for pattern, placement in self.placements.items():
            if not isinstance(pattern, str):
                raise ValueError(f"Config.placements: expected patterns of names as keys, got {pattern!r}")
            _check_choice(f"placements[{pattern!r}]", placement, get_args(FixedPlacement))
        p, least = self.partitions, self.min_partitions
        if p is not None and p != "search" and not _is_count(p):
            raise ValueError(f"Config.partitions: expected a whole number, at least 1, 'search' or None, got {p!r}")
        if not _is_count(least):
            raise ValueError(f"Config.min_partitions: expected a whole number, at least 1, got {least!r}")
        if isinstance(p, int) and p < least:
            raise ValueError(f"Config.partitions: expected at least Config.min_partitions={least}, got {p}")
        _check_positive("search_share", self.search_share)
        if self.search_share > 1:
            raise ValueError(f"Config.search_share: expected at most 1, got {self.search_share!r}")
        if self.topology is not None and not isinstance(self.topology, (str, os.PathLike)):
            raise ValueError(
                f"Config.topology: expected 'auto' | 'measure', the path of a file, or None, got {self.topology!r}"
            )
        if self.init is not None and not callable(self.init):
            raise ValueError(f"Config.init: expected a function of (name, rows) or None, got {self.init!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " | ".join(repr(a) for a in allowed)
        raise ValueError(f"Config.{field}: expected {choices}, got {value!r}")


def _check_positive(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"Config.{field}: expected a number greater than 0, got {value!r}")
