"""One wave of messages, each rank to each other: by gloo's point-to-point calls, its all-to-all, and the mesh.

The mesh comes a second time with the system's congestion control, if it uses another (see docs/design/transport.md).

    sudo .venv/bin/python benchmarks/transport.py --machines 8 --bandwidth 300Mbit \
        --output benchmarks/results/transport.json

Each machine of the cluster (`cluster.py`) has one worker. In a turn all workers send `size` bytes to each other rank
and take in as much, `--waves` times, one after the other; the turns of the three ways alternate. Stated are medians
over turns of the milliseconds of a wave, on the slowest rank, and of the CPU time in it (all threads), on average.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster

from parallax.mesh import Kind, Mesh

SYSTEM = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def ways(world_size: int, rank: int, size: int, meshes: dict[str, Mesh]) -> dict[str, Callable[[], None]]:
    """What each way does in one wave."""
    peers = [(rank + i) % world_size for i in range(1, world_size)]
    outbox, inbox = torch.ones(world_size, size, dtype=torch.uint8), torch.empty(world_size, size, dtype=torch.uint8)

    def point_to_point() -> None:
        works = [dist.isend(outbox[p], p) for p in peers] + [dist.irecv(inbox[p], p) for p in peers]
        for work in works:
            assert work is not None
            work.wait()

    def all_to_all() -> None:
        dist.all_to_all_single(inbox, outbox)

    sending, taking = ([memoryview(t[p].numpy()) for p in range(world_size)] for t in (outbox, inbox))

    def by_mesh(mesh: Mesh) -> None:
        for p in peers:
            mesh.send(p, Kind.ROUND, [sending[p]])
        for p in reversed(peers):
            mesh.receive(p, Kind.ROUND, [taking[p]])
        mesh.finish()

    by_meshes = {name: functools.partial(by_mesh, mesh) for name, mesh in meshes.items()}
    return {"gloo isend/irecv": point_to_point, "gloo all_to_all_single": all_to_all, **by_meshes}


def work(sizes: list[int], num_waves: int, num_turns: int) -> None:
    """What a worker does; rank 0 prints the result."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    meshes = {"mesh": Mesh(rank, world_size, 60.0, all_gather)}
    system = SYSTEM.read_text().strip()
    if system.startswith("bbr"):
        meshes[f"mesh, {system}"] = other = Mesh(rank, world_size, 60.0, all_gather)
        for connection in other._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, system.encode())
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in sizes:
        of_size: dict[str, list[tuple[float, float]]] = {}
        wave_of = ways(world_size, rank, size, meshes)
        for turn in range(num_turns + 1):  # the first warms up
            for name, wave in wave_of.items():
                dist.barrier()
                started, cpu = time.perf_counter(), time.process_time()
                for _ in range(num_waves):
                    wave()
                took, used = time.perf_counter() - started, time.process_time() - cpu
                everyone = all_gather((took / num_waves * 1e3, used / num_waves * 1e3))
                if turn:
                    slowest, on_average = max(t for t, _ in everyone), statistics.mean(u for _, u in everyone)
                    of_size.setdefault(name, []).append((slowest, on_average))
        found[str(size)] = {
            name: {"ms": statistics.median(t for t, _ in of), "cpu_ms": statistics.median(u for _, u in of)}
            for name, of in of_size.items()
        }
    dist.barrier()
    if rank == 0:
        print(json.dumps(found))
    for mesh in meshes.values():
        mesh.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--bandwidth", default="300Mbit")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 4096, 65_536], help="bytes of a message")
    parser.add_argument("--waves", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.sizes, args.waves, args.turns)
        return
    command = [sys.executable, __file__, "--worker", "--waves", str(args.waves), "--turns", str(args.turns)]
    command += ["--sizes", *map(str, args.sizes)]
    with Cluster(machines=args.machines, bandwidth=args.bandwidth) as cluster:
        result = cluster.run(command, timeout=300)
    if any(result.exit_codes):
        sys.exit("\n".join(result.outputs))
    found = json.loads(result.outputs[0].splitlines()[-1])
    for size, of_size in found.items():
        for name, figures in of_size.items():
            print(f"{int(size):7,} bytes  {name:24}{figures['ms']:8.2f} ms{figures['cpu_ms']:8.2f} ms of CPU")
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python benchmarks/transport.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs",
        "congestion_control": SYSTEM.read_text().strip(),
        "setting": {"machines": args.machines, "bandwidth": args.bandwidth, "waves": args.waves, "turns": args.turns},
        "by_size": found,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
