"""The workers of a job in which `torch.distributed` is initialised, for `turns.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from turns import Group


def torch_group(folder: Path) -> Group:
    def largest(value: float) -> float:
        joint = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(joint, dist.ReduceOp.MAX)
        return float(joint)

    return Group(folder, dist.get_rank(), dist.barrier, largest)
