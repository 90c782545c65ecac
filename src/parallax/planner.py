"""How a plan is made: pure functions from what was observed to where each parameter goes, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.config import Config
from parallax.cost import bytes_per_step
from parallax.plan import ParameterPlan, ParameterProfile, Placement, Plan, Use, format_bytes


def make_plan(profiles: Sequence[ParameterProfile], *, world_size: int, config: Config) -> Plan:
    """The plan for a model; equal on all ranks, since the profiles are.

    Args:
        profiles: every parameter once, in the model's order.
        world_size: number of workers, at least 1.
        config: `architecture` and `sparse_allreduce` count.

    Raises:
        ValueError: a parameter was built on the meta device and cannot be split over the workers (the message
            names it), or occurs twice.
    """
    return Plan(
        world_size=world_size,
        architecture=config.architecture,
        parameters=tuple(_plan(profile, world_size, config) for profile in profiles),
    )


def _plan(profile: ParameterProfile, world_size: int, config: Config) -> ParameterPlan:
    placement, reason = _decide(profile, world_size, config)
    return ParameterPlan(
        name=profile.name,
        shape=profile.shape,
        use=profile.use,
        alpha=profile.alpha,
        placement=placement,
        owners=tuple(range(world_size)) if placement is Placement.SHARDED else (),
        bytes_per_step=bytes_per_step(profile, placement, world_size),
        reason=reason,
    )


def _decide(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    if world_size == 1 and not config.lazy_rows:
        return Placement.LOCAL, "one worker: nothing to exchange"
    if profile.meta:
        return _decide_meta(profile, world_size, config)
    if profile.renormed:
        return _decide_renormed(profile, config)
    if not profile.trainable:
        return Placement.LOCAL, "frozen: no gradient, every worker has a copy"
    if not profile.use:
        return Placement.WATCHED, "not used yet: decided when a step uses it"
    if Use.DENSE in profile.use:
        return _decide_dense(profile, world_size)
    return _decide_looked_up(profile, world_size, config)


def _decide_dense(profile: ParameterProfile, world_size: int) -> tuple[Placement, str]:
    if profile.by_frequency:
        raise ValueError(
            f"parameter {profile.name!r} is looked up with scale_grad_by_freq=True and also used whole; counting "
            f"lookups over all workers works for parameters that are only looked up"
        )
    if Use.LOOKUP in profile.use:
        return Placement.ALLREDUCE, (
            "looked up and also used whole (as a tied weight is): its gradient has a value for every row, so "
            "it is reduced like a dense one"
        )
    return Placement.ALLREDUCE, "used whole: its gradient has a value for every element"


def _decide_looked_up(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    seen = f"only looked up, a worker touches {_rows(profile)} in a step"
    if config.lazy_rows:
        if profile.across_rows:
            raise ValueError(
                f"parameter {profile.name!r}: Config.lazy_rows needs an optimizer that updates row by row (SGD, "
                f"Adagrad, Adam, AdamW, RMSprop), but {profile.across_rows}"
            )
        seen += ", the only ones that are updated (lazy_rows)"
    if config.architecture == "hybrid":
        if profile.across_rows:
            return Placement.ALLREDUCE, (f"{seen}, but {profile.across_rows}, so every worker needs the whole gradient")
        here, there = Placement.SHARDED, Placement.ALLREDUCE
        how = "rows live on their owners"
    elif config.sparse_allreduce == "gather" or profile.by_frequency:
        here, there = Placement.GATHER, Placement.ALLREDUCE
        how = "architecture 'allreduce' gathers the touched rows of the gradient"
    else:
        here, there = Placement.ALLREDUCE, Placement.GATHER
        how = "architecture 'allreduce' with sparse_allreduce='dense' reduces the whole gradient"
    other = {Placement.ALLREDUCE: "reduced whole", Placement.GATHER: "with its touched rows gathered"}[there]
    costs = _cost(profile, here, world_size), _cost(profile, there, world_size)
    return here, f"{seen}: {how}, {costs[0]}; {other} {costs[1]}"


def _decide_renormed(profile: ParameterProfile, config: Config) -> tuple[Placement, str]:
    """Rows that a lookup may change live in one place, from the start."""
    if config.architecture != "hybrid":
        raise ValueError(
            f"parameter {profile.name!r} is looked up with max_norm, which changes rows where they live, "
            f"but Config.architecture={config.architecture!r} keeps a copy on every worker; use "
            f"Config(architecture='hybrid')"
        )
    return Placement.SHARDED, "looked up with max_norm: a row is renormalised by its owner, for all workers"


def _decide_meta(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    """A parameter that has never existed whole, and must not."""
    if config.architecture != "hybrid":
        raise ValueError(
            f"parameter {profile.name!r} was built on the meta device, to be split over the workers, but "
            f"Config.architecture={config.architecture!r} keeps every parameter on every worker; build it on "
            f"a real device, or use Config(architecture='hybrid')"
        )
    if profile.trainable and profile.use and profile.across_rows:
        raise ValueError(
            f"parameter {profile.name!r} was built on the meta device, to be split over the workers, but "
            f"{profile.across_rows}, so no worker can update its part alone; build it on a real device, or train "
            f"it with an optimizer that updates row by row (SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam)"
        )
    size = format_bytes(profile.num_bytes)
    reason = f"built on the meta device: each worker holds 1/{world_size} of its {size}"
    if not profile.trainable:
        reason += "; frozen, only rows travel"
    elif not profile.use:
        reason += "; not used yet"
    elif profile.use is Use.LOOKUP:
        cost = _cost(profile, Placement.SHARDED, world_size)
        reason += f"; a worker touches {_rows(profile)} in a step, {cost}"
    if Use.DENSE in profile.use:
        reason += "; it is also used whole, and each whole read gathers it from all workers"
    return Placement.SHARDED, reason


def _rows(profile: ParameterProfile) -> str:
    touched = f"{profile.num_rows_touched:,.1f}".removesuffix(".0")
    return f"{touched} of {profile.num_rows:,} rows (alpha {profile.alpha:.3g})"


def _cost(profile: ParameterProfile, placement: Placement, world_size: int) -> str:
    return format_bytes(bytes_per_step(profile, placement, world_size))
