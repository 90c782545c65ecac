"""What `make demo` runs: trains the language model on several workers and measures what they send each other.

    parallax run --nproc 4 examples/lm/demo.py [--seconds 60] [options of train.py]

Three trainings one after the other: two short ones that keep whole tables on every worker (architecture
"allreduce"), then a longer one with the architecture that is parallax's default. All numbers in the table at the
end are counted or timed in these runs, but for the line that says "predicted".
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from corpus import Corpus, CorpusError, Windows, epochs, load_corpus, spread
from progress import Training
from rich.console import Console
from rich.table import Table
from train import RANK, WORLD_SIZE, build, default_device, parse_args, quieten_torch

import parallax

NUM_WARMUP_STEPS = 5
"""Steps at the start of each run that are not measured: parallax watches the first and then makes its plan."""

STEPS_BETWEEN_LOOKS = 8
"""At the time, if that is what ends training."""


@dataclasses.dataclass(frozen=True)
class Run:
    heading: str
    description: str
    config: parallax.Config
    steps: int | None
    """Steps to take, or None to train for --seconds, with perplexity before and after."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one worker measured in one run; bytes are those that it sent in a step."""

    table_bytes: float
    dense_bytes: float
    header_bytes: float
    predicted_bytes: float
    loopback_bytes: float
    """What the kernel saw on the loopback interface, per worker and step; 0 if it cannot tell."""
    num_rounds: float
    words_per_second: float
    num_steps: int
    perplexity_before: float | None
    perplexity_after: float | None

    @property
    def num_bytes(self) -> float:
        return self.table_bytes + self.dense_bytes + self.header_bytes


def main(options: argparse.Namespace, args: argparse.Namespace) -> None:
    quieten_torch()
    if WORLD_SIZE > 1:  # here, and not in parallax.distribute, because it has to outlast three runs
        dist.init_process_group("nccl" if default_device().type == "cuda" else "gloo")
    console = Console(highlight=False, quiet=RANK != 0)
    corpus = load_corpus(args.corpus, args.vocab_size, data=args.data)
    console.print(f"{corpus}; {WORLD_SIZE} worker(s)", soft_wrap=True)
    runs = [
        Run(
            "allreduce,\nrows gathered",
            "allreduce, touched rows of tables gathered",
            parallax.Config(architecture="allreduce", sparse_allreduce="gather"),
            options.compare_steps,
        ),
        Run(
            "allreduce,\nall dense",
            "allreduce, tables treated as dense",
            parallax.Config(architecture="allreduce", sparse_allreduce="dense"),
            options.compare_steps,
        ),
        Run("hybrid\n(default)", "hybrid, tables spread over the workers by rows", parallax.Config(), None),
    ]
    measured = []
    for number, run in enumerate(runs, 1):
        how_long = f"{options.seconds:g} s" if run.steps is None else f"{run.steps} steps"
        console.print(f"\n[bold]Training {number} of {len(runs)}, {how_long}: {run.description}[/]")
        mine, plan = train(run, corpus, options.seconds, args)
        everyone = [mine] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(everyone, mine)
        measured.append(everyone)
    console.print("\n[bold]The plan of the last training[/] (parallax.explain)")
    if RANK == 0:
        print(plan)
    console.print()
    console.print(results(runs, measured))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    console.print(
        f"{WORLD_SIZE} workers on this machine ({cores} cores, {platform.machine()}, torch {torch.__version__}); "
        f"means over the workers and steps, after {NUM_WARMUP_STEPS} steps of warming up. An AllReduce counts as a "
        f"ring; what the kernel saw has TCP headers, and any other programs on loopback, in it. Here all workers "
        f"share the cores and talk through memory: on a network, bytes matter more to words/s.",
        style="dim",
    )
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def train(run: Run, corpus: Corpus, seconds: float, args: argparse.Namespace) -> tuple[Measured, parallax.Plan]:
    """Trains a new model, as train.py does, and measures."""
    model, optimizer, loader = build(args, corpus)
    parallax.distribute(model, optimizer, config=run.config)
    batches = epochs(parallax.shard(loader))
    device = default_device()
    held_out = [t.to(device) for t in spread(Windows(corpus.held_out, args.seq_len), args.eval_tokens)]

    def take_steps(num_steps: int | None) -> Training:
        training = Training(
            steps=num_steps,
            minutes=seconds / 60,
            words_per_step=args.batch_size * args.seq_len * WORLD_SIZE,
            show=RANK == 0 and num_steps is None,
        )
        with training:
            while not is_over(training, num_steps):
                x, y = next(batches)
                optimizer.zero_grad()
                loss = model(x.to(device), y.to(device))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.lstm.parameters(), args.clip)
                optimizer.step()
                training.step(loss.item())
        return training

    def perplexity(when: str) -> float | None:
        """Taken by one worker alone, which the others serve: never while bytes are counted."""
        if RANK != 0 or run.steps is not None:
            return None
        value = model.perplexity(*held_out)
        print(f"perplexity on held-out text {when}: {value:,.1f}", flush=True)
        return value

    before = perplexity("before")
    take_steps(NUM_WARMUP_STEPS)
    start, loopback_start = parallax.traffic(model), bytes_on_loopback()
    training = take_steps(run.steps)
    sent, loopback = parallax.traffic(model) - start, bytes_on_loopback() - loopback_start
    after = perplexity(f"after {NUM_WARMUP_STEPS + training.num_steps} steps")
    plan = parallax.explain(model)
    parallax.shutdown()
    measured = Measured(
        table_bytes=sent.table_bytes / sent.num_steps,
        dense_bytes=sent.dense_bytes / sent.num_steps,
        header_bytes=sent.round_header_bytes / sent.num_steps,
        predicted_bytes=sum(p.bytes_per_step for p in plan),
        loopback_bytes=loopback / sent.num_steps / WORLD_SIZE,
        num_rounds=sent.num_rounds / sent.num_steps,
        words_per_second=training.words_per_second,
        num_steps=training.num_steps,
        perplexity_before=before,
        perplexity_after=after,
    )
    return measured, plan


def is_over(training: Training, num_steps: int | None) -> bool:
    """The same on all workers: their clocks differ."""
    if num_steps is not None:
        return training.over
    return training.num_steps % STEPS_BETWEEN_LOOKS == 0 and parallax.reduce(int(training.over), "max") > 0


def bytes_on_loopback() -> int:
    """Bytes sent so far over this machine's loopback interface; 0 where nobody tells (not Linux, or GPUs)."""
    table = Path("/proc/net/dev")
    if default_device().type != "cpu" or not table.exists():
        return 0
    lines = (line.split() for line in table.read_text().splitlines())
    return next((int(fields[9]) for fields in lines if fields[:1] == ["lo:"]), 0)


def results(runs: list[Run], measured: list[list[Measured]]) -> Table:
    """A column for each run; `measured` has a list for each, of what its workers measured."""
    table = Table(title="Measured", title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.heading, justify="right", style="bold" if run.steps is None else "")

    def row(label: str, value: Callable[[Measured], float], show: Callable[[float], str]) -> None:
        table.add_row(label, *(show(mean(map(value, workers))) for workers in measured))

    table.add_row("sent by a worker in a step")
    row("  for tables", lambda m: m.table_bytes, in_bytes)
    row("  for dense parameters", lambda m: m.dense_bytes, in_bytes)
    row("  headers of rounds", lambda m: m.header_bytes, in_bytes)
    row("  together", lambda m: m.num_bytes, in_bytes)
    row("  together, as predicted", lambda m: m.predicted_bytes, in_bytes)
    if all(workers[0].loopback_bytes for workers in measured):
        row("  together, as the kernel saw it", lambda m: m.loopback_bytes, in_bytes)
    table.add_section()
    row("rounds of messages in a step", lambda m: m.num_rounds, lambda n: f"{n:.2f}")
    row("words/s, all workers", lambda m: m.words_per_second, lambda n: f"{n:,.0f}")
    row("steps measured", lambda m: m.num_steps, lambda n: f"{n:,.0f}")
    table.add_section()
    for label, field in (("before", "perplexity_before"), ("after", "perplexity_after")):
        values = (getattr(workers[0], field) for workers in measured)
        table.add_row(f"perplexity {label}", *("" if v is None else f"{v:,.1f}" for v in values))
    return table


def in_bytes(number: float) -> str:
    """In the units of `parallax.explain`."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def parse() -> tuple[argparse.Namespace, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description="Trains the language model in three ways and measures them.",
        epilog="All other options are those of train.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to train with the hybrid architecture")
    parser.add_argument("--compare-steps", type=int, default=20, help="steps of each of the other trainings")
    options, rest = parser.parse_known_args()
    return options, parse_args(rest)


if __name__ == "__main__":
    try:
        main(*parse())
    except CorpusError as error:
        sys.exit(f"demo.py: {error}")
