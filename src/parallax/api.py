"""The public functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallax import runtime
from parallax.comm import ParallaxError
from parallax.config import Config
from parallax.plan import Plan
from parallax.runtime import Runtime, Traffic


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
        model: any module with its parameters on one device.
        optimizer: the optimizer or optimizers that train it, if they exist already. Optional; those made later
            are found when they step.
        config: settings; see `Config`.

    Returns:
        `model` itself.

    Raises:
        ParallaxError: this process distributes a model already, or workers have different models.
    """
    active = runtime.current()
    if active is not None:
        which = "this model" if active.model is model else "another model"
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
    Runtime(model, optimizers, config or Config())
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


def shutdown() -> None:
    """Ends the run before the program ends: waits for all workers. The model cannot train on after it."""
    active = runtime.current()
    if active is not None:
        active.leave()


def _run_of(model: nn.Module) -> Runtime:
    active = runtime.current()
    if active is None or active.model is not model:
        raise ParallaxError("this model was not given to parallax.distribute")
    return active
