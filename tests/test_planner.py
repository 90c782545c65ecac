"""Planner and cost: where each parameter goes, why, and what it costs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.config import Config
from parallax.cost import bytes_per_step, parameter_cost, shared_cost
from parallax.plan import ParameterPlan, ParameterProfile, Placement, Plan, Use, format_seconds
from parallax.planner import make_plan
from parallax.topology import Coefficients, Topology

HYBRID = Config()
GATHER = Config(architecture="allreduce")
DENSE = Config(architecture="allreduce", sparse_allreduce="dense")


def _profile(**fields: Any) -> ParameterProfile:
    """A table of 1000 rows of 64 bytes, 50 of which a worker looks up in a step."""
    usual = {"name": "w", "shape": (1000, 16), "itemsize": 4, "use": Use.LOOKUP, "num_rows_touched": 50.0}
    return ParameterProfile(**{**usual, **fields})


def _decide(config: Config = HYBRID, world_size: int = 4, **fields: Any) -> ParameterPlan:
    [decided] = make_plan([_profile(**fields)], world_size=world_size, config=config)
    return decided


class TestCost:
    """Bytes sent by one worker: half of what arXiv 1808.02621, table 3, says is sent and received."""

    def test_allreduce(self) -> None:
        assert bytes_per_step(_profile(), Placement.ALLREDUCE, 4) == 2 * 64000 * 3 / 4

    def test_gather(self) -> None:
        assert bytes_per_step(_profile(), Placement.GATHER, 4) == 50 * (64 + 4) * 3

    def test_sharded(self) -> None:
        num_remote = 50 * 3 / 4
        assert bytes_per_step(_profile(), Placement.SHARDED, 4) == num_remote * (64 + 64 + 4)

    def test_sharded_and_frozen_has_no_gradients(self) -> None:
        assert bytes_per_step(_profile(trainable=False), Placement.SHARDED, 4) == 50 * 3 / 4 * (64 + 4)

    def test_sharded_and_used_whole_moves_every_row(self) -> None:
        used_whole = _profile(use=Use.DENSE | Use.LOOKUP)
        assert bytes_per_step(used_whole, Placement.SHARDED, 4) == 1000 * 3 / 4 * (64 + 64)

    @pytest.mark.parametrize("placement", [Placement.LOCAL, Placement.WATCHED])
    def test_nothing_travels(self, placement: Placement) -> None:
        assert bytes_per_step(_profile(), placement, 4) == 0

    @pytest.mark.parametrize("placement", list(Placement))
    def test_one_worker_sends_nothing(self, placement: Placement) -> None:
        assert bytes_per_step(_profile(), placement, 1) == 0

    @pytest.mark.parametrize("placement", list(Placement))
    def test_rows_that_do_not_exist_cost_nothing(self, placement: Placement) -> None:
        assert bytes_per_step(_profile(shape=(0, 16), num_rows_touched=0.0), placement, 4) == 0

    @settings(deadline=None)
    @given(
        width=st.integers(1, 10**4).map(lambda n: n * 1000),
        num_rows=st.integers(1, 10**7),
        touched=st.floats(0, 1),
        world_size=st.integers(1, 1000),
    )
    def test_wide_rows_cost_half_of_the_papers_table_3(
        self, width: int, num_rows: int, touched: float, world_size: int
    ) -> None:
        """The paper does not count ids: 4 bytes do not matter where a row is wide."""
        p = _profile(shape=(num_rows, width), num_rows_touched=touched * num_rows)
        w, alpha, n = p.num_bytes, p.alpha, world_size
        table_3 = {
            Placement.ALLREDUCE: 4 * w * (n - 1) / n,
            Placement.SHARDED: 4 * alpha * w * (n - 1) / n,
            Placement.GATHER: 2 * alpha * w * (n - 1),
        }
        for placement, num_bytes in table_3.items():
            assert bytes_per_step(p, placement, n) == pytest.approx(num_bytes / 2, rel=2e-3)

    def test_with_two_workers_owners_and_gathering_cost_the_same_but_for_ids(self) -> None:
        sharded, gathered = (bytes_per_step(_profile(), p, 2) for p in (Placement.SHARDED, Placement.GATHER))
        assert gathered - sharded == 50 * 4 / 2

    def test_with_many_workers_every_touched_row_is_remote(self) -> None:
        assert bytes_per_step(_profile(), Placement.SHARDED, 10**9) == pytest.approx(50 * (64 + 64 + 4))


@pytest.mark.parametrize("config", [HYBRID, GATHER, DENSE], ids=["hybrid", "gather", "dense"])
class TestEitherArchitecture:
    @pytest.mark.parametrize(
        "fields", [{}, {"use": Use.DENSE}, {"trainable": False}, {"use": Use.NONE}, {"meta": True}]
    )
    def test_one_worker(self, config: Config, fields: dict[str, Any]) -> None:
        decided = _decide(config, world_size=1, **fields)
        assert (decided.placement, decided.bytes_per_step) == (Placement.LOCAL, 0)
        assert decided.reason == "one worker: nothing to exchange"

    @pytest.mark.parametrize("use", [Use.NONE, Use.LOOKUP, Use.DENSE])
    def test_frozen(self, config: Config, use: Use) -> None:
        decided = _decide(config, trainable=False, use=use)
        assert (decided.placement, decided.bytes_per_step) == (Placement.LOCAL, 0)
        assert decided.reason == "frozen: no gradient, every worker has a copy"

    def test_not_used(self, config: Config) -> None:
        decided = _decide(config, use=Use.NONE, num_rows_touched=0.0)
        assert (decided.placement, decided.bytes_per_step) == (Placement.WATCHED, 0)
        assert decided.reason == "not used yet: decided when a step uses it"

    def test_used_whole(self, config: Config) -> None:
        decided = _decide(config, use=Use.DENSE)
        assert (decided.placement, decided.alpha) == (Placement.ALLREDUCE, 1.0)
        assert decided.bytes_per_step == 2 * 64000 * 3 / 4
        assert decided.reason == "used whole: its gradient has a value for every element"

    def test_used_both_ways(self, config: Config) -> None:
        decided = _decide(config, use=Use.DENSE | Use.LOOKUP)
        assert (decided.placement, decided.alpha) == (Placement.ALLREDUCE, 1.0)
        assert decided.reason == (
            "looked up and also used whole (as a tied weight is): its gradient has a value for every row, so "
            "it is reduced like a dense one"
        )


class TestLookedUp:
    def test_hybrid(self) -> None:
        decided = _decide(HYBRID)
        assert (decided.placement, decided.owners) == (Placement.SHARDED, (0, 1, 2, 3))
        assert (decided.alpha, decided.bytes_per_step) == (0.05, 4950)
        assert decided.reason == (
            "only looked up, a worker touches 50 of 1,000 rows (alpha 0.05) in a step: rows live on their "
            "owners, 4.8 KiB; reduced whole 93.8 KiB"
        )

    def test_gather(self) -> None:
        decided = _decide(GATHER)
        assert (decided.placement, decided.owners) == (Placement.GATHER, ())
        assert decided.bytes_per_step == 10200
        assert decided.reason == (
            "only looked up, a worker touches 50 of 1,000 rows (alpha 0.05) in a step: architecture "
            "'allreduce' gathers the touched rows of the gradient, 10.0 KiB; reduced whole 93.8 KiB"
        )

    def test_dense(self) -> None:
        decided = _decide(DENSE)
        assert (decided.placement, decided.owners) == (Placement.ALLREDUCE, ())
        assert decided.bytes_per_step == 96000
        assert decided.reason == (
            "only looked up, a worker touches 50 of 1,000 rows (alpha 0.05) in a step: architecture "
            "'allreduce' with sparse_allreduce='dense' reduces the whole gradient, 93.8 KiB; with its "
            "touched rows gathered 10.0 KiB"
        )

    def test_the_optimizer_needs_all_rows(self) -> None:
        decided = _decide(HYBRID, across_rows="LAMB's update of a row depends on other rows", num_rows_touched=2.5)
        assert (decided.placement, decided.owners) == (Placement.ALLREDUCE, ())
        assert decided.reason == (
            "only looked up, a worker touches 2.5 of 1,000 rows (alpha 0.0025) in a step, but "
            "LAMB's update of a row depends on other rows, so every worker needs the whole gradient"
        )

    @pytest.mark.parametrize("config", [GATHER, DENSE], ids=["gather", "dense"])
    def test_every_worker_updates_all_rows_anyway(self, config: Config) -> None:
        assert _decide(config, across_rows="LAMB's update of a row depends on other rows") == _decide(config)

    def test_lazy_rows(self) -> None:
        lazy = Config(lazy_rows=True)
        for decided in (_decide(lazy), make_plan([_profile()], world_size=1, config=lazy)["w"]):
            assert decided.placement is Placement.SHARDED
            assert "in a step, the only ones that are updated (lazy_rows): rows live on their owners" in decided.reason
        with pytest.raises(ValueError, match=r"'w': Config\.lazy_rows needs an optimizer that .* but LAMB's update"):
            _decide(lazy, across_rows="LAMB's update of a row depends on other rows")

    @pytest.mark.parametrize("shape", [(1, 16), (3,), (1000, 1)])
    def test_small_tables_have_owners_too(self, shape: tuple[int, ...]) -> None:
        assert _decide(HYBRID, shape=shape, num_rows_touched=1.0).owners == (0, 1, 2, 3)


class TestMeta:
    """Parameters that were built on the meta device have never existed whole, and never will."""

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"use": Use.NONE}, "; not used yet"),
            ({"use": Use.NONE, "across_rows": "..."}, "; not used yet"),
            ({"trainable": False}, "; frozen, only rows travel"),
            ({"trainable": False, "across_rows": "..."}, "; frozen, only rows travel"),
            ({}, "; a worker touches 50 of 1,000 rows (alpha 0.05) in a step, 4.8 KiB"),
            ({"use": Use.DENSE}, "; it is also used whole, and each whole read gathers it from all workers"),
            (
                {"use": Use.DENSE | Use.LOOKUP},
                "; it is also used whole, and each whole read gathers it from all workers",
            ),
        ],
    )
    def test_stays_split(self, fields: dict[str, Any], reason: str) -> None:
        decided = _decide(HYBRID, meta=True, **fields)
        assert (decided.placement, decided.owners) == (Placement.SHARDED, (0, 1, 2, 3))
        assert decided.reason == f"built on the meta device: each worker holds 1/4 of its 62.5 KiB{reason}"

    @pytest.mark.parametrize("use", [Use.LOOKUP, Use.DENSE, Use.LOOKUP | Use.DENSE])
    def test_the_optimizer_needs_all_rows(self, use: Use) -> None:
        with pytest.raises(ValueError, match="'w' was built") as caught:
            _decide(HYBRID, meta=True, across_rows="LAMB's update of a row depends on other rows", use=use)
        assert str(caught.value) == (
            "parameter 'w' was built on the meta device, to be split over the workers, but LAMB's "
            "update of a row depends on other rows, so no worker can update its part alone; build it on a "
            "real device, or train it with an optimizer that updates row by row (SGD, Adagrad, Adam, AdamW, "
            "RMSprop, SparseAdam)"
        )

    @pytest.mark.parametrize("config", [GATHER, DENSE], ids=["gather", "dense"])
    @pytest.mark.parametrize("fields", [{}, {"use": Use.NONE}, {"use": Use.DENSE}, {"trainable": False}])
    def test_the_architecture_keeps_all_rows_everywhere(self, config: Config, fields: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="'w' was built") as caught:
            _decide(config, meta=True, **fields)
        assert str(caught.value) == (
            "parameter 'w' was built on the meta device, to be split over the workers, but "
            "Config.architecture='allreduce' keeps every parameter on every worker; build it on a real "
            "device, or use Config(architecture='hybrid')"
        )


def test_a_plan_keeps_the_models_order() -> None:
    names = ["b", "a", "c"]
    plan = make_plan([_profile(name=n) for n in names], world_size=3, config=HYBRID)
    assert [p.name for p in plan] == names
    assert (plan.world_size, plan.architecture) == (3, "hybrid")


def test_a_name_that_occurs_twice() -> None:
    with pytest.raises(ValueError, match=r"occur twice: \['w'\]"):
        make_plan([_profile(), _profile()], world_size=3, config=HYBRID)


FOUR = Topology.of(machines=4, bandwidth="1Gbit", latency="100us")


class TestPredicted:
    """With the links known, what decides is the predicted time of the step."""

    def _decide(self, topology: Topology = FOUR, config: Config = HYBRID, **fields: Any) -> ParameterPlan:
        big = {"shape": (10_000, 256), "num_rows_touched": 500.0, **fields}
        return make_plan([_profile(**big)], world_size=4, config=config, topology=topology)["w"]

    def test_a_sparse_table_has_owners(self) -> None:
        decided = self._decide()
        assert (decided.placement, decided.runner_up) == (Placement.SHARDED, Placement.GATHER)
        assert decided.owners == (0, 1, 2, 3)
        assert decided.seconds is not None
        assert decided.runner_up_seconds is not None
        assert decided.seconds < decided.runner_up_seconds
        assert decided.runner_up_bytes == bytes_per_step(
            _profile(shape=(10_000, 256), num_rows_touched=500.0), Placement.GATHER, 4
        )

    def test_the_reason_has_the_figures(self) -> None:
        decided = self._decide()
        assert decided.seconds is not None
        assert decided.runner_up_seconds is not None
        assert decided.reason == (
            "only looked up, a worker touches 500 of 10,000 rows (alpha 0.05) in a step: with its rows on their "
            f"owners, {format_seconds(decided.seconds)} of a step predicted; with its touched rows gathered "
            f"{format_seconds(decided.runner_up_seconds)}"
        )

    def test_a_table_that_is_nearly_dense_is_reduced(self) -> None:
        """Two workers on a machine send each of its rows twice, but one stream of a ring leaves it."""
        pairs = Topology.of(machines=2, workers=2, bandwidth="100Mbit", latency="100us")
        decided = self._decide(pairs, num_rows_touched=9_900.0)
        assert (decided.placement, decided.runner_up) == (Placement.ALLREDUCE, Placement.SHARDED)
        assert "reduced whole, " in decided.reason
        assert self._decide(pairs, num_rows_touched=500.0).placement is Placement.SHARDED

    def test_a_small_table_is_not_worth_a_round(self) -> None:
        slow = Topology.of(machines=4, bandwidth="10Gbit", latency="5ms")
        assert self._decide(slow, shape=(100, 16), num_rows_touched=5.0).placement is Placement.GATHER

    def test_a_round_that_there_is_anyway_costs_nothing(self) -> None:
        slow = Topology.of(machines=4, bandwidth="10Gbit", latency="5ms")
        alone = _profile(name="small", shape=(1000, 256), num_rows_touched=300.0)
        forced = _profile(name="meta", meta=True)
        pair = make_plan([forced, alone], world_size=4, config=HYBRID, topology=slow)
        assert make_plan([alone], world_size=4, config=HYBRID, topology=slow)["small"].placement is Placement.GATHER
        assert pair["small"].placement is Placement.SHARDED

    @pytest.mark.parametrize(
        ("fields", "placement"),
        [
            ({"use": Use.DENSE}, Placement.ALLREDUCE),
            ({"use": Use.DENSE | Use.LOOKUP}, Placement.ALLREDUCE),
            ({"use": Use.NONE}, Placement.WATCHED),
            ({"trainable": False}, Placement.LOCAL),
            ({"meta": True, "num_rows_touched": 10_000.0}, Placement.SHARDED),
            ({"renormed": True, "num_rows_touched": 10_000.0}, Placement.SHARDED),
        ],
    )
    def test_where_there_is_no_choice(self, fields: dict[str, Any], placement: Placement) -> None:
        decided = self._decide(**fields)
        assert (decided.placement, decided.runner_up) == (placement, None)
        assert "predicted" not in decided.reason

    def test_what_an_optimizer_or_a_lookup_needs_is_kept(self) -> None:
        everything = {"num_rows_touched": 10_000.0}
        assert self._decide(across_rows="LAMB", num_rows_touched=1.0).placement is not Placement.SHARDED
        assert self._decide(by_frequency=True, **everything).placement is not Placement.ALLREDUCE
        assert self._decide(config=Config(lazy_rows=True), **everything).placement is not Placement.ALLREDUCE

    def test_other_architectures_are_what_they_say(self) -> None:
        assert self._decide(config=GATHER, num_rows_touched=9_900.0).placement is Placement.GATHER
        assert self._decide(config=DENSE, num_rows_touched=1.0).placement is Placement.ALLREDUCE

    def test_the_topology_has_to_fit(self) -> None:
        with pytest.raises(ValueError, match="are 4 workers, but there are 8"):
            make_plan([_profile()], world_size=8, config=HYBRID, topology=FOUR)

    @settings(deadline=None, max_examples=60)
    @given(
        tables=st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 512), st.floats(0, 1)), min_size=1, max_size=3),
        latency=st.sampled_from(["1us", "200us", "5ms"]),
        bandwidth=st.sampled_from(["50Mbit", "1Gbit", "100Gbit"]),
    )
    def test_no_other_plan_is_predicted_to_be_faster(
        self, tables: list[tuple[int, int, float]], latency: str, bandwidth: str
    ) -> None:
        topology = Topology.of(machines=4, latency=latency, bandwidth=bandwidth)
        profiles = [
            _profile(name=str(i), shape=(rows, width), num_rows_touched=alpha * rows)
            for i, (rows, width, alpha) in enumerate(tables)
        ]

        def seconds(ways: tuple[Placement, ...]) -> float:
            c = Coefficients()
            costs = (parameter_cost(p, way, topology, c) for p, way in zip(profiles, ways, strict=True))
            return sum(costs, shared_cost(zip(profiles, ways, strict=True), topology, c)).seconds

        plan = make_plan(profiles, world_size=4, config=HYBRID, topology=topology)
        ways = (Placement.SHARDED, Placement.ALLREDUCE, Placement.GATHER)
        least = min(map(seconds, itertools.product(ways, repeat=len(profiles))))
        assert seconds(tuple(p.placement for p in plan)) <= least * 1.001


class TestPartitions:
    def test_of_all_tables(self) -> None:
        assert _decide(Config(partitions=2)).owners == (0, 1)
        assert _decide(Config(partitions=6)).owners == (0, 1, 2, 3, 0, 1)

    def test_of_one_table_as_a_search_found(self) -> None:
        tables = [_profile(name="a"), _profile(name="b")]
        plan = make_plan(tables, world_size=4, config=HYBRID, partitions={"b": 3})
        assert (len(plan["a"].owners), len(plan["b"].owners)) == (4, 3)

    def test_machines_first(self) -> None:
        topology = Topology.of(machines=2, workers=2, bandwidth="100Mbit")
        wide = _profile(shape=(10**6, 256))
        plan = make_plan([wide], world_size=4, config=Config(partitions=2), topology=topology)
        assert plan["w"].owners == (0, 2)


class TestChosen:
    """`Config.placements`."""

    @pytest.mark.parametrize("placement", ["allreduce", "gather", "sharded"])
    @pytest.mark.parametrize("topology", [None, FOUR])
    def test_counts_more_than_any_prediction(self, placement: str, topology: Topology | None) -> None:
        config = Config(placements={"w": placement})
        decided = make_plan([_profile()], world_size=4, config=config, topology=topology)["w"]
        assert decided.placement == placement
        assert decided.reason == "chosen by Config.placements['w']"

    def test_the_first_pattern_that_matches_counts(self) -> None:
        profiles = [_profile(name=n) for n in ("encoder.embed", "encoder.types", "decoder.embed")]
        config = Config(placements={"encoder.embed": "allreduce", "*.embed": "gather"})
        plan = make_plan(profiles, world_size=4, config=config)
        assert [p.placement.value for p in plan] == ["allreduce", "sharded", "gather"]

    def test_one_worker_has_no_choice_but_names_are_checked(self) -> None:
        assert _decide(Config(placements={"w": "gather"}), world_size=1).placement is Placement.LOCAL
        with pytest.raises(ValueError, match="no parameter matches 'v'"):
            _decide(Config(placements={"v": "gather"}), world_size=1)

    def test_what_was_not_used_yet_is_watched_first(self) -> None:
        assert _decide(Config(placements={"w": "gather"}), use=Use.NONE).placement is Placement.WATCHED

    def test_a_pattern_that_matches_nothing(self) -> None:
        profiles = [_profile(name=n) for n in ("encoder.embed.weight", "decoder.embed.weight", "head.bias")]
        with pytest.raises(ValueError, match="no parameter matches") as caught:
            make_plan(profiles, world_size=4, config=Config(placements={"encoder.embd.weight": "gather"}))
        assert str(caught.value) == (
            "Config.placements: no parameter matches 'encoder.embd.weight'; near it: 'encoder.embed.weight', "
            "'decoder.embed.weight'"
        )
        with pytest.raises(
            ValueError, match=r"'zz\*'; there are 'encoder.embed.weight', 'decoder.embed.weight', 'head"
        ):
            make_plan(profiles, world_size=4, config=Config(placements={"zz*": "gather"}))

    @pytest.mark.parametrize(
        ("placement", "fields", "why"),
        [
            ("sharded", {"use": Use.DENSE}, "it is used whole, and owners only give out rows"),
            ("sharded", {"across_rows": "LAMB needs all rows"}, "LAMB needs all rows"),
            ("sharded", {"trainable": False}, "it is frozen, so nothing travels"),
            ("gather", {"use": Use.LOOKUP | Use.DENSE}, "it is used whole: its gradient has a value for every row"),
            ("gather", {"meta": True}, "it was built on the meta device, to be split over the workers"),
            ("allreduce", {"meta": True}, "it was built on the meta device, to be split over the workers"),
            ("allreduce", {"renormed": True}, "it is looked up with max_norm, which changes rows where they live"),
            (
                "allreduce",
                {"by_frequency": True},
                "it is looked up with scale_grad_by_freq, and only rows travel with counts of their lookups",
            ),
        ],
    )
    def test_a_placement_that_is_impossible(self, placement: str, fields: dict[str, Any], why: str) -> None:
        with pytest.raises(ValueError, match="cannot be") as caught:
            _decide(Config(placements={"w*": placement}), **fields)
        assert str(caught.value) == f"Config.placements['w*']: parameter 'w' cannot be {placement!r}: {why}"

    def test_impossible_with_other_settings(self) -> None:
        with pytest.raises(ValueError, match=r"Config.architecture='allreduce' keeps every parameter on every worker"):
            _decide(Config(architecture="allreduce", placements={"w": "sharded"}))
        with pytest.raises(ValueError, match=r"'w': Config\.lazy_rows needs an optimizer that .* but LAMB"):
            _decide(Config(lazy_rows=True, placements={"w": "gather"}), across_rows="LAMB needs all rows")
        with pytest.raises(ValueError, match=r"with Config.lazy_rows it has to be known which rows were looked up"):
            _decide(Config(lazy_rows=True, placements={"w": "allreduce"}))


def test_a_plan_knows_what_it_was_made_from() -> None:
    profiles = [_profile(name="a"), _profile(name="b", use=Use.DENSE)]
    plan = make_plan(profiles, world_size=4, config=HYBRID, topology=FOUR)
    assert (plan.profiles, plan.topology, plan.coefficients) == (tuple(profiles), FOUR, Coefficients())
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_says_what_it_does_not_cover() -> None:
    plan = make_plan([_profile(name="a"), _profile(name="b")], world_size=4, config=HYBRID)
    with pytest.raises(ValueError, match=r"exactly once, but these have no decision: \['b'\]"):
        dataclasses.replace(plan, parameters=plan.parameters[:1])
    with pytest.raises(ValueError, match=r"exactly once, but these are not in the model: \['b'\]"):
        dataclasses.replace(plan, profiles=plan.profiles[:1])
    with pytest.raises(ValueError, match=r"no decision: \['c'\]; these are not in the model: \['a', 'b'\]"):
        plan.check_covers(["c"])
