"""Predicted against measured seconds of a step, for each placement of a language model's tables.

    sudo .venv/bin/python benchmarks/predict.py --machines 4 --output benchmarks/results/predict.json

For each number of words and each batch: what forward and backward take (on all workers at once, without exchange),
then a step with the tables sharded, gathered and reduced whole. The prediction is that of `parallax plan`, from the
links and the speed of work that parallax has measured as it started, and the profile that it has watched.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import steps
import torch.distributed as dist
from evaluate import circumstances
from turns import tell

import parallax
from parallax.plan import Plan
from parallax.simulate import Model, predict

PLACEMENTS = ("sharded", "gather", "allreduce")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
        return
    parser = steps.parser(__doc__, machines=4, bandwidth="300Mbit")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[5_000, 20_000, 50_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps, about")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    told = steps.launch(__file__, args)
    rows = [{k: v for k, v in row.items() if k != "plan"} | {"predicted": predicted(row)} for row in told]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        what = f"{row['words']:7,} words  batch {row['batch']:3}  {row['placement']:9}"
        print(f"{what}  predicted {row['predicted']:.4f} s  measured {row['measured']:.4f} s  {error:+.0%}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        text = json.dumps({**circumstances("predict.py"), "settings": settings, "rows": rows, "plans": told}, indent=1)
        args.output.write_text(text + "\n")


def predicted(row: dict[str, Any]) -> float:
    plan = Plan.from_json(row["plan"])
    assert plan.topology is not None, "every run has measured its links"
    assert plan.coefficients is not None
    model = Model(
        name="lm",
        unit="words",
        units_per_worker=1,
        compute_seconds=row["compute"],
        profiles=plan.profiles,
        coefficients=plan.coefficients,
    )
    return predict(model, plan.topology, {p.name: p.placement for p in plan}).step_seconds


def work(folder: Path) -> None:
    args = steps.begin(folder)
    for words, batch in itertools.product(args.vocabularies, args.batches):
        alone = steps.Training(args, "lm", words=words, batch=batch)
        compute = steps.seconds_of(alone.compute, args.seconds)
        for placement in PLACEMENTS:
            training = steps.Training(args, "lm", words=words, batch=batch)
            tables = {"embedding.*": placement, "softmax_*": placement}
            steps.distributed(training, placements=tables, topology="measure")
            measured = steps.seconds_of(training.step, args.seconds)
            plan = parallax.explain(training.model).to_json()
            if dist.get_rank() == 0:
                tell(
                    words=words,
                    batch=batch,
                    placement=placement,
                    compute=compute,
                    measured=measured,
                    plan=plan,
                )
            steps.over()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
