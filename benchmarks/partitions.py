"""The number of partitions that a search finds, against trying all of them, for tables of three shapes.

    sudo .venv/bin/python benchmarks/partitions.py --machines 4 --output benchmarks/results/partitions.json

Every number from 1, doubling, is trained with twice, there and back. Then a search runs inside a job, as with
`Config(partitions="search")`. The least of many times is partly luck, so what was best and what the search has found
are then trained with six times in turn: the median of the ratios counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import steps
import torch.distributed as dist
from evaluate import circumstances
from turns import tell

import parallax

NUM_PASSES, NUM_DUELS = 2, 6
MOST_STEPS = 3000
"""After which a search is given up."""


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
        return
    parser = steps.parser(__doc__, machines=4, bandwidth="300Mbit")
    parser.add_argument("--shapes", nargs="+", default=["2000x512", "20000x128", "100000x32"], help="rows x elements")
    parser.add_argument("--alpha", type=float, default=0.05, help="part of the rows that a batch looks up")
    parser.add_argument("--most", type=int, default=64, help="partitions that are tried")
    parser.add_argument("--seconds", type=float, default=1.5, help="of timed steps in a pass, about")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.batch = args.batch or 16
    rows = steps.launch(__file__, args)
    for row in rows:
        times = ", ".join(f"{p}: {seconds * 1e3:.1f}" for p, seconds in row["measured"].items())
        print(
            f"{row['shape']:12}  best {row['best']}  found {row['found']} ({row['found_by_best'] - 1:+.0%})  "
            f"{row['reason']}  ms by number: {times}"
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        text = json.dumps({**circumstances("partitions.py"), "settings": settings, "rows": rows}, indent=1)
        args.output.write_text(text + "\n")


def work(folder: Path) -> None:
    args = steps.begin(folder)
    for shape in args.shapes:
        words, dim = map(int, shape.split("x"))

        def seconds(num_partitions: int, words: int = words, dim: int = dim) -> float:
            training = steps.Training(args, "one-table", words=words, dim=dim)
            steps.distributed(training, placements={"table.*": "sharded"}, partitions=num_partitions, topology=None)
            took = steps.seconds_of(training.step, args.seconds)
            steps.over()
            return took

        numbers = [2**k for k in range(args.most.bit_length()) if 2**k <= args.most]
        passes: dict[int, list[float]] = {p: [] for p in numbers}
        for turn in range(NUM_PASSES):
            for p in numbers[:: 1 - turn % 2 * 2]:
                passes[p].append(seconds(p))
        measured = {p: statistics.median(took) for p, took in passes.items()}
        training = steps.Training(args, "one-table", words=words, dim=dim)
        search = {"partitions": "search", "search_share": 1.0}
        steps.distributed(training, placements={"table.*": "sharded"}, topology=None, **search)
        plan, num_steps = parallax.explain(training.model)["table.weight"], 0
        while "best of" not in plan.reason and num_steps < MOST_STEPS:
            training.step()
            plan, num_steps = parallax.explain(training.model)["table.weight"], num_steps + 1
        steps.over()
        found, best = len(plan.owners), min(measured, key=lambda p: measured[p])
        duels = [seconds(found) / seconds(best) for _ in range(NUM_DUELS)] if found != best else [1.0]
        if dist.get_rank() == 0:
            tell(
                shape=shape,
                measured=measured,
                best=best,
                found=found,
                found_by_best=statistics.median(duels),
                reason=plan.reason.split("; ")[-1],
                num_steps=num_steps,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
