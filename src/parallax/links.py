"""Which ranks share a machine, and what their links give: measured once for a set of machines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from parallax import cache
from parallax.comm import Comm, machine_name
from parallax.mesh import Column
from parallax.topology import Coefficients, Link, Links, Topology

LOG = logging.getLogger("parallax")

MAX_AGE = 86400.0
"""Seconds after which links are measured again: host names stay when networks change."""

LONG_SECONDS = 0.06
"""A message that takes so long tells the bandwidth, whatever is thought of latency; larger ones are not tried."""
REPEAT_SECONDS = 0.1
"""For so long each kind of message is sent again, but two to eight times."""
SMALL_BYTES, MOST_BYTES = 2**10, 2**23
NUM_ROWS, NUM_IDS, WORK_SECONDS = 50_000, 8_000, 0.04
"""Of the work whose time is taken: as that of `Coefficients.ids`; for longer than a core stays with one worker."""
RING_BYTES = 5 * 2**18
"""Above `comm.DIRECT_BYTES`, so that it is a ring."""


def machines_of(comm: Comm) -> list[int]:
    """For each rank the number of its machine. All ranks call it together."""
    names = comm.gather(machine_name())
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def find_topology(comm: Comm, wanted: str | os.PathLike[str]) -> Topology | None:
    """The machines and links of this run, equal on all ranks, which call it together.

    Args:
        wanted: "auto", "measure" or the path of a file, as `Config.topology`.

    Returns:
        None if the machines have different numbers of workers, or ranks are not numbered machine by machine.

    Raises:
        ValueError: (on all ranks) the file cannot be read, has no topology, or one for another number of workers.
    """
    if wanted not in ("auto", "measure"):
        text, error = None, ""
        if comm.rank == 0:
            try:
                text = Path(wanted).read_text()
            except OSError as e:
                error = str(e)
        text, error = comm.gather((text, error))[0]
        if text is None:
            raise ValueError(f"Config.topology: cannot read {str(wanted)!r}: {error}")
        topology = Topology.from_json(text)
        topology.check_fits(comm.world_size)
        return topology
    places = machines_of(comm)
    num_machines, num_workers = max(places) + 1, len(places) // (max(places) + 1)
    if places != [rank // num_workers for rank in range(len(places))]:
        LOG.warning("parallax: links are not measured: machines have different numbers of workers, by rank %s", places)
        return None
    key = f"{comm.gather(socket.gethostname())} {comm.device.type}"
    known = comm.gather(cache.read("topology", key, MAX_AGE))[0] if wanted == "auto" else None  # rank 0's
    with contextlib.suppress(ValueError):
        return Topology.from_json(known or "")
    topology = measure(comm, num_machines, num_workers)
    if comm.rank == 0:
        cache.write("topology", key, topology.to_json())
    return topology


def measure(comm: Comm, num_machines: int, num_workers: int) -> Topology:
    """The links, by sending a few messages of growing size, on all ranks together."""
    sent, seconds = dataclasses.replace(comm.sent), comm.seconds
    n, k = comm.world_size, num_workers
    everyone = list(range(n))
    mates = [rank for rank in everyone if rank // k == comm.rank // k]
    per_message = Coefficients().message  # the cost model counts it apart

    def latency_and_long(run: Callable[[int], None], first: int) -> tuple[float, int, float]:
        """Seconds of a small message; bytes and seconds of a long one."""
        small, size = _seconds(comm, run, SMALL_BYTES), first
        while (took := _seconds(comm, run, size)) < LONG_SECONDS and size < MOST_BYTES:
            size *= 4
        return small, size, took

    def exchanges(ranks: Sequence[int], per_peer: float) -> Link:
        """`per_peer`: bytes that count, by the bytes for each other rank."""
        small, size, took = latency_and_long(lambda num_bytes: _send(comm, ranks, num_bytes), 2**16)
        latency = max(0.0, small - (len(ranks) - 1) * per_message)
        return Link(latency=latency, bandwidth=size * per_peer / max(took - latency, took / 10))

    def ring() -> Link:
        waits = 2 * (n - 1)
        small, size, took = latency_and_long(lambda num_bytes: _reduce(comm, num_bytes), RING_BYTES)
        latency = min(small / 2, took / 2 / waits)  # a small one goes directly, as two messages
        return Link(latency=latency, bandwidth=2 * size * (n - 1) / n / (took - latency * waits))

    # Gathers send what rounds send, from memory that is the same for all: one measurement serves both.
    reduce = ring()
    if num_machines == 1:
        rounds = exchanges(everyone, n - 1)
        links = Links(allreduce=reduce, rounds=rounds, gathers=rounds)
        topology = Topology(machines=1, workers=k, between=links, inside=links)
    else:
        rounds = exchanges(everyone, k * (n - k))
        between = Links(allreduce=reduce, rounds=rounds, gathers=rounds)
        topology = Topology(machines=num_machines, workers=k, between=between)
        if k > 1:
            topology = dataclasses.replace(topology, inside=Links.same(exchanges(mates, k - 1)))
    topology = dataclasses.replace(topology, slowness=_slowness(comm))
    comm.sent, comm.seconds = sent, seconds  # that was no training
    return topology


def _slowness(comm: Comm) -> float:
    """`Topology.slowness`, by sorting ids on all workers at once; the average over the workers."""
    if comm.device.type != "cpu":
        return 1.0
    ids = torch.randint(NUM_ROWS, (NUM_IDS,), generator=torch.Generator().manual_seed(0))
    torch.unique(ids, return_inverse=True)
    comm.gather(None)
    start, num_ids = time.monotonic(), 0
    while (took := time.monotonic() - start) < WORK_SECONDS:
        torch.unique(ids, return_inverse=True)
        num_ids += NUM_IDS
    speeds = comm.gather(num_ids / took)
    return Coefficients().ids * len(speeds) / sum(speeds)


def _seconds(comm: Comm, run: Callable[[int], None], num_bytes: int) -> float:
    """Of one `run` on the slowest rank, the fastest of some; the same number on all ranks."""

    def seconds() -> float:
        start = time.monotonic()
        run(num_bytes)
        return time.monotonic() - start

    first = max(comm.gather(seconds()))
    took = [seconds() for _ in range(min(8, max(2, int(REPEAT_SECONDS / first))))]
    return min(max(by_rank) for by_rank in zip(*comm.gather(took), strict=True))


def _send(comm: Comm, ranks: Sequence[int], num_bytes: int) -> None:
    """Sends as much to each of `ranks`, and takes in as much from each."""
    sizes = [num_bytes if rank in ranks and rank != comm.rank else 0 for rank in range(comm.world_size)]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=comm.device)
    comm.swap([Column.split(whole, sizes)], [Column.split(torch.empty_like(whole), sizes)])


def _reduce(comm: Comm, num_bytes: int) -> None:
    comm.wait(comm.all_reduce(torch.zeros(num_bytes // 4, device=comm.device)))
