"""How a plan is made: pure functions from what was observed to where each parameter goes, with the reason."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from parallax.config import Config, WireDtype
from parallax.cost import bytes_per_step, parameter_cost, shared_cost
from parallax.plan import ParameterPlan, ParameterProfile, Placement, Plan, Use, format_bytes, format_seconds
from parallax.topology import Coefficients, Topology

HOW = {
    Placement.ALLREDUCE: "reduced whole",
    Placement.GATHER: "with its touched rows gathered",
    Placement.SHARDED: "with its rows on their owners",
}

MARGIN = 0.02
"""See `keep` of `make_plan`."""


def make_plan(
    profiles: Sequence[ParameterProfile],
    *,
    world_size: int,
    config: Config,
    topology: Topology | None = None,
    coefficients: Coefficients | None = None,
    partitions: Mapping[str, int] | None = None,
    keep: Mapping[str, Placement] | None = None,
) -> Plan:
    """The plan for a model; equal on all ranks, if the arguments are.

    Where the links are known, looked-up parameters of the hybrid architecture go where the whole step is predicted to
    be shortest: a table of which nearly all rows are touched is reduced whole. Without, they have owners.

    Args:
        profiles: every parameter once, in the model's order.
        world_size: number of workers, at least 1.
        config: `architecture`, `sparse_allreduce`, `wire_dtype`, `lazy_rows`, `placements` and `partitions` count.
        topology: the machines and links.
        coefficients: what work costs.
        partitions: number of partitions by name, where it is not `config.partitions`: what a search has found.
        keep: placements by name that stay unless exchanges get shorter by more than `MARGIN` without: predictions are
            not that exact. An empty one stands for where parameters would go if the links were not known.

    Raises:
        ValueError: a parameter was built on the meta device and cannot be split over the workers (the message
            names it), or occurs twice; `config.placements` has a pattern that no parameter matches, or a placement
            that is impossible for one; the topology is one of another number of workers.
    """
    coefficients = coefficients or Coefficients()
    if topology is not None:
        topology.check_fits(world_size)
    wire = config.wire_dtype
    _check_patterns(config.placements, [profile.name for profile in profiles])
    decided = [_decide(profile, world_size, config) for profile in profiles]
    usual = config.partitions if isinstance(config.partitions, int) else max(world_size, config.min_partitions)
    counts = {p.name: (partitions or {}).get(p.name, usual) for p in profiles}
    owners = {name: owners_of(count, world_size, topology) for name, count in counts.items()}
    if config.architecture == "ps":
        owners = _on_servers(profiles, [way for way, _ in decided], counts, world_size)
    if topology is None:
        plans = [
            _plan(profile, placement, reason, owners[profile.name], world_size, wire)
            for profile, (placement, reason) in zip(profiles, decided, strict=True)
        ]
    else:
        plans = _cheapest(profiles, decided, owners, topology, coefficients, config, keep)
    return Plan(
        world_size=world_size,
        architecture=config.architecture,
        parameters=tuple(plans),
        wire_dtype=wire if world_size > 1 else "float32",
        profiles=tuple(profiles),
        topology=topology,
        coefficients=coefficients if topology is not None else None,
    )


def keeping(before: Plan, plan: Plan, reduced: Collection[str]) -> Plan:
    """`plan` without moves that take all ranks together: what is spread, or is a table no more (`reduced`), stays."""

    def kept(p: ParameterPlan) -> ParameterPlan:
        earlier = before[p.name]
        if p.name in reduced or (earlier.owners and p.placement is not Placement.SHARDED):
            return earlier
        return dataclasses.replace(p, owners=earlier.owners) if earlier.owners else p

    return dataclasses.replace(plan, parameters=tuple(map(kept, plan)))


def owners_of(num_partitions: int, world_size: int, topology: Topology | None) -> tuple[int, ...]:
    """The rank that holds each partition."""
    if topology is not None:
        return topology.owners(num_partitions)
    return tuple(p % world_size for p in range(num_partitions))


def _on_servers(
    profiles: Sequence[ParameterProfile], placements: Sequence[Placement], counts: Mapping[str, int], world_size: int
) -> dict[str, tuple[int, ...]]:
    """The ranks that serve each parameter: the largest first, each to those that serve the fewest bytes so far."""
    loads = [0.0] * world_size
    owners = {}
    for i in sorted(range(len(profiles)), key=lambda i: -profiles[i].num_bytes):
        profile, placement = profiles[i], placements[i]
        num_parts = 1 if placement is Placement.SERVED else counts[profile.name]
        least = sorted(sorted(range(world_size), key=loads.__getitem__)[:num_parts])
        owners[profile.name] = tuple(least[part % len(least)] for part in range(num_parts))
        if placement in (Placement.SERVED, Placement.SHARDED):
            for rank in owners[profile.name]:
                loads[rank] += profile.num_bytes / num_parts
    return owners


def _plan(
    profile: ParameterProfile,
    placement: Placement,
    reason: str,
    owners: tuple[int, ...],
    world_size: int,
    wire: WireDtype,
    seconds: float | None = None,
    runner_up: tuple[Placement, float] | None = None,
) -> ParameterPlan:
    other, other_seconds = runner_up or (None, None)
    return ParameterPlan(
        name=profile.name,
        shape=profile.shape,
        use=profile.use,
        alpha=profile.alpha,
        placement=placement,
        owners=owners if placement is Placement.SHARDED else (),
        server=owners[0] if placement is Placement.SERVED else None,
        bytes_per_step=bytes_per_step(profile, placement, world_size, wire),
        reason=reason,
        seconds=seconds,
        runner_up=other,
        runner_up_seconds=other_seconds,
        runner_up_bytes=None if other is None else bytes_per_step(profile, other, world_size, wire),
    )


# -- by predicted seconds -----------------------------------------------------------------------------


def _cheapest(
    profiles: Sequence[ParameterProfile],
    decided: Sequence[tuple[Placement, str]],
    owners: Mapping[str, tuple[int, ...]],
    topology: Topology,
    coefficients: Coefficients,
    config: Config,
    keep: Mapping[str, Placement] | None,
) -> list[ParameterPlan]:
    """The placements with the shortest step.

    A placement costs something for each parameter, and something once for the whole model (a round for one table is
    one for all of them). So: for each set of placements that tables may have, the best for each table; of these, the
    best in all.
    """
    choices = [
        possible_placements(profile, config) if _is_open(profile, placement, config) else (placement,)
        for profile, (placement, _) in zip(profiles, decided, strict=True)
    ]
    costs = [
        {
            way: parameter_cost(p, way, topology, coefficients, owners=owners[p.name], wire=config.wire_dtype)
            for way in possible
        }
        for p, possible in zip(profiles, choices, strict=True)
    ]

    def total(chosen: Sequence[Placement]) -> float:
        shared = shared_cost(zip(profiles, chosen, strict=True), topology, coefficients)
        return sum((cost[way] for cost, way in zip(costs, chosen, strict=True)), shared).seconds

    candidates = [
        [min((w for w in cost if w in allowed or len(cost) == 1), key=lambda w: cost[w].seconds) for cost in costs]
        for allowed in _subsets((Placement.SHARDED, Placement.GATHER, Placement.ALLREDUCE))
        if all(len(cost) == 1 or allowed & cost.keys() for cost in costs)
    ]
    best = min(candidates, key=total)
    if keep is not None:
        usual = [keep.get(p.name, way) for p, (way, _) in zip(profiles, decided, strict=True)]
        usual = [way if way in cost else first for way, cost, first in zip(usual, costs, best, strict=True)]
        if total(best) > (1 - MARGIN) * total(usual):
            best = usual
    plans = []
    for i, (profile, way) in enumerate(zip(profiles, best, strict=True)):
        others = {w: total([*best[:i], w, *best[i + 1 :]]) - total(best) for w in costs[i] if w is not way}
        seconds = costs[i][way].seconds
        runner_up = min(((w, max(0.0, seconds + more)) for w, more in others.items()), key=lambda o: o[1], default=None)
        reason = decided[i][1]
        if runner_up is not None:
            reason = (
                f"{_seen(profile, config)}: {HOW[way]}, {format_seconds(seconds)} of a step predicted; "
                f"{HOW[runner_up[0]]} {format_seconds(runner_up[1])}"
            )
        plans.append(
            _plan(
                profile, way, reason, owners[profile.name], topology.world_size, config.wire_dtype, seconds, runner_up
            )
        )
    return plans


def _subsets(ways: Sequence[Placement]) -> list[set[Placement]]:
    return [set(some) for size in (3, 2, 1) for some in itertools.combinations(ways, size)]


def _is_open(profile: ParameterProfile, placement: Placement, config: Config) -> bool:
    """Whether there is a choice: nobody made it, and nothing but the costs decides."""
    return (
        config.architecture == "hybrid"
        and placement in HOW
        and profile.use is Use.LOOKUP
        and _chosen(profile.name, config) is None
    )


def possible_placements(profile: ParameterProfile, config: Config) -> tuple[Placement, ...]:
    """Where a trained parameter that has been used may be placed, the usual one first."""
    usual = (Placement.SHARDED, Placement.ALLREDUCE, Placement.GATHER)
    return tuple(way for way in usual if not _impossible(profile, way, config))


# -- by the user's choice -----------------------------------------------------------------------------


def _check_patterns(placements: Mapping[str, str], names: Sequence[str]) -> None:
    for pattern in placements:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            hint = f"near it: {', '.join(map(repr, near))}" if near else f"there are {', '.join(map(repr, names[:5]))}"
            more = ", ..." if not near and len(names) > 5 else ""
            raise ValueError(f"Config.placements: no parameter matches {pattern!r}; {hint}{more}")


def _chosen(name: str, config: Config) -> tuple[str, Placement] | None:
    """The first pattern that matches `name`, and its placement."""
    return next(((p, Placement(way)) for p, way in config.placements.items() if fnmatchcase(name, p)), None)


def _impossible(profile: ParameterProfile, placement: Placement, config: Config) -> str:
    """Why a parameter cannot be placed so; empty if it can."""
    if not profile.trainable and not profile.meta:
        return "it is frozen, so nothing travels"
    if placement is Placement.SHARDED:
        if config.architecture == "allreduce":
            return "Config.architecture='allreduce' keeps every parameter on every worker"
        if Use.DENSE in profile.use and not profile.meta:
            return "it is used whole, and owners only give out rows"
        return profile.across_rows
    if profile.meta:
        return "it was built on the meta device, to be split over the workers"
    if profile.renormed:
        return "it is looked up with max_norm, which changes rows where they live"
    if placement is Placement.GATHER:
        return "it is used whole: its gradient has a value for every row" if Use.DENSE in profile.use else ""
    if profile.by_frequency:
        return "it is looked up with scale_grad_by_freq, and only rows travel with counts of their lookups"
    if config.lazy_rows and profile.use is Use.LOOKUP:
        return "with Config.lazy_rows it has to be known which rows were looked up"
    return ""


# -- by what was observed -----------------------------------------------------------------------------


def _decide(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    if world_size == 1 and not config.lazy_rows:
        return Placement.LOCAL, "one worker: nothing to exchange"
    chosen = _chosen(profile.name, config)
    if chosen is not None:
        pattern, placement = chosen
        why = _impossible(profile, placement, config)
        if why:
            raise ValueError(
                f"Config.placements[{pattern!r}]: parameter {profile.name!r} cannot be {placement.value!r}: {why}"
            )
        if profile.use or profile.meta:
            _check_lazy(profile, config)
            return placement, f"chosen by Config.placements[{pattern!r}]"
    if profile.meta:
        return _decide_meta(profile, world_size, config)
    if profile.renormed:
        return _decide_renormed(profile, config)
    if not profile.trainable:
        return Placement.LOCAL, "frozen: no gradient, every worker has a copy"
    if not profile.use:
        return Placement.WATCHED, "not used yet: decided when a step uses it"
    if Use.DENSE in profile.use:
        return _decide_dense(profile, config)
    return _decide_looked_up(profile, world_size, config)


def _decide_dense(profile: ParameterProfile, config: Config) -> tuple[Placement, str]:
    if profile.by_frequency:
        raise ValueError(
            f"parameter {profile.name!r} is looked up with scale_grad_by_freq=True and also used whole; counting "
            f"lookups over all workers works for parameters that are only looked up"
        )
    if config.architecture == "ps":
        return Placement.SERVED, "used whole: one worker adds up its gradients, and hands out the sum"
    if Use.LOOKUP in profile.use:
        return Placement.ALLREDUCE, (
            "looked up and also used whole (as a tied weight is): its gradient has a value for every row, so "
            "it is reduced like a dense one"
        )
    return Placement.ALLREDUCE, "used whole: its gradient has a value for every element"


def _decide_looked_up(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    seen = _seen(profile, config)
    _check_lazy(profile, config)
    if config.architecture != "allreduce":
        if profile.across_rows:
            whole = Placement.SERVED if config.architecture == "ps" else Placement.ALLREDUCE
            return whole, (f"{seen}, but {profile.across_rows}, so every worker needs the whole gradient")
        here, there = Placement.SHARDED, Placement.ALLREDUCE
        how = "rows live on their owners"
    elif config.sparse_allreduce == "gather" or profile.by_frequency:
        here, there = Placement.GATHER, Placement.ALLREDUCE
        how = "architecture 'allreduce' gathers the touched rows of the gradient"
    else:
        here, there = Placement.ALLREDUCE, Placement.GATHER
        how = "architecture 'allreduce' with sparse_allreduce='dense' reduces the whole gradient"
    costs = [_cost(profile, placement, world_size, config) for placement in (here, there)]
    return here, f"{seen}: {how}, {costs[0]}; {HOW[there]} {costs[1]}"


def _decide_renormed(profile: ParameterProfile, config: Config) -> tuple[Placement, str]:
    """Rows that a lookup may change live in one place, from the start."""
    if config.architecture == "allreduce":
        raise ValueError(
            f"parameter {profile.name!r} is looked up with max_norm, which changes rows where they live, "
            f"but Config.architecture={config.architecture!r} keeps a copy on every worker; use "
            f"Config(architecture='hybrid')"
        )
    return Placement.SHARDED, "looked up with max_norm: a row is renormalised by its owner, for all workers"


def _decide_meta(profile: ParameterProfile, world_size: int, config: Config) -> tuple[Placement, str]:
    """A parameter that has never existed whole, and must not."""
    if config.architecture == "allreduce":
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
        cost = _cost(profile, Placement.SHARDED, world_size, config)
        reason += f"; a worker touches {_rows(profile)} in a step, {cost}"
    if Use.DENSE in profile.use:
        reason += "; it is also used whole, and each whole read gathers it from all workers"
    return Placement.SHARDED, reason


def _check_lazy(profile: ParameterProfile, config: Config) -> None:
    if config.lazy_rows and profile.across_rows:
        raise ValueError(
            f"parameter {profile.name!r}: Config.lazy_rows needs an optimizer that updates row by row (SGD, "
            f"Adagrad, Adam, AdamW, RMSprop), but {profile.across_rows}"
        )


def _seen(profile: ParameterProfile, config: Config) -> str:
    lazy = ", the only ones that are updated (lazy_rows)" if config.lazy_rows else ""
    return f"only looked up, a worker touches {_rows(profile)} in a step{lazy}"


def _rows(profile: ParameterProfile) -> str:
    touched = f"{profile.num_rows_touched:,.1f}".removesuffix(".0")
    return f"{touched} of {profile.num_rows:,} rows (alpha {profile.alpha:.3g})"


def _cost(profile: ParameterProfile, placement: Placement, world_size: int, config: Config) -> str:
    return format_bytes(bytes_per_step(profile, placement, world_size, config.wire_dtype))
