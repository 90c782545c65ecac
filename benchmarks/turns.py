"""What a worker does in its turn of an evaluation, whatever trains: `arms.py` and the peers do it alike.

It needs nothing but the standard library, since peers import it in environments of their own.

A turn: some steps over unlimited links to warm up (in which libraries watch, or build what they need), some over the
links of the setting (more, where a library tries something then), and then about `seconds` of steps that count, between
two barriers. Each worker prints one line, which the launcher reads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import link_counters

WARM_UP, WARM_UP_LIMITED = 3, 2
"""Steps before those that count: over unlimited links, then over those of the setting."""

_MARK = "turn: "


@dataclass(frozen=True)
class Group:
    """The workers of a job, by what their library offers."""

    folder: Path
    """Where they meet the launcher."""
    rank: int
    barrier: Callable[[], object]
    largest: Callable[[float], float]
    """The largest of the numbers that the workers give."""

    def ask(self, wish: str) -> None:
        """Asks the launcher for something, such as links of another bandwidth, and waits until it is done."""
        self.barrier()
        if self.rank == 0:
            ask(self.folder, wish)
        self.barrier()


def ask(folder: Path, wish: str) -> None:
    new = folder / "new"
    new.write_text(wish)
    new.rename(folder / "wish")
    start = time.monotonic()
    while (folder / "wish").exists():
        time.sleep(min(0.2, 0.01 + 0.1 * (time.monotonic() - start)))  # a peer's turn takes long: stay out of its way


def settings(folder: Path) -> argparse.Namespace:
    """What is to be evaluated, as the launcher has written it down."""
    return argparse.Namespace(**json.loads((folder / "settings.json").read_text()))


def take(step: Callable[[], Any], group: Group, seconds: float, settle: int = 0, **facts: Any) -> None:
    """Takes a turn with a step that returns its loss, and prints what was measured, with `facts`.

    Args:
        settle: further steps before those that count, in which something is tried over the links of the setting.
    """
    group.ask("links unlimited")
    for _ in range(WARM_UP):
        step()
    group.ask("links limited")
    start = time.perf_counter()
    for _ in range(WARM_UP_LIMITED):
        loss = float(step())
    for _ in range(settle):
        step()
    num_steps = max(2, round(seconds / group.largest((time.perf_counter() - start) / (WARM_UP_LIMITED + settle))))
    group.barrier()
    start, cpu, (sent, received) = time.perf_counter(), time.process_time(), link_counters()
    for _ in range(num_steps):
        step()
    group.barrier()
    took, cpu, (now_sent, now_received) = time.perf_counter() - start, time.process_time() - cpu, link_counters()
    group.ask("links unlimited")  # the next turn begins with sending whole tables
    tell(
        **facts,
        rank=group.rank,
        steps=num_steps,
        seconds=took,
        cpu_ms=1e3 * cpu / num_steps,
        sent_mb=(now_sent - sent) / num_steps / 1e6,
        received_mb=(now_received - received) / num_steps / 1e6,
        loss=loss,
    )


def tell(**facts: Any) -> None:
    print(_MARK + json.dumps(facts), flush=True)


def told(output: str) -> list[dict[str, Any]]:
    """What a worker has told with its output."""
    return [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
