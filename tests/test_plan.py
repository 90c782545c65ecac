"""Plans as data: what is derived from a profile, JSON both ways, the printed table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.plan import ParameterPlan, ParameterProfile, Placement, Plan, Use, format_bytes, format_seconds
from parallax.topology import Coefficients, Topology


def _profile(**fields: Any) -> ParameterProfile:
    return ParameterProfile(**{"name": "w", "shape": (10, 4), "itemsize": 4, "use": Use.LOOKUP, **fields})


def _parameter(**fields: Any) -> ParameterPlan:
    return ParameterPlan(
        **{
            "name": "w",
            "shape": (10, 4),
            "use": Use.DENSE,
            "alpha": 1.0,
            "placement": Placement.ALLREDUCE,
            "reason": "used whole",
            **fields,
        }
    )


PLAN = Plan(
    world_size=4,
    architecture="hybrid",
    parameters=(
        _parameter(
            name="embed.weight",
            shape=(50000, 128),
            use=Use.LOOKUP,
            alpha=0.0123456,
            placement=Placement.SHARDED,
            owners=(0, 1, 2, 3),
            bytes_per_step=1536.0,
            reason="only looked up",
        ),
        _parameter(name="head.weight", shape=(7, 128), bytes_per_step=3 * 2**20),
        _parameter(name="tied", shape=(9,), use=Use.LOOKUP | Use.DENSE, bytes_per_step=12.0, reason="both"),
        _parameter(name="scale", shape=(), use=Use.NONE, alpha=0.0, placement=Placement.WATCHED, reason="not used"),
    ),
)


class TestProfile:
    def test_sizes(self) -> None:
        p = _profile(shape=(10, 4, 2), itemsize=2)
        assert (p.num_rows, p.numel, p.num_bytes, p.row_bytes) == (10, 80, 160, 16)

    def test_sizes_of_a_scalar(self) -> None:
        p = _profile(shape=())
        assert (p.num_rows, p.numel, p.num_bytes, p.row_bytes) == (1, 1, 4, 4)

    def test_sizes_without_rows(self) -> None:
        p = _profile(shape=(0, 4))
        assert (p.num_rows, p.num_bytes, p.row_bytes, p.alpha) == (0, 0, 0, 0.0)

    def test_alpha_is_the_fraction_of_rows_touched(self) -> None:
        assert _profile(num_rows_touched=2.5).alpha == 0.25

    @pytest.mark.parametrize("use", [Use.DENSE, Use.DENSE | Use.LOOKUP])
    def test_a_dense_use_touches_every_row(self, use: Use) -> None:
        assert _profile(use=use, num_rows_touched=2.5).alpha == 1.0


class TestPlan:
    def test_finds_a_parameter_by_name(self) -> None:
        assert PLAN["tied"].reason == "both"
        assert [p.name for p in PLAN] == ["embed.weight", "head.weight", "tied", "scale"]

    def test_names_what_it_has_when_asked_for_another(self) -> None:
        with pytest.raises(KeyError, match=r"no parameter 'x' in this plan; it has \['embed.weight', "):
            PLAN["x"]

    def test_covers_each_parameter_once(self) -> None:
        with pytest.raises(ValueError, match=r"each parameter exactly once, but these occur twice: \['w'\]"):
            Plan(world_size=1, architecture="hybrid", parameters=(_parameter(), _parameter()))

    def test_only_sharded_parameters_have_owners(self) -> None:
        with pytest.raises(ValueError, match=r"plan of 'w': .* got placement 'gather' with owners \(0,\)"):
            _parameter(placement=Placement.GATHER, owners=(0,))
        with pytest.raises(ValueError, match=r"plan of 'w': .* got placement 'sharded' with owners \(\)"):
            _parameter(placement=Placement.SHARDED)

    def test_does_not_change(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            PLAN.world_size = 2  # type: ignore[misc]


class TestJSON:
    def test_both_ways(self) -> None:
        assert Plan.from_json(PLAN.to_json()) == PLAN

    def test_is_plain_json(self) -> None:
        data = json.loads(PLAN.to_json())
        assert (data["world_size"], data["architecture"]) == (4, "hybrid")
        assert data["parameters"][0]["placement"] == "sharded"
        assert data["parameters"][0]["owners"] == [0, 1, 2, 3]

    @settings(deadline=None)
    @given(
        st.lists(
            st.builds(
                ParameterPlan,
                name=st.text(),
                shape=st.lists(st.integers(0, 10**12)).map(tuple),
                use=st.sampled_from([Use.NONE, Use.LOOKUP, Use.DENSE, Use.LOOKUP | Use.DENSE]),
                alpha=st.floats(0, 1),
                placement=st.sampled_from([p for p in Placement if p not in (Placement.SHARDED, Placement.SERVED)]),
                bytes_per_step=st.floats(0, 1e18),
                reason=st.text(),
            ),
            unique_by=lambda p: p.name,
        )
    )
    def test_both_ways_for_any_plan(self, parameters: list[ParameterPlan]) -> None:
        plan = Plan(world_size=3, architecture="allreduce", parameters=tuple(parameters))
        assert Plan.from_json(plan.to_json()) == plan
        assert str(plan)


class TestTable:
    def test_text(self) -> None:
        assert str(PLAN) == "\n".join(
            [
                "plan for 4 workers, architecture hybrid (bytes/step: what one worker sends in one step)",
                "parameter     shape      use            alpha  placement  bytes/step  reason",
                "embed.weight  50000x128  lookup        0.0123  sharded       1.5 KiB  only looked up",
                "head.weight   7x128      dense              1  allreduce     3.0 MiB  used whole",
                "tied          9          lookup+dense       1  allreduce        12 B  both",
                "scale         scalar     none               0  watched           0 B  not used",
                "total: 4 parameters, 3.0 MiB per worker and step "
                "(2 allreduce 3.0 MiB, 1 sharded 1.5 KiB, 1 watched 0 B)",
            ]
        )

    def test_text_without_parameters(self) -> None:
        assert str(Plan(world_size=1, architecture="allreduce", parameters=())) == "\n".join(
            [
                "plan for 1 worker, architecture allreduce (bytes/step: what one worker sends in one step)",
                "parameter  shape  use  alpha  placement  bytes/step  reason",
                "total: 0 parameters, 0 B per worker and step",
            ]
        )


class TestSaved:
    def test_both_ways(self, tmp_path: Path) -> None:
        topology = Topology.of(machines=2, workers=2)
        whole = dataclasses.replace(
            PLAN,
            parameters=(
                dataclasses.replace(
                    PLAN.parameters[0],
                    seconds=0.01,
                    runner_up=Placement.GATHER,
                    runner_up_seconds=0.02,
                    runner_up_bytes=3.0,
                ),
            ),
            profiles=(_profile(name="embed.weight", shape=(50000, 128), num_rows_by_machine=3.5, skew=1.25),),
            topology=topology,
            coefficients=Coefficients(copy=1e9),
            compute_seconds=0.125,
            units_per_worker=2560.0,
        )
        whole.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == whole

    @pytest.mark.parametrize(
        ("text", "error"),
        [("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError: 'topology'"), ("3", "TypeError")],
    )
    def test_something_else(self, text: str, error: str) -> None:
        with pytest.raises(ValueError, match=f"not a saved plan: {error}"):
            Plan.from_json(text)


class TestAlphaOfAMachine:
    def test_independent_draws(self) -> None:
        assert _profile(num_rows_touched=5.0).alpha_of(2) == pytest.approx(0.75)
        assert _profile(num_rows_touched=5.0).alpha_of(1) == 0.5
        assert _profile(num_rows_touched=10.0).alpha_of(3) == _profile(use=Use.DENSE).alpha_of(3) == 1.0
        assert _profile(shape=(10**9, 1), num_rows_touched=1e-3).alpha_of(8) == pytest.approx(8e-12)

    def test_as_observed(self) -> None:
        observed = _profile(num_rows_touched=5.0, num_rows_by_machine=6.0)
        assert (observed.alpha_by_machine(2), observed.alpha_by_machine(1)) == (0.6, 0.5)
        assert dataclasses.replace(observed, use=Use.DENSE).alpha_by_machine(2) == 1.0


def test_seconds_of_a_step_are_a_column_where_they_are_known() -> None:
    known = dataclasses.replace(PLAN.parameters[0], seconds=0.00123)
    lines = str(dataclasses.replace(PLAN, parameters=(known, PLAN.parameters[1]))).splitlines()
    assert lines[1].split() == ["parameter", "shape", "use", "alpha", "placement", "bytes/step", "predicted", "reason"]
    assert lines[2].endswith("1.5 KiB    1.23 ms  only looked up")
    assert lines[3].endswith("3.0 MiB             used whole")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (12.3456e-6, "12.3 µs"), (999.7e-6, "1 ms"), (0.5, "500 ms"), (0.9997, "1 s"), (75, "75 s")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (0.4, "0 B"),
        (1023, "1023 B"),
        (1023.97, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (3.25 * 2**30, "3.2 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_for_people(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
