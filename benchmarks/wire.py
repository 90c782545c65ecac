"""What rounding on the wire (`Config.wire_dtype`) does to training: the language model's loss, and bytes.

    .venv/bin/parallax run --nproc 2 benchmarks/wire.py --output benchmarks/results/wire.json

Each word of the text has one that follows it most of the time; otherwise words come by Zipf's law. No batch comes
twice, so the loss over the last tenth of the steps is that of text not seen before. Every wire dtype trains on the same
batches with the same initial values, for each of a few seeds: how far seeds are apart says what a difference between
dtypes means.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from evaluate import circumstances
from models import LM, Batch

import parallax
from parallax.config import WireDtype

LR = 0.05


class Text:
    """Batches for the LM, other ones for each rank and seed."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args = args
        self.follower = torch.randperm(args.words, generator=torch.Generator().manual_seed(seed))
        self.zipf = 1 / torch.arange(1, args.words + 1, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(1000 * seed + parallax.rank())

    def batch(self) -> Batch:
        args, shape = self.args, (self.args.batch, self.args.time + 1)
        tokens = torch.multinomial(self.zipf, shape[0] * shape[1], True, generator=self.generator).view(shape)
        follows = torch.rand(shape, generator=self.generator) < args.predictable
        for t in range(1, shape[1]):
            tokens[:, t] = torch.where(follows[:, t], self.follower[tokens[:, t - 1]], tokens[:, t])
        samples = torch.randperm(args.words, generator=self.generator)[: args.samples]
        # all words are as likely to be drawn as samples, so the odds of it cancel out
        return tokens, samples, torch.zeros(args.batch * args.time + args.samples)


def train(args: argparse.Namespace, wire: WireDtype, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    text, model = Text(args, seed), LM(args, sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire))
    losses: list[torch.Tensor] = []
    for step in range(args.steps):
        if step == 1:  # the plan is made
            before = parallax.traffic(model)
        optimizer.zero_grad()
        loss = model(*text.batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    sent = parallax.traffic(model) - before
    last = torch.stack(losses[-args.steps // 10 :]).mean().item()
    loss = parallax.reduce(last, "mean")
    parallax.shutdown()
    return {
        "seed": seed,
        "first_loss": losses[0].item(),
        "loss": loss,
        "table_bytes_per_step": sent.table_bytes / sent.num_steps,
        "dense_bytes_per_step": sent.dense_bytes / sent.num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--words", type=int, default=1000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=64, help="elements of a row")
    parser.add_argument("--hidden", type=int, default=64, help="of the recurrent layer")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a worker's batch")
    parser.add_argument("--time", type=int, default=20, help="words in a sequence")
    parser.add_argument("--samples", type=int, default=256, help="of the softmax, in a step")
    parser.add_argument("--predictable", type=float, default=0.7, help="fraction of words that follow from the last")
    parser.add_argument("--output", type=Path, help="where to write what is printed, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said explicitly, so that torch does not warn
    dist.init_process_group("gloo")  # one for all runs

    runs: dict[str, list[dict[str, Any]]] = {wire: [] for wire in get_args(WireDtype)}
    for seed in range(1, args.seeds + 1):
        for wire, done in runs.items():
            done.append(train(args, wire, seed))  # type: ignore[arg-type]
    if parallax.rank():
        return
    exact = runs["float32"]
    summary = {wire: compared(done, exact) for wire, done in runs.items()}
    print(f"{args.steps} steps, {parallax.world_size()} workers, seeds 1 to {args.seeds}; bytes that a worker sends")
    print(f"{'wire':10}{'loss':>8}{'- float32':>11}{'KB/step':>10}{'of float32':>12}")
    for wire, s in summary.items():
        print(f"{wire:10}{s['loss']:8.4f}{s['more_loss']:+11.4f}{s['kb_per_step']:10.1f}{s['bytes']:12.3f}")
    spread = max(r["loss"] for r in exact) - min(r["loss"] for r in exact)
    print(f"float32's seeds are {spread:.4f} apart; its first loss was {exact[0]['first_loss']:.3f}")
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        arguments = shlex.join(["--nproc", str(parallax.world_size()), "benchmarks/wire.py", *sys.argv[1:]])
        now = circumstances()
        found = {
            **now,
            "versions": {name: now["versions"][name] for name in ("python", "torch", "parallax-train")},
            "command": f"parallax run {arguments}",
            "settings": settings,
            "summary": summary,
            "by_wire_dtype": runs,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")


def compared(done: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds; differences are seed by seed."""
    num_bytes, exact_bytes = (
        statistics.mean(r["table_bytes_per_step"] + r["dense_bytes_per_step"] for r in of) for of in (done, exact)
    )
    return {
        "loss": statistics.mean(r["loss"] for r in done),
        "more_loss": statistics.mean(r["loss"] - e["loss"] for r, e in zip(done, exact, strict=True)),
        "kb_per_step": num_bytes / 1000,
        "bytes": num_bytes / exact_bytes,
    }


if __name__ == "__main__":
    main()
