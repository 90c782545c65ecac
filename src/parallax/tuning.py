"""What a run changes of its plan while it trains: trials on real steps, between which rows move.

All ranks decide alike, without a leader: at the end of backward passes that all have counted alike they bring what each
has measured, and go on from the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import socket
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import nn

from parallax import cache
from parallax.comm import Comm
from parallax.config import Config, WireDtype
from parallax.cost import parameter_cost, shared_cost
from parallax.links import machines_of
from parallax.moves import Moves
from parallax.plan import Measured, ParameterPlan, ParameterProfile, Placement, Plan, Use, format_seconds
from parallax.planner import owners_of
from parallax.profiling import Counted, Lap, RowCounts, profile_of
from parallax.search import SearchResult, next_trial
from parallax.simulate import model_of_plan, predict
from parallax.topology import Coefficients, Topology

LOG = logging.getLogger("parallax")

TRIAL_SECONDS = 0.25
"""A trial takes so long, but between `TRIAL_STEPS` steps."""
TRIAL_STEPS = (5, 30)


PROFILE_STEPS = 3
"""Steps that are watched, after the first, to see what the plan is made from."""
WATCH_EVERY = 100
"""Steps until they are watched again, where links are known and another placement is possible."""
DRIFT = 1.5
"""The plan is made anew when a table's rows touched have changed by this factor."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What the steps since the last decision took, on the rank where it was most."""

    step: float
    """Seconds of a step, the median; 0 if none was seen whole."""
    total: float
    """Seconds since the decision: with what it did itself, and all steps."""


Process = Generator[int, Agreed, None]
"""Gives the number of steps to train before it goes on, and is sent what they took."""


@dataclasses.dataclass(frozen=True)
class _Watched:
    """What one rank has seen of a few steps."""

    counted: dict[str, Counted]
    reduced: dict[str, int]
    """Of tables that are reduced whole, the rows that this rank's gradients had."""
    laps: list[Lap]
    num_bytes: float
    units: float


class Tuning:
    """The trials of a run."""

    def __init__(
        self,
        comm: Comm,
        config: Config,
        moves: Moves,
        profiles: dict[str, ParameterProfile],
        plan: Callable[[], Plan],
        make_plan: Callable[[], Plan],
        put: Callable[[Plan], None],
        units: Callable[[], float],
    ) -> None:
        """
        Args:
            profiles: what plans are made from, by name; is changed.
            plan: the one that is applied now.
            make_plan: makes another one from the profiles.
            put: applies it, on all ranks together.
            units: samples of this rank's latest step.
        """
        self._comm, self._config, self._moves, self._tables = comm, config, moves, moves.tables
        self._profiles, self._plan, self._make_plan, self._put = profiles, plan, make_plan, put
        self._units = units
        self._process: Process | None = None
        self._num_steps, self._due = 0, 0
        self._laps: list[Lap] = []
        self._since = 0.0
        self._elapsed = 0.0
        """Agreed seconds of all steps that were watched."""
        self._searched: set[str] = set()
        self._reduced: dict[nn.Parameter, tuple[str, int]] = {}
        """While steps are watched: of tables that are reduced whole, name and rows that this rank's gradients had."""
        self._steady = False
        """An optimizer has stepped after each backward pass since the last decision: no graph is older than a move."""

    def plan_made(self) -> None:
        """The plan was made, or made anew, on this rank; the others will find so before their next backward pass."""
        if self._comm.world_size > 1:
            self._unwatch()
            self._process = self._all()
            self._num_steps, self._due = 0, 0

    def after_backward(self, lap: Lap | None, stepped: bool) -> None:
        """All ranks are at the end of the same backward pass, and have the same plan.

        Args:
            lap: the step that ends, if it was seen whole.
            stepped: an optimizer had stepped since the backward pass before.
        """
        if self._process is None:
            return
        self._num_steps += 1
        self._steady &= stepped
        if lap is not None:
            self._laps.append(lap)
        if self._num_steps < self._due:
            return
        mine = statistics.median(lap.seconds for lap in self._laps) if self._laps else 0.0
        total = time.monotonic() - self._since
        self._since = time.monotonic()
        try:
            if self._due:
                everyone = self._comm.gather((mine, total))
                agreed = Agreed(max(step for step, _ in everyone), max(total for _, total in everyone))
                self._elapsed += agreed.total
                self._due = self._process.send(agreed)
            else:
                self._due = next(self._process)
        except StopIteration:
            self._process = None
        self._num_steps, self._steady = 0, True
        self._laps = []

    def see_gradient(self, p: nn.Parameter) -> None:
        """This rank's gradient of a parameter that is reduced whole is there."""
        if self._reduced and p in self._reduced and p.grad is not None:
            name, num_rows = self._reduced[p]
            grad = p.grad.coalesce().values() if p.grad.layout == torch.sparse_coo else p.grad
            self._reduced[p] = (
                name,
                num_rows + int(grad.flatten(1).ne(0).any(1).sum() if grad.dim() > 1 else grad.ne(0).sum()),
            )

    def _all(self) -> Process:
        machines = machines_of(self._comm)
        yield from self._profile(machines)
        if self._config.partitions == "search":
            for names in self._groups():
                yield from self._search(names, max(machines) + 1)
        while self._plan().topology is not None and any(p.runner_up for p in self._plan()):
            yield WATCH_EVERY
            yield from self._profile(machines)

    # -- what steps are like --------------------------------------------------------------------------

    def _profile(self, machines: Sequence[int]) -> Process:
        """Watches a few steps; makes the plan anew if they are not what it was made from."""
        tables = {name: t for name, t in self._tables.items() if t.use is Use.LOOKUP}
        counts = {name: RowCounts(machines) for name in tables}
        for name, table in tables.items():
            table.watch = counts[name].see
        self._reduced = {t.parameter: (name, 0) for name, t in self._moves.reduced.items() if t.use is Use.LOOKUP}
        sent = self._comm.sent.total
        yield PROFILE_STEPS
        mine = _Watched(
            counted={
                name: Counted(c.touched, c.served, c.by_machine, tables[name].sparse_grad or tables[name].lazy)
                for name, c in counts.items()
            },
            reduced=dict(self._reduced.values()),
            laps=self._laps,
            num_bytes=(self._comm.sent.total - sent) / PROFILE_STEPS,
            units=self._units(),
        )
        self._unwatch()
        everyone = self._comm.gather(mine)
        earlier = dict(self._profiles)
        for name, table in tables.items():
            counted = [watched.counted[name] for watched in everyone]
            self._profiles[name] = profile_of(earlier[name], table, counted, PROFILE_STEPS)
        for name in mine.reduced:
            num_rows = sum(watched.reduced[name] for watched in everyone) / len(everyone) / PROFILE_STEPS
            self._profiles[name] = dataclasses.replace(earlier[name], num_rows_touched=num_rows)
        before, plan = self._plan(), self._make_plan()
        drifted = any(map(_has_drifted, before.profiles, self._profiles.values()))
        if plan.topology is None or not drifted or not self._steady:
            plan = _staying(before, plan)
        self._put(_with_measured(plan, everyone, self._config.wire_dtype))

    def _unwatch(self) -> None:
        self._reduced = {}
        for table in self._tables.values():
            table.watch = None

    # -- partitions ---------------------------------------------------------------------------------

    def _groups(self) -> list[list[str]]:
        """Names of tables that are spread and have not been searched for, by their shape; the largest first."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, table in self._tables.items():
            if table.sharded and table.use is Use.LOOKUP and name not in self._searched and table.num_rows > 1:
                groups.setdefault((table.shape, table.dtype), []).append(name)
        return sorted(
            groups.values(), key=lambda names: -self._tables[names[0]].num_rows * self._tables[names[0]].row_bytes
        )

    def _search(self, names: Sequence[str], num_machines: int) -> Process:
        """Tries numbers of partitions for tables of one shape, and keeps the best."""
        table, plan = self._tables[names[0]], self._plan()[names[0]]
        touched = round(math.log2(max(1.0, plan.alpha * table.num_rows)))
        hosts = self._comm.gather(socket.gethostname())
        key = f"{hosts} {table.shape} {table.dtype} {touched} {len(names)}"
        known = self._comm.gather(cache.read("partitions", key))[0]  # rank 0's: others may have other files
        least = min(self._config.min_partitions, table.num_rows)
        with contextlib.suppress(ValueError):
            result = SearchResult.from_json(known or "")
            if result.best >= least:
                self._deal(names, result.best, "found before")
                self._searched.update(names)
                return
        samples: list[tuple[int, float]] = []
        spent, best, num_steps = 0.0, 0.0, TRIAL_STEPS[0]
        while not best:  # what a step takes as it is
            yield 1
            best = (yield num_steps).step
        num_steps = min(max(num_steps, math.ceil(TRIAL_SECONDS / best)), TRIAL_STEPS[1])
        times = {len(plan.owners): best}
        while True:
            p = next_trial(samples, start=num_machines, max_partitions=table.num_rows, min_partitions=least)
            if isinstance(p, SearchResult):
                break
            if p not in times:
                wait = math.ceil((spent / self._config.search_share - self._elapsed) / best)
                if wait > 0:
                    fastest = min(times, key=lambda p: times[p])
                    spent += yield from self._moved(names, fastest, "fastest so far", best)
                    yield wait
                spent += yield from self._moved(names, p, "on trial", best)
                while p not in times:
                    seconds = (yield num_steps).step
                    if seconds:
                        times[p] = seconds
                spent += max(0.0, times[p] - best) * num_steps
                best = min(best, times[p])
            samples.append((p, times[p]))
        self._searched.update(names)
        self._deal(names, p.best, f"best of {len(p.samples)} trials")
        if self._comm.rank == 0:
            cache.write("partitions", key, p.to_json())
            LOG.info(
                "parallax: partitions of %s: %s\nthe search has cost %s of %s",
                ", ".join(names),
                p,
                format_seconds(spent),
                format_seconds(self._elapsed),
            )

    def _moved(self, names: Sequence[str], num_partitions: int, why: str, step: float) -> Generator[int, Agreed, float]:
        """Seconds that it takes to deal out rows anew, where a step takes `step` seconds."""
        self._deal(names, num_partitions, why)
        return max(0.0, (yield 1).total - step)

    def _deal(self, names: Sequence[str], num_partitions: int, why: str) -> None:
        """Deals the rows of tables out anew."""
        plan = self._plan()
        owners = owners_of(num_partitions, self._comm.world_size, plan.topology)
        self._put(with_owners(plan, dict.fromkeys(names, owners), f"{num_partitions} partitions, {why}"))


def with_owners(plan: Plan, owners: Mapping[str, tuple[int, ...]], why: str) -> Plan:
    """`plan` with other owners for some of its tables."""

    def changed(p: ParameterPlan) -> ParameterPlan:
        if p.name not in owners:
            return p
        reason = f"{p.reason.split(_PARTITIONS)[0]}{_PARTITIONS}{why}"
        return dataclasses.replace(p, placement=Placement.SHARDED, owners=owners[p.name], reason=reason)

    return dataclasses.replace(plan, parameters=tuple(map(changed, plan)))


_PARTITIONS = "; partitions: "


def _staying(before: Plan, plan: Plan) -> Plan:
    """`plan` with every parameter where it is."""

    def stayed(p: ParameterPlan) -> ParameterPlan:
        earlier = before[p.name]
        if p.placement is not earlier.placement:
            return earlier
        return dataclasses.replace(p, owners=earlier.owners, reason=p.reason + _partitions_of(earlier))

    return dataclasses.replace(plan, parameters=tuple(map(stayed, plan)))


def _partitions_of(p: ParameterPlan) -> str:
    """What a search has added to the reason."""
    return "".join(p.reason.partition(_PARTITIONS)[1:])


def _has_drifted(before: ParameterProfile, now: ParameterProfile) -> bool:
    few, many = sorted((before.num_rows_touched, now.num_rows_touched))
    return many > DRIFT * few and now.use is Use.LOOKUP


def _with_measured(plan: Plan, everyone: Sequence[_Watched], wire: WireDtype) -> Plan:
    """`plan` with what steps took, on average over the ranks, and are predicted to take."""
    if not all(watched.laps for watched in everyone):
        return plan

    def average(of: Callable[[Lap], float]) -> float:
        return statistics.mean(statistics.median(map(of, watched.laps)) for watched in everyone)

    measured = Measured(
        step_seconds=average(lambda lap: lap.seconds),
        exchange_seconds=average(lambda lap: lap.exchange),
        update_seconds=average(lambda lap: lap.update),
        bytes_per_step=statistics.mean(watched.num_bytes for watched in everyone),
    )
    topology = plan.topology or Topology.of(workers=plan.world_size)
    coefficients = plan.coefficients or Coefficients()
    chosen = [(profile, plan[profile.name]) for profile in plan.profiles]
    work = shared_cost([(profile, p.placement) for profile, p in chosen], topology, coefficients).work
    work += sum(parameter_cost(f, p.placement, topology, coefficients, owners=p.ranks).work for f, p in chosen)
    plan = dataclasses.replace(
        plan,
        measured=measured,
        compute_seconds=max(0.0, measured.step_seconds - measured.exchange_seconds - work),
        units_per_worker=statistics.mean(watched.units for watched in everyone),
    )
    if plan.topology is None:
        return plan
    prediction = predict(model_of_plan(plan, "this model"), topology, {p.name: p.placement for p in plan}, wire)
    return dataclasses.replace(plan, step_seconds=prediction.step_seconds)
