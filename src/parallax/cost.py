"""What a placement costs: bytes on the wire and seconds of a step, from what was observed of a parameter.

The formulas of the bytes are those of table 3 of arXiv 1808.02621 (Parallax), with w the bytes of a parameter, alpha
the fraction of its rows that one worker touches in a step, and N the number of workers. The paper counts what a
machine sends *and* receives; here, as in `parallax.traffic`, only what one worker *sends* counts: half of it.

Seconds are bytes over links (`Topology`), plus messages that wait for each other, plus the work of merging rows and
updating parameters at measured speeds (`Coefficients`). docs/design/plan.md has the terms and why they are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from parallax.config import WireDtype
from parallax.plan import REDUCED, ParameterProfile, Placement, Use
from parallax.topology import Coefficients, Topology

ID_BYTES = 4
"""Bytes of a row's id on the wire."""
SCALE_BYTES = 4
"""Bytes of the scale of a row that travels as int8."""


def wire_row(width: int, itemsize: int, wire: WireDtype) -> tuple[WireDtype, int]:
    """How a row of `width` elements of `itemsize` bytes travels, and its bytes: as `Config.wire_dtype` says ("float32":
    as it is in memory), or in another way that is not larger and loses less."""
    ways: dict[WireDtype, int] = {"float32": width * itemsize}
    if wire == "int8":
        ways |= {"bfloat16": 2 * width, "int8": width + SCALE_BYTES}
    elif wire != "float32":
        ways[wire] = 2 * width
    way = min(ways, key=lambda w: ways[w])  # of equal ones the first
    return way, ways[way]


def bytes_per_step(
    profile: ParameterProfile, placement: Placement, world_size: int, wire: WireDtype = "float32"
) -> float:
    """Bytes that one worker sends in one step for a parameter, on average over the workers.

    Args:
        profile: the parameter; `alpha` and whether it is trainable count.
        placement: where it lives.
        world_size: N, at least 1.
        wire: `Config.wire_dtype`.
    """
    if placement in REDUCED:  # to a server and back: on average over the workers it is the same
        return allreduce_bytes(profile, world_size, wire)
    if placement is Placement.GATHER:
        return gather_bytes(profile, world_size, wire)
    if placement is Placement.SHARDED:
        return sharded_bytes(profile, world_size, wire)
    return 0.0


def allreduce_bytes(profile: ParameterProfile, world_size: int, wire: WireDtype = "float32") -> float:
    """2w(N-1)/N: a ring passes each part of the gradient on N-1 times to add it up, and N-1 times to hand it
    out (arXiv 1808.02621, table 3, dense by AllReduce: 4w(N-1)/N sent and received)."""
    return 2 * _bucket_bytes(profile, wire) * (world_size - 1) / world_size


def gather_bytes(profile: ParameterProfile, world_size: int, wire: WireDtype = "float32") -> float:
    """alpha·w(N-1), and one id per row: the touched rows of the gradient go to every other worker
    (arXiv 1808.02621, table 3, sparse by AllGather: 2·alpha·w(N-1) sent and received; ids not counted)."""
    return _rows_touched(profile) * (_row_bytes(profile, wire) + ID_BYTES) * (world_size - 1)


def sharded_bytes(profile: ParameterProfile, world_size: int, wire: WireDtype = "float32") -> float:
    """2·alpha·w(N-1)/N, and one id per row (arXiv 1808.02621, table 3, sparse by a parameter server, its rows
    spread evenly: 4·alpha·w(N-1)/N sent and received; ids not counted).

    (N-1)/N of the touched rows live elsewhere. For each of them a worker sends its id, later its gradient
    (which refers to the id that was sent, so it travels without one), and, being an owner itself, a row to
    somebody else. Rows that are not trained have no gradient. A parameter that is used whole travels without ids.
    """
    num_remote = _rows_touched(profile) * (world_size - 1) / world_size
    num_rows_sent = 2 if profile.trainable else 1
    return num_remote * (num_rows_sent * _row_bytes(profile, wire) + _id_bytes(profile))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a step: seconds on the links, seconds of work, bytes that the busiest machine sends to (or, if that is more,
    takes from) the others."""

    wire: float = 0.0
    work: float = 0.0
    bytes_per_machine: float = 0.0

    @property
    def seconds(self) -> float:
        return self.wire + self.work

    def slower(self, factor: float) -> Cost:
        """With work that takes so many times as long."""
        return dataclasses.replace(self, work=self.work * factor)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wire + other.wire, self.work + other.work, self.bytes_per_machine + other.bytes_per_machine)


def parameter_cost(
    profile: ParameterProfile,
    placement: Placement,
    topology: Topology,
    coefficients: Coefficients,
    *,
    owners: Sequence[int] = (),
    wire: WireDtype = "float32",
) -> Cost:
    """What one parameter adds to a step, without what is shared by all parameters of a placement (`shared_cost`).

    Args:
        owners: rank of each partition, for SHARDED, or the server, for SERVED; default: one partition for each worker.
            With a parameter that is used whole, SHARDED is the parameter server of a dense parameter: everybody pulls
            all of it and pushes a gradient for all of it.
        wire: `Config.wire_dtype`. What rounding takes is not reckoned with.
    """
    if placement is Placement.ALLREDUCE:
        cost = _allreduce(profile, topology, coefficients, wire)
    elif placement is Placement.GATHER:
        cost = _gather(profile, topology, coefficients, wire)
    elif placement in (Placement.SHARDED, Placement.SERVED):
        cost = _sharded(profile, topology, coefficients, owners or topology.owners(topology.world_size), wire)
    else:
        cost = Cost(work=_update(profile, profile.num_rows, 1, coefficients) if profile.use else 0.0)
    return cost.slower(topology.slowness)


def shared_cost(
    chosen: Iterable[tuple[ParameterProfile, Placement]], topology: Topology, coefficients: Coefficients
) -> Cost:
    """What the placements of a whole model cost once: a worker's time for a step with others, and for its rounds, and
    the messages of buckets and rounds.

    All tables share one round with an answer (rows are pulled) and one without (gradients are pushed; all that
    GATHER needs).
    """
    reduced = 0
    placements = set()
    for profile, placement in chosen:
        placements.add(placement)
        if placement is Placement.ALLREDUCE:
            reduced += profile.num_bytes
    n, m, k = topology.world_size, topology.machines, topology.workers
    total = Cost(work=coefficients.step if n > 1 else 0.0).slower(topology.slowness)
    if reduced and n > 1:
        link = topology.between.allreduce if m > 1 else topology.inside.allreduce
        total += Cost(wire=link.seconds(0, _num_waits(reduced, n, coefficients)))
    if n == 1 or not placements & {Placement.SHARDED, Placement.GATHER}:
        return total
    links = topology.between if m > 1 else topology.inside
    link, num_rounds, num_waits = links.gathers, 1, 1
    if Placement.SHARDED in placements:
        link, num_rounds, num_waits = links.rounds, 2, 3
    headers = num_rounds * k * (n - k if m > 1 else n - 1) * coefficients.header_bytes
    work = num_rounds * coefficients.round + num_waits * (n - 1) * coefficients.message
    rounds = Cost(link.seconds(headers, num_waits), work, headers if m > 1 else 0.0)
    return total + rounds.slower(topology.slowness)


def _num_waits(num_bytes: float, world_size: int, c: Coefficients) -> float:
    """Messages of the AllReduces of all buckets that wait for each other."""
    full, rest = divmod(num_bytes, c.bucket_bytes)

    def waits(size: float) -> int:
        return 2 if size <= c.direct_bytes else 2 * (world_size - 1)

    return full * waits(c.bucket_bytes) + (waits(rest) if rest else 0)


def _allreduce(profile: ParameterProfile, topology: Topology, c: Coefficients, wire_dtype: WireDtype) -> Cost:
    """A ring over all workers, machine by machine, so that one stream leaves each machine."""
    n, size = topology.world_size, profile.num_bytes
    sent = allreduce_bytes(profile, n, wire_dtype)
    links = ([topology.between] if topology.machines > 1 else []) + ([topology.inside] if topology.workers > 1 else [])
    wire = max((links_.allreduce.seconds(sent) for links_ in links), default=0.0)
    work = 2 * size / c.copy if n > 1 else 0.0
    if Use.DENSE in profile.use:
        work += size / c.update
    else:
        touched = _rows_touched(profile) * profile.row_bytes
        work += touched / c.merge + _update(profile, profile.num_rows, n, c)
        if profile.sparse_gradient:  # it is made dense for the bucket, and sparse again for the optimizer
            work += size / c.fresh + touched / c.merge
            work += profile.alpha_of(n) * size * (1 / c.fresh + 1 / c.merge - 1 / c.copy)
    return Cost(wire, work, sent if topology.machines > 1 else 0.0)


def _gather(profile: ParameterProfile, topology: Topology, c: Coefficients, wire_dtype: WireDtype) -> Cost:
    n, m, k = topology.world_size, topology.machines, topology.workers
    row = _row_bytes(profile, wire_dtype) + ID_BYTES
    mine = _rows_touched(profile)
    if c.merges_gathers:
        ours = profile.alpha_by_machine(k) * profile.num_rows
        leaves, arriving = ours * row * (m - 1), ours * m
        inside = (mine + arriving) * row if k > 1 else 0.0
    else:
        leaves, arriving = k * mine * row * (n - k), n * mine
        inside = (k - 1) * mine * row
    wire = topology.between.gathers.seconds(leaves) + topology.inside.gathers.seconds(inside)
    work = c.table + mine / c.ids + (mine + arriving) * profile.row_bytes / c.merge
    return Cost(wire, work + _update(profile, profile.num_rows, n, c), leaves)


def _sharded(
    profile: ParameterProfile, topology: Topology, c: Coefficients, owners: Sequence[int], wire_dtype: WireDtype
) -> Cost:
    n, m, k = topology.world_size, topology.machines, topology.workers
    row, id_bytes = _row_bytes(profile, wire_dtype), _id_bytes(profile)
    gradient = row if profile.trainable else 0
    mine = _rows_touched(profile)
    asked = profile.alpha_by_machine(k) * profile.num_rows if c.merges_machines else k * mine
    by_worker = [0.0] * n
    for owner in owners:
        by_worker[owner] += 1 / len(owners)
    by_machine = [sum(by_worker[i * k : (i + 1) * k]) for i in range(m)]
    busiest = 0.0
    for share in {min(by_machine), min(1.0, max(by_machine) * profile.skew)}:
        sent = asked * ((1 - share) * (id_bytes + gradient) + (m - 1) * share * row)
        taken = asked * ((1 - share) * row + (m - 1) * share * (id_bytes + gradient))
        busiest = max(busiest, sent, taken)
    if m == 1:
        busiest = 0.0
    both_ways = mine * (row + gradient + id_bytes)
    if k == 1:
        inside = 0.0
    elif c.merges_machines and m > 1:
        inside = both_ways  # to the worker that speaks for the machine, and back
    else:
        inside = both_ways * (k - 1) / n
    wire = topology.between.rounds.seconds(busiest) + topology.inside.rounds.seconds(inside)
    held = min(1.0, max(by_worker) * profile.skew)
    served = held * (m * asked)
    rows = 2 if profile.trainable else 1
    work = mine * profile.row_bytes / c.merge + len(owners) * c.partition
    if id_bytes:
        work += 2 * c.table + (mine + served) / c.ids  # in the round that pulls, and the one that pushes
    work += served * rows * profile.row_bytes / c.merge
    return Cost(wire, work + _update(profile, max(by_worker) * profile.num_rows, n, c), busiest)


def _update(profile: ParameterProfile, num_held: float, world_size: int, c: Coefficients) -> float:
    """Seconds of making the gradient of `num_held` rows, and of the optimizer's step."""
    if not profile.trainable:
        return 0.0
    if profile.sparse_gradient and Use.DENSE not in profile.use:
        return profile.alpha_of(world_size) * num_held * profile.row_bytes / c.update_rows
    return num_held * profile.row_bytes * (1 / c.fresh + 1 / c.update)


def _row_bytes(profile: ParameterProfile, wire: WireDtype) -> int:
    """Of a row, or of its gradient, on the wire."""
    return wire_row(profile.numel // max(profile.num_rows, 1), profile.itemsize, wire)[1]


def _bucket_bytes(profile: ParameterProfile, wire: WireDtype) -> int:
    """Of a gradient in a bucket that travels."""
    return profile.num_bytes if wire == "float32" else profile.numel * min(profile.itemsize, 2)


def _id_bytes(profile: ParameterProfile) -> int:
    return 0 if Use.DENSE in profile.use else ID_BYTES


def _rows_touched(profile: ParameterProfile) -> float:
    return profile.alpha * profile.num_rows  # all of them if it is used whole, whatever was looked up
