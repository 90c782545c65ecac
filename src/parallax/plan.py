"""Plans: frozen data that says which way each parameter goes, and why.

A plan is made once by `planner.make_plan`, is equal on all ranks, and is applied many times.
Nothing in this file computes or communicates.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallax.topology import Coefficients, Topology


class Use(enum.Flag):
    """How a parameter was used in the observed steps, on any rank."""

    NONE = 0
    LOOKUP = enum.auto()
    """Rows were picked by ids: `F.embedding`, `F.embedding_bag`, `weight[ids]`, `index_select`."""
    DENSE = enum.auto()
    """Anything else that needs every element: a product, a norm, a sum."""


class Placement(str, enum.Enum):
    """Where a parameter lives and how its gradient travels."""

    ALLREDUCE = "allreduce"
    """A copy on each rank; the whole gradient is reduced in buckets."""
    GATHER = "gather"
    """A copy on each rank; the touched rows of the gradient are gathered from all ranks."""
    SHARDED = "sharded"
    """Rows interleaved over owners; rows are pulled and row gradients pushed. Updated by its owner."""
    SERVED = "served"
    """A copy on each rank; one of them, its server, adds up the gradients of all and hands out the sum."""
    LOCAL = "local"
    """A copy on each rank; nothing travels (one worker, or a frozen parameter)."""
    WATCHED = "watched"
    """Not used yet: a copy on each rank until a step uses it."""


REDUCED = (Placement.ALLREDUCE, Placement.SERVED)
"""The whole gradient is added up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterProfile:
    """What was observed of one parameter; equal on all ranks.

    `num_rows_touched` is the number of distinct rows that one worker looks up in one step, averaged
    over the workers. `across_rows` says why an optimizer cannot update a row by itself; empty if it can.
    `meta` marks a parameter that was built on the meta device and has never existed whole. `renormed` marks the
    weight of a module with max_norm: looking a row up changes it. `by_frequency` marks lookups with
    scale_grad_by_freq: the gradient of a row is divided by how often all workers looked it up.

    `num_rows_by_machine` is the number of distinct rows that the workers of one machine look up together; without it
    they are taken to draw independently. `skew` is how much more of the touched rows the busiest owner has than the
    average one. `sparse_gradient` marks a table whose optimizer updates only the rows that have a gradient.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    use: Use
    num_rows_touched: float = 0.0
    trainable: bool = True
    across_rows: str = ""
    meta: bool = False
    renormed: bool = False
    by_frequency: bool = False
    num_rows_by_machine: float | None = None
    skew: float = 1.0
    sparse_gradient: bool = False

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(self.num_rows, 1)

    @property
    def alpha(self) -> float:
        """Fraction of the rows that one worker touches in one step, between 0 and 1."""
        if Use.DENSE in self.use:
            return 1.0
        return self.num_rows_touched / self.num_rows if self.num_rows else 0.0

    def alpha_of(self, num_workers: int) -> float:
        """Fraction of the rows that `num_workers` workers touch together, if their draws are independent:
        1-(1-alpha)^W. What the workers of a machine share, as words of one text do, makes it less."""
        alpha = min(self.alpha, 1.0)
        return alpha if num_workers == 1 or alpha == 1 else -math.expm1(num_workers * math.log1p(-alpha))

    def alpha_by_machine(self, num_workers: int) -> float:
        """Fraction of the rows that the `num_workers` workers of one machine touch together, each row counted once."""
        if self.num_rows_by_machine is None or Use.DENSE in self.use or num_workers == 1 or not self.num_rows:
            return self.alpha_of(num_workers)
        return self.num_rows_by_machine / self.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """The decision for one parameter.

    `owners` maps partition p (the rows r with r mod len(owners) == p) to the rank that holds it; it is
    empty unless the placement is SHARDED. `server` is the rank that adds up, for placement SERVED alone.
    `bytes_per_step` is what one worker sends in one step, predicted from alpha (`cost.bytes_per_step`). Where the links
    are known, `seconds` is what the parameter adds to a step, and `runner_up` the best of the other placements, with
    its figures.
    """

    name: str
    shape: tuple[int, ...]
    use: Use
    alpha: float
    placement: Placement
    owners: tuple[int, ...] = ()
    server: int | None = None
    bytes_per_step: float = 0.0
    reason: str
    seconds: float | None = None
    runner_up: Placement | None = None
    runner_up_seconds: float | None = None
    runner_up_bytes: float | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold or add up more of it than others: its owners, or its server."""
        return self.owners if self.server is None else (self.server,)

    def __post_init__(self) -> None:
        if (self.server is not None) != (self.placement is Placement.SERVED):
            raise ValueError(
                f"plan of {self.name!r}: a server is given for placement 'served' and for no other, "
                f"got placement {self.placement.value!r} with server {self.server}"
            )
        if bool(self.owners) != (self.placement is Placement.SHARDED):
            raise ValueError(
                f"plan of {self.name!r}: owners are given for placement 'sharded' and for no other, "
                f"got placement {self.placement.value!r} with owners {self.owners}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a step took and sent when it was watched: medians of a few steps, on average over the workers.

    `step_seconds` is all of it; in it are the seconds in calls that send or wait for others (`exchange_seconds`), those
    of the optimizers (`update_seconds`), and the rest: forward, backward, and what else the program does.
    """

    step_seconds: float
    exchange_seconds: float
    update_seconds: float
    bytes_per_step: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for a model: each parameter exactly once, in the model's order.

    `profiles` is what they were made from, in the same order; `topology` and `coefficients` are the links and the speed
    of machines, if these were known. `compute_seconds` is what forward and backward of a step take a worker, without
    exchange and optimizer, if that was measured, and `units_per_worker` the samples (words, images) that a worker
    trains on in a step. `step_seconds` is what a step is predicted to take, `measured` what it did take (of computing,
    what was measured is also what is predicted). `wire_dtype` is `Config.wire_dtype`, with one worker "float32":
    nothing travels.
    """

    world_size: int
    architecture: str
    parameters: tuple[ParameterPlan, ...]
    wire_dtype: str = "float32"
    profiles: tuple[ParameterProfile, ...] = ()
    topology: Topology | None = None
    coefficients: Coefficients | None = None
    compute_seconds: float | None = None
    units_per_worker: float | None = None
    step_seconds: float | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"a plan covers each parameter exactly once, but these occur twice: {twice}")
        if self.profiles:
            self.check_covers([p.name for p in self.profiles])

    def check_covers(self, names: Sequence[str]) -> None:
        """Raises ValueError, which names them, if parameters of `names` have no decision, or decisions no parameter."""
        mine = {p.name for p in self.parameters}
        missing, other = [n for n in names if n not in mine], sorted(mine - set(names))
        if missing or other:
            wrong = [f"these have no decision: {missing}"] if missing else []
            wrong += [f"these are not in the model: {other}"] if other else []
            raise ValueError(f"a plan covers each parameter exactly once, but {'; '.join(wrong)}")

    def __iter__(self) -> Iterator[ParameterPlan]:
        return iter(self.parameters)

    def __getitem__(self, name: str) -> ParameterPlan:
        for p in self.parameters:
            if p.name == name:
                return p
        raise KeyError(f"no parameter {name!r} in this plan; it has {[p.name for p in self.parameters]}")

    def to_json(self) -> str:
        return json.dumps(
            {
                "world_size": self.world_size,
                "architecture": self.architecture,
                "wire_dtype": self.wire_dtype,
                "parameters": [_plain(p) for p in self.parameters],
                "profiles": [_plain(p) for p in self.profiles],
                "topology": json.loads(self.topology.to_json()) if self.topology else None,
                "coefficients": vars(self.coefficients) if self.coefficients else None,
                "compute_seconds": self.compute_seconds,
                "units_per_worker": self.units_per_worker,
                "step_seconds": self.step_seconds,
                "measured": vars(self.measured) if self.measured else None,
            }
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for anything that `to_json` did not write."""
        try:
            data = json.loads(text)
            topology, coefficients = data["topology"], data["coefficients"]
            return Plan(
                world_size=data["world_size"],
                architecture=data["architecture"],
                wire_dtype=data["wire_dtype"],
                parameters=tuple(_read(ParameterPlan, row) for row in data["parameters"]),
                profiles=tuple(_read(ParameterProfile, row) for row in data["profiles"]),
                topology=None if topology is None else Topology.from_json(json.dumps(topology)),
                coefficients=None if coefficients is None else Coefficients(**coefficients),
                compute_seconds=data["compute_seconds"],
                units_per_worker=data["units_per_worker"],
                step_seconds=data["step_seconds"],
                measured=None if data["measured"] is None else Measured(**data["measured"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a saved plan: {type(error).__name__}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan, with what it was made from, as JSON: what `parallax plan --profile` reads."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Raises OSError if `path` cannot be read, ValueError if it has no plan."""
        return Plan.from_json(Path(path).read_text())

    def __str__(self) -> str:
        """A table in plain text, one line per parameter, for a terminal or a log."""
        head: tuple[str, ...] = ("parameter", "shape", "use", "alpha", "placement", "bytes/step", "reason")
        rows: list[tuple[str, ...]] = [
            (
                p.name,
                "x".join(str(size) for size in p.shape) or "scalar",
                "+".join(u.name.lower() for u in Use if u in p.use and u.name) or "none",
                f"{p.alpha:.3g}",
                p.placement.value,
                format_bytes(p.bytes_per_step),
                p.reason,
            )
            for p in self
        ]
        if any(p.seconds is not None for p in self):  # the links are known
            head = (*head[:-1], "predicted", head[-1])
            rows = [
                (*row[:-1], "" if p.seconds is None else format_seconds(p.seconds), row[-1])
                for row, p in zip(rows, self, strict=True)
            ]
        return "\n".join(
            [
                f"plan for {counted(self.world_size, 'worker')}, architecture {self.architecture}"
                f"{'' if self.wire_dtype == 'float32' else f', rows and gradients rounded to {self.wire_dtype}'} "
                f"(bytes/step: what one worker sends in one step)",
                *aligned([head, *rows], right=("alpha", "bytes/step", "predicted")),
                self._totals(),
            ]
        )

    def _totals(self) -> str:
        parts = []
        for placement in Placement:
            chosen = [p for p in self if p.placement is placement]
            if chosen:
                sent = format_bytes(sum(p.bytes_per_step for p in chosen))
                parts.append(f"{len(chosen)} {placement.value} {sent}")
        sent = format_bytes(sum(p.bytes_per_step for p in self))
        detail = f" ({', '.join(parts)})" if parts else ""
        total = f"total: {counted(len(self.parameters), 'parameter')}, {sent} per worker and step{detail}"
        if self.measured is None:
            return total
        m = self.measured
        step, exchange, update = map(format_seconds, (m.step_seconds, m.exchange_seconds, m.update_seconds))
        predicted = "" if self.step_seconds is None else f"{format_seconds(self.step_seconds)} predicted, "
        return (
            f"{total}; {format_bytes(m.bytes_per_step)} measured\n"
            f"a step: {predicted}{step} measured ({exchange} in exchanges, {update} in optimizers)"
        )


def _plain(row: ParameterPlan | ParameterProfile) -> dict[str, Any]:
    return {k: v.value if isinstance(v, enum.Enum) else v for k, v in vars(row).items()}


def _read(kind: type[Any], row: dict[str, Any]) -> Any:
    """What `_plain` made `row` of."""
    types = {"shape": tuple, "owners": tuple, "use": Use, "placement": Placement, "runner_up": Placement}
    return kind(**{k: types[k](v) if k in types and v is not None else v for k, v in row.items()})


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` for people, in B, KiB, MiB, GiB or TiB (powers of 1024)."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """`seconds` for people, in µs, ms or s, three digits."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[str]) -> list[str]:
    """Lines with the columns below each other; `right` names (by the first row) those set to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    sides = [">" if column[0] in right else "<" for column in columns]
    return [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
