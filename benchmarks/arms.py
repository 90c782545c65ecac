"""A worker of `evaluate.py`: parallax's architectures, PyTorch's DDP, and computing alone, in turn in one process.

In the turns of peers, which have processes of their own, it waits.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from handwritten import HandWritten
from models import MODELS, Batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_group import torch_group
from turns import Group, settings, take, tell

import parallax
from parallax.foresight import NUM_TURNS, TURN_STEPS


def by_naive_servers(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Each parameter whole on one server; workers of a machine do not merge, and row gradients leave at the end."""
    os.environ["PARALLAX_MACHINE"] = f"of worker {dist.get_rank()}"
    try:
        return by_parallax(model, optimizer, architecture="ps", partitions=1, overlap=False)
    finally:
        del os.environ["PARALLAX_MACHINE"]


def by_parallax(model: nn.Module, optimizer: torch.optim.Optimizer, **config: Any) -> nn.Module:
    return parallax.distribute(model, optimizer, config=parallax.Config(**config))


ARMS: dict[str, tuple[bool, Callable[[nn.Module, torch.optim.Optimizer], nn.Module]]] = {
    "hybrid": (True, lambda m, o: by_parallax(m, o, topology=None)),
    "hybrid-bfloat16": (True, lambda m, o: by_parallax(m, o, topology=None, wire_dtype="bfloat16")),
    "planned": (True, lambda m, o: by_parallax(m, o, topology="measure")),
    "allreduce-gather": (True, lambda m, o: by_parallax(m, o, architecture="allreduce", sparse_allreduce="gather")),
    "allreduce-dense": (True, lambda m, o: by_parallax(m, o, architecture="allreduce", sparse_allreduce="dense")),
    "ps": (True, lambda m, o: by_parallax(m, o, architecture="ps")),
    "ps-naive": (True, by_naive_servers),
    "ddp-sparse": (True, lambda m, o: DistributedDataParallel(m)),
    "ddp-dense": (False, lambda m, o: DistributedDataParallel(m)),
    "hand-written": (True, lambda m, o: m),
    "compute-only": (True, lambda m, o: m),
}
"""By name: whether tables have sparse gradients, and what makes a model one that trains on all workers
("hand-written" has a step of its own, `handwritten.py`)."""

NOT_OURS = ("ddp-sparse", "ddp-dense", "hand-written", "compute-only")

SETTLE = 2 + 2 * NUM_TURNS * TURN_STEPS
"""Steps after which parallax knows whether it pays to ask ahead, and to send row gradients early."""

ONLY_NAMED = ("planned", "hybrid-bfloat16", "hand-written")
"""Arms that take part when they are asked for."""


def main() -> None:
    folder = Path(sys.argv[1])
    args = settings(folder)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said explicitly, so that torch does not warn
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
    group = torch_group(folder)
    batches = MODELS[args.model].batches(args, group.rank)
    for repeat, arm in args.order:
        if arm in ARMS:
            take_turn(args, batches, group, arm=arm, repeat=repeat)
            gc.collect()
        else:
            start, cpu = time.perf_counter(), time.process_time()
            group.ask(f"peer {arm} {repeat}")
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            tell(waited_for=arm, repeat=repeat, rank=group.rank, waited=took, cpu_seconds=cpu)
    dist.barrier()
    dist.destroy_process_group()


def take_turn(args: Any, batches: list[Batch], group: Group, *, arm: str, repeat: int) -> None:
    sparse, distributed = ARMS[arm]
    kind = MODELS[args.model]
    torch.manual_seed(0)
    plain = kind.make(args, sparse)
    if arm == "planned":  # it measures links as it starts
        group.ask("links limited")
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=kind.lr, initial_accumulator_value=0.1)
    model, data = distributed(plain, optimizer), cycle(batches)
    if arm not in NOT_OURS:  # as its users have it: each worker gets every N-th of a sequence
        size = args.machines * args.workers
        data = iter(parallax.shard(batch for batch in cycle(batches) for _ in range(size)))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    if arm == "hand-written":
        trainer = HandWritten(args, kind.lr)
        take(lambda: trainer.step(next(data)), group, args.seconds, arm=arm, repeat=repeat)
        trainer.comm.close()
        return
    settle = SETTLE if arm.startswith(("hybrid", "planned")) or arm == "ps" else 0
    take(step, group, args.seconds, settle, arm=arm, repeat=repeat)
    parallax.shutdown()  # nothing for the arms that are not parallax's


if __name__ == "__main__":
    main()
