"""What a training loop may say beyond forward, backward, step: no_sync, weight, reduce, hooks, lazy rows."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.nn.functional as F
from oracle import Case
from torch import nn

import parallax


class Net(nn.Module):
    """Two tables, one of them also the softmax weight if `tied`, and a dense part."""

    def __init__(self, kind: str = "tables") -> None:
        super().__init__()
        self.kind = kind
        if kind != "dense":
            self.a = nn.Embedding(7, 3)
            self.b = nn.Embedding(5, 3, sparse=kind == "sparse")
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 1)
        self.spare = nn.Linear(3, 3)  # used in some steps
        self.double()

    def forward(self, ids: torch.Tensor, spare: bool = False) -> torch.Tensor:
        if self.kind == "dense":
            h = torch.stack([ids, ids**2, ids + 1], 1).double() / 7
        else:
            h = self.a(ids) + self.b(ids % 5)
        h = torch.tanh(self.inner(h))
        if spare:
            h = h + self.spare(h)
        y = self.out(h).squeeze(-1)
        return y + (h @ self.a.weight.t()).mean(1) if self.kind == "tied" else y


KINDS = ("tables", "sparse", "tied", "dense")


def batches(world_size: int, num_steps: int, num_micro: int, sizes: tuple[int, ...] = (4,)) -> list[list[Any]]:
    """For each step and rank, `num_micro` micro-batches of ids and targets, of these sizes in turn."""
    generator = torch.Generator().manual_seed(2)

    def micro(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 7, (size,), generator=generator)
        return ids, torch.randn(size, generator=generator, dtype=torch.float64)

    return [
        [tuple(micro(sizes[(step + rank + m) % len(sizes)]) for m in range(num_micro)) for rank in range(world_size)]
        for step in range(num_steps)
    ]


def squares(model: Any, batch: Any, **kwargs: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0], **kwargs), batch[1])


# -- no_sync ------------------------------------------------------------------------------------------


def accumulate(pattern: str) -> Any:
    """A step of several backward passes; "n" runs one inside no_sync, "s" outside."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        for m, (kind, micro) in enumerate(zip(pattern, batch, strict=True)):
            with parallax.no_sync() if kind == "n" else contextlib.nullcontext():
                (squares(model, micro, spare=(number + m) % 3 == 2) / len(batch)).backward()
        grads = oracle.read_parts(model, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
        return grads

    return step


def accumulating(world_size: int, kind: str, pattern: str, uneven: bool) -> Case:
    def optimizers(model: nn.Module) -> Any:
        if kind == "sparse":
            rest = [p for name, p in model.named_parameters() if name != "b.weight"]
            return [torch.optim.Adagrad(rest, lr=0.1), torch.optim.SparseAdam([model.b.weight], lr=0.1)]
        return torch.optim.Adam(model.parameters(), lr=0.05)

    return Case(
        model=lambda: Net(kind),
        optimizers=optimizers,
        batches=batches(world_size, 4, len(pattern), (4, 1, 3) if uneven else (4,)),
        loss=squares,
        step=accumulate(pattern),
        reads="parts",
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync(world_size: int) -> None:
    """The sums of accumulation, also with batches of different sizes and a backward pass outside in between."""
    cases = [(accumulating, kind, "nns", world_size != 2) for kind in KINDS]
    cases += [(accumulating, kind, "snns", world_size == 2) for kind in KINDS]
    oracle.check_all(world_size, cases)


def dense_bytes(pattern: str) -> int:
    torch.manual_seed(0)
    model = Net("dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for step in batches(2, 3, len(pattern)):
        before = parallax.traffic(model)
        accumulate(pattern)(None, model, [optimizer], step[parallax.rank()], 0)
    sent = (parallax.traffic(model) - before).dense_bytes
    parallax.shutdown()
    return sent


def test_no_sync_sends_dense_gradients_once() -> None:
    each, last = (ranks.run(2, dense_bytes, pattern) for pattern in ("sss", "nns"))
    assert each == [3 * n for n in last]
    assert last[0] > 0


def no_sync_on_one_rank(model: Any, optimizer: Any, batch: Any) -> None:
    with parallax.no_sync() if parallax.rank() == 1 else contextlib.nullcontext():
        squares(model, batch).backward()


def step_without_exchange(model: Any, optimizer: Any, batch: Any) -> None:
    with parallax.no_sync():
        squares(model, batch).backward()
    optimizer.step()


def reduce_on_one_rank(model: Any, optimizer: Any, batch: Any) -> None:
    if parallax.rank() == 1:
        parallax.reduce(1.0)
    squares(model, batch).backward()


def reduce_differently(model: Any, optimizer: Any, batch: Any) -> None:
    parallax.reduce(torch.zeros(parallax.rank() + 1), "sum")


def after_two_steps(misuse: Any, kind: str, timeout: float = 20.0) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    del model.spare  # without parameters that wait to be used, a dense model has no rounds
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer, config=parallax.Config(timeout=timeout))
    for step in batches(2, 2, 1):
        accumulate("s")(None, model, [optimizer], step[parallax.rank()], 0)
    misuse(model, optimizer, batches(2, 1, 1)[0][0][0])


@pytest.mark.parametrize(
    ("misuse", "error", "text"),
    [
        (no_sync_on_one_rank, "DisagreementError", "inside parallax.no_sync or none, but only ranks [1] did"),
        (
            step_without_exchange,
            "ParallaxError",
            "have not been exchanged; run the last backward pass of a step outside",
        ),
        (reduce_on_one_rank, "DisagreementError", "ranks [1] are in parallax.reduce, but ranks [0] at the end of a"),
        (reduce_differently, "DisagreementError", "with the same operation, shape and dtype"),
    ],
)
def test_misuse_is_an_error_on_all_ranks(misuse: Any, error: str, text: str) -> None:
    for outcome in ranks.run(2, after_two_steps, misuse, "tables", expect_errors=True):
        assert outcome.error in (error, "PeerError"), outcome
        assert text in outcome.text, outcome
        assert outcome.seconds < 10, outcome


def test_ranks_that_wait_in_vain_say_where_each_is() -> None:
    """Without tables there are no rounds that would notice at once: the timeout does."""
    outcomes = ranks.run(2, after_two_steps, reduce_on_one_rank, "dense", 3.0, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "PeerError", outcome
        assert f"rank {rank} stops: " in outcome.text
        assert "Rank 0 was waiting for an AllReduce in phase closing, after 2 backward passes" in outcome.text
        assert "Rank 1 was waiting for a round in phase forward, after 2 backward passes" in outcome.text
        assert outcome.seconds < 10, outcome


def uneven_accumulation(kind: str, num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one sample, two to a step: rank 1 runs out of data at the start or in the middle of a step."""
    torch.manual_seed(0)
    model = Net(kind)
    del model.spare  # without parameters that wait to be used, a dense model has no rounds
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    alone = parallax.world_size() == 1
    parallax.distribute(model, optimizer)
    data = [(ids[None], target[None]) for ids, target in zip(*batches(1, 1, 1, (num_samples,))[0][0][0], strict=True)]
    micro = [
        (torch.cat([a for a, _ in data[i : i + 2]]), torch.cat([b for _, b in data[i : i + 2]]))
        for i in range(0, num_samples, 2)
    ]
    weights = []
    for number, batch in enumerate(
        micro if alone else parallax.shard(torch.utils.data.DataLoader(data, collate_fn=_cat))
    ):
        with parallax.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            squares(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    weights.append({name: value.clone() for name, value in model.state_dict().items()})
    parallax.shutdown()
    return weights


def _cat(samples: list[Any]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*samples, strict=True))


@pytest.mark.parametrize("num_samples", [5, 7])
@pytest.mark.parametrize("kind", ["tables", "dense"])
def test_no_sync_on_ranks_that_run_out_of_data(kind: str, num_samples: int) -> None:
    (expected,) = ranks.run(1, uneven_accumulation, kind, num_samples)
    for found in ranks.run(2, uneven_accumulation, kind, num_samples):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- optimizers that are not set alike ----------------------------------------------------------------


def own_learning_rate(kind: str, when: str) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    del model.spare
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1 + (when == "start") * parallax.rank())
    if when == "state" and parallax.rank() == 1:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    parallax.distribute(model, optimizer)
    for number, step in enumerate(batches(2, 12, 1)):
        if number == 3 and when == "later" and parallax.rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        accumulate("s")(None, model, [optimizer], step[parallax.rank()], 0)


@pytest.mark.parametrize(
    ("kind", "when", "text"),
    [
        ("tables", "start", "the optimizers given to parallax.distribute differ from those of rank"),
        ("tables", "state", "in their state: load a checkpoint on all ranks"),
        ("tables", "later", "the optimizer's settings differ from those of ranks [1] in the latest step"),
        ("dense", "later", "the ranks are not at the same step"),
    ],
)
def test_optimizers_are_set_alike(kind: str, when: str, text: str) -> None:
    outcomes = ranks.run(2, own_learning_rate, kind, when, expect_errors=True)
    for outcome in outcomes:
        assert outcome.error in ("DisagreementError", "PeerError"), outcome
    assert text in outcomes[0].text, outcomes[0]
    if when == "later":
        assert "'lr': 0.1," in outcomes[0].text, outcomes[0]


# -- weight -------------------------------------------------------------------------------------------


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    """A mean over the targets that are not negative, of which ranks have different numbers."""
    ids, targets = batch
    there = targets > 0
    parallax.weight(there.sum())
    error = (model(ids) - targets)[there] ** 2
    return error.mean()  # NaN where there is none


def weighted(world_size: int, kind: str, optimizer: str = "Adam") -> Case:
    steps = [[micro[0] for micro in step] for step in batches(world_size, 4, 1)]
    if world_size > 1:  # no tokens on rank 0
        steps[2][0] = (steps[2][0][0], -torch.ones(4, dtype=torch.float64))
        steps[2][1] = (steps[2][1][0], torch.ones(4, dtype=torch.float64))
    return Case(
        model=lambda: Net(kind),
        optimizers=lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=0.05),
        batches=steps,
        loss=token_mean,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weight(world_size: int) -> None:
    oracle.check_all(world_size, [(weighted, kind) for kind in ("tables", "tied", "dense")])


def closure_step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        return loss

    return optimizers[0].step(closure).detach()


def weighted_closure(world_size: int) -> Case:
    case = weighted(world_size, "tables", "SGD")
    case.step = closure_step
    return case


def test_weight_counts_in_the_loss_of_a_closure() -> None:
    oracle.check(2, weighted_closure)


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_weight_is_a_number_of_samples(number: float) -> None:
    with pytest.raises(ValueError, match=r"parallax\.weight: expected a number of samples, at least 0, got"):
        parallax.weight(number)


def weight_inside_a_backward() -> None:
    model = Net("tables")
    parallax.distribute(model)
    for number in range(2):
        if number == 1 and parallax.rank() == 1:  # after gradients of the layers above
            model.a.register_forward_hook(lambda _m, _i, out: out.register_hook(lambda _: parallax.weight(3)) and None)
        model(torch.tensor([1, 2])).sum().backward()


def test_weight_comes_before_backward() -> None:
    outcomes = ranks.run(2, weight_inside_a_backward, expect_errors=True)
    for outcome in outcomes:
        assert "rank 1: parallax.weight(3) comes too late: call it before backward" in outcome.text, outcome


# -- reduce -------------------------------------------------------------------------------------------


def reduced() -> list[Any]:
    rank = parallax.rank()
    found: list[Any] = [parallax.reduce(2.0)]  # without a run: as on one device
    model = Net("tables")
    parallax.distribute(model)
    values = [rank + 1, float(rank), torch.tensor([rank, -rank]), torch.tensor(rank / 4, dtype=torch.bfloat16)]
    for op in ("sum", "min", "max", "mean"):
        found += [parallax.reduce(value, op) for value in values]
    found.append(parallax.reduce(float(rank == 2), weight=2**25 - (rank == 2)))  # which float32 rounds
    found.append(parallax.reduce(float("nan") if rank == 0 else float(rank), weight=rank))
    # each sample of an evaluation counts once, wherever it is
    loader = parallax.shard(torch.utils.data.DataLoader(torch.arange(7.0), batch_size=1))
    count, total, largest = 0, 0.0, 0.0
    for batch in loader:
        count, total = count + len(batch), total + float(batch.sum())
        largest = parallax.reduce(float(batch.max()), "max")  # ranks without a batch are left out
    found += [parallax.reduce(count, "sum"), parallax.reduce(total, "sum"), parallax.reduce(largest, "max")]
    parallax.shutdown()
    return found


def test_reduce() -> None:
    by_rank = ranks.run(3, reduced)
    alone, s, f, t, b, low_s, low_f, low_t, low_b, high_s, high_f, high_t, high_b, *rest = by_rank[0]
    assert (alone, s, f, t.tolist(), float(b)) == (2.0, 6, 3.0, [3, -3], 0.75)
    assert (low_s, low_f, low_t.tolist(), float(low_b)) == (1, 0.0, [0, -2], 0.0)
    assert (high_s, high_f, high_t.tolist(), float(high_b)) == (3, 2.0, [2, 0], 0.5)
    mean_s, mean_f, mean_t, mean_b, large_weights, weighted_mean, *evaluation = rest
    assert large_weights == (2**25 - 1) / (3 * 2**25 - 1)
    assert (mean_s, mean_f, mean_t.tolist(), float(mean_b)) == (2.0, 1.0, [1.0, -1.0], 0.25)
    assert isinstance(s, int)
    assert (t.dtype, b.dtype, mean_b.dtype) == (torch.int64, torch.bfloat16, torch.bfloat16)
    assert weighted_mean == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert evaluation == [7, 21.0, 6.0]
    for other in by_rank[1:]:
        assert all(bool(torch.as_tensor(a == b).all()) for a, b in zip(by_rank[0], other, strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((1.0, "median"), {}, ValueError, "expected op 'sum', 'mean', 'min' or 'max', got 'median'"),
        ((torch.ones(2, dtype=torch.complex64),), {}, TypeError, "expected real numbers, got torch.complex64"),
        (("1",), {}, TypeError, "expected a number or a tensor, got str"),
        ((1.0,), {"weight": -1}, ValueError, "expected a weight of at least 0, got -1"),
    ],
)
def test_reduce_checks_its_arguments(args: Any, kwargs: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"parallax.reduce: {text}"):
        parallax.reduce(*args, **kwargs)


# -- parameters that come late ------------------------------------------------------------------------


class Holder(nn.Module):
    """Is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)


class Late(nn.Module):
    """Trained through `loss`, which calls no module that tells us of it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = Holder()
        vars(self)["late"] = self.layers.late  # not a child, whose call would tell of a step
        if what != "layer":
            del vars(self)["late"]
            self.layers.late, self.late = nn.Identity(), nn.Parameter(torch.tensor(0.7), what == "scalar")
        self.double()

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, late: bool) -> torch.Tensor:
        parallax.weight(len(ids))
        h = torch.tanh(self.layers.first(torch.stack([ids, ids**2, ids + 1], 1).double() / 7))
        if late:
            h = h + self.layers.late(h) * (1 if isinstance(self.late, nn.Linear) else self.late)
        return F.mse_loss(self.layers.last(h).squeeze(1), targets)


def late_step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    optimizers[0].zero_grad()
    if number == 3:
        model.late.requires_grad_()
    model.loss(*batch, late=number >= 3).backward()
    grads = oracle.read_gradients(model)
    optimizers[0].step()
    return grads


def late(world_size: int, what: str) -> Case:
    return Case(
        model=lambda: Late(what),
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        batches=[[micro[0] for micro in step] for step in batches(world_size, 7, 1, (4, 2))],
        loss=lambda model, batch: model.loss(*batch, late=True),
        step=late_step,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_that_are_used_late(world_size: int) -> None:
    oracle.check_all(world_size, [(late, what) for what in ("layer", "scalar", "frozen scalar")])


def placements_after_two_steps() -> set[str]:
    model = Late("scalar")  # whose modules are all inside of one that is never called
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for step in batches(2, 2, 1):
        model.loss(*step[parallax.rank()][0], late=True).backward()
        optimizer.step()
    placements = {p.placement.value for p in parallax.explain(model)}
    parallax.shutdown()
    return placements


def test_a_plan_is_applied_where_no_module_and_no_lookup_tells_of_a_step() -> None:
    assert ranks.run(2, placements_after_two_steps) == [{"allreduce"}] * 2


# -- a rank alone -------------------------------------------------------------------------------------


def evaluated(model: Any, optimizer: Any) -> Any:
    model.eval()
    with torch.no_grad():
        value = model(torch.tensor([6, 2, 0]))
    model.train()
    return value.clone()


def saved(model: Any, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    return [*loaded["model"].values(), *(v for entry in loaded["optimizer"]["state"].values() for v in entry.values())]


def looked_at(model: Any, optimizer: Any) -> Any:
    return [p.detach().norm().clone() for p in model.parameters()]


def looking_alone(kind: str, look: Any) -> list[Any]:
    """Rank 0 alone does something with the model between two steps, and the others go on."""
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    world_size, found = parallax.world_size(), None
    parallax.distribute(model, optimizer)
    for number, step in enumerate(batches(2, 4, 1)):
        mine = (
            step[parallax.rank()]
            if world_size > 1
            else [tuple(map(torch.cat, zip(step[0][0], step[1][0], strict=True)))]
        )
        accumulate("s")(None, model, [optimizer], mine, number)
        if number in (0, 2) and parallax.rank() == 0:
            found = look(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallax.shutdown()
    return [found, weights]


@pytest.mark.parametrize("kind", ["tables", "tied", "dense"])
@pytest.mark.parametrize("look", [evaluated, saved, looked_at])
def test_rank_0_alone(kind: str, look: Any) -> None:
    ((found, weights),) = ranks.run(1, looking_alone, kind, look)
    first, second = ranks.run(2, looking_alone, kind, look)
    torch.testing.assert_close(first[0], found, rtol=1e-12, atol=1e-12)
    for other in (first, second):
        torch.testing.assert_close(other[1], weights, rtol=1e-12, atol=1e-12)


def stopping_early(kind: str) -> Any:
    torch.manual_seed(0)
    model = Net(kind)
    del model.spare
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parallax.distribute(model, optimizer)
    for number, step in enumerate(batches(2, 4, 1)):
        if number == 2 and parallax.rank() == 0:
            break
        accumulate("s")(None, model, [optimizer], step[parallax.rank()], 0)
    weights = {name: value.clone() for name, value in model.state_dict().items()} if parallax.rank() else None
    parallax.shutdown()
    return weights


def until_one_stops(world_size: int) -> Case:
    def model() -> nn.Module:
        net = Net("tables")
        del net.spare
        return net

    steps = [[micro[0] for micro in step] for step in batches(2, 4, 1)]
    return Case(
        model=model,
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        batches=[*steps[:2], *([step[1]] for step in steps[2:])],
        loss=squares,
    )


def test_rank_0_stops_early() -> None:
    """With tables the others go on without its samples; in a model without, they stop and say who has left."""
    _, weights = ranks.run(2, stopping_early, "tables")
    torch.testing.assert_close(weights, oracle.one_process(until_one_stops(1)).weights[-1], rtol=1e-12, atol=1e-12)
    first, second = ranks.run(2, stopping_early, "dense", expect_errors=True)
    assert first.error is None
    assert second.error == "PeerError", second
    assert "rank 1 stops: rank 0 is gone" in second.text, second
    assert "Rank 0 left no word: it has ended, or waits for no other rank" in second.text, second


# -- hooks on parameters ------------------------------------------------------------------------------


class Recorder:
    """A hook that is not linear, and notes what it gets."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen.append(grad.detach().clone().cpu())
        return (grad.to_dense() if grad.is_sparse else grad).clamp(-0.05, 0.08) * 2


def hooked_step(late: bool) -> Any:
    recorders: dict[str, Recorder] = {}
    handles: list[Any] = []

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == (2 if late else 0):
            for name, p in model.named_parameters():
                if "spare" not in name:
                    recorders[name] = Recorder()
                    handles.append(p.register_hook(recorders[name]))
        if number == 4:
            for handle in handles:
                handle.remove()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in batch:
            squares(model, micro).backward()
        grads = oracle.read_parts(model, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
        return {"grads": grads, "seen": {name: [*recorder.seen] for name, recorder in recorders.items()}}

    return step


def hooked(world_size: int, kind: str, late: bool, architecture: str = "hybrid") -> Case:
    return Case(
        model=lambda: Net(kind),
        optimizers=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        batches=batches(world_size, 5, 2, (4, 1)),
        loss=squares,
        step=hooked_step(late),
        config={"architecture": architecture},
        reads="parts",
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_see_the_gradient_of_one_device(world_size: int) -> None:
    cases = [(hooked, kind, late) for kind in ("tables", "tied", "dense") for late in (False, True)]
    oracle.check_all(world_size, [*cases, (hooked, "tables", False, "allreduce")])


def early_hooks(world_size: int) -> Case:
    """Hooks that are there before `distribute`, one of which is removed later by its handle."""
    handles: list[Any] = []

    def model() -> nn.Module:
        net = Net("tables")
        handles[:] = [p.register_hook(lambda grad: grad.clamp(-0.03, 0.03)) for p in net.parameters()]
        return net

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == 2:
            for handle in handles[::2]:
                handle.remove()
        return oracle.train_step(case, model, optimizers, batch[0], number)

    return Case(model=model, batches=batches(world_size, 4, 1), loss=squares, step=step)


def test_hooks_from_before_stay_removable() -> None:
    oracle.check(2, early_hooks)


def step_in_backward(world_size: int, kind: str) -> Case:
    """An optimizer for each parameter, which steps as soon as the gradient is there, and drops it."""
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def make(model: nn.Module) -> Any:
        optimizers.clear()
        optimizers.update({p: torch.optim.Adam([p], lr=0.05) for p in model.parameters()})
        return list(optimizers.values())

    def update(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    def step(case: Case, model: Any, listed: Any, batch: Any, number: int) -> Any:
        if number == 0:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(update)
        squares(model, batch[0], spare=number % 2 == 1).backward()
        return [name for name, p in model.named_parameters() if p.grad is not None]

    return Case(model=lambda: Net(kind), optimizers=make, batches=batches(world_size, 4, 1), loss=squares, step=step)


@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizers_may_step_inside_hooks(world_size: int) -> None:
    oracle.check_all(world_size, [(step_in_backward, kind) for kind in ("tables", "tied", "dense")])


def hook_that_changes_the_size() -> None:
    model = Net("tables")
    parallax.distribute(model)
    if parallax.rank() == 1:
        model.inner.weight.register_hook(lambda grad: grad[:1])
    model(torch.tensor([1])).sum().backward()


def test_a_hook_that_fails_fails_all_ranks() -> None:
    for outcome in ranks.run(2, hook_that_changes_the_size, expect_errors=True):
        assert "has changed the size of value" in outcome.text, outcome


def hook_on_one_rank(kind: str, changes: bool) -> list[float]:
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    seen: list[float] = []
    for number, step in enumerate(batches(2, 4, 1)):
        if number == 2 and parallax.rank() == 1:
            for p in model.parameters():
                p.register_hook(lambda grad: seen.append(grad.norm().item()) or (grad * 0.5 if changes else None))
        accumulate("s")(None, model, [optimizer], step[parallax.rank()], 0)
    parallax.shutdown()
    return seen


def test_a_hook_on_one_rank_may_look_at_dense_gradients_but_not_change_them() -> None:
    silent, seen = ranks.run(2, hook_on_one_rank, "dense", False)
    assert (silent, len(seen)) == ([], 2 * 4)  # two steps; the spare layer has no gradient
    for kind, changes in (("dense", True), ("tables", False), ("tables", True)):
        for outcome in ranks.run(2, hook_on_one_rank, kind, changes, expect_errors=True):
            assert outcome.error in ("DisagreementError", "PeerError"), outcome
            assert "change gradients in hooks the same number of times" in outcome.text, outcome


def after_the_run() -> list[float]:
    p = nn.Linear(1, 1)
    parallax.distribute(p)
    p.weight.register_hook(lambda grad: grad * 3)
    p(torch.ones(1, 1)).sum().backward()
    first = p.weight.grad.item()
    parallax.shutdown()
    p(torch.ones(1, 1)).sum().backward()
    return [first, p.weight.grad.item(), copy.deepcopy(p).weight.item() - p.weight.item()]


def test_hooks_go_on_after_the_run() -> None:
    assert ranks.run(2, after_the_run) == [[3.0, 6.0, 0.0]] * 2


# -- lazy rows ----------------------------------------------------------------------------------------

LAZY = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def reference(name: str, steps: list[torch.Tensor], targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lazy rows by definition: every row is a parameter of its own, without a gradient unless it was looked up. The
    step count of Adam is the table's."""
    start = nn.Embedding(7, 3, dtype=torch.float64).weight.detach()
    rows = [nn.Parameter(row.clone()[None]) for row in start]
    optimizers = [LAZY[name]([row]) for row in rows]
    weights = []
    for ids, target in zip(steps, targets, strict=True):
        F.mse_loss(torch.cat(rows)[ids].sum(1), target).backward()
        touched = set(ids.tolist())
        for r, (row, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
            if r in touched:
                optimizer.step()
            else:  # time passes for a row that was not looked up
                state = optimizer.state.setdefault(row, {}) if name == "Adagrad" else optimizer.state.get(row)
                if state and "step" in state:
                    state["step"] += 1
            row.grad = None
        weights.append(torch.cat(rows).detach().clone())
    return weights


def lazy_data(world_size: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    every_row_first = torch.arange(7).repeat(2)[: 7 + (-7) % world_size]
    ids = [list(every_row_first.chunk(world_size))]
    ids += [[torch.randint(0, 7, (2,), generator=generator) for _ in range(world_size)] for _ in range(4)]
    targets = [[torch.randn(len(i), generator=generator, dtype=torch.float64) for i in step] for step in ids]
    return ids, targets


def lazy(world_size: int, name: str, architecture: str, set_to_none: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Embedding(7, 3, dtype=torch.float64)
    optimizer = LAZY[name](model.parameters())
    parallax.distribute(model, optimizer, config=parallax.Config(lazy_rows=True, architecture=architecture))
    weights = []
    for ids, targets in zip(*lazy_data(world_size), strict=True):
        optimizer.zero_grad(set_to_none)
        F.mse_loss(model(ids[parallax.rank()]).sum(1), targets[parallax.rank()]).backward()
        optimizer.step()
        weights.append(model.state_dict()["weight"].clone())
    assert "lazy_rows" in parallax.explain(model)["weight"].reason
    parallax.shutdown()
    return weights


def all_lazy(world_size: int, architecture: str) -> dict[str, list[torch.Tensor]]:
    return {name: lazy(world_size, name, architecture, n % 2 == 0) for n, name in enumerate(LAZY)}


@pytest.mark.parametrize(
    ("world_size", "architecture"), [(1, "hybrid"), (1, "allreduce"), (2, "hybrid"), (2, "allreduce"), (3, "hybrid")]
)
def test_lazy_rows_update_touched_rows_only(world_size: int, architecture: str) -> None:
    ids, targets = lazy_data(world_size)
    joined = [torch.cat(step) for step in ids], [torch.cat(step) for step in targets]
    by_rank = ranks.run(world_size, all_lazy, world_size, architecture)
    for name in LAZY:
        torch.manual_seed(0)
        for number, wanted in enumerate(reference(name, *joined)):
            for found in by_rank:
                torch.testing.assert_close(
                    found[name][number],
                    wanted,
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda m: f"{name}, step {number}: {m}",  # noqa: B023
                )


def lazy_first_touch() -> list[Any]:
    """Rows that are first touched in the second step start from the optimizer's initial state; accumulation, a gradient
    that the user replaces, a closure, and a tied table, which is not lazy."""
    torch.manual_seed(0)
    model = Net("tied")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer, config=parallax.Config(lazy_rows=True))
    moved = []

    def moves(do: Any) -> None:
        before = {name: w.clone() for name, w in model.state_dict().items()}
        do()
        after = model.state_dict()
        moved.append(
            [(after[f"{t}.weight"] != before[f"{t}.weight"]).any(1).nonzero().squeeze(1).tolist() for t in "ab"]
        )

    def two_backwards() -> None:
        optimizer.zero_grad()
        model(torch.tensor([0])).sum().backward()
        model(torch.tensor([3])).sum().backward()
        optimizer.step()

    def replaced() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        grad = model.b.weight.grad.clone()
        grad[2] = 0
        model.b.weight.grad = grad
        optimizer.step()

    def closure() -> None:
        def run() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([4])).sum()
            loss.backward()
            return loss

        optimizer.step(run)

    for do in (two_backwards, replaced, closure, two_backwards):
        moves(do)
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    moved.append((state[names.index("b.weight")]["exp_avg_sq"] != 0).any(1).tolist())
    parallax.shutdown()
    return moved


@pytest.mark.parametrize("world_size", [1, 2])
def test_lazy_rows_in_a_loop(world_size: int) -> None:
    everything = list(range(7))
    for moved in ranks.run(world_size, lazy_first_touch):
        assert moved == [
            [everything, [0, 3]],
            [everything, [1]],
            [everything, [4]],
            [everything, [0, 3]],
            [True, True, False, True, True],
        ]


class WholeNorm(torch.optim.Optimizer):
    """Its update of a row depends on all rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * p.grad / (1 + p.grad.norm())


def lazy_with_a_norm() -> None:
    model = Net("tables")
    optimizer = WholeNorm(model.parameters())
    parallax.distribute(model, optimizer, config=parallax.Config(lazy_rows=True))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def test_lazy_rows_need_an_optimizer_that_updates_by_rows() -> None:
    for outcome in ranks.run(2, lazy_with_a_norm, expect_errors=True):
        assert "'a.weight' is updated with Config.lazy_rows, but WholeNorm's update of a row depends" in outcome.text
