"""`torch.compile` before and after `parallax.distribute`: the numbers of the uncompiled model on one device."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch._dynamo
import torch.nn.functional as F
from oracle import Case
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import parallax

NUM_STEPS, LATE = 6, 4
"""Steps; the one from which on the recommender uses parameters that it has not used before."""


class LanguageModel(nn.Module):
    """An embedding, dense layers, a sampled output, and a weight that is looked up and used whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.bias = nn.Embedding(11, 4), nn.Embedding(11, 4), nn.Embedding(11, 1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Parameter(torch.randn(7, 4))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        h += 1  # in place, on a lookup that waits
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = self.norm(h) * self.embed.weight.shape[0]
        samples = torch.arange(5)
        logits = h @ self.out(samples).t() + self.bias(samples).squeeze(-1)
        return logits.sum(-1) + (h @ self.tied.t()).sum(-1) + self.tied[ids % 7].sum(-1)


class Recommender(nn.Module):
    """Bags and embeddings side by side, then dense layers; some parameters are used late."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 4, mode="sum")
        self.user, self.item = nn.Embedding(11, 4), nn.Embedding(9, 4)
        self.top = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
        self.late, self.late_table = nn.Linear(12, 12), nn.Embedding(11, 12)
        self.is_late = False
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bag, user, item = self.bag(ids[:, None]), self.user(ids), self.item(ids % 9)
        h = torch.cat([bag, user, item], 1)
        if self.is_late:
            h = torch.tanh(self.late(torch.tanh(h))) + self.late_table(ids)
        return self.top(h).squeeze(-1)


def squares(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def case(world_size: int, model: Callable[[], nn.Module]) -> Case:
    generator = torch.Generator().manual_seed(1)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 11, (size,), generator=generator)
        return ids, torch.randn(size, generator=generator, dtype=torch.float64)

    return Case(
        model=model,
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        batches=[[batch(4 + (r + step) % 2) for r in range(world_size)] for step in range(NUM_STEPS)],
        loss=squares,
        step=train_step,
    )


def train_step(this: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    model.is_late = number >= LATE
    return oracle.train_step(this, model, optimizers, batch, number)


def on_a_rank(form: str, backend: str, model: type[nn.Module]) -> tuple[oracle.Trace, list[int], list[int]]:
    """The case on this rank; also the number of graphs so far and of rounds, by step."""
    warnings.filterwarnings("ignore", ".*grad attribute of a Tensor that is not a leaf.*")  # dynamo looks
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch's own code
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    this = case(parallax.world_size(), model)
    torch.manual_seed(0)
    plain = made = this.model()
    optimizer = this.optimizers(plain)
    if "before" in form:
        made = torch.compile(plain, backend=counter)
    if form == "ran before":
        squares(made, this.batches[0][0]).backward()
        optimizer.zero_grad()
        counter.clear()
    assert parallax.distribute(made, optimizer) is made
    if form == "after":
        made = torch.compile(plain, backend=counter)
    elif form == "in place":
        plain.compile(backend=counter)
    elif form == "part":
        plain.top.compile(backend=counter, fullgraph=True)
    elif form == "all":
        made = torch.compile(plain, backend=counter, fullgraph=True)
    elif form == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend=counter)
    elif form == "loss":
        this.loss = torch.compile(squares, backend=counter)
    elif form == "step":

        def backward_and_step(loss: Callable[..., torch.Tensor], *args: Any) -> None:
            optimizer.zero_grad()
            loss(*args).backward()
            optimizer.step()

        compiled = torch.compile(backward_and_step, backend=counter)

        def step(this: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
            model.is_late = number >= LATE
            compiled(squares, model, batch)
            return {"between": None, "grads": oracle.read_gradients(model)}

        this.step = step
    trace = oracle.Trace([oracle.read_weights(plain)], [], [])
    num_graphs, num_rounds = [], []
    for number, batches in enumerate(this.batches):
        before = parallax.traffic(made).num_rounds
        seen = this.step(this, made, [optimizer], batches[parallax.rank()], number)
        num_rounds.append(parallax.traffic(made).num_rounds - before)
        seen["grads"] = {name.removeprefix("_orig_mod."): grad for name, grad in seen["grads"].items()}
        trace.seen.append(seen)
        trace.weights.append(oracle.read_weights(plain))
        num_graphs.append(counter.frame_count)
    assert "_orig_mod" not in str(parallax.explain(made))
    parallax.shutdown()
    trace.state = [optimizer.state_dict()]
    return trace, num_graphs, num_rounds


@functools.cache
def expected(model: type[nn.Module]) -> tuple[oracle.Trace, list[list[int]]]:
    """On one device, and the rounds of both ranks without torch.compile."""
    found = ranks.run(2, on_a_rank, "uncompiled", "eager", model)
    return oracle.one_process(case(2, model)), [rounds for _, _, rounds in found]


def check(form: str, backend: str, model: type[nn.Module]) -> list[int]:
    """Parity, and lookups that share rounds as they do without torch.compile; returns the numbers of graphs."""
    found = ranks.run(2, on_a_rank, form, backend, model)
    trace, rounds = expected(model)
    problems = oracle.compare(trace, [trace for trace, _, _ in found])
    assert not problems, f"{form}, {backend}:\n" + "\n".join(problems)
    assert [rounds for _, _, rounds in found] == rounds
    return found[0][1]


@pytest.mark.parametrize("form", ["before", "ran before", "after", "in place", "loss", "step"])
def test_language_model(form: str) -> None:
    num_graphs = check(form, "aot_eager" if form == "after" else "eager", LanguageModel)
    assert num_graphs[:2] == [0, 0], "until the plan is made, nothing is compiled"
    assert 0 < num_graphs[2] <= num_graphs[3], "then it is, and once more for batches of any size"
    assert num_graphs[3] == num_graphs[-1], "and not again"


def test_recommender() -> None:
    num_graphs = check("after", "aot_eager", Recommender)
    assert 0 < num_graphs[2] <= num_graphs[3] < num_graphs[-1]


def test_part_in_one_graph() -> None:
    assert check("part", "eager", Recommender)[2:] == [1, 2, 2, 2]


def test_optimizer() -> None:
    check("optimizer", "eager", LanguageModel)


def test_all_in_one_graph_is_an_error_on_all_ranks() -> None:
    for outcome in ranks.run(2, on_a_rank, "all", "eager", LanguageModel, expect_errors=True):
        assert outcome.error == "Unsupported", outcome
        assert "compile without fullgraph=True, see docs/limits.md" in outcome.text


class Small(nn.Module):
    """Little to compile: inductor takes seconds for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 1)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)).exp()).squeeze(-1).sin()


def inductor_on_a_rank(cache: str) -> tuple[oracle.Trace, int]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    warnings.simplefilter("ignore")  # of torch's own code
    torch._dynamo.reset()
    this = dataclasses.replace(case(parallax.world_size(), Small), batches=small_batches())
    torch.manual_seed(0)
    model = this.model()
    optimizer = this.optimizers(model)
    compiled = torch.compile(parallax.distribute(model, optimizer))
    trace = oracle.Trace([oracle.read_weights(model)], [], [])
    for number, batches in enumerate(this.batches):
        seen = train_step(this, compiled, [optimizer], batches[parallax.rank()], number)
        seen["grads"] = {name.removeprefix("_orig_mod."): grad for name, grad in seen["grads"].items()}
        trace.seen.append(seen)
        trace.weights.append(oracle.read_weights(model))
    trace.state = [optimizer.state_dict()]
    monkeypatch.undo()
    return trace, int(torch._dynamo.utils.counters["aot_autograd"]["ok"])


def small_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 11, (4, 2, 4), generator=generator)
    targets = torch.randn(4, 2, 4, generator=generator, dtype=torch.float64)
    return [list(zip(*step, strict=True)) for step in zip(ids, targets, strict=True)]


@pytest.mark.programs
def test_inductor(tmp_path: Path) -> None:
    found = ranks.run(2, inductor_on_a_rank, str(tmp_path))
    this = dataclasses.replace(case(2, Small), batches=small_batches())
    problems = oracle.compare(oracle.one_process(this), [trace for trace, _ in found])
    assert not problems, "\n".join(problems)
    assert [num_graphs for _, num_graphs in found] == [1, 1]
