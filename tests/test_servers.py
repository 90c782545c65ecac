"""`Config(architecture="ps")`: parameters live on servers, each on the one that serves the fewest bytes so far.

That it trains as one device does is in `test_exactness`, with the other architectures, and for buckets of all sizes
here; buckets of all dtypes are summed in `test_mesh`.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import ranks
import torch
from oracle import Case
from test_exactness import OPTIMIZERS, Recommender, make_batch, squares
from torch import nn

import parallax
from parallax.config import Config
from parallax.plan import ParameterPlan, ParameterProfile, Placement, Plan, Use
from parallax.planner import make_plan

SERVERS = Config(architecture="ps")
WIDE = 500
"""A square of it goes over the mesh in single precision (`comm.DIRECT_BYTES`), and not in double precision."""


def dense(name: str, *shape: int) -> ParameterProfile:
    return ParameterProfile(name=name, shape=shape, itemsize=4, use=Use.DENSE)


def table(name: str, num_rows: int, **fields: Any) -> ParameterProfile:
    used = {"use": Use.LOOKUP, "num_rows_touched": 5.0}
    return ParameterProfile(name=name, shape=(num_rows, 4), itemsize=4, **{**used, **fields})


def plan_of(*profiles: ParameterProfile, config: Config = SERVERS) -> dict[str, ParameterPlan]:
    return {p.name: p for p in make_plan(profiles, world_size=3, config=config)}


def test_the_largest_parameters_are_dealt_out_first() -> None:
    plan = plan_of(dense("a", 10), dense("b", 30), dense("c", 20), dense("d", 5), dense("e", 12))
    assert {name: p.server for name, p in plan.items()} == {"a": 2, "b": 0, "c": 1, "d": 1, "e": 2}
    assert {p.placement for p in plan.values()} == {Placement.SERVED}
    assert plan["b"].bytes_per_step == 2 * 120 * 2 / 3


def test_tables_are_cut_and_dealt_out_with_the_others() -> None:
    plan = plan_of(dense("w", 100), table("t", 90), table("u", 60), config=Config(architecture="ps", partitions=1))
    assert (plan["t"].owners, plan["u"].owners, plan["w"].server) == ((0,), (1,), 2)
    assert plan["t"].placement is Placement.SHARDED
    spread = plan_of(dense("w", 100), table("t", 90), table("u", 60))
    assert spread["t"].owners == spread["u"].owners == (0, 1, 2)
    two = plan_of(dense("w", 1000), table("t", 90), config=Config(architecture="ps", partitions=2))
    assert (two["w"].server, two["t"].owners) == (0, (1, 2))


def test_what_no_server_can_update_by_rows_is_served_whole() -> None:
    [decided] = plan_of(table("t", 90, across_rows="LBFGS looks at all of it")).values()
    assert decided.placement is Placement.SERVED
    assert "LBFGS" in decided.reason
    [tied] = plan_of(table("t", 90, use=Use.LOOKUP | Use.DENSE)).values()
    assert tied.placement is Placement.SERVED
    [frozen] = plan_of(table("t", 90, trainable=False)).values()
    assert frozen.placement is Placement.LOCAL


def test_plans_with_servers_are_saved_and_read() -> None:
    plan = make_plan([dense("w", 3), table("t", 9)], world_size=3, config=SERVERS)
    assert Plan.from_json(plan.to_json()) == plan
    assert "served" in str(plan)
    with pytest.raises(ValueError, match="plan of 'w': a server is given for placement 'served' and for no other"):
        ParameterPlan(name="w", shape=(3,), use=Use.DENSE, alpha=1.0, placement=Placement.SERVED, reason="")


def large(world_size: int) -> Case:
    """Two parameters that are too large for the mesh, on different servers, and others."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(3, world_size, 2, WIDE, generator=generator, dtype=torch.float64)
    return Case(
        model=lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE + 1), nn.Linear(WIDE + 1, 1)).double(),
        optimizers=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
        batches=[list(step) for step in inputs],
        loss=lambda model, batch: model(batch).square().mean(),
        config={"architecture": "ps"},
    )


def recommender(world_size: int, optimizer: str, **config: Any) -> Case:
    generator = torch.Generator().manual_seed(2)
    return Case(
        model=lambda: Recommender(False, torch.float64),
        optimizers=OPTIMIZERS[optimizer],
        batches=[
            [make_batch(1 + 3 * (rank % 2), torch.float64, generator) for rank in range(world_size)] for _ in range(4)
        ],
        loss=squares,
        config={"architecture": "ps", **config},
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_parameters_train_as_on_one_device(world_size: int) -> None:
    oracle.check_all(world_size, [(large,), (recommender, "Adam")])


@pytest.mark.parametrize("world_size", [3, 4])
def test_workers_of_a_machine_add_up_first(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")
    oracle.check_all(world_size, [(recommender, "Adam"), (recommender, "momentum"), (large,)])


def bytes_sent() -> tuple[int, int, list[int | None]]:
    """Of a step: (to others, to those of this machine), and who serves what."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 1, bias=False))
    parallax.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), config=SERVERS)
    for step in range(2):
        if step == 1:
            before = parallax.traffic(model)
        model(torch.ones(1, WIDE)).sum().backward()
    traffic = parallax.traffic(model) - before
    return traffic.dense_bytes, traffic.merging_bytes, [p.server for p in parallax.explain(model)]


def test_the_server_of_a_parameter_sends_it_to_all() -> None:
    size, tail = WIDE * WIDE * 4, 4 * (1 + 6)  # facts travel with gradients
    found = ranks.run(3, bytes_sent)
    assert [servers for _, _, servers in found] == [[0, 1]] * 3
    small = WIDE * 4 + tail
    assert [sent for sent, _, _ in found] == [2 * (size + tail) + small, size + tail + 2 * small, size + tail + small]


def test_one_worker_of_a_machine_sends_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")
    size, small = WIDE * WIDE * 4 + 28, WIDE * 4 + 28
    found = ranks.run(4, bytes_sent)  # servers are rank 0, for what is large, and rank 1
    assert [sent for sent, _, _ in found] == [size, small, size, small]
    assert [inside for _, inside, _ in found] == [size + small] * 4


def rounded(wire: str, architecture: str) -> list[torch.Tensor]:
    """The weights of a model of small layers in two precisions, after three steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float32, torch.float64) * 3]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.01)
    model = nn.ModuleList(layers)
    parallax.distribute(model, optimizer, config=parallax.Config(architecture=architecture, wire_dtype=wire))
    for step in range(3):
        x = torch.linspace(0, 1 + step + parallax.rank(), 16).view(2, 8)
        optimizer.zero_grad()
        for layer in model:
            x = layer(x.to(layer.weight.dtype)).tanh()
        x.square().mean().backward()
        optimizer.step()
    return [p.detach().double().clone() for p in model.parameters()]


@pytest.mark.parametrize("architecture", ["hybrid", "ps"])
def test_what_is_rounded_does_not_overtake_what_machines_add_up(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")
    found, exact = (ranks.run(4, rounded, wire, architecture) for wire in ("bfloat16", "float32"))
    for weights in found:
        for mine, first, right in zip(weights, found[0], exact[0], strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-3)
