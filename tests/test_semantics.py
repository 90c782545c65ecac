"""What lookups, whole tables and training steps mean, beyond the handed cases: each was wrong once, or could be."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.nn.functional as F
from oracle import Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallax
from parallax.optimizer import probe
from parallax.table import Table


def ids_and_targets(world_size: int, num_steps: int, num_rows: int = 5, size: int = 4) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, num_rows, (size,), generator=generator)
        return ids, torch.randn(size, generator=generator, dtype=torch.float64)

    return [[batch() for _ in range(world_size)] for _ in range(num_steps)]


def squares(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Net(nn.Module):
    """Two tables of equal width, looked up in the order opposite to their names."""

    def __init__(self, use: str = "reversed", **options: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(5, 3, **options), nn.Embedding(5, 3)
        self.first, self.second, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.use = use
        self.double()

    def _segment(self, h: torch.Tensor, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(h) + self.b(ids))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.use == "in_place":
            h = self.a(ids).mul_(2)
            h[:, 0] += 1
            h = F.relu(h, inplace=True)
        elif self.use in ("reentrant", "non_reentrant"):
            h = self.a(ids)
            for layer in (self.first, self.second):
                h = checkpoint(self._segment, h, layer, ids, use_reentrant=self.use == "reentrant")
        else:
            other = self.b(ids)
            h = self.a(ids) * 2 + other
        return self.out(h).squeeze(-1)


def net(world_size: int, use: str) -> Case:
    return Case(
        model=lambda: Net(use),
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        batches=ids_and_targets(world_size, 4),
        loss=squares,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_forward(world_size: int) -> None:
    uses = ("reversed", "in_place", "reentrant", "non_reentrant")
    oracle.check_all(world_size, [(net, use) for use in uses])


def renormed(world_size: int, training: bool) -> Case:
    def model() -> nn.Module:
        e = nn.Embedding(3, 2, max_norm=1.0)
        with torch.no_grad():
            e.weight.copy_(torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]]))
        return nn.Sequential(e)

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if training:
            oracle.train_step(case, model, optimizers, batch, number)
        else:
            with torch.no_grad():
                model(batch)
        return None

    return Case(
        model=model,
        batches=[[torch.tensor([2 * (r % 2)]) for r in range(world_size)]] * 3,
        loss=lambda model, batch: model(batch).pow(3).mean(),
        step=step,
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_10_max_norm(world_size: int) -> None:
    traces = oracle.check_all(world_size, [(renormed, True), (renormed, False)])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]])
    for trace in traces[1]:
        assert torch.allclose(trace.weights[-1]["0.weight"], expected)


def by_frequency(world_size: int, config: dict[str, Any]) -> Case:
    return Case(
        model=lambda: nn.Sequential(nn.Embedding(4, 1, scale_grad_by_freq=True)),
        batches=[[torch.tensor([1, 1 + r % 2]) for r in range(world_size)]] * 3,
        loss=lambda model, batch: model(batch).mean(),
        config=config,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_case_11_scale_grad_by_freq(world_size: int) -> None:
    allreduce = {"architecture": "allreduce"}
    configs = ({}, allreduce, {**allreduce, "sparse_allreduce": "dense"})
    traces = oracle.check_all(world_size, [(by_frequency, config) for config in configs])
    if world_size == 2:
        for by_rank in traces:
            gradient = by_rank[0].seen[0]["grads"]["0.weight"]
            assert torch.allclose(gradient.to_dense(), torch.tensor([[0.0], [0.25], [0.25], [0.0]]))


def scaled(only_tables: bool) -> list[tuple[float, bool]]:
    """(scale, weights changed) after each step; in step 2 the last rank's loss is infinite."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(4, 2)) if only_tables else Net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for step in range(4):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.zero_grad()
        loss = model(torch.tensor([parallax.rank(), 3])).sum()
        if step == 2 and parallax.rank() == parallax.world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        seen.append((scaler.get_scale(), any(not torch.equal(before[k], after[k]) for k in before)))
    return seen


@pytest.mark.parametrize("only_tables", [False, True])
def test_case_20_grad_scaler(only_tables: bool) -> None:
    for seen in ranks.run(3, scaled, only_tables):
        assert seen == [(8.0, True), (8.0, True), (4.0, False), (4.0, True)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(5, 2), nn.Embedding(5, 2)])
        self.layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        self.double()

    def forward(self, which: list[int]) -> torch.Tensor:
        ids = torch.tensor([1, 3])
        return torch.stack([self.layers[w](self.tables[w](ids)).sum() for w in which]).mean()


def accumulate_where_one_rank_has_no_gradient(world_size: int) -> Case:
    """The second backward reaches the second half on rank 0 only; the first reached all of it."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        optimizers[0].zero_grad()
        for which in batch:
            case.loss(model, [which]).backward()
        grads = oracle.read_gradients(model)
        optimizers[0].step()
        return grads

    second = [[1]] + [[0]] * (world_size - 1)
    return Case(
        model=Pair,
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        batches=[[[[0, 1], which] for which in second]] * 3,
        loss=lambda model, batch: torch.stack([model(which) for which in batch]).mean(),
        step=step,
        join=lambda batches: [[w for b in batches for w in b[i]] for i in range(2)],
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_where_one_rank_has_no_gradient(world_size: int) -> None:
    oracle.check(world_size, accumulate_where_one_rank_has_no_gradient)


def _in_place(w: Any) -> None:
    with torch.no_grad():
        w[2] = 9.0
        w[1:2].zero_()
        w.add_(1)


EDITS: dict[str, Any] = {
    "zero a row": lambda w: w.data.__setitem__(0, 0.0),
    "scale": lambda w: w.data.mul_(2),
    "through a view": lambda w: w.data.view(-1).__setitem__(4, 7.0),
    "row of data": lambda w: w.data[1].fill_(5.0),
    "assign data": lambda w: setattr(w, "data", w.data * 3),
    "copy": lambda w: w.data.copy_(torch.arange(15.0).view(5, 3)),
    "add a tensor": lambda w: w.data.add_(torch.arange(15.0, dtype=torch.float64).view(5, 3)),
    "slice": lambda w: w.data[2:4].mul_(3),
    "init": nn.init.ones_,
    "without a graph": _in_place,
    "foreach": lambda w: torch._foreach_mul_([w.data], 0.5),
    "gradient": lambda w: w.data.add_(w.grad, alpha=-0.1),
    "gradient, scaled": lambda w: (w.grad.mul_(2), w.data.sub_(w.grad)),
    "gradient, assigned": lambda w: (setattr(w, "grad", w.grad * 3), w.data.sub_(w.grad)),
    "gradient of another kind": lambda w: (w.grad.data.copy_(torch.ones(5, 3)), w.data.sub_(w.grad)),
}


READS: dict[str, Any] = {
    "shape": lambda w: (tuple(w.shape), w.numel(), len(w), w.size(1), w.dim(), w.nelement()),
    "norm": lambda w: w.norm(),
    "transposed": lambda w: w.t() @ w,
    "slice": lambda w: w[1:3],
    "mask": lambda w: w[torch.tensor([True, False, True, False, False])],
    "negative ids": lambda w: w[torch.tensor([-1, 0])],
    "other dimension": lambda w: w.index_select(1, torch.tensor([2, 0])),
    "sum of squares": lambda w: (w**2).sum(),
    "list": lambda w: w.tolist(),
}


def edit_and_read() -> dict[str, Any]:
    """What each edit leaves and each read gives, with the pending lookup made before each edit."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([step, 4])).sum().backward()
        optimizer.step()
    w = model.a.weight
    found: dict[str, Any] = {"identity": w is next(model.parameters())}
    for name, edit in EDITS.items():
        pending = model.a(torch.tensor([0, 1, 2]))
        edit(w)
        now = model.a(torch.arange(5)).detach().clone()
        found[name] = (pending.detach().clone(), model.state_dict()["a.weight"].clone(), now)
    for name, read in READS.items():
        value = read(w)
        found["read " + name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def test_a_table_is_whole_outside_of_steps() -> None:
    (expected,) = ranks.run(1, edit_and_read)
    for world_size in (2, 3):
        for rank, found in enumerate(ranks.run(world_size, edit_and_read)):
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[name], value, msg=lambda text, n=name, r=rank: f"{n}, rank {r}: {text}"
                )


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {"lr": 0.1})
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def lookahead(world_size: int) -> Case:
    return Case(
        model=Net,
        optimizers=lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)),
        batches=ids_and_targets(world_size, 4),
        loss=squares,
    )


def lbfgs(world_size: int) -> Case:
    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        def closure() -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            return loss

        optimizers[0].step(closure)

    return Case(
        model=Net,
        optimizers=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
        batches=ids_and_targets(world_size, 3),
        loss=squares,
        step=step,
        tolerance={torch.float64: 1e-7},
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_optimizers(world_size: int) -> None:
    oracle.check_all(world_size, [(lookahead,), (lbfgs,)])


@pytest.mark.parametrize(
    ("make", "by_rows", "keys"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9), True, {"momentum_buffer"}),
        (lambda p: torch.optim.Adam(p, lr=1e-9, amsgrad=True), True, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.Adagrad(p), True, {"sum"}),
        (lambda p: torch.optim.Adafactor(p, lr=1e-9), False, None),
        (lambda p: torch.optim.Muon(p, lr=1e-9), False, None),
        (lambda p: torch.optim.LBFGS(p), False, None),
    ],
    ids=["SGD", "Adam", "Adagrad", "Adafactor", "Muon", "LBFGS"],
)
def test_whether_an_optimizer_updates_row_by_row_is_tried(make: Any, by_rows: bool, keys: set[str] | None) -> None:
    parameter = nn.Parameter(torch.randn(7, 4))
    optimizer = make([parameter])
    how = probe(optimizer, Table("w", parameter, rank=0, world_size=2, device=torch.device("cpu")))
    assert how.by_rows is by_rows
    if keys is None:
        assert type(optimizer).__name__ in how.reason
    else:
        assert how.keys == keys


def meta_tables() -> dict[str, Any]:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Embedding(9, 3, padding_idx=2), "b": nn.Embedding(9, 3)})
    model["out"] = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    held = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        held.append(model["a"].weight.shape[0])

    optimizer.register_step_pre_hook(note)
    for _ in range(2):
        optimizer.zero_grad()
        model["out"](model["a"](torch.tensor([1, 2])) + model["b"](torch.tensor([1, 2]))).mean().backward()
        optimizer.step()
    plan = {p.name: p.placement.value for p in parallax.explain(model)}
    return {"before": before, "after": model.state_dict(), "held": held, "plan": plan}


def test_meta_tables() -> None:
    results = ranks.run(2, meta_tables)
    for rank, result in enumerate(results):
        a, b = result["before"]["a.weight"], result["before"]["b.weight"]
        assert a.shape == b.shape == (9, 3)
        assert len({tuple(row.tolist()) for table in (a, b) for row in table}) == 18  # every row its own
        assert torch.equal(a[2], torch.zeros(3))
        assert not torch.equal(result["after"]["a.weight"][1], a[1])
        assert torch.equal(result["after"]["a.weight"][5], a[5])
        assert result["held"] == [5 - rank] * 2
        assert result["plan"]["a.weight"] == "sharded"
        assert torch.equal(a, results[0]["before"]["a.weight"])


def placement_after_a_late_whole_use() -> list[str]:
    """A spread table that is used whole when another parameter is new to the run: the plan is made again."""
    model = Net()
    parallax.distribute(model)
    ids = torch.tensor([1, 4])
    for step in range(4):
        loss = model.a(ids).sum()
        if step >= 2:
            loss = loss + model.a.weight.square().sum() + model.first.weight.sum()
        loss.backward()
    model(ids)
    plan = {p.name: p.placement.value for p in parallax.explain(model)}
    with torch._C.DisableTorchFunctionSubclass():
        return [plan["a.weight"], plan["first.weight"], str(model.a.weight.shape[0])]


def test_the_plan_says_where_a_table_lives() -> None:
    assert ranks.run(2, placement_after_a_late_whole_use) == [["sharded", "allreduce", n] for n in "32"]


def layouts_of_one_rank() -> list[str]:
    """The layout of a gradient, step by step; from the third on, rank 1 alone looks up with another one, too."""
    embedding = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    parallax.distribute(embedding, optimizer)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        ids = torch.tensor([step, parallax.rank()])
        loss = embedding(ids).sum()
        if step >= 2 and parallax.rank() == 1:
            loss = loss + F.embedding(ids, embedding.weight, sparse=False).sum()
        loss.backward()
        found.append(str(embedding.weight.grad.layout))
        optimizer.step()
    return found


def test_the_layout_of_a_gradient_is_the_same_on_all_ranks() -> None:
    assert ranks.run(2, layouts_of_one_rank) == [["torch.sparse_coo"] * 2 + ["torch.strided"] * 3] * 2
