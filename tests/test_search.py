"""The search for a number of partitions: few trials, near the best, whatever the noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallax.search import SearchResult, fit, next_trial, search_partitions

seconds = st.one_of(st.just(0.0), st.floats(1e-5, 10))


def _curve(th0: float, th1: float, th2: float) -> Callable[[int], float]:
    return lambda p: th0 + th1 / p + th2 * p


@settings(deadline=None, max_examples=150)
@given(
    th0=st.floats(1e-5, 10),
    th1=seconds,
    th2=seconds,
    start=st.integers(1, 64),
    lowest=st.integers(1, 64),
    highest=st.integers(64, 3000),
)
@example(th0=1e-5, th1=10.0, th2=1e-5, start=1, lowest=1, highest=3000)  # the best P is far from the start
@example(th0=1e-5, th1=1e-5, th2=10.0, start=64, lowest=1, highest=3000)
@example(th0=0.5, th1=0.0, th2=0.0, start=8, lowest=1, highest=64)
@example(th0=1e-5, th1=0.17, th2=1.0, start=64, lowest=1, highest=64)  # between P=1, where it rises, and nothing
def test_it_is_within_5_percent_of_trying_all(
    th0: float, th1: float, th2: float, start: int, lowest: int, highest: int
) -> None:
    measure, trials = _curve(th0, th1, th2), []
    result = search_partitions(
        lambda p: trials.append(p) or measure(p),  # type: ignore[func-returns-value]
        start=start,
        min_partitions=lowest,
        max_partitions=highest,
    )
    assert measure(result.best) <= 1.05 * min(map(measure, range(lowest, highest + 1)))
    assert len(trials) == len(set(trials)) <= 8
    assert all(lowest <= p <= highest for p in [*trials, result.best])
    assert [p for p, _ in result.samples] == trials


def test_with_noise_it_is_near_the_best() -> None:
    """3 % of noise on each trial, 200 searches: rarely more than 10 % off, and not by much."""
    draw = random.Random(7)
    worst = []
    for _ in range(200):
        measure = _curve(draw.uniform(0.01, 0.1), 10 ** draw.uniform(-2, 0), 10 ** draw.uniform(-5, -2))
        noisy = lambda p, measure=measure: measure(p) * draw.gauss(1, 0.03)  # noqa: E731
        best = search_partitions(noisy, start=8, max_partitions=512).best
        worst.append(measure(best) / min(map(measure, range(1, 513))))
    worst.sort()
    assert worst[180] < 1.1
    assert worst[-1] < 1.25


def test_it_starts_at_the_machines_and_doubles() -> None:
    result = search_partitions(_curve(0.01, 0.8, 0.0005), start=8, max_partitions=10**6)
    assert [p for p, _ in result.samples][:4] == [8, 16, 32, 64]
    assert 38 <= result.best <= 42  # sqrt(0.8 / 0.0005) = 40
    assert result.theta == pytest.approx((0.01, 0.8, 0.0005))


def test_one_trial_is_enough_where_there_is_no_choice() -> None:
    result = search_partitions(_curve(1, 1, 1), start=8, min_partitions=4, max_partitions=4)
    assert (result.best, result.samples) == (4, ((4, 5.25),))


def test_few_trials_are_all_it_takes() -> None:
    for most in range(1, 9):
        result = search_partitions(_curve(0.01, 1, 0.001), start=2, max_partitions=512, max_trials=most)
        assert len(result.samples) <= most


def test_a_fit_has_no_negative_terms() -> None:
    samples = tuple((p, 2 - 1 / p) for p in (1, 2, 4, 8))
    theta = fit(samples)  # least squares alone would have th1 = -1
    assert min(theta) >= 0
    assert theta[1] == 0


def test_it_prints_well() -> None:
    result = SearchResult(best=4, samples=((2, 0.03), (4, 0.02), (8, 0.025)), theta=(0.001, 0.05, 0.0015))
    assert str(result) == "\n".join(
        [
            "4 partitions after 3 trials; fit 1 ms + 50 ms/P + 1.5 ms·P",
            "partitions  measured      fit",
            "         2     30 ms    29 ms",
            "         4     20 ms  19.5 ms  best",
            "         8     25 ms  19.2 ms",
        ]
    )
    untried = SearchResult(best=5, samples=((2, 0.03), (8, 0.025)), theta=(0.001, 0.05, 0.0015))
    assert str(untried).splitlines()[3] == "         5  not tried  18.5 ms  best"


def test_it_is_cached_as_json() -> None:
    result = search_partitions(_curve(0.01, 0.8, 0.0005), start=8, max_partitions=512)
    assert SearchResult.from_json(result.to_json()) == result
    with pytest.raises(ValueError, match="not a saved search: KeyError: 'theta'"):
        SearchResult.from_json("{}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"start": 0}, "expected start of at least 1, got 0"),
        ({"min_partitions": 0}, "expected min_partitions of at least 1, got 0"),
        ({"max_trials": 0}, "expected max_trials of at least 1, got 0"),
        ({"min_partitions": 9}, "expected max_partitions of at least min_partitions=9, got 8"),
    ],
)
def test_limits_that_leave_nothing(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=f"partition search: {text}"):
        search_partitions(_curve(1, 1, 1), **{"start": 1, "max_partitions": 8, **arguments})


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_trial_without_a_time_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match="partition search: expected seconds of a step with 4 partitions, got"):
        search_partitions(lambda p: wrong, start=4, max_partitions=8)


def test_one_trial_at_a_time() -> None:
    curve = _curve(0.01, 0.8, 0.0005)
    whole = search_partitions(curve, start=8, max_partitions=512)
    samples: list[tuple[int, float]] = []
    while isinstance(p := next_trial(samples, start=8, max_partitions=512), int):
        samples.append((p, curve(p)))
    assert p == whole
    assert tuple(samples) == whole.samples
