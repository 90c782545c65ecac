"""Loops as people write them: without an optimizer, with two forwards, averaged models, schedulers, frozen tables."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.nn.functional as F
from oracle import Case
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import parallax

two_and_three = pytest.mark.parametrize("world_size", [2, 3])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 4e-2}
Batches = list[list[torch.Tensor]]


def id_batches(world_size: int, num_steps: int = 4, size: int = 4, rows: int = 7) -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randint(rows, (size, 2), generator=generator) for _ in range(world_size)] for _ in range(num_steps)]


class Raw(nn.Module):
    """Tables that are plain parameters: looked up by a bag, by F.embedding and by indexing; one is of one dimension."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse
        self.users, self.items = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(7, 3))
        self.tags, self.bias = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(7))
        self.layer = nn.Linear(3, 1)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = F.embedding_bag(ids, self.users, mode="sum", sparse=self.sparse)
        h = h * F.embedding(ids[:, 0], self.items, sparse=self.sparse)
        bias = self.bias[ids].sum(1)
        return self.layer(h + F.embedding_bag(ids, self.tags, sparse=self.sparse)).squeeze(1) + bias


def squares(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - 1).square().mean()


# -- without an optimizer -----------------------------------------------------------------------------


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def assign(model: nn.Module) -> None:
    for p in with_gradients(model):
        p.data = p.data - 0.1 * p.grad


def momentum(model: Any) -> None:
    if not hasattr(model, "velocity"):
        model.velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        model.velocity[name].mul_(0.9).add_(p.grad)
        p.data.add_(model.velocity[name], alpha=-0.1)


def adagrad(model: Any) -> None:
    """State beside the parameters, of the shape of the whole."""
    if not hasattr(model, "sums"):
        model.sums = [torch.full(p.shape, 0.1, dtype=p.dtype) for p in model.parameters()]
    for p, total in zip(model.parameters(), model.sums, strict=True):
        total.addcmul_(p.grad, p.grad)
        p.data.addcdiv_(p.grad, total.sqrt(), value=-0.1)


def foreach(model: nn.Module) -> None:
    found = with_gradients(model)
    torch._foreach_add_(found, [p.grad for p in found], alpha=-0.1)


def foreach_data(model: nn.Module) -> None:
    found = with_gradients(model)
    torch._foreach_sub_([p.data for p in found], torch._foreach_mul([p.grad for p in found], 0.1))


def each(update: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for p in with_gradients(model):
            update(p)

    return run


def subtract(p: nn.Parameter) -> None:
    p -= 0.1 * p.grad


def rows(p: nn.Parameter) -> None:
    p[1:] -= 0.1 * p.grad[1:]
    p[0] = p[0] - 0.1 * p.grad[0]


UPDATES: dict[str, Callable[[Any], None]] = {
    "data.add_": each(lambda p: p.data.add_(p.grad, alpha=-0.1)),
    "data.add_ of grad.data": each(lambda p: p.data.add_(p.grad.data, alpha=-0.1)),
    "data.sub_": each(lambda p: p.data.sub_(0.1 * p.grad)),
    "subtract": each(subtract),
    "add_": each(lambda p: p.add_(p.grad, alpha=-0.1)),
    "add_ of a detached one": each(lambda p: p.detach().add_(p.grad, alpha=-0.1)),
    "copy_": each(lambda p: p.copy_(p - 0.1 * p.grad)),
    "out": each(lambda p: torch.add(p, p.grad, alpha=-0.1, out=p.data)),
    "scaled gradient": each(lambda p: p.data.sub_(p.grad.mul_(0.1))),
    "sign": each(lambda p: p.data.add_(p.grad.sign(), alpha=-0.01)),
    "decay": each(lambda p: p.mul_(0.9).add_(p.grad, alpha=-0.1)),
    "lerp": each(lambda p: p.data.lerp_(p.data - p.grad, 0.1)),
    "rows": each(rows),
    "assign": assign,
    "momentum": momentum,
    "adagrad": adagrad,
    "foreach": foreach,
    "foreach data": foreach_data,
}
FOR_SPARSE = ("data.add_", "subtract", "add_")
FORGET: dict[str, Callable[[Any], Any]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "None": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "grad.zero_": lambda model: [p.grad.zero_() for p in with_gradients(model)],
    "grad.data.zero_": lambda model: [p.grad.data.zero_() for p in with_gradients(model)],
}


def by_hand(world_size: int, updates: list[str], forget: str, architecture: str, sparse: bool) -> Case:
    """Each step with another update; from the third on tables are spread."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        squares(model, batch).backward()
        with torch.no_grad():
            UPDATES[updates[number]](model)
        FORGET[forget](model)

    return Case(
        model=lambda: Raw(sparse),
        optimizers=lambda model: [],
        batches=id_batches(world_size, len(updates)),
        loss=squares,
        step=step,
        config={"architecture": architecture},
        reads="parts",
        tolerance=TOLERANCE,
    )


@two_and_three
def test_updates_without_an_optimizer(world_size: int) -> None:
    everything = [*UPDATES, "adagrad", "momentum"]
    cases: list[tuple[Any, ...]] = [(by_hand, everything, "zero_grad", "hybrid", False)]
    cases += [(by_hand, ["subtract", "data.add_", "subtract"], forget, "hybrid", False) for forget in FORGET]
    cases += [(by_hand, [*FOR_SPARSE, *FOR_SPARSE], forget, "hybrid", True) for forget in ("None", "zeros")]
    if world_size == 2:
        cases += [(by_hand, everything, "zero_grad", "allreduce", False)]
    oracle.check_all(world_size, cases)


# -- the loop -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """A table, a bag and layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.items = nn.Embedding(7, 4, **options)
        self.tags = nn.EmbeddingBag(7, 4, mode="sum")
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.items(ids[:, 0]) + self.tags(ids)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(ids)).squeeze(1)


def case(world_size: int, step: Any, num_steps: int = 5, optimizer: str = "Adam", **options: Any) -> Case:
    settings = {"Adam": {"eps": 1e-3}, "SGD": {}}[optimizer]
    given = {"model": lambda: Net().double(), "tolerance": TOLERANCE} | options
    return Case(
        optimizers=lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **settings),
        batches=id_batches(world_size, num_steps),
        loss=squares,
        step=step,
        reads="parts",
        **given,
    )


def train(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


EVERYTHING = torch.stack([torch.arange(7), torch.arange(7).flip(0)], 1)


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def averaged(world_size: int, kind: str, start: int) -> Case:
    """An average of the model that is made before tables are spread, or after it."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == start:
            how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if kind == "EMA" else {}
            vars(model)["average"] = AveragedModel(model, **how)  # not one of its modules
            vars(model)["scheduler"] = SWALR(optimizers[0], swa_lr=0.01, anneal_epochs=2)
        train(optimizers[0], squares(model, batch))
        if number < start:
            return None
        average = model.average
        average.update_parameters(model)
        model.scheduler.step()
        with torch.no_grad():
            return plain(average.module), average(EVERYTHING), [g["lr"] for g in optimizers[0].param_groups]

    return case(world_size, step)


@two_and_three
def test_averaged_models(world_size: int) -> None:
    oracle.check_all(world_size, [(averaged, kind, start) for kind in ("SWA", "EMA") for start in (0, 2)])


def copies(world_size: int) -> Case:
    """Copies are plain models, on every rank, that train by themselves."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        train(optimizers[0], squares(model, batch))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        found = []
        for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert {type(p) for p in each.parameters()} == {nn.Parameter}
            train(torch.optim.SGD(each.parameters(), lr=0.1), squares(each, EVERYTHING))
            found.append((each(EVERYTHING).detach(), plain(each)))
        return found, model(EVERYTHING).detach().clone()

    return case(world_size, step, 3)


@two_and_three
def test_copies_of_the_model(world_size: int) -> None:
    oracle.check(world_size, copies)


def freezing(world_size: int, what: str) -> Case:
    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        for p in getattr(model, what).parameters():
            p.requires_grad_(number not in (first, first + 1))
        train(optimizers[0], squares(model, batch))
        return [p.requires_grad for p in model.parameters()], oracle.read_parts(model, gradients=True)

    first = {"items": 2, "layer": 2, "tags": 0}[what]
    return case(world_size, step, 6)


@two_and_three
def test_freezing_and_thawing(world_size: int) -> None:
    oracle.check_all(world_size, [(freezing, what) for what in ("items", "layer", "tags")])


def one_backward(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Two forwards, and one for looking only, before one backward."""
    first = squares(model, ids)
    with torch.no_grad():
        looked = model(ids.flip(0)).mean() * 0
    train(optimizers[0], first + 2 * squares(model, ids.flip(1)) + looked)


def unused_forwards(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Forwards whose results nobody uses, or that are used after the step."""
    model(ids)
    kept = model.items(ids[:, 1])
    train(optimizers[0], squares(model, ids))
    return EVERYTHING.sum(), bool(torch.isfinite(kept).all())


def gradient_penalty(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Backward through a gradient with respect to looked-up values."""
    h = model.items(ids[:, 0]) + model.tags(ids)
    out = model.out(torch.tanh(model.layer(h))).squeeze(1)
    (grad,) = torch.autograd.grad(out.sum(), h, create_graph=True)
    train(optimizers[0], (out - 1).square().mean() + grad.square().sum(1).mean())


def looked_up_penalty(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """The same with the lookup's own result, and backward for one part of the graph after the other."""
    h = model.items(ids[:, 0])
    out = model.out(torch.tanh(model.layer(h))).squeeze(1)
    (grad,) = torch.autograd.grad(out.sum(), h, create_graph=True)
    optimizers[0].zero_grad()
    (out - 1).square().mean().backward(retain_graph=True)
    grad.square().sum(1).mean().backward()
    optimizers[0].step()


def checkpointed(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """The lookup itself inside a segment."""
    h = checkpoint(model.hidden, ids, use_reentrant=False)
    train(optimizers[0], (model.out(h).squeeze(1) - 1).square().mean())


def written(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Writes to a lookup's result, through views and reshapes of it."""
    h = model.items(ids)
    h.view(len(ids), -1)[:, 3] = 2.0
    h[:, 0].mul_(3)
    h.transpose(0, 1)[1, :, 2:] += 1
    flat = h.reshape(len(ids), -1)
    flat[:, 0] = flat[:, 0].exp()
    h.clamp_(min=-2)
    target = model.tags(ids).mul_(0.5).detach_()
    out = model.out(torch.tanh(model.layer(h.sum(1) + model.tags(ids).add_(1).sigmoid_())))
    train(optimizers[0], (out - target).square().mean())


def evaluating(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Ranks evaluate different numbers of batches between steps."""
    model.train()
    train(optimizers[0], squares(model, ids))
    model.eval()
    with torch.no_grad():
        for _ in range(1 + (parallax.rank() + number) % 3):
            model(ids)
    with torch.inference_mode():
        for _ in range((parallax.rank() + number) % 2):
            model(ids).sum().item()


def scaled(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """A GradScaler that grows in each step, with clipping of unscaled gradients."""
    if number == 0:
        vars(model)["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler = model.scaler
    optimizers[0].zero_grad()
    scaler.scale(squares(model, ids)).backward()
    scaler.unscale_(optimizers[0])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizers[0])
    scaler.update()
    return norm, scaler.get_scale()


def in_bfloat16(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = squares(model, ids)
    train(optimizers[0], loss)


def reading(case: Case, model: Any, optimizers: Any, ids: Any, number: int) -> Any:
    """Whole tables in the middle of a step: parts of losses (once, not on each rank), and things to look at."""
    w = model.items.weight
    loss = squares(model, ids) + 0.1 * w.norm() + 0.01 * sum(p.abs().sum() for p in model.parameters())
    loss = loss + (model.hidden(ids) @ w.t()).square().mean() + F.linear(w[1:3], w[4:]).sum() + w.mean(0).square().sum()
    seen = [row.detach().sum() for row in w], sum(p.numel() for p in model.parameters()), len(w), tuple(w.shape)
    train(optimizers[0], loss)
    return seen, w.std(), w.max(), torch.cosine_similarity(w[:1], w).detach().clone(), (w.T @ w).detach().clone()


STEPS: tuple[Any, ...] = (
    one_backward,
    unused_forwards,
    gradient_penalty,
    looked_up_penalty,
    checkpointed,
    written,
    evaluating,
    scaled,
    reading,
)


@two_and_three
def test_steps(world_size: int) -> None:
    cases: list[tuple[Any, ...]] = [(case, step, 4) for step in STEPS]
    oracle.check_all(world_size, [*cases, (rounded,)])


def rounded(world_size: int) -> Case:
    """Under autocast ranks round their own sums: near, not equal."""
    return case(world_size, in_bfloat16, optimizer="SGD", model=Net, tolerance={torch.float32: 1e-2})


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def scheduled(world_size: int, name: str) -> Case:
    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == 0:
            vars(model)["scheduler"] = SCHEDULERS[name](optimizers[0])
        train(optimizers[0], squares(model, batch))
        metric = ((1.0, 0.9, 0.95, 0.96, 0.97)[number],) if name == "plateau" else ()
        model.scheduler.step(*metric)
        return [g["lr"] for g in optimizers[0].param_groups]

    return case(world_size, step)


@two_and_three
def test_schedulers(world_size: int) -> None:
    oracle.check_all(world_size, [(scheduled, name) for name in SCHEDULERS])


# -- optimizers that people write ---------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average, grad = state["exp_avg"], p.grad
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * beta1 + grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(grad, alpha=1 - beta2)


class OldStyle(torch.optim.Optimizer):
    """As in books: the state begins as a clone of the gradient, in lists, all under `.data`."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad.data
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.clone(d_p).detach()
                else:
                    state["buffer"].mul_(group["momentum"]).add_(d_p)
                p.data = p.data - group["lr"] * state["buffer"]


class OwnState(torch.optim.Optimizer):
    """Keeps its state in an attribute of its own, by parameter."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.velocity: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                v = self.velocity.setdefault(p, torch.zeros_like(p))
                v.mul_(0.9).add_(p.grad)
                p -= group["lr"] * v


def written_optimizer(world_size: int, kind: Any, last: bool) -> Case:
    return Case(
        model=lambda: Net().double(),
        optimizers=lambda model: kind(model.parameters()),
        batches=id_batches(world_size),
        loss=squares,
        optimizers_last=last,
        reads="parts",
        tolerance=TOLERANCE,
    )


@two_and_three
def test_optimizers_that_people_write(world_size: int) -> None:
    kinds = (Lion, OldStyle, OwnState)
    oracle.check_all(world_size, [(written_optimizer, kind, last) for kind in kinds for last in (False, True)])


def placement_with(kind: Any) -> tuple[str, str]:
    model = Net()
    parallax.distribute(model, kind(model.parameters()))
    for _ in range(2):
        squares(model, EVERYTHING).backward()
        model(EVERYTHING)
    plan = parallax.explain(model)["items.weight"]
    return plan.placement.value, plan.reason


def test_an_optimizer_with_state_of_its_own_keeps_tables_whole() -> None:
    assert ranks.run(2, placement_with, Lion)[0][0] == "sharded"
    for placement, reason in ranks.run(2, placement_with, OwnState):
        assert placement == "allreduce"
        assert "keeps state of rows outside of its `state`" in reason


# -- modules of torch ---------------------------------------------------------------------------------


class Adaptive(nn.Module):
    """A softmax in clusters, each used by the batches that have its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 7, [2, 5], div_value=2.0)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.softmax(torch.tanh(self.words(ids[:, 0])), ids[:, 1]).loss


class Complex(nn.Module):
    """Complex numbers, which torch looks up by indexing alone."""

    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Parameter(torch.randn(7, 3, dtype=torch.complex128))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        a, b = self.entities[ids].unbind(1)
        return (a * b.conj()).sum(1).real


def module(world_size: int, kind: Any) -> Case:
    made = case(world_size, oracle.train_step, 4, model=kind)
    if kind is Adaptive:
        made.loss = lambda model, ids: model(ids)
    return made


@two_and_three
def test_modules_of_torch(world_size: int) -> None:
    oracle.check_all(world_size, [(module, Adaptive), (module, Complex)])


# -- warnings -----------------------------------------------------------------------------------------


def read_whole_tables() -> list[list[str]]:
    """What is said of reads of a table of 1.5 MiB, by read, and of a small one."""
    model = nn.ModuleDict({"large": nn.Embedding(2**15, 12), "small": nn.Embedding(5, 12)})
    parallax.distribute(model)
    for _ in range(2):
        (model["large"](torch.tensor([1])) + model["small"](torch.tensor([1]))).sum().backward()
    model["small"](torch.tensor([1]))
    reads = (
        lambda: (model["large"].weight.shape, len(model["large"].weight), model["large"].weight.grad.norm()),
        lambda: model["small"].weight.norm(),
        lambda: model["large"].weight.norm(),
        lambda: (model["large"].weight.data.sum(), model["large"].weight[3]),
    )
    said = []
    for read in reads:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read()
        said.append([str(warning.message) for warning in caught])
    return said


def test_reads_of_large_tables_are_warned_of_once() -> None:
    for rank, (about, small, large, again) in enumerate(ranks.run(2, read_whole_tables)):
        assert about == small == again == []
        assert large == [f"parallax: 'large.weight' is read as a whole: its 2 MiB travel to rank {rank} each time"]
