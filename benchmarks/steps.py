"""Workers that time steps of different configurations of parallax, one after the other, and their launcher.

`predict.py` and `partitions.py` say which. Workers run on the machines of `cluster.py`, with links that stay as they
are, so that what parallax measures of them as it starts is what its steps meet.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turns
from cluster import Cluster, ClusterError
from models import MODELS, add_options

import parallax

WARM_UP = 6
"""Steps that are not timed: parallax has its plan, and has watched some, before they are over."""


def parser(description: str | None, machines: int, bandwidth: str) -> argparse.ArgumentParser:
    """With the options of the machines and of the models; the arguments are defaults."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--machines", type=int, default=machines)
    options.add_argument("--workers", type=int, default=1, help="per machine")
    options.add_argument("--bandwidth", default=bandwidth, help="of each link")
    add_options(options)
    return options


def launch(script: str, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs `script` on all workers; returns what they tell (`turns.tell`). If a worker fails, the program ends."""
    name = Path(script).stem
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        path = Path(folder, "settings.json")
        path.write_text(json.dumps({k: v for k, v in vars(settings).items() if k != "output"}))
        try:
            with Cluster(machines=settings.machines, bandwidth=settings.bandwidth) as cluster:
                command = [sys.executable, script, "--worker", folder]
                job = cluster.start(command, workers=settings.workers, env={"XDG_CACHE_HOME": folder})
                result = job.wait()
        except ClusterError as error:
            sys.exit(f"{name}: {error}")
    if any(result.exit_codes):
        sys.exit(f"{name}: workers failed, exit codes by rank: {result.exit_codes}")
    return [fact for output in result.outputs for fact in turns.told(output)]


def begin(folder: Path) -> argparse.Namespace:
    """A worker joins the others; returns the settings."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
    return turns.settings(folder)


class Training:
    """A model, its batches and an optimizer on one worker."""

    def __init__(self, args: argparse.Namespace, model: str, **changes: Any) -> None:
        """
        Args:
            changes: of the settings, such as another number of words.
        """
        args = argparse.Namespace(**{**vars(copy.copy(args)), **changes})
        kind = MODELS[model]
        torch.manual_seed(0)
        self.model = kind.make(args, True)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=kind.lr, initial_accumulator_value=0.1)
        self._data = cycle(kind.batches(args, dist.get_rank()))

    def compute(self) -> None:
        """Forward and backward alone."""
        self.optimizer.zero_grad()
        self.model(*next(self._data)).backward()

    def step(self) -> None:
        self.compute()
        self.optimizer.step()


def seconds_of(step: Callable[[], None], num_seconds: float) -> float:
    """Seconds of a step, the mean over about `num_seconds`; the same number on all workers."""
    for _ in range(WARM_UP):
        step()
    start = time.perf_counter()
    step()
    num_steps = max(3, round(num_seconds / largest(time.perf_counter() - start)))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return largest(time.perf_counter() - start) / num_steps


def largest(value: float) -> float:
    joint = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(joint, dist.ReduceOp.MAX)
    return float(joint)


def distributed(training: Training, **config: Any) -> Training:
    parallax.distribute(training.model, training.optimizer, config=parallax.Config(**config))
    return training


def over() -> None:
    parallax.shutdown()
    gc.collect()
    dist.barrier()
