"""What a user may set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

Architecture = Literal["hybrid", "allreduce"]
Reduction = Literal["mean", "sum"]
SparseAllreduce = Literal["gather", "dense"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `parallax.distribute`. All have defaults that are right for exact synchronous training."""

    architecture: Architecture = "hybrid"
    """"hybrid": dense parameters by AllReduce, looked-up ones row by row on their owners. "allreduce": every
    worker keeps every parameter (what the hybrid is measured against; see `sparse_allreduce`)."""

    sparse_allreduce: SparseAllreduce = "gather"
    """With architecture "allreduce": the touched rows of looked-up parameters are gathered ("gather"), or
    their whole gradients are reduced like dense ones ("dense")."""

    reduction: Reduction = "mean"
    """"mean": gradients are averaged over the samples of all workers' batches, which is what one device
    computes on the batches put together. "sum": gradients of the workers are added. The rule is the same
    for dense and sparse parameters."""

    timeout: float = 600.0
    """Seconds to wait for a silent worker before all workers stop with an error; more than 0."""

    bucket_mb: float = 25.0
    """Size of a bucket of dense gradients in MiB (2**20 bytes); more than 0."""

    init: Callable[[str, torch.Tensor], Any] | None = None
    """Fills the rows of a table that was built on the meta device: called on each worker as
    `init(name, rows)` with that worker's own rows, shape (rows held, *row shape). Default: standard normal
    for the weight of an `nn.Embedding` or `nn.EmbeddingBag`, an error for any other."""

    def __post_init__(self) -> None:
        _check_choice("architecture", self.architecture, get_args(Architecture))
        _check_choice("sparse_allreduce", self.sparse_allreduce, get_args(SparseAllreduce))
        _check_choice("reduction", self.reduction, get_args(Reduction))
        _check_positive("timeout", self.timeout)
        _check_positive("bucket_mb", self.bucket_mb)
        if self.init is not None and not callable(self.init):
            raise ValueError(f"Config.init: expected a function of (name, rows) or None, got {self.init!r}")


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " | ".join(repr(a) for a in allowed)
        raise ValueError(f"Config.{field}: expected {choices}, got {value!r}")


def _check_positive(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"Config.{field}: expected a number greater than 0, got {value!r}")
