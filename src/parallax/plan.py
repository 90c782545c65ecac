"""Plans: frozen data that says which way each parameter goes, and why.

A plan is made once by `planner.make_plan`, is equal on all ranks, and is applied many times.
Nothing in this file computes or communicates.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any


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
    LOCAL = "local"
    """A copy on each rank; nothing travels (one worker, or a frozen parameter)."""
    WATCHED = "watched"
    """Not used yet: a copy on each rank until a step uses it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterProfile:
    """What was observed of one parameter; equal on all ranks.

    `num_rows_touched` is the number of distinct rows that one worker looks up in one step, averaged
    over the workers. `across_rows` says why an optimizer cannot update a row by itself; empty if it can.
    `meta` marks a parameter that was built on the meta device and has never existed whole. `renormed` marks the
    weight of a module with max_norm: looking a row up changes it. `by_frequency` marks lookups with
    scale_grad_by_freq: the gradient of a row is divided by how often all workers looked it up.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """The decision for one parameter.

    `owners` maps partition p (the rows r with r mod len(owners) == p) to the rank that holds it; it is
    empty unless the placement is SHARDED. `bytes_per_step` is what one worker sends in one step, predicted
    from alpha (`cost.bytes_per_step`).
    """

    name: str
    shape: tuple[int, ...]
    use: Use
    alpha: float
    placement: Placement
    owners: tuple[int, ...] = ()
    bytes_per_step: float = 0.0
    reason: str

    def __post_init__(self) -> None:
        if bool(self.owners) != (self.placement is Placement.SHARDED):
            raise ValueError(
                f"plan of {self.name!r}: owners are given for placement 'sharded' and for no other, "
                f"got placement {self.placement.value!r} with owners {self.owners}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for a model: each parameter exactly once, in the model's order."""

    world_size: int
    architecture: str
    parameters: tuple[ParameterPlan, ...]

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"a plan covers each parameter exactly once, but these occur twice: {twice}")

    def __iter__(self) -> Iterator[ParameterPlan]:
        return iter(self.parameters)

    def __getitem__(self, name: str) -> ParameterPlan:
        for p in self.parameters:
            if p.name == name:
                return p
        raise KeyError(f"no parameter {name!r} in this plan; it has {[p.name for p in self.parameters]}")

    def to_json(self) -> str:
        def plain(value: Any) -> Any:
            return value.value if isinstance(value, enum.Enum) else value

        rows = [{k: plain(v) for k, v in vars(p).items()} for p in self.parameters]
        return json.dumps({"world_size": self.world_size, "architecture": self.architecture, "parameters": rows})

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        rows = tuple(
            ParameterPlan(
                **{
                    **row,
                    "shape": tuple(row["shape"]),
                    "owners": tuple(row["owners"]),
                    "use": Use(row["use"]),
                    "placement": Placement(row["placement"]),
                }
            )
            for row in data["parameters"]
        )
        return Plan(world_size=data["world_size"], architecture=data["architecture"], parameters=rows)

    def __str__(self) -> str:
        """A table in plain text, one line per parameter, for a terminal or a log."""
        head = ("parameter", "shape", "use", "alpha", "placement", "bytes/step", "reason")
        rows = [
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
        return "\n".join(
            [
                f"plan for {counted(self.world_size, 'worker')}, architecture {self.architecture} "
                f"(bytes/step: what one worker sends in one step)",
                *aligned([head, *rows], right=("alpha", "bytes/step")),
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
        return f"total: {counted(len(self.parameters), 'parameter')}, {sent} per worker and step{detail}"


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` for people, in B, KiB, MiB, GiB or TiB (powers of 1024)."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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
