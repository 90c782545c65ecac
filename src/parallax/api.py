"""The public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from parallax import runtime
from parallax.comm import DisagreementError, ParallaxError
from parallax.config import Config
from parallax.plan import Plan
from parallax.profiling import Traffic
from parallax.runtime import Runtime
from parallax.untraced import uncompiled

Number = TypeVar("Number", int, float, torch.Tensor)


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    config: Config | None = None,
) -> nn.Module:
    """Trains `model` on all workers from here on, as if their batches were one batch on one device.

    In place: the model, its class, its parameters and their names stay what they are. All workers start from
    rank 0's weights and buffers. The first step is watched; then the plan is made (`explain`). Started by
    `torchrun` or `parallax run`, this joins the workers; without a launcher there is one worker and nothing
    changes. A table that is too large for one worker may be built under `torch.device("meta")`: each worker
    then makes its own rows only (`Config.init`).

    Args:
        model: any module with its parameters on one device; `torch.compile` may come before or after.
        optimizer: the optimizer or optimizers that train it, if they exist already. Optional; those made later
            are found when they step.
        config: settings; see `Config`.

    Returns:
        `model` itself.

    Raises:
        ParallaxError: this process distributes a model already, or workers have different models.
    """
    active = runtime.current()
    plain = uncompiled(model)
    if active is not None:
        which = "this model" if active.model is plain else "another model"
        raise ParallaxError(
            f"rank {active.comm.rank}: parallax.distribute was called already, for {which}; call it once per process. "
            f"Several models that train together go into one nn.ModuleList"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallax.distribute: expected an nn.Module, got {type(model).__name__}")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise TypeError(f"parallax.distribute: expected optimizers, got {type(o).__name__}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"parallax.distribute: expected a parallax.Config, got {type(config).__name__}")
    Runtime(plain, optimizers, config or Config())
    return model


def explain(model: nn.Module) -> Plan:
    """The plan that `model` trains with; print it for a table.

    Before the first step, parameters that wait to be seen in use are "watched".

    Raises:
        ParallaxError: `model` was not distributed.
    """
    return _run_of(model).explain()


def traffic(model: nn.Module) -> Traffic:
    """Counters of what this worker has sent since `distribute`; subtract two to see what is between.

    Raises:
        ParallaxError: `model` was not distributed.
    """
    return _run_of(model).traffic()


def weight(num_samples: float | torch.Tensor) -> None:
    """Says how many samples this rank's next backward pass has its loss's mean over.

    For losses that are means over something else than samples, such as tokens of sequences of different lengths:
    with `reduction="mean"`, the gradient is then that of the mean over the tokens of all workers. It holds for one
    backward pass; without a call, the number is observed (see docs/limits.md). Without `distribute` it does nothing.

    Args:
        num_samples: at least 0; a tensor of one element counts as its value. A loss with 0 samples may be NaN.

    Raises:
        ValueError: the number is negative or not finite.
        ParallaxError: a backward pass is running.
    """
    number = float(num_samples)
    if not 0 <= number < float("inf"):
        raise ValueError(f"parallax.weight: expected a number of samples, at least 0, got {number:g}")
    active = runtime.current()
    if active is not None:
        active.give_samples(number)


def no_sync() -> contextlib.AbstractContextManager[None]:
    """In this context, backward passes keep dense gradients on their worker; the next one outside sends their sum.

    Like DistributedDataParallel's `no_sync`, for gradient accumulation: what it saves are AllReduces. Accumulation
    is exact without it too. Row gradients of tables are exchanged in each backward pass. Inside, and until the next
    backward pass outside, `.grad` of a dense parameter is this worker's part of the sum.

    Raises (later, on all ranks):
        DisagreementError: some workers run a backward pass inside, and some outside.
        ParallaxError: an optimizer steps before a backward pass outside.
    """
    active = runtime.current()
    return contextlib.nullcontext() if active is None else active.no_sync()


def reduce(
    value: Number, op: Literal["sum", "mean", "min", "max"] = "mean", *, weight: float | torch.Tensor = 1.0
) -> Number:
    """A number or tensor of all workers put together, the same on each; for metrics.

    Every worker that has data calls it. Workers whose loop over `parallax.shard` has ended do not take part: after a
    loop, where all are together again, each sample has counted once.

    Args:
        value: a float, an int, or a tensor of real numbers (any shape and dtype, the same on all workers).
        op: "sum", "min", "max" element by element, or "mean": the sum of the values times their weights, divided by the
            sum of the weights.
        weight: for "mean", e.g. the number of samples that `value` is a mean of. A value of weight 0 may be NaN.

    Returns:
        A number for a number ("mean": a float), a tensor on the same device for a tensor.

    Raises:
        TypeError, ValueError: `value`, `op` or `weight` is none of the above.
        DisagreementError: (on all workers) shapes or operations differ, or other workers are in a training step.
    """
    if op not in ("sum", "mean", "min", "max"):
        raise ValueError(f"parallax.reduce: expected op 'sum', 'mean', 'min' or 'max', got {op!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        raise TypeError(f"parallax.reduce: expected a number or a tensor, got {type(value).__name__}")
    if isinstance(value, torch.Tensor) and (value.is_complex() or value.dtype == torch.bool):
        raise TypeError(f"parallax.reduce: expected real numbers, got {value.dtype}")
    number = float(weight)
    if not 0 <= number < float("inf"):
        raise ValueError(f"parallax.reduce: expected a weight of at least 0, got {number:g}")
    active = runtime.current()
    mine = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=_wide(value))
    parts = [(op, mine, number)] if active is None else active.gather((op, mine, number))
    kinds = {(o, tuple(v.shape), v.dtype) for o, v, _ in parts}
    if len(kinds) > 1:
        assert active is not None, "one worker agrees with itself"
        active.fail(  # workers without data do not know
            DisagreementError(
                f"rank {active.comm.rank}: every rank must call parallax.reduce with the same operation, shape and "
                f"dtype, but they differ: {sorted(kinds, key=str)}"
            )
        )
    joint = _reduced(
        torch.stack([v for _, v, _ in parts]), op, torch.tensor([w for *_, w in parts], dtype=torch.float64)
    )
    return joint.to(value.device) if isinstance(value, torch.Tensor) else joint.item()  # type: ignore[return-value]


def _wide(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def _reduced(values: torch.Tensor, op: str, weights: torch.Tensor) -> torch.Tensor:
    """`values` (ranks, ...) over the ranks, in rank order."""
    if op == "min":
        return values.amin(0)
    if op == "max":
        return values.amax(0)
    if op == "sum":
        return values.sum(0, dtype=values.dtype)
    counts = weights.view(-1, *[1] * (values.dim() - 1))
    wide = torch.where(counts > 0, values.double() * counts, 0.0)
    mean = wide.sum(0) / weights.sum()
    return mean.to(values.dtype) if values.is_floating_point() else mean


def shutdown() -> None:
    """Ends the run before the program ends: waits for all workers. The model cannot train on after it."""
    active = runtime.current()
    if active is not None:
        active.leave()


def _run_of(model: nn.Module) -> Runtime:
    active = runtime.current()
    if active is None or active.model is not uncompiled(model):
        raise ParallaxError("this model was not given to parallax.distribute")
    return active
