"""Measures the defaults of `parallax.topology.Coefficients` on one core of this machine.

    OMP_NUM_THREADS=1 python benchmarks/coefficients.py

The best of 30 repeats, as others may use the machine; rows of 1 KiB, float32, a table of 51 MB, 8,000 ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from parallax.table import add_rows
from parallax.topology import Coefficients

NUM_ROWS, WIDTH, NUM_IDS = 50_000, 256, 8_000


def main() -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad's warning otherwise
    for name, speed in measure().items():
        print(f"{name:12} {speed:10.3g} per second (default {getattr(Coefficients(), name):.3g})")


def measure() -> dict[str, float]:
    """Speeds by the names of `Coefficients`."""
    torch.manual_seed(0)
    table, other = torch.randn(2, NUM_ROWS, WIDTH)
    ids = torch.randint(NUM_ROWS, (NUM_IDS,))
    rows = table[ids]
    unique, slots = torch.unique(ids, return_inverse=True)
    picked = rows[: unique.numel()]
    sparse = torch.sparse_coo_tensor(unique[None], picked, table.shape, is_coalesced=True, check_invariants=False)
    return {
        "copy": table.nbytes / _seconds(lambda: torch.mul(table, 0.5, out=other)),
        "fresh": table.nbytes / _seconds(lambda: torch.zeros(NUM_ROWS, WIDTH)),
        "merge": 2 * rows.nbytes / _seconds(lambda: (table[ids], add_rows(rows, slots, unique.numel()))),
        "update": table.nbytes / _seconds(_step(table.clone(), other)),
        "update_rows": picked.nbytes / _seconds(_step(table.clone(), sparse)),
        "ids": NUM_IDS / _seconds(lambda: torch.unique(ids, return_inverse=True)),
    }


def _step(table: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    parameter = torch.nn.Parameter(table)
    parameter.grad = grad
    return torch.optim.Adagrad([parameter], lr=0.1).step


def _seconds(work: Callable[[], object], num_repeats: int = 30) -> float:
    taken = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    main()
