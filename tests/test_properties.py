"""Random programs train on several ranks as on one device.

A `Program` says in plain data what a model, its batches, its optimizers and its loop are like, so that a rank
process builds the same as this one. `make test` tries a fixed set of them; `make fuzz` draws new ones (as many
as FUZZ says).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import oracle
import ranks
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Case
from test_exactness import ARCHITECTURES
from torch import nn

import parallax

NUM_DRAWN = int(os.environ.get("FUZZ", "0"))


def tried(num_examples: int) -> settings:
    """The same examples each time, or as many new ones as FUZZ says."""
    return settings(
        max_examples=NUM_DRAWN or num_examples,
        derandomize=not NUM_DRAWN,
        phases=[Phase.generate, *[Phase.shrink] * bool(NUM_DRAWN)],
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
WIDTH = 3
"""Columns of the dense features of a sample."""


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table and how a forward looks it up."""

    rows: int
    width: int
    how: str
    """"module", "function", "pick" (weight[ids]), "select", or a mode of a bag: "sum", "mean", "max"."""
    num_ids: int
    """Ids of a sample."""
    sparse: bool
    padding_idx: int | None
    again: str
    """A second lookup in the same forward: "", "same", or "dense" (of another layout than the first if sparse)."""
    ragged: bool
    """Bags of different sizes, empty ones among them."""
    weighted: bool
    """Per-sample weights (in bags of mode sum) that a layer makes."""
    tied: bool
    """The table is the weight of an output layer too."""
    frozen: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """What `make_case` makes a training program of."""

    tables: tuple[TableSpec, ...]
    hidden: tuple[int, ...]
    optimizer: str
    optimizers_last: bool
    architecture: str
    reduction: str
    clip: str
    regularized_from: int | None
    """The step from which on the squares of all weights are part of the loss."""
    set_to_none: bool
    gated: bool
    """A sample uses some of the tables, and a batch those that its samples use."""
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    """Samples by step, micro-batch and rank."""
    ids: str
    """"random", "few" (many duplicates) or "same" (one row)."""
    seed: int

    @property
    def sparse(self) -> bool:
        return any(t.sparse and not t.frozen for t in self.tables)


class Net(nn.Module):
    """The model of a `Program`. A batch is (features, a gate per sample and table, ids of each table ...)."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.tables = nn.ModuleList()
        for t in program.tables:
            options = {"padding_idx": t.padding_idx, "sparse": t.sparse, "dtype": torch.float64}
            bag = t.how in ("sum", "mean", "max")
            module = (
                nn.EmbeddingBag(t.rows, t.width, mode=t.how, **options)
                if bag
                else nn.Embedding(t.rows, t.width, **options)
            )
            module.weight.requires_grad_(not t.frozen)
            self.tables.append(module)
        width = WIDTH + sum(t.width for t in program.tables)
        self.weights = nn.Linear(WIDTH, max(t.num_ids for t in program.tables))
        self.layers = nn.ModuleList()
        for size in program.hidden:
            self.layers.append(nn.Linear(width, size))
            width = size
        self.out = nn.Linear(width, 1)
        self.ties = nn.ModuleDict(
            {str(i): nn.Linear(width, t.width) for i, t in enumerate(program.tables) if t.tied}
        )  # from the last layer to a row
        self.double()

    def look_up(self, i: int, ids: torch.Tensor, x: torch.Tensor, sparse: bool) -> torch.Tensor:
        """(samples, width)"""
        t, module = self.program.tables[i], self.tables[i]
        if t.how == "module" and sparse == t.sparse:
            return module(ids).mean(1)
        if t.how in ("module", "function"):
            return F.embedding(ids, module.weight, padding_idx=t.padding_idx, sparse=sparse).mean(1)
        if t.how == "pick":
            return module.weight[ids - t.rows * (ids % 2)].mean(1)  # some of them counted from the end
        if t.how == "select":
            return module.weight.index_select(0, ids.reshape(-1)).view(*ids.shape, t.width).mean(1)
        weights = self.weights(x)[:, : t.num_ids] if t.weighted and t.how == "sum" else None
        if not t.ragged:
            return module(ids, per_sample_weights=weights)
        inside = torch.arange(t.num_ids) < (ids.sum(1) % (t.num_ids + 1))[:, None]
        lengths = inside.sum(1)
        offsets = lengths.cumsum(0) - lengths
        return module(ids[inside], offsets, per_sample_weights=None if weights is None else weights[inside])

    def forward(self, x: torch.Tensor, gate: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for i, t in enumerate(self.program.tables):
            chosen = gate[:, i]
            h = torch.zeros(len(x), t.width, dtype=torch.float64)
            if not self.program.gated:
                h = h + self.look_up(i, ids[i], x, t.sparse)
            elif bool(chosen.any()):
                h = h.index_put((chosen,), self.look_up(i, ids[i][chosen], x[chosen], t.sparse))
            if t.again and not self.program.gated:
                h = h - 2 * self.look_up(i, ids[i].flip(1), x, t.sparse and t.again == "same")
            seen.append(h)
        h = torch.cat(seen, 1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        out = self.out(h).squeeze(1)
        for i, layer in self.ties.items():
            out = out + (layer(h) @ self.tables[int(i)].weight.t()).square().mean(1)
        return out


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, eps=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-2, weight_decay=0.2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, eps=1e-2, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-2),
    "by hand": lambda p: [],
}
"""Gradients may cancel to nothing, and what divides by their size would make their rounding large: eps is not small."""
FOR_SPARSE = ("SGD", "momentum", "Adagrad", "SparseAdam", "by hand")
FOR_DENSE = ("SGD", "momentum", "decay", "Adagrad", "Adam", "AdamW", "RMSprop", "Adafactor", "by hand")


def make_optimizers(program: Program, model: Any) -> Any:
    if program.optimizer != "SparseAdam":
        return OPTIMIZERS[program.optimizer](model.parameters())
    sparse = [model.tables[i].weight for i, t in enumerate(program.tables) if t.sparse and not t.frozen]
    rest = [p for p in model.parameters() if all(p is not s for s in sparse)]
    return [OPTIMIZERS["SparseAdam"](sparse), OPTIMIZERS["Adam"](rest)]


def make_batch(program: Program, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(features, gates, ids ...) of `size` samples."""

    def ids(t: TableSpec) -> torch.Tensor:
        last = {"random": t.rows, "few": min(t.rows, 3), "same": 1}[program.ids]
        return (torch.randint(last, (size, t.num_ids), generator=generator) * 7 + program.seed) % t.rows

    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    gate = torch.rand(size, len(program.tables), generator=generator) < 0.4
    return x, gate, *map(ids, program.tables)


def clip(model: nn.Module, how: str) -> Any:
    if how == "value":
        return nn.utils.clip_grad_value_(model.parameters(), 0.01)
    order = {"norm": 2.0, "inf": float("inf"), "one": 1.0}[how]
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order)


def loss_of(program: Program, model: Any, batch: Any, number: int) -> torch.Tensor:
    errors = (model(*batch) - 1).square()
    loss = errors.sum() / (max(len(errors), 1) if program.reduction == "mean" else 1)
    if program.regularized_from is not None and number >= program.regularized_from:
        loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
    return loss


def one_step(program: Program, model: Any, optimizers: list[torch.optim.Optimizer], batch: Any, number: int) -> Any:
    """The user's loop body; also in one process."""
    if optimizers:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=program.set_to_none)
    else:
        model.zero_grad(set_to_none=program.set_to_none)
    for micro_batch in batch:
        (loss_of(program, model, micro_batch, number) / len(batch)).backward()
    norm = clip(model, program.clip) if program.clip else None
    if not optimizers:
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.1)
    for optimizer in optimizers:
        optimizer.step()
    return norm


def make_case(world_size: int, program: Program) -> Case:
    generator = torch.Generator().manual_seed(program.seed)
    by_micro_batch = [
        [[make_batch(program, size, generator) for size in ranks] for ranks in micro] for micro in program.sizes
    ]

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        norm = one_step(program, model, optimizers, batch, number)
        whole = number + 1 == len(program.sizes)
        grads = oracle.read_gradients(model) if whole else oracle.read_parts(model, gradients=True)
        return {"norm": norm, "grads": grads}

    return Case(
        model=lambda: Net(program),
        optimizers=lambda model: make_optimizers(program, model),
        batches=[list(zip(*micro, strict=True)) for micro in by_micro_batch],
        loss=lambda model, batch: model(*batch).sum(),
        step=step,
        config={**ARCHITECTURES[program.architecture], "reduction": program.reduction},
        reads="parts",
        optimizers_last=program.optimizers_last,
        tolerance=TOLERANCE,
    )


def train_unevenly(program: Program, num_batches: int, every: int, num_epochs: int) -> oracle.Trace:
    """A loop over sharded data, of which ranks may have different numbers of batches; a step after `every` of them."""
    torch.manual_seed(0)
    model = Net(program)
    optimizers = oracle._listed(make_optimizers(program, model))
    parallax.distribute(model, optimizers, config=parallax.Config(**ARCHITECTURES[program.architecture]))
    data = parallax.shard(uneven_batches(program, num_batches))
    trace = oracle.Trace([oracle.read_weights(model)], [], [])
    for _ in range(num_epochs):
        for number, batch in enumerate(data, 1):
            backward_and_step(program, model, optimizers, batch, number % every == 0)
        trace.weights.append(oracle.read_weights(model))
    trace.state = [optimizer.state_dict() for optimizer in optimizers]
    parallax.shutdown()
    return trace


def unevenly_in_one_process(
    world_size: int, program: Program, num_batches: int, every: int, num_epochs: int
) -> oracle.Trace:
    torch.manual_seed(0)
    model = Net(program)
    optimizers = oracle._listed(make_optimizers(program, model))
    batches = uneven_batches(program, num_batches)
    steps = [oracle.join(batches[i : i + world_size]) for i in range(0, num_batches, world_size)]
    trace = oracle.Trace([oracle.read_weights(model)], [], [])
    for _ in range(num_epochs):
        for number, batch in enumerate(steps, 1):
            backward_and_step(program, model, optimizers, batch, number % every == 0)
        trace.weights.append(oracle.read_weights(model))
    trace.state = [optimizer.state_dict() for optimizer in optimizers]
    return trace


def uneven_batches(program: Program, num_batches: int) -> list[Any]:
    generator = torch.Generator().manual_seed(program.seed)
    sizes = [size for micro in program.sizes for by_rank in micro for size in by_rank]
    return [make_batch(program, max(sizes[i % len(sizes)], 1), generator) for i in range(num_batches)]


def backward_and_step(
    program: Program, model: Any, optimizers: list[torch.optim.Optimizer], batch: Any, steps: bool
) -> None:
    loss_of(program, model, batch, 0).backward()
    if not steps:
        return
    if program.clip:
        clip(model, program.clip)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=program.set_to_none)


# -- drawing ------------------------------------------------------------------------------------------

few = st.integers(0, 2).map(lambda n: n == 0)
"""True now and then."""


@st.composite
def table_specs(draw: Any) -> TableSpec:
    how = draw(st.sampled_from(("module", "module", "function", "pick", "select", "sum", "mean", "max")))
    rows = draw(st.one_of(st.integers(1, 6), st.integers(1, 50)))
    can_be_sparse = how in ("module", "function", "sum", "mean")
    sparse = can_be_sparse and draw(st.booleans())
    has_padding = how not in ("pick", "select") and draw(few)
    return TableSpec(
        rows=rows,
        width=draw(st.integers(1, 5)),
        how=how,
        num_ids=draw(st.integers(1, 3)),
        sparse=sparse,
        padding_idx=draw(st.integers(-rows, rows - 1)) if has_padding else None,
        again=draw(st.sampled_from(("", "", "same", "dense" if how in ("module", "function") else ""))),
        ragged=draw(st.booleans()),
        weighted=draw(st.booleans()),
        tied=not sparse and draw(few),
        frozen=draw(st.integers(0, 7)) == 7,
    )


@st.composite
def programs(draw: Any, world_size: int, uneven: bool = False) -> Program:
    tables = tuple(draw(st.lists(table_specs(), min_size=1, max_size=4)))
    sparse = any(t.sparse and not t.frozen for t in tables)
    reduction = draw(st.sampled_from(("mean",) if uneven else ("mean", "mean", "mean", "sum")))
    regularized = not uneven and not sparse and reduction == "mean" and draw(few)
    optimizers = FOR_SPARSE if sparse else FOR_DENSE
    optimizer = draw(st.sampled_from(optimizers[:-1] if uneven else optimizers))
    if optimizer == "SparseAdam":  # which does not take what is looked up with both layouts
        tables = tuple(dataclasses.replace(t, again="same" if t.again else "") for t in tables)
    size = st.integers(int(regularized), 4)
    num_micro = draw(st.sampled_from((1, 1, 2)))
    sizes = draw(
        st.lists(
            st.tuples(*[st.tuples(*[size] * world_size)] * num_micro),
            min_size=2,
            max_size=4,
        )
    )
    return Program(
        tables=tables,
        hidden=tuple(draw(st.lists(st.integers(1, 4), max_size=2))),
        optimizer=optimizer,
        optimizers_last=not uneven and optimizer != "Adafactor" and draw(few),
        architecture=draw(st.sampled_from(("hybrid", "hybrid", "hybrid", "gather", "dense"))),
        reduction=reduction,
        clip="" if sparse else draw(st.sampled_from(("", "norm", "inf", "one", "value"))),
        regularized_from=draw(st.integers(0, 2)) if regularized else None,
        set_to_none=draw(st.booleans()),
        gated=draw(few),
        sizes=tuple(sizes),
        ids=draw(st.sampled_from(("random", "few", "same"))),
        seed=draw(st.integers(0, 2**16)),
    )


sized_programs = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), programs(n)))


@tried(20)
@given(sized_programs)
def test_random_programs(sized: tuple[int, Program]) -> None:
    world_size, program = sized
    oracle.check(world_size, make_case, program)


@tried(8)
@given(st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), programs(n, uneven=True))), st.data())
def test_random_programs_on_uneven_data(sized: tuple[int, Program], data: Any) -> None:
    world_size, program = sized
    num_batches = data.draw(st.integers(1, 3 * world_size))
    settings = (program, num_batches, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)))
    expected = unevenly_in_one_process(world_size, *settings)
    traces = ranks.run(world_size, train_unevenly, *settings)
    assert not oracle.compare(expected, traces, TOLERANCE)
