"""Seconds and bytes of each placement; `test_planner.py` has the bytes of one worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.cost import parameter_cost, shared_cost
from parallax.plan import ParameterProfile, Placement, Use
from parallax.topology import Coefficients, Link, Links, Topology

FREE = Coefficients(
    copy=1e30,
    fresh=1e30,
    merge=1e30,
    update=1e30,
    update_rows=1e30,
    ids=1e30,
    header_bytes=0,
    message=0,
    step=0,
    round=0,
    table=0,
    direct_bytes=0,
)
MERGED = dataclasses.replace(FREE, merges_machines=True, merges_gathers=True)
ONLY_COUNTS = Link(latency=0, bandwidth=1)  # a second for a byte


def _table(**fields: Any) -> ParameterProfile:
    usual = {"name": "w", "shape": (1000, 250), "itemsize": 4, "use": Use.LOOKUP, "num_rows_touched": 50.0}
    return ParameterProfile(**{**usual, **fields})


def _machines(machines: int, workers: int = 1) -> Topology:
    free = Links.same(Link(latency=0, bandwidth=1e30))
    return Topology(machines=machines, workers=workers, between=Links.same(ONLY_COUNTS), inside=free)


@settings(deadline=None)
@given(
    width=st.integers(1, 1000).map(lambda n: n * 1000),
    num_rows=st.integers(1, 10**6),
    touched=st.floats(0, 1),
    machines=st.integers(2, 500),
)
def test_the_papers_table_3_is_the_limit(width: int, num_rows: int, touched: float, machines: int) -> None:
    """One worker per machine, rows so wide that ids do not count, work that costs nothing: what a machine sends is half
    of what table 3 of arXiv 1808.02621 says it sends and receives."""
    table = _table(shape=(num_rows, width), num_rows_touched=touched * num_rows)
    dense = _table(shape=(num_rows, width), use=Use.DENSE)
    w, alpha, n = table.num_bytes, table.alpha, machines
    table_3 = [
        (dense, Placement.ALLREDUCE, 4 * w * (n - 1) / n),
        (dense, Placement.SHARDED, 4 * w * (n - 1) / n),  # a parameter server
        (table, Placement.SHARDED, 4 * alpha * w * (n - 1) / n),
        (table, Placement.GATHER, 2 * alpha * w * (n - 1)),
        (table, Placement.ALLREDUCE, 4 * w * (n - 1) / n),
    ]
    for profile, placement, both_ways in table_3:
        cost = parameter_cost(profile, placement, _machines(n), FREE)
        assert cost.bytes_per_machine == pytest.approx(both_ways / 2, rel=2e-3)
        assert cost.seconds == pytest.approx(both_ways / 2, rel=2e-3)


class TestMachinesOfSeveralWorkers:
    def test_without_merging_each_worker_asks_for_itself(self) -> None:
        one, six = (parameter_cost(_table(), Placement.SHARDED, _machines(8, k), FREE) for k in (1, 6))
        assert six.bytes_per_machine == pytest.approx(6 * one.bytes_per_machine)

    def test_merged_rows_leave_once(self) -> None:
        merged = parameter_cost(_table(), Placement.SHARDED, _machines(8, 6), MERGED)
        rows = 1000 * (1 - (1 - 0.05) ** 6)
        assert merged.bytes_per_machine == pytest.approx(rows * 7 / 8 * (1000 + 1000 + 4))
        gathered = parameter_cost(_table(), Placement.GATHER, _machines(8, 6), MERGED)
        assert gathered.bytes_per_machine == pytest.approx(rows * 7 * (1000 + 4))

    def test_what_was_observed_counts_more_than_independent_draws(self) -> None:
        observed = _table(num_rows_by_machine=80.0)
        merged = parameter_cost(observed, Placement.SHARDED, _machines(8, 6), MERGED)
        assert merged.bytes_per_machine == pytest.approx(80 * 7 / 8 * (1000 + 1000 + 4))
        assert observed.alpha_by_machine(1) == observed.alpha == 0.05

    def test_a_dense_parameter_leaves_a_machine_as_often_as_merging_says(self) -> None:
        dense = _table(use=Use.DENSE)
        merged, apart = (parameter_cost(dense, Placement.SHARDED, _machines(8, 6), c) for c in (MERGED, FREE))
        assert merged.bytes_per_machine == pytest.approx(2 * dense.num_bytes * 7 / 8)
        assert apart.bytes_per_machine == pytest.approx(6 * 2 * dense.num_bytes * 7 / 8)

    @pytest.mark.parametrize("placement", [Placement.ALLREDUCE, Placement.GATHER, Placement.SHARDED])
    def test_on_one_machine_nothing_leaves_it(self, placement: Placement) -> None:
        slow_inside = Topology(machines=1, workers=4, between=Links.same(ONLY_COUNTS), inside=Links.same(ONLY_COUNTS))
        for coefficients in (FREE, MERGED):
            cost = parameter_cost(_table(), placement, slow_inside, coefficients)
            assert cost.bytes_per_machine == 0
            assert cost.wire > 0


@pytest.mark.parametrize("placement", list(Placement))
def test_one_worker_has_nothing_on_the_wire(placement: Placement) -> None:
    for coefficients in (FREE, MERGED):
        cost = parameter_cost(_table(), placement, _machines(1), coefficients)
        assert (cost.wire, cost.bytes_per_machine) == (0, 0)


class TestPartitions:
    def _bytes(self, owners: tuple[int, ...], **fields: Any) -> float:
        return parameter_cost(_table(**fields), Placement.SHARDED, _machines(4), FREE, owners=owners).bytes_per_machine

    def test_one_owner_sends_all_rows(self) -> None:
        assert self._bytes((0,)) == pytest.approx(50 * 3 * (1000 + 4))  # takes ids too: more than it sends

    def test_more_owners_share(self) -> None:
        sent = [self._bytes(tuple(range(p))) for p in (1, 2, 3, 4)]
        assert sent == sorted(sent, reverse=True)
        assert self._bytes((0, 1, 2, 3) * 2) == pytest.approx(sent[-1])

    def test_skew_makes_the_busiest_busier(self) -> None:
        assert self._bytes((0, 1, 2, 3), skew=2.0) == pytest.approx(self._bytes((0, 1)), rel=0.01)
        assert self._bytes((0,), skew=2.0) == self._bytes((0,))

    def test_each_has_its_price(self) -> None:
        priced = dataclasses.replace(FREE, partition=0.5)
        cost = parameter_cost(_table(), Placement.SHARDED, _machines(4), priced, owners=(0, 1, 2, 3, 0))
        assert cost.work == pytest.approx(2.5)


class TestWork:
    def _work(self, placement: Placement, coefficients: Coefficients, **fields: Any) -> float:
        return parameter_cost(_table(**fields), placement, _machines(4), coefficients).work

    def test_a_step_a_round_and_a_table_take_their_time(self) -> None:
        c = dataclasses.replace(FREE, step=1.0, round=10.0, table=100.0)
        machines = _machines(4)
        for placement, num_rounds in [(Placement.ALLREDUCE, 0), (Placement.GATHER, 1), (Placement.SHARDED, 2)]:
            assert self._work(placement, c) == pytest.approx(100 * num_rounds)
            tables = [(_table(), placement), (_table(), placement)]
            assert shared_cost(tables, machines, c).work == pytest.approx(1 + 10 * num_rounds), (
                "for all tables together"
            )
        assert self._work(Placement.SHARDED, c, use=Use.DENSE) < 1, "it is no table"
        assert shared_cost([(_table(), Placement.LOCAL)], _machines(1), c).work == 0

    @pytest.mark.parametrize("placement", list(Placement))
    def test_work_is_slower_where_workers_share_cores(self, placement: Placement) -> None:
        fast, slow = (dataclasses.replace(_machines(4), slowness=slowness) for slowness in (1.0, 3.0))
        c = Coefficients()
        costs = [
            parameter_cost(_table(), placement, t, c) + shared_cost([(_table(), placement)], t, c) for t in (fast, slow)
        ]
        assert costs[1].work == pytest.approx(3 * costs[0].work)
        assert costs[0].work > 0
        assert (costs[1].wire, costs[1].bytes_per_machine) == (costs[0].wire, costs[0].bytes_per_machine)

    def test_owners_update_a_part_and_copies_all(self) -> None:
        c = dataclasses.replace(FREE, update=1.0)
        assert self._work(Placement.SHARDED, c) == pytest.approx(1e6 / 4)
        assert self._work(Placement.ALLREDUCE, c) == pytest.approx(1e6)
        assert self._work(Placement.GATHER, c) == pytest.approx(1e6)

    def test_sparse_gradients_update_touched_rows(self) -> None:
        c = dataclasses.replace(FREE, update_rows=1.0)
        touched = 1 - 0.95**4
        assert self._work(Placement.SHARDED, c, sparse_gradient=True) == pytest.approx(touched * 1e6 / 4)
        assert self._work(Placement.GATHER, c, sparse_gradient=True) == pytest.approx(touched * 1e6)

    def test_sparse_gradients_are_made_dense_and_sparse_again_to_be_reduced(self) -> None:
        touched = 1 - 0.95**4  # of the rows, by any worker
        for priced, dense, sparse in [
            ({"update": 1.0}, 1e6, 0),
            ({"update_rows": 1.0}, 0, touched * 1e6),
            ({"fresh": 1.0}, 1e6, 1e6 + touched * 1e6),
            ({"merge": 1.0}, 50_000, 2 * 50_000 + touched * 1e6),
            ({"copy": 1.0}, 2e6, 2e6 - touched * 1e6),  # rows are picked instead
        ]:
            c = dataclasses.replace(FREE, **priced)
            assert self._work(Placement.ALLREDUCE, c) == pytest.approx(dense, abs=1e-6)
            assert self._work(Placement.ALLREDUCE, c, sparse_gradient=True) == pytest.approx(sparse, abs=1e-6)

    def test_gathered_rows_are_merged_everywhere(self) -> None:
        c = dataclasses.replace(FREE, merge=1.0)
        assert self._work(Placement.GATHER, c) == pytest.approx(50_000 * (1 + 4))
        assert self._work(Placement.SHARDED, c) == pytest.approx(50_000 * (1 + 2))

    def test_frozen_rows_are_not_updated(self) -> None:
        c = dataclasses.replace(FREE, update=1.0)
        assert self._work(Placement.SHARDED, c, trainable=False) == pytest.approx(0)


class TestShared:
    """What a model pays once, whatever the number of its tables."""

    LATE = Topology(
        machines=4,
        workers=1,
        between=Links.same(Link(latency=1.0, bandwidth=1e30)),
        inside=Links.same(Link(latency=0.1, bandwidth=1e30)),
    )

    def _shared(self, *placements: Placement, coefficients: Coefficients = FREE) -> float:
        chosen = [(_table(name=str(i)), placement) for i, placement in enumerate(placements)]
        return shared_cost(chosen, self.LATE, coefficients).seconds

    def test_tables_share_their_rounds(self) -> None:
        assert self._shared(Placement.SHARDED) == self._shared(Placement.SHARDED, Placement.SHARDED) == 3
        assert self._shared(Placement.GATHER) == 1
        assert self._shared(Placement.GATHER, Placement.SHARDED) == 3

    def test_a_bucket_takes_a_ring_of_messages(self) -> None:
        assert self._shared(Placement.ALLREDUCE) == self._shared(Placement.ALLREDUCE, Placement.ALLREDUCE) == 6
        small = dataclasses.replace(FREE, bucket_bytes=500_000.0)
        assert self._shared(Placement.ALLREDUCE, coefficients=small) == 12

    def test_a_small_bucket_takes_two_messages(self) -> None:
        direct = dataclasses.replace(FREE, direct_bytes=1_000_000.0)
        assert self._shared(Placement.ALLREDUCE, coefficients=direct) == 2
        assert self._shared(Placement.ALLREDUCE, Placement.ALLREDUCE, coefficients=direct) == 6
        small = dataclasses.replace(direct, bucket_bytes=600_000.0)  # a full one and a rest
        assert self._shared(Placement.ALLREDUCE, coefficients=small) == 4

    def test_messages_and_headers(self) -> None:
        priced = dataclasses.replace(FREE, message=10.0, header_bytes=100.0)
        cost = shared_cost([(_table(), Placement.SHARDED)], _machines(4), priced)
        assert (cost.work, cost.bytes_per_machine, cost.wire) == (3 * 3 * 10, 2 * 3 * 100, 600)

    def test_one_worker_waits_for_nobody(self) -> None:
        cost = shared_cost([(_table(), way) for way in Placement], _machines(1), Coefficients())
        assert cost.seconds == 0


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("copy", 0, "Coefficients.copy: expected a number greater than 0, got 0"),
        ("message", -1.0, "Coefficients.message: expected a number, at least 0, got -1.0"),
        ("overlap", 1.5, "Coefficients.overlap: expected a number between 0 and 1, got 1.5"),
        ("merges_machines", 1, "Coefficients.merges_machines: expected True or False, got 1"),
        ("ids", "many", "Coefficients.ids: expected a number greater than 0, got 'many'"),
    ],
)
def test_coefficients_are_checked(field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Coefficients(**{field: value})
