"""Machines and links as data: from words, from measurements, JSON both ways."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.topology import Link, Links, Topology, parse_bytes_per_second, parse_seconds

CLUSTER = Topology.of(machines=8, workers=6, bandwidth="100Gbit", latency="20us")


def test_from_words() -> None:
    assert (CLUSTER.machines, CLUSTER.workers, CLUSTER.world_size) == (8, 6, 48)
    assert CLUSTER.between == Links.same(Link(latency=20e-6, bandwidth=12.5e9))
    other = Topology.of(machines=2, inside_bandwidth="16GB", inside_latency="5 us")
    assert other.inside == Links.same(Link(latency=5e-6, bandwidth=16e9))


@pytest.mark.parametrize(
    ("text", "number"),
    [("100Gbit", 12.5e9), ("300Mbit", 37.5e6), ("1.5 kbit", 187.5), ("12.5GB", 12.5e9), ("10Gbit/s", 1.25e9)],
)
def test_bandwidths(text: str, number: float) -> None:
    assert parse_bytes_per_second(text, "bandwidth") == pytest.approx(number)


@pytest.mark.parametrize(("text", "number"), [("20us", 2e-5), ("20µs", 2e-5), ("1.5ms", 1.5e-3), ("0.3 s", 0.3)])
def test_times(text: str, number: float) -> None:
    assert parse_seconds(text, "latency") == pytest.approx(number)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"machines": 0}, "Topology.machines: expected a whole number, at least 1, got 0"),
        ({"workers": True}, "Topology.workers: expected a whole number, at least 1, got True"),
        ({"bandwidth": "fast"}, "bandwidth: expected bits or bytes per second such as .*, got 'fast'"),
        ({"bandwidth": "0Gbit"}, "bandwidth: expected bits or bytes per second such as .*, got '0Gbit'"),
        ({"bandwidth": "10Gb"}, "bandwidth: expected bits or bytes per second such as .*, got '10Gb'"),
        ({"latency": "20"}, "latency: expected a time such as .*, got '20'"),
        ({"inside_bandwidth": "1"}, "inside_bandwidth: expected bits or bytes"),
        ({"inside_latency": "-1us"}, "inside_latency: expected a time"),
    ],
)
def test_words_that_mean_nothing(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology.of(**arguments)  # type: ignore[arg-type]


def test_links_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Link.latency: expected seconds, at least 0, got -1"):
        Link(latency=-1, bandwidth=1)
    with pytest.raises(ValueError, match=r"Link.bandwidth: expected bytes per second, more than 0, got 0"):
        Link(latency=0, bandwidth=0)


def test_it_has_to_fit_the_ranks() -> None:
    CLUSTER.check_fits(48)
    with pytest.raises(ValueError, match="8 machines with 6 workers each are 48 workers, but there are 4; measure"):
        CLUSTER.check_fits(4)


def test_partitions_go_over_machines_first() -> None:
    two_by_two = Topology.of(machines=2, workers=2)
    assert two_by_two.owners(1) == (0,)
    assert two_by_two.owners(3) == (0, 2, 1)
    assert two_by_two.owners(4) == (0, 1, 2, 3)
    assert two_by_two.owners(5) == (0, 2, 1, 3, 0)


def test_json_both_ways() -> None:
    assert Topology.from_json(CLUSTER.to_json()) == CLUSTER


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["machines"], None, "topology: 'machines' is missing; expected machines, workers, between, inside"),
        (["between", "rounds"], None, "topology.between: 'rounds' is missing; expected allreduce, rounds, gathers"),
        (["inside", "gathers", "latency"], None, r"topology.inside.gathers: 'latency' is missing"),
        (["between", "rounds", "bandwidth"], -1, r"topology.between.rounds: Link.bandwidth: expected bytes per second"),
        (["racks"], 3, "topology: 'racks' is unknown"),
        (["between"], 3, "topology.between: expected an object with allreduce, rounds, gathers, got 3"),
        (["workers"], "6", "Topology.workers: expected a whole number, at least 1, got '6'"),
        (["slowness"], 0, "Topology.slowness: expected a number greater than 0, got 0"),
    ],
)
def test_json_that_is_no_topology(path: list[str], value: object, text: str) -> None:
    data = json.loads(CLUSTER.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=text):
        Topology.from_json(json.dumps(data))


def test_work_is_as_fast_as_usual_where_nobody_says() -> None:
    data = json.loads(dataclasses.replace(CLUSTER, slowness=2.5).to_json())
    assert Topology.from_json(json.dumps(data)).slowness == 2.5
    del data["slowness"]
    assert Topology.from_json(json.dumps(data)) == CLUSTER


def test_text_that_is_no_json() -> None:
    with pytest.raises(ValueError, match="topology: not JSON"):
        Topology.from_json("8x6")


class TestFit:
    @given(st.floats(0, 1e-2), st.floats(1e6, 1e11))
    def test_finds_the_link(self, latency: float, bandwidth: float) -> None:
        link = Link(latency=latency, bandwidth=bandwidth)
        samples = [(m, b, link.seconds(b, m)) for m in (1, 6) for b in (1e3, 1e6, 1e8)]
        found = Link.fit(samples)
        for messages, num_bytes, seconds in samples:
            assert found.seconds(num_bytes, messages) == pytest.approx(seconds, rel=1e-3)

    def test_noise_does_not_make_a_negative_latency(self) -> None:
        found = Link.fit([(1, 1e6, 0.9e-3), (1, 2e6, 2.1e-3)])
        assert found.latency == 0
        assert found.bandwidth == pytest.approx(1e9, rel=0.15)

    @pytest.mark.parametrize("samples", [[], [(1, 1e6, 1e-3)], [(1, 0, 1e-3), (1, 0, 2e-3)], [(1, 1, 2), (1, 9, 1)]])
    def test_samples_that_tell_nothing(self, samples: list[tuple[float, float, float]]) -> None:
        with pytest.raises(ValueError, match=r"Link.fit: "):
            Link.fit(samples)
