"""How many partitions: a search with few trials, given what a step takes with P of them.

As in arXiv 1808.02621, section on partitioning: t(P) = th0 + th1/P + th2·P, where th0 is what does not depend on P,
th1 the work that partitions share, th2 what each of them costs. All but `measure` is pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from parallax.plan import aligned, format_seconds

WORSE = 1.02
"""A trial ends a direction if it takes this many times the best one: less may be noise."""

Theta = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was tried, the fit, and the number of partitions to use; print it for a table."""

    best: int
    samples: tuple[tuple[int, float], ...]
    """(P, seconds), in the order in which they were tried."""
    theta: Theta
    """(th0, th1, th2) in seconds, each at least 0."""

    def predicted(self, num_partitions: int) -> float:
        """th0 + th1/P + th2·P, in seconds."""
        return _model(self.theta, num_partitions)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> SearchResult:
        """Raises ValueError for anything that `to_json` did not write."""
        try:
            data = json.loads(text)
            th0, th1, th2 = data["theta"]
            samples = tuple((int(p), float(t)) for p, t in data["samples"])
            return SearchResult(best=int(data["best"]), samples=samples, theta=(th0, th1, th2))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a saved search: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        th0, th1, th2 = map(format_seconds, self.theta)
        rows = [
            (str(p), format_seconds(t), format_seconds(self.predicted(p)), "best" if p == self.best else "")
            for p, t in sorted(self.samples)
        ]
        if self.best not in dict(self.samples):
            rows.append((str(self.best), "not tried", format_seconds(self.predicted(self.best)), "best"))
            rows.sort(key=lambda row: int(row[0]))
        lines = aligned([("partitions", "measured", "fit", ""), *rows], right=("partitions", "measured", "fit"))
        title = f"{self.best} partitions after {len(self.samples)} trials; fit {th0} + {th1}/P + {th2}·P"
        return "\n".join([title, *lines])


def search_partitions(
    measure: Callable[[int], float],
    *,
    start: int,
    max_partitions: int,
    min_partitions: int = 1,
    max_trials: int = 8,
) -> SearchResult:
    """The number of partitions with the shortest step.

    From `start` doubles, then halves, until a step takes longer; then tries where the fit has its minimum, until that
    was tried or the trials are used up.

    Args:
        measure: seconds of a step with P partitions; called at most once for each P.
        start: first P, usually the number of machines; brought between the limits.
        max_partitions: the largest P, usually the number of rows.
        min_partitions: the smallest P, for tables too large for fewer.
        max_trials: at least 1.

    Raises:
        ValueError: the limits leave nothing to try, or `measure` returned no time.
    """
    for name, value in (("start", start), ("min_partitions", min_partitions), ("max_trials", max_trials)):
        if value < 1:
            raise ValueError(f"partition search: expected {name} of at least 1, got {value}")
    if max_partitions < min_partitions:
        raise ValueError(
            f"partition search: expected max_partitions of at least min_partitions={min_partitions}, "
            f"got {max_partitions}"
        )
    tried: dict[int, float] = {}

    def trial(p: int) -> float:
        seconds = float(measure(p))
        if not 0 < seconds < float("inf"):
            raise ValueError(f"partition search: expected seconds of a step with {p} partitions, got {seconds}")
        tried[p] = seconds
        return seconds

    first = min(max(start, min_partitions), max_partitions)
    trial(first)
    outward = max_trials - 2 if max_trials > 4 else max_trials  # two are kept for where the fit has its minimum
    for double, budget in ((True, min(max_trials, outward // 2 + 2)), (False, outward)):
        p = first
        while len(tried) < budget:
            p = min(2 * p, max_partitions) if double else max(p // 2, min_partitions)
            if p in tried or trial(p) > WORSE * min(tried.values()):
                break
    while True:
        theta = fit(tuple(tried.items()))
        best = _best(theta, min_partitions, max_partitions, tried)
        if best in tried or len(tried) >= max_trials:
            break
        trial(best)
    if len(tried) < 3 or tried.get(best, 0.0) > WORSE * min(tried.values()):  # there the fit is no guide
        best = min(tried, key=lambda p: tried[p])
    return SearchResult(best=best, samples=tuple(tried.items()), theta=theta)


class _NotTried(Exception):
    """What `next_trial` has to know next."""


def next_trial(
    samples: Sequence[tuple[int, float]], *, start: int, max_partitions: int, min_partitions: int = 1
) -> int | SearchResult:
    """`search_partitions`, one trial at a time: the P to try after `samples`, or what came out.

    Args:
        samples: (P, seconds) of the trials so far, as this function asked for them.
    """
    known = dict(samples)

    def measured(p: int) -> float:
        if p not in known:
            raise _NotTried(p)
        return known[p]

    try:
        return search_partitions(measured, start=start, max_partitions=max_partitions, min_partitions=min_partitions)
    except _NotTried as missing:
        return int(missing.args[0])


def fit(samples: tuple[tuple[int, float], ...]) -> Theta:
    """(th0, th1, th2), none negative, with the smallest sum of squared relative errors over (P, seconds)."""
    p, t = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    terms = np.stack([np.ones_like(p), 1 / p, p], axis=1) / t[:, None]
    scales = np.linalg.norm(terms, axis=0)
    best, least = (0.0, 0.0, 0.0), math.inf
    for size in (1, 2, 3):
        for some in itertools.combinations(range(3), min(size, len(samples))):
            found, *_ = np.linalg.lstsq(terms[:, some] / scales[list(some)], np.ones_like(t), rcond=None)
            theta = np.zeros(3)
            theta[list(some)] = found / scales[list(some)]
            error = float(np.sum((terms @ theta - 1) ** 2))
            if (theta >= 0).all() and error < least * 0.999 - 1e-24:  # more terms have to explain more
                best, least = (float(theta[0]), float(theta[1]), float(theta[2])), error
    return best


def _model(theta: Theta, p: float) -> float:
    return theta[0] + theta[1] / p + theta[2] * p


def _best(theta: Theta, lowest: int, highest: int, tried: dict[int, float]) -> int:
    """The whole P between the limits where the fit is least; one that was tried if it is as good."""
    valley = math.sqrt(theta[1] / theta[2]) if theta[2] > 0 else (float(highest) if theta[1] > 0 else float(lowest))
    near = min(max(valley, lowest), highest)
    candidates = {math.floor(near), math.ceil(near), *tried}
    least = min(_model(theta, p) for p in candidates)
    good = [p for p in candidates if _model(theta, p) <= least * 1.005]
    return min(good, key=lambda p: (p not in tried, _model(theta, p)))
