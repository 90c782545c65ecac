"""Speed of a model without tables: parallax against DistributedDataParallel, interleaved in one run.

    parallax run --nproc 2 benchmarks/dense.py

Both train the same multilayer perceptron on the same processes, taking turns of a few steps, so that a change of
the machine's speed meets both. Prints the median time of a turn for each and the median of the ratios turn by turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallax


def mlp(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, n: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(n):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.barrier()
    return (time.perf_counter() - start) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    args = parser.parse_args()

    torch.manual_seed(0)
    ours = mlp(args.width, args.depth)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, theirs)]
    parallax.distribute(ours, optimizers[0])
    wrapped = DistributedDataParallel(theirs)
    x = torch.randn(args.batch_size, args.width)
    y = torch.randint(0, 10, (args.batch_size,))
    arms = [(ours, optimizers[0]), (wrapped, optimizers[1])]
    for model, optimizer in arms:
        steps(model, optimizer, x, y, args.steps)
    times: list[list[float]] = [[], []]
    for turn in range(args.turns):
        for arm in (0, 1) if turn % 2 else (1, 0):
            times[arm].append(steps(*arms[arm], x, y, args.steps))
    difference = max(
        float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    if parallax.rank() == 0:
        numel = sum(p.numel() for p in theirs.parameters())
        ratio = statistics.median(t / o for o, t in zip(*times, strict=True))
        ours_ms, theirs_ms = (1e3 * statistics.median(t) for t in times)
        workers = parallax.world_size()
        print(f"{numel / 1e6:.1f} M parameters, {workers} workers, {args.turns} turns of {args.steps} steps")
        print(f"parallax {ours_ms:.2f} ms a step, DDP {theirs_ms:.2f} ms")
        print(f"speed of parallax / speed of DDP: {ratio:.3f}; largest difference of a parameter: {difference:.1e}")


if __name__ == "__main__":
    main()
