"""Words per second and bytes on the links, of several ways to train one model, over links of a given bandwidth.

    sudo .venv/bin/python benchmarks/evaluate.py --machines 8 --bandwidth 300Mbit --output benchmarks/results/a.json

All ways ("arms") train on the same processes of one cluster (`cluster.py`) and take turns: in each repeat, each arm
begins anew, takes some steps to warm up, and is timed between two barriers. What is stated is the median over the
repeats, and the median of hybrid's speed by the arm's, repeat by repeat, so that a change of the machine's speed meets
both. Links are unlimited while a turn is set up. The loss after the warm-up is equal for arms that compute the same.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, ClusterError, link_counters
from models import MODELS, add_options
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallax

WARM_UP, WARM_UP_LIMITED = 3, 2
"""Steps at the start of a turn: over unlimited links (parallax watches the first), then over those of the setting."""


def by_parallax(model: nn.Module, optimizer: torch.optim.Optimizer, **config: Any) -> nn.Module:
    return parallax.distribute(model, optimizer, config=parallax.Config(**config))


ARMS: dict[str, tuple[bool, Callable[[nn.Module, torch.optim.Optimizer], nn.Module]]] = {
    "hybrid": (True, by_parallax),
    "allreduce-gather": (True, lambda m, o: by_parallax(m, o, architecture="allreduce", sparse_allreduce="gather")),
    "allreduce-dense": (True, lambda m, o: by_parallax(m, o, architecture="allreduce", sparse_allreduce="dense")),
    "ddp-sparse": (True, lambda m, o: DistributedDataParallel(m)),
    "ddp-dense": (False, lambda m, o: DistributedDataParallel(m)),
    "compute-only": (True, lambda m, o: m),
}
"""By name: whether tables have sparse gradients, and what makes a model one that trains on all workers."""


def main() -> None:
    args, parser = parse()
    if args.folder is not None:
        work(args)
        return
    try:
        turns = launch(args)
    except ClusterError as error:
        parser.exit(2, f"evaluate: {error}\n")
    report = summary(args, turns)
    print(as_table(report))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="per machine")
    parser.add_argument("--bandwidth", default="300Mbit", help="of each link")
    parser.add_argument("--model", choices=list(MODELS), default="lm")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, about")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to workers: where to meet the launcher
    add_options(parser)
    return parser.parse_args(), parser


# -- in the launcher ----------------------------------------------------------------------------------


def launch(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all turns, and returns what was measured in each."""
    with (
        tempfile.TemporaryDirectory(prefix="evaluate-") as name,
        Cluster(machines=args.machines, bandwidth=args.bandwidth) as cluster,
    ):
        folder = Path(name)

        def follow() -> None:
            """Sets the links as rank 0 asks, and says that it is done."""
            wish = folder / "wish"
            if wish.exists():
                cluster.set_bandwidth(args.bandwidth if wish.read_text() == "limited" else None)
                wish.unlink()

        job = cluster.start(
            [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)], workers=args.workers, echo=True
        )
        result = job.wait(on_tick=follow)
        if any(result.exit_codes):
            raise ClusterError(f"workers failed; exit codes by rank: {result.exit_codes}")
        return json.loads((folder / "turns.json").read_text())


def summary(args: argparse.Namespace, turns: list[dict[str, Any]]) -> dict[str, Any]:
    arms = {}
    for arm in args.arms:
        mine = [turn for turn in turns if turn["arm"] == arm]
        arms[arm] = {
            key: statistics.median(turn[key] for turn in mine) for key in ("words_per_second", "sent_mb", "loss")
        }
        if "hybrid" in args.arms:
            hybrid = [turn for turn in turns if turn["arm"] == "hybrid"]
            pairs = zip(hybrid, mine, strict=True)
            arms[arm]["hybrid_by_this"] = statistics.median(
                h["words_per_second"] / m["words_per_second"] for h, m in pairs
            )
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("folder", "output")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/evaluate.py", *sys.argv[1:]]),
        "machine": f"{cpu()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "parallax": metadata.version("parallax-train"),
        },
        "settings": settings,
        "arms": arms,
        "turns": turns,
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def as_table(report: dict[str, Any]) -> str:
    lines = [f"{'':18}{'words/s':>10}{'MB sent':>10}{'hybrid/this':>13}{'loss':>9}   medians; sent by machine and step"]
    for arm, m in report["arms"].items():
        ratio = f"{m['hybrid_by_this']:.2f}" if "hybrid_by_this" in m else ""
        lines.append(f"{arm:18}{m['words_per_second']:10,.0f}{m['sent_mb']:10.2f}{ratio:>13}{m['loss']:9.4f}")
    return "\n".join(lines)


# -- in the workers -----------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said explicitly, so that torch does not warn
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    batches = MODELS[args.model][1](args, dist.get_rank())
    turns = []
    for repeat in range(args.repeats):
        for arm in args.arms if repeat % 2 == 0 else reversed(args.arms):
            turn = {"arm": arm, "repeat": repeat, **take_turn(args, arm, cycle(batches))}
            turns.append(turn)
            gc.collect()
            if dist.get_rank() == 0:
                print(f"{repeat} {arm}: {turn['words_per_second']:,.0f} words/s, {turn['sent_mb']:.2f} MB", flush=True)
    if dist.get_rank() == 0:
        (args.folder / "turns.json").write_text(json.dumps(turns))
    dist.barrier()
    dist.destroy_process_group()


def take_turn(args: argparse.Namespace, arm: str, batches: Iterator[Any]) -> dict[str, Any]:
    links(args, "unlimited")
    sparse, distributed = ARMS[arm]
    torch.manual_seed(0)
    plain = MODELS[args.model][0](args, sparse)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.2, initial_accumulator_value=0.1)
    model = distributed(plain, optimizer)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(WARM_UP):
        step()
    links(args, "limited")
    start = time.perf_counter()
    for _ in range(WARM_UP_LIMITED):
        loss = step()
    took = joint((time.perf_counter() - start) / WARM_UP_LIMITED, max)
    num_steps = max(2, round(args.seconds / took))
    dist.barrier()
    start, (sent, received) = time.perf_counter(), link_counters()
    for _ in range(num_steps):
        step()
    dist.barrier()
    seconds, (now_sent, now_received) = time.perf_counter() - start, link_counters()
    num_words = args.batch * args.time * num_steps * dist.get_world_size()
    measured = {
        "steps": num_steps,
        "seconds": seconds,
        "words_per_second": num_words / seconds,
        "sent_mb": joint((now_sent - sent) / num_steps / 1e6, statistics.mean),
        "most_received_mb": joint((now_received - received) / num_steps / 1e6, max),
        "loss": joint(float(loss), statistics.mean),
    }
    parallax.shutdown()  # nothing for the arms that are not parallax's
    return measured


def links(args: argparse.Namespace, wish: str) -> None:
    """Asks the launcher to set the links, and waits until it has."""
    dist.barrier()
    if dist.get_rank() == 0:
        new = args.folder / "new"
        new.write_text(wish)
        new.rename(args.folder / "wish")
        while (args.folder / "wish").exists():
            time.sleep(0.01)
    dist.barrier()


def joint(value: float, function: Callable[[list[float]], float]) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return function(values)


if __name__ == "__main__":
    main()
