"""The least bytes that exact synchronous training of a model has to move, counted from the batches themselves."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from models import MODELS, TABLE_TYPES

ID_BYTES, ELEMENT_BYTES = 4, 4


def least_bytes(args: argparse.Namespace) -> dict[str, float]:
    """Bytes that a machine sends in a step, at least: the mean over machines and batches.

    Returns:
        "ids", "rows", "gradients" of what is looked up (`row_bytes`), "dense" for the other parameters, "total".
    """
    kind = MODELS[args.model]
    num_machines, num_ranks = args.machines, args.machines * args.workers
    lookups = [[kind.lookups(batch) for batch in kind.batches(args, rank)] for rank in range(num_ranks)]
    elements = kind.row_elements(args)
    steps = [row_bytes(of_step, elements, args.workers) for of_step in zip(*lookups, strict=True)]
    least = {key: statistics.mean(step[key] for step in steps) for key in ("ids", "rows", "gradients")}
    least["dense"] = ring_bytes(num_dense_elements(args), num_machines)
    return {**least, "total": sum(least.values())}


def row_bytes(lookups: Sequence[Sequence[torch.Tensor]], elements: Sequence[int], workers: int) -> dict[str, float]:
    """Bytes that a machine sends in one step for tables, on average.

    Row r lies on rank r mod N. A machine asks another for each row once, and gets it once, whatever the number of its
    workers and of the places in their batches; and gives a sum of gradients back once, in the order of the ids.

    Args:
        lookups: of each rank, its ids by table.
        elements: of a row, by table.
        workers: ranks on each machine.
    """
    num_ranks, num_rows, num_elements = len(lookups), 0, 0
    num_machines = num_ranks // workers
    for machine in range(num_machines):
        ranks = lookups[machine * workers : (machine + 1) * workers]
        for size, *of_ranks in zip(elements, *ranks, strict=True):
            ids = torch.cat([ids.flatten() for ids in of_ranks]).unique()
            num_remote = int((ids % num_ranks // workers != machine).sum())
            num_rows += num_remote
            num_elements += num_remote * size
    payload = num_elements * ELEMENT_BYTES / num_machines
    return {"ids": num_rows * ID_BYTES / num_machines, "rows": payload, "gradients": payload}


def ring_bytes(num_elements: int, num_machines: int) -> float:
    """Bytes that a machine sends in a ring AllReduce (Patarasu and Yuan, 2009), which is the least: 2 (N - 1) / N."""
    return 2 * (num_machines - 1) / num_machines * num_elements * ELEMENT_BYTES


def num_dense_elements(args: argparse.Namespace) -> int:
    model = MODELS[args.model].make(args, False)
    owned = [p for m in model.modules() if not isinstance(m, TABLE_TYPES) for p in m.parameters(recurse=False)]
    return sum(p.numel() for p in owned)
