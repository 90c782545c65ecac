"""Measures what distributed training costs a worker whatever travels: `step`, `round` and `table` of
`parallax.topology.Coefficients`.

    sudo .venv/bin/python benchmarks/fixed.py

CPU time of steps of two small models, with one table and with three, on two machines with links that do not limit:
alone, and with the tables in each placement. Reduced whole, a step differs from one alone by `step`; gathered, it has
one round more, with all tables; sharded, two.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import steps
import torch.distributed as dist
from turns import tell

from parallax.topology import Coefficients

TABLES = {"one-table": ("table.*",), "lm": ("embedding.*", "softmax_*")}
NUM_TABLES = {"one-table": 1, "lm": 3}
NUM_STEPS, NUM_REPEATS = 60, 5


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
        return
    parser = steps.parser(__doc__, machines=2, bandwidth="10Gbit")
    args = parser.parse_args()
    told = steps.launch(__file__, args)
    alone, reduced, gathered, sharded = (
        {model: statistics.median(t[way] for t in told if t["model"] == model) for model in TABLES}
        for way in ("alone", "allreduce", "gather", "sharded")
    )
    # By rounds: that of gathered tables, and half of the two of sharded ones; a line over the number of tables.
    one, three = (
        statistics.mean([gathered[m] - reduced[m], (sharded[m] - reduced[m]) / 2]) for m in ("one-table", "lm")
    )
    table = (three - one) / (NUM_TABLES["lm"] - NUM_TABLES["one-table"])
    found = {"step": statistics.mean(reduced[m] - alone[m] for m in TABLES), "round": one - table, "table": table}
    for name, seconds in found.items():
        print(f"{name:6} {seconds * 1e3:6.2f} ms (default {getattr(Coefficients(), name) * 1e3:.2f})")


def work(folder: Path) -> None:
    args = steps.begin(folder)
    small = {"alpha": 0.02, "words": 2000, "dim": 16, "batch": 4, "samples": 16}
    for _ in range(NUM_REPEATS):
        for model, patterns in TABLES.items():
            took = {"alone": cpu_seconds(steps.Training(args, model, **small).step)}
            for placement in ("sharded", "gather", "allreduce"):
                training = steps.Training(args, model, **small)
                steps.distributed(training, placements=dict.fromkeys(patterns, placement), topology=None)
                took[placement] = cpu_seconds(training.step)
                steps.over()
            if dist.get_rank() == 0:
                tell(model=model, **took)
    dist.destroy_process_group()


def cpu_seconds(step: Callable[[], None]) -> float:
    """Of a step, on this worker."""
    for _ in range(steps.WARM_UP):
        step()
    start = time.process_time()
    for _ in range(NUM_STEPS):
        step()
    return (time.process_time() - start) / NUM_STEPS


if __name__ == "__main__":
    main()
