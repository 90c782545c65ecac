"""What travels in fewer bits: how far it is off, what it saves, and what stays exact."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import nn

import parallax
from parallax.config import WireDtype
from parallax.cost import bytes_per_step, parameter_cost, wire_row
from parallax.plan import ParameterProfile, Placement, Use
from parallax.planner import make_plan
from parallax.topology import Coefficients, Topology
from parallax.wire import bucket_dtype, decode, encode, new_encoded

WIRES = get_args(WireDtype)
ROUNDING: list[WireDtype] = ["bfloat16", "float16", "int8"]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")

every_wire = pytest.mark.parametrize("wire", WIRES)
rounding = pytest.mark.parametrize("wire", ROUNDING)
every_float = pytest.mark.parametrize("dtype", FLOATS)


def there_and_back(rows: torch.Tensor, wire: WireDtype) -> torch.Tensor:
    return decode(encode(rows, wire), rows.dtype)


def draw(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.randint(-3, 3, (num_rows, 1), generator=generator)
    return (torch.randn(num_rows, width, generator=generator) * sizes).to(dtype)


# -- the codec ----------------------------------------------------------------------------------------


@every_float
@every_wire
@pytest.mark.parametrize("shape", [(50, 16), (50, 1), (1, 300), (0, 16), (3, 0)])
def test_rounding_is_bounded(shape: tuple[int, int], wire: WireDtype, dtype: torch.dtype) -> None:
    rows = draw(*shape, dtype)
    found = there_and_back(rows, wire)
    assert (found.shape, found.dtype) == (rows.shape, dtype)
    way, _ = wire_row(shape[1], dtype.itemsize, wire)
    error, size = (found.double() - rows.double()).abs(), rows.double().abs()
    if way == "float32":
        assert torch.equal(found, rows)
    elif way == "int8":
        bound = size.amax(1, keepdim=True) * (0.5 / 127 + 2**-23)
        assert bool((error <= bound + size * torch.finfo(dtype).eps / 2).all())  # to the nearest step, then to dtype
    else:
        smallest = torch.finfo(getattr(torch, way)).smallest_normal
        assert bool((error <= size * torch.finfo(getattr(torch, way)).eps / 2 + smallest).all())


@every_float
@every_wire
def test_room_is_for_what_is_encoded(wire: WireDtype, dtype: torch.dtype) -> None:
    for width in (0, 1, 4, 5, 16):
        encoded = encode(draw(7, width, dtype), wire)
        made = new_encoded(7, width, dtype, wire, CPU)
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in encoded]
        assert sum(t.nbytes for t in encoded) == 7 * wire_row(width, dtype.itemsize, wire)[1]
        assert all(t.is_contiguous() for t in encoded)


@pytest.mark.parametrize(
    ("width", "itemsize", "wire", "expected"),
    [
        (256, 4, "float32", ("float32", 1024)),
        (256, 8, "float32", ("float32", 2048)),
        (256, 4, "bfloat16", ("bfloat16", 512)),
        (256, 8, "float16", ("float16", 512)),
        (256, 2, "float16", ("float32", 512)),
        (256, 4, "int8", ("int8", 260)),
        (256, 2, "int8", ("int8", 260)),
        (5, 4, "int8", ("int8", 9)),
        (4, 4, "int8", ("bfloat16", 8)),  # not larger, and loses less
        (1, 4, "int8", ("bfloat16", 2)),
        (1, 2, "int8", ("float32", 2)),
        (0, 4, "bfloat16", ("float32", 0)),
    ],
)
def test_the_smallest_way_that_loses_least(width: int, itemsize: int, wire: WireDtype, expected: Any) -> None:
    assert wire_row(width, itemsize, wire) == expected


def test_int8_uses_all_steps_and_keeps_zeros() -> None:
    rows = torch.tensor([[0.0] * 6, [1.0, -1.0, 0.5, 1e-9, 0.0, -0.25], [1e-44] + [0.0] * 5])
    steps, scales = encode(rows, "int8")
    assert steps[:2].tolist() == [[0] * 6, [127, -127, 64, 0, 0, -32]]
    torch.testing.assert_close(scales[:, 0], torch.tensor([0.0, 1 / 127, 0.0]))
    assert bool(there_and_back(rows, "int8").isfinite().all())


@rounding
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(bad: float, dtype: torch.dtype, wire: WireDtype) -> None:
    rows = draw(3, 8, dtype)
    rows[1, 5] = bad
    found = there_and_back(rows, wire)
    assert not found[1, 5].isfinite()
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.parametrize(("wire", "value"), [("float16", 7e4), ("bfloat16", 1e39), ("int8", 1e41)])
def test_what_is_out_of_range_becomes_visible(wire: WireDtype, value: float) -> None:
    assert not bool(there_and_back(torch.full((1, 8), value, dtype=torch.float64), wire).isfinite().any())


def test_buckets_have_no_int8() -> None:
    found = {wire: [bucket_dtype(d, wire) for d in (torch.float64, torch.float16, torch.complex64)] for wire in WIRES}
    as_they_are = [torch.float16, torch.complex64]
    assert found == {
        "float32": [torch.float64, *as_they_are],
        "bfloat16": [torch.bfloat16, *as_they_are],
        "float16": [torch.float16, *as_they_are],
        "int8": [torch.bfloat16, *as_they_are],
    }


# -- training -----------------------------------------------------------------------------------------

ROWS, WIDTH, LR, STEPS = 40, 8, 0.1, 4
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "gather": {"architecture": "allreduce"},
    "dense": {"architecture": "allreduce", "sparse_allreduce": "dense"},
}


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(ROWS, width)
        self.bias = nn.Embedding(ROWS, 1)
        self.layer = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.layer(self.table(ids).sum(1)) + self.bias(ids).sum(1)).square().mean()


def batch_size(rank: int) -> int:
    return 6 + rank * (rank + 1) // 2  # weights that 16 bits cannot hold


def ids_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(ROWS, (batch_size(rank), 3), generator=torch.Generator().manual_seed(100 * rank + step))


def trained(wire: WireDtype, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire, **options))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(ids_of(parallax.rank(), step)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def rounded_on_one_device(
    world_size: int, wire: WireDtype, architecture: str, per_machine: int = 1
) -> dict[str, torch.Tensor]:
    """Each rank's forward pass on rounded rows, the sum of its rounded gradients (of rows: its machine's): what
    `Config.wire_dtype` says."""
    weights = Model().state_dict()
    parts = [batch_size(rank) / batch_size(world_size - 1) for rank in range(world_size)]
    for step in range(STEPS):
        sums = {name: torch.zeros_like(w) for name, w in weights.items()}
        merges = per_machine if architecture == "hybrid" and step else 1  # in the first step all have copies
        reduced = ("layer", "table", "bias") if architecture == "dense" and step else ("layer",)
        of_machine: dict[tuple[int, str], torch.Tensor] = {}
        for rank in range(world_size):
            model = Model()
            pulled = {n: there_and_back(w, wire) if not n.startswith("layer") else w for n, w in weights.items()}
            model.load_state_dict(pulled if architecture == "hybrid" and step else weights)
            model(ids_of(rank, step)).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                if name.startswith(reduced):
                    part = p.grad * (parts[rank] / world_size)
                    sums[name] += world_size * part.to(bucket_dtype(p.dtype, wire)).float()
                elif merges == 1:
                    sums[name] += parts[rank] * there_and_back(p.grad, wire)
                else:
                    machine = rank // merges, name
                    of_machine[machine] = of_machine.get(machine, torch.zeros(())) + parts[rank] * p.grad
        for (_, name), total in of_machine.items():
            sums[name] += there_and_back(total, wire)
        for name, total in sums.items():
            if name.startswith(reduced):
                total = world_size * (total / world_size).to(bucket_dtype(total.dtype, wire)).float()
            weights[name] -= LR * total / sum(parts)
    return weights


def check_trained(wire: WireDtype, architecture: str, world_size: int, per_machine: int = 1) -> None:
    expected = rounded_on_one_device(world_size, wire, architecture, per_machine)
    plain = rounded_on_one_device(world_size, "float32", architecture, per_machine)
    found = ranks.run(world_size, trained, wire, ARCHITECTURES[architecture])
    for values in found:
        for name, value in values.items():
            assert torch.equal(value, found[0][name]), f"{name} differs between ranks"
            off = float((value - expected[name]).abs().max())
            assert off < 0.05 * float((plain[name] - expected[name]).abs().max()), f"{name} is {off:.2g} off"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@rounding
def test_training_is_that_of_one_device_that_rounds(wire: WireDtype, architecture: str) -> None:
    check_trained(wire, architecture, 3)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_a_machine_has_added_up_is_rounded_once(wire: WireDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", "2")
    check_trained(wire, "hybrid", 4, per_machine=2)


def large_buckets(wire: WireDtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layer = nn.Linear(1100, 1100)  # more than comm.DIRECT_BYTES, also in 16 bits
    parallax.distribute(layer, config=parallax.Config(wire_dtype=wire))
    for step in range(2):
        layer.zero_grad()
        x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(10 * parallax.rank() + step))
        layer(x).square().mean().backward()
    return [p.grad[:50].clone() for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_large_buckets_are_equal_on_all_ranks(wire: WireDtype) -> None:
    exact = ranks.run(3, large_buckets, "float32")[0]
    found = ranks.run(3, large_buckets, wire)
    for grads in found:
        for grad, first, target in zip(grads, found[0], exact, strict=True):
            assert torch.equal(grad, first)
            assert not torch.equal(grad, target)
            torch.testing.assert_close(grad, target, rtol=0.05, atol=float(target.abs().max()) / 50)


def what_is_read(wire: WireDtype) -> list[Any]:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire))
    for step in range(2):
        optimizer.zero_grad()
        model(ids_of(parallax.rank(), step)).backward()
        optimizer.step()
    everything = torch.arange(ROWS)
    whole = model.table.weight.detach().clone()
    with torch.no_grad():
        looked_up = model.table(everything).clone()
    in_training = model.table(everything).detach().clone()
    accumulated = optimizer.state_dict()["state"][0]["sum"].clone()
    held = model.table.weight._table  # type: ignore[attr-defined]
    own = held.partitioning.rows_of(parallax.rank())
    return [own, held.data.clone(), whole, looked_up, in_training, accumulated]


@rounding
def test_what_is_read_outside_of_training_is_exact(wire: WireDtype) -> None:
    for own, rows, whole, looked_up, in_training, accumulated in ranks.run(2, what_is_read, wire):
        assert torch.equal(whole[own], rows)
        assert torch.equal(looked_up, whole)
        assert torch.equal(in_training, there_and_back(whole, wire))  # on the owner too
        assert not torch.equal(in_training, whole)
        assert not torch.equal(accumulated, there_and_back(accumulated, wire))


def broken(wire: WireDtype, bad: float) -> list[bool]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire))
    for step in range(2):
        optimizer.zero_grad()
        loss = model(ids_of(parallax.rank(), step))
        (loss * (bad if step and parallax.rank() == 0 else 1.0)).backward()
        if not step:
            optimizer.step()
    return [bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None]


@rounding
def test_gradients_that_are_not_finite_reach_all_ranks(wire: WireDtype) -> None:
    assert ranks.run(2, broken, wire, math.inf) == [[False] * 4] * 2


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 0.3 * self.table(ids).sum()


def counted(wire: WireDtype) -> torch.Tensor:
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire, reduction="sum"))
    ids = torch.arange(4).repeat_interleave(torch.tensor([333, 1, 5, 7]))
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).backward()
    assert model.table.weight.grad is not None
    return model.table.weight.grad.clone()


@rounding
def test_counts_of_lookups_are_not_rounded(wire: WireDtype) -> None:
    for grad in ranks.run(2, counted, wire):
        torch.testing.assert_close(grad, torch.full((4, WIDTH), 0.3))


# -- bytes --------------------------------------------------------------------------------------------


def traffic(wire: WireDtype, options: dict[str, Any]) -> tuple[parallax.Traffic, str]:
    model = Model(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parallax.distribute(model, optimizer, config=parallax.Config(wire_dtype=wire, **options))
    for step in range(2):
        before = parallax.traffic(model)
        optimizer.zero_grad()
        model(ids_of(parallax.rank(), step)).backward()
        optimizer.step()
    return parallax.traffic(model) - before, str(parallax.explain(model))


@every_wire
def test_bytes(wire: WireDtype) -> None:
    row = {"float32": 4 * 32 + 4, "bfloat16": 2 * 32 + 2, "float16": 2 * 32 + 2, "int8": 32 + 4 + 2}[wire]
    numel, num_facts = 3 * 33, 2 + 6
    asked = [ids_of(rank, 1).unique() for rank in range(2)]  # row r lives on rank r mod 2
    for rank, (sent, plan) in enumerate(ranks.run(2, traffic, wire, {})):
        brought, given = (asked[rank] % 2 != rank).sum(), (asked[1 - rank] % 2 == rank).sum()
        assert sent.table_bytes == brought * (2 * 4 + row) + given * row
        assert sent.dense_bytes == (4 if wire == "float32" else 2) * numel + 4 * num_facts
        assert f"architecture hybrid{'' if wire == 'float32' else f', rows and gradients rounded to {wire}'} (" in plan


def test_gathered_rows_are_rounded_too() -> None:
    exact, half = (ranks.run(2, traffic, w, ARCHITECTURES["gather"])[0][0].table_bytes for w in ("float32", "bfloat16"))
    num_ids = 2 * len(ids_of(0, 1).unique())
    assert exact - 4 * num_ids == 2 * (half - 4 * num_ids)


def profile(width: int, use: Use = Use.LOOKUP) -> ParameterProfile:
    return ParameterProfile(name="w", shape=(1000, width), itemsize=4, use=use, num_rows_touched=50)


@every_wire
def test_predicted_bytes(wire: WireDtype) -> None:
    row = {"float32": 64, "bfloat16": 32, "float16": 32, "int8": 20}[wire]
    whole = 64000 if wire == "float32" else 32000
    table = profile(16)
    for placement, expected in {
        Placement.SHARDED: 50 * 3 / 4 * (2 * row + 4),
        Placement.GATHER: 50 * 3 * (row + 4),
        Placement.ALLREDUCE: 2 * whole * 3 / 4,
    }.items():
        assert bytes_per_step(table, placement, 4, wire) == expected
        cost = parameter_cost(table, placement, Topology.of(machines=4), Coefficients(), wire=wire)
        assert cost.bytes_per_machine == pytest.approx(expected)
        exact = parameter_cost(table, placement, Topology.of(machines=4), Coefficients())
        assert cost.work == pytest.approx(exact.work)
    plan = make_plan([table], world_size=4, config=parallax.Config(wire_dtype=wire))
    assert plan["w"].bytes_per_step == 50 * 3 / 4 * (2 * row + 4)
    assert type(plan).from_json(plan.to_json()) == plan
    assert plan.wire_dtype == wire
    assert make_plan([table], world_size=1, config=parallax.Config(wire_dtype=wire)).wire_dtype == "float32"


# -- agreement ----------------------------------------------------------------------------------------


def of_two_minds(options: list[dict[str, Any]]) -> None:
    parallax.distribute(Model(), config=parallax.Config(**options[parallax.rank()]))


@pytest.mark.parametrize(
    ("field", "here", "there"),
    [("wire_dtype", "bfloat16", "float32"), ("placements", {"table*": "gather"}, {})],
)
def test_ranks_that_differ_stop(field: str, here: Any, there: Any) -> None:
    outcomes = ranks.run(2, of_two_minds, [{field: here}, {field: there}], expect_errors=True)
    assert [o.error for o in outcomes] == ["DisagreementError"] * 2
    assert outcomes[0].text == (
        f"rank 0: Config.{field} differs from that of rank 1: {here!r} here, {there!r} there. Every rank must give "
        f"parallax.distribute the same settings"
    )


def test_ranks_may_differ_in_what_is_their_own() -> None:
    ranks.run(2, of_two_minds, [{"timeout": 20.0}, {"timeout": 30.0, "init": F.relu}])


def alone(wire: WireDtype) -> dict[str, torch.Tensor]:
    return trained(wire, {"lazy_rows": True})


def test_nothing_is_rounded_on_one_worker() -> None:
    [exact], [found] = ranks.run(1, alone, "float32"), ranks.run(1, alone, "int8")
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_verify_says_that_it_compares_exact_numbers() -> None:
    with pytest.raises(ValueError, match=r"Config\.wire_dtype rounds what travels, so nothing would be equal"):
        parallax.verify("none.py:factory", config=parallax.Config(wire_dtype="bfloat16"))
