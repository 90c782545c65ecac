"""Machines, their speed, and the links between them, as frozen data: what costs are reckoned with."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BYTES = {"bit": 1 / 8, "B": 1.0}
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What a message costs: `latency` seconds, and its bytes divided by `bandwidth` (bytes per second)."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not _is_number(self.latency) or not 0 <= self.latency < float("inf"):
            raise ValueError(f"Link.latency: expected seconds, at least 0, got {self.latency!r}")
        if not _is_number(self.bandwidth) or not self.bandwidth > 0:
            raise ValueError(f"Link.bandwidth: expected bytes per second, more than 0, got {self.bandwidth!r}")

    def seconds(self, num_bytes: float, num_messages: float = 0) -> float:
        """Of `num_bytes` in all, and `num_messages` that wait for each other."""
        return num_messages * self.latency + num_bytes / self.bandwidth

    @staticmethod
    def fit(samples: Sequence[tuple[float, float, float]]) -> Link:
        """The link that explains measured (messages one after the other, bytes, seconds) best: the smallest sum of
        squared relative errors, with a latency of at least 0.

        Raises:
            ValueError: fewer than two samples, or they do not tell the bandwidth (the bytes, or the times, are 0, or
                more bytes take less time).
        """
        usable = [(m / t, b / t) for m, b, t in samples if t > 0]
        if len(usable) < 2:
            raise ValueError(f"Link.fit: expected two or more samples that took time, got {len(usable)}")
        mm, mb, bb = (sum(s[i] * s[j] for s in usable) for i, j in ((0, 0), (0, 1), (1, 1)))
        m1, b1 = (sum(s[i] for s in usable) for i in (0, 1))
        determinant = mm * bb - mb * mb
        latency = per_byte = 0.0
        if determinant > 1e-12 * mm * bb:
            latency, per_byte = (m1 * bb - b1 * mb) / determinant, (b1 * mm - m1 * mb) / determinant
        if latency <= 0 and bb > 0:
            latency, per_byte = 0.0, b1 / bb
        if per_byte <= 0:
            raise ValueError(f"Link.fit: these samples do not tell a bandwidth: {list(samples)}")
        return Link(latency=latency, bandwidth=1 / per_byte)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """One network, for each way in which it is used: the same wires give different speeds."""

    allreduce: Link
    """Latency of one of the 2(N-1) steps of a ring; bandwidth of the stream to the next in the ring."""
    rounds: Link
    """Latency from each to each at once; bandwidth of all that a machine (inside one: a worker) sends to the others."""
    gathers: Link
    """As `rounds`, where everybody gets the same: rows of gradients gathered from all."""

    @staticmethod
    def same(link: Link) -> Links:
        return Links(allreduce=link, rounds=link, gathers=link)


LOOPBACK = Links.same(Link(latency=10e-6, bandwidth=5e9))
"""Inside a machine, where nobody said: what a memory copy between processes takes, roughly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """`machines` machines with `workers` workers each; ranks are numbered machine by machine, as torchrun does.

    `between` is what a whole machine can send to the others, `inside` what a worker can send inside a machine.
    """

    machines: int
    workers: int
    between: Links
    inside: Links = LOOPBACK
    slowness: float = 1.0
    """More than 0: how many times as long as `Coefficients` say work takes when all workers are at it, who may share
    cores."""

    def __post_init__(self) -> None:
        for field in ("machines", "workers"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Topology.{field}: expected a whole number, at least 1, got {value!r}")
        for field in ("between", "inside"):
            if not isinstance(getattr(self, field), Links):
                raise ValueError(f"Topology.{field}: expected Links, got {getattr(self, field)!r}")
        slow = self.slowness
        if isinstance(slow, bool) or not isinstance(slow, (int, float)) or not 0 < slow < math.inf:
            raise ValueError(f"Topology.slowness: expected a number greater than 0, got {slow!r}")

    @property
    def world_size(self) -> int:
        return self.machines * self.workers

    @staticmethod
    def of(
        *,
        machines: int = 1,
        workers: int = 1,
        bandwidth: str = "10Gbit",
        latency: str = "50us",
        inside_bandwidth: str | None = None,
        inside_latency: str | None = None,
    ) -> Topology:
        """From words: `Topology.of(machines=8, workers=6, bandwidth="100Gbit", latency="20us")`.

        Raises:
            ValueError: names the argument, and says what it may look like.
        """
        link = Link(latency=parse_seconds(latency, "latency"), bandwidth=parse_bytes_per_second(bandwidth, "bandwidth"))
        inside = LOOPBACK.rounds
        if inside_latency is not None:
            inside = dataclasses.replace(inside, latency=parse_seconds(inside_latency, "inside_latency"))
        if inside_bandwidth is not None:
            speed = parse_bytes_per_second(inside_bandwidth, "inside_bandwidth")
            inside = dataclasses.replace(inside, bandwidth=speed)
        return Topology(machines=machines, workers=workers, between=Links.same(link), inside=Links.same(inside))

    def check_fits(self, world_size: int) -> None:
        """Raises ValueError unless these are `world_size` workers."""
        if self.world_size != world_size:
            raise ValueError(
                f"topology: {self.machines} machines with {self.workers} workers each are {self.world_size} workers, "
                f"but there are {world_size}; measure again, or correct `machines` and `workers`"
            )

    def owners(self, num_partitions: int) -> tuple[int, ...]:
        """The rank that holds each partition: over the machines first, then over the workers of a machine."""
        ranks = [m * self.workers + w for w in range(self.workers) for m in range(self.machines)]
        if num_partitions == self.world_size:
            return tuple(range(self.world_size))
        return tuple(ranks[p % len(ranks)] for p in range(num_partitions))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Topology:
        """Raises ValueError, which names the field, for anything that is not a topology."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"topology: not JSON: {error}") from None
        if isinstance(data, dict):
            data = {"slowness": 1.0, **data}
        data = _fields(data, "topology", ("machines", "workers", "between", "inside", "slowness"))
        return Topology(
            machines=data["machines"],
            workers=data["workers"],
            between=_links(data["between"], "topology.between"),
            inside=_links(data["inside"], "topology.inside"),
            slowness=data["slowness"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Speeds of one worker, and what messages carry besides rows. The defaults are of one core of a server's CPU
    (rows of 1 KiB, float32, Adagrad; `benchmarks/coefficients.py` and `fixed.py` measure them); all more than 0 unless
    said.
    """

    copy: float = 7e9
    """Bytes per second copied or scaled from one tensor to another, as into a bucket and out of it."""

    fresh: float = 1.5e9
    """Bytes per second of a new tensor of zeros, as autograd makes for the gradient of a whole table."""

    merge: float = 2e9
    """Bytes per second of rows picked by ids, or added up by ids."""

    update: float = 0.7e9
    """Bytes per second of parameters that the optimizer updates when it goes through all of them."""

    update_rows: float = 0.4e9
    """Bytes per second of rows that the optimizer updates when it picks them out (sparse gradients, lazy rows)."""

    ids: float = 15e6
    """Ids per second that are sorted and rid of doubles."""

    header_bytes: float = 100.0
    """Bytes, at least 0: of a header, which each worker sends to each other one in each round."""

    message: float = 50e-6
    """Seconds, at least 0: of a worker's time for one message that it sends to one other worker."""

    partition: float = 0.0
    """Seconds per step, at least 0: for each partition of a table."""

    step: float = 2.5e-3
    """Seconds, at least 0: of a worker's time for a step with others, whatever is exchanged."""

    round: float = 0.6e-3
    """Seconds, at least 0: of a worker's time for a round, whatever it brings."""

    table: float = 0.5e-3
    """Seconds, at least 0: of a worker's time for a table in a round, however few rows of it travel."""

    bucket_bytes: float = 25 * 2**20
    """Bytes of dense gradients that are reduced in one AllReduce."""

    direct_bytes: float = 2**20
    """Bytes, at least 0: an AllReduce of up to so many takes 2 messages one after the other, a larger one is a ring."""

    overlap: float = 0.5
    """Between 0 and 1: the part of the time of computing during which buckets of dense gradients can travel."""

    merges_machines: bool = False
    """The workers of a machine merge what they ask owners for, and add up what they push, before it leaves it."""

    merges_gathers: bool = False
    """The workers of a machine merge their rows before these are gathered from all machines."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("merges_"):
                fine, expected = isinstance(value, bool), "True or False"
            else:
                number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                may_be_0 = field.name in (
                    "header_bytes", "message", "partition", "step", "round", "table", "direct_bytes", "overlap"
                )  # fmt: skip
                fine = number and (value >= 0 if may_be_0 else value > 0)
                expected = "a number, at least 0" if may_be_0 else "a number greater than 0"
                if field.name == "overlap":
                    fine, expected = fine and value <= 1, "a number between 0 and 1"
            if not fine:
                raise ValueError(f"Coefficients.{field.name}: expected {expected}, got {value!r}")


def parse_seconds(text: str, field: str) -> float:
    """Seconds that e.g. "20us" stands for.

    Raises:
        ValueError: names `field`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", str(text).strip().lower().replace("µ", "u"))
    if not match:
        raise ValueError(f'{field}: expected a time such as "20us", "1.5ms" or "0.3s", got {text!r}')
    return float(match[1]) / _PER_SECOND[match[2]]


def parse_bytes_per_second(text: str, field: str) -> float:
    """Bytes per second that e.g. "100Gbit" or "12.5GB" stands for (powers of 1000).

    Raises:
        ValueError: names `field`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGTmgt]?)(bit|B)(?:/s|ps)?", str(text).strip())
    value = float(match[1]) * _SCALE[match[2].lower()] * _BYTES[match[3]] if match else 0.0
    if value <= 0:
        raise ValueError(f'{field}: expected bits or bytes per second such as "100Gbit" or "12.5GB", got {text!r}')
    return value


def _fields(data: Any, where: str, names: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(names)}, got {data!r}")
    missing, unknown = [n for n in names if n not in data], sorted(set(data) - set(names))
    if missing or unknown:
        wrong = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is unknown"
        raise ValueError(f"{where}: {wrong}; expected {', '.join(names)}")
    return data


def _links(data: Any, where: str) -> Links:
    ways = [field.name for field in dataclasses.fields(Links)]
    found = {}
    for way, link in _fields(data, where, ways).items():
        try:
            found[way] = Link(**_fields(link, f"{where}.{way}", ("latency", "bandwidth")))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(where) else f"{where}.{way}: {text}") from None
    return Links(**found)
