"""From what workers have told to medians, ratios and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Turn = Mapping[str, Any]

HYBRID, COMPUTE = "hybrid", "compute-only"
"""What others are compared with."""


def merged(told: Sequence[Turn], samples_per_step: int) -> list[dict[str, Any]]:
    """One turn for what the ranks have told of it.

    Args:
        told: facts with "arm", "repeat" and, where an arm has several, "way".
        samples_per_step: of all workers.
    """
    by_turn: dict[tuple[Any, ...], list[Turn]] = {}
    for fact in told:
        by_turn.setdefault((fact["repeat"], fact["arm"], fact.get("way")), []).append(fact)
    turns = []
    for (repeat, arm, way), facts in by_turn.items():
        seconds = max(fact["seconds"] for fact in facts) / facts[0]["steps"]
        turns.append(
            {
                "arm": arm,
                **({} if way is None else {"way": way}),
                "repeat": repeat,
                "steps": facts[0]["steps"],
                "step_ms": 1e3 * seconds,
                "samples_per_second": samples_per_step / seconds,
                **{
                    key: statistics.mean(fact[key] for fact in facts)
                    for key in ("sent_mb", "cpu_ms", "loss")
                    if key in facts[0]
                },
                "most_received_mb": max(fact["received_mb"] for fact in facts),
            }
        )
    return turns


def waited(told: Sequence[Turn]) -> list[dict[str, Any]]:
    """What our workers used of the CPUs in the turn of a peer: it should be next to nothing."""
    by_turn: dict[tuple[Any, ...], list[Turn]] = {}
    for fact in told:
        by_turn.setdefault((fact["repeat"], fact["waited_for"]), []).append(fact)
    return [
        {
            "peer": peer,
            "repeat": repeat,
            "seconds": max(fact["waited"] for fact in facts),
            "cpu_seconds_of_all_ranks": sum(fact["cpu_seconds"] for fact in facts),
        }
        for (repeat, peer), facts in by_turn.items()
    ]


def summary(turns: Sequence[Turn], least: Mapping[str, float], wire_samples_per_second: float | None) -> dict[str, Any]:
    """Medians by arm. Of an arm with several ways its fastest counts, and all are in "ways".

    Args:
        turns: as `merged` gives them.
        least: bytes that a machine sends in a step at least ("total").
        wire_samples_per_second: the speed at which these bytes would fill the links; None if there are none.
    """
    arms: dict[str, Any] = {}
    for arm in dict.fromkeys(turn["arm"] for turn in turns):
        ways: dict[Any, Any] = {}
        for way in dict.fromkeys(turn.get("way") for turn in turns if turn["arm"] == arm):
            mine = [turn for turn in turns if (turn["arm"], turn.get("way")) == (arm, way)]
            ways[way] = {**medians(mine), **compared(mine, turns)}
            if wire_samples_per_second is not None:
                ways[way]["of_wire"] = ways[way]["samples_per_second"] / wire_samples_per_second
                ways[way]["sent_by_least"] = ways[way]["sent_mb"] * 1e6 / least["total"]
        best = max(ways, key=lambda way: ways[way]["samples_per_second"])
        arms[arm] = ways[best] if best is None else {"way": best, **ways[best], "ways": ways}
    return arms


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    keys = ("samples_per_second", "step_ms", "sent_mb", "most_received_mb", "cpu_ms", "loss")
    return {key: statistics.median(turn[key] for turn in turns) for key in keys if key in turns[0]}


def compared(mine: Sequence[Turn], turns: Sequence[Turn]) -> dict[str, float]:
    """Medians over the repeats of ratios of speeds: hybrid's by these, and these by computing's alone."""

    def median_ratio(other: str, *, inverse: bool) -> float | None:
        speed = {turn["repeat"]: turn["samples_per_second"] for turn in turns if turn["arm"] == other}
        ratios = [m["samples_per_second"] / speed[m["repeat"]] for m in mine if m["repeat"] in speed]
        return statistics.median(1 / r if inverse else r for r in ratios) if ratios else None

    found = {
        "hybrid_by_this": median_ratio(HYBRID, inverse=True),
        "of_compute": median_ratio(COMPUTE, inverse=False),
    }
    return {key: ratio for key, ratio in found.items() if ratio is not None}


def as_table(run: Mapping[str, Any]) -> str:
    """A run's figures by arm; of peers all ways, the one that counts with a star."""
    columns = [f"{run['unit']}/s", "MB sent", "x least", "hybrid/this", "of compute", "of wire", "loss"]
    lines = [f"{'':40}" + "".join(f"{column:>12}" for column in columns)]
    for arm, of_arm in run["arms"].items():
        for way, figures in of_arm.get("ways", {None: of_arm}).items():
            name = arm if way is None else f"{arm}, {way}{' *' if way == of_arm['way'] else ''}"
            lines.append(f"{name:40}" + "".join(f"{cell:>12}" for cell in _cells(figures)))
    lines += [f"{arm:40}{'missing: ' + how}" for arm, how in run["missing"].items()]
    lines += [f"{f['arm']:40}failed in repeat {f['repeat']}: {f['error'].splitlines()[-1]}" for f in run["failed"]]
    least = ", ".join(f"{key} {value / 1e6:.3f}" for key, value in run["least_bytes"].items())
    lines.append(f"medians; MB by machine and step; least MB: {least}")
    return "\n".join(lines)


def _cells(figures: Mapping[str, float]) -> list[str]:
    formats = {
        "samples_per_second": ",.0f",
        "sent_mb": ".2f",
        "sent_by_least": ".2f",
        "hybrid_by_this": ".2f",
        "of_compute": ".2f",
        "of_wire": ".2f",
        "loss": ".4f",
    }
    return [format(figures[key], spec) if key in figures else "" for key, spec in formats.items()]


def time_split(run: Mapping[str, Any], arm: str) -> dict[str, float] | None:
    """Milliseconds of a step.

    "computing" is a step without any exchange; of the rest "wire" is what the bytes take on a link, as far as it is not
    hidden behind computing; and "waiting" is all else: latency of rounds, slower ranks, and work for others.

    None if the run has no arm that only computes.
    """
    if COMPUTE not in run["arms"]:
        return None
    step = run["arms"][arm]["step_ms"]
    computing = min(step, run["arms"][COMPUTE]["step_ms"])
    wire = 8e3 * run["arms"][arm]["sent_mb"] * 1e6 / run["bits_per_second"]
    wire = min(wire, step - computing)
    return {"computing": computing, "wire": wire, "waiting": step - computing - wire}
