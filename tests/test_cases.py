"""Cases from the field: situations that users of embedding tables on several workers have reported.

Each has the values that one device gives, and then the whole kind of it against the oracle.
"""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.nn.functional as F
from oracle import Case
from test_exactness import ARCHITECTURES
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import parallax

every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
up_to_three = pytest.mark.parametrize("world_size", [1, 2, 3])  # many steps: four ranks take long on two cores
several_ranks = pytest.mark.parametrize("world_size", [2, 3, 4])
two_and_three = pytest.mark.parametrize("world_size", [2, 3])


def ids(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def check_architectures(world_size: int, make_case: Any, *args: Any) -> list[list[oracle.Trace]]:
    """One case with every architecture; the traces of the ranks for each."""
    return check_each(world_size, [(make_case, *args)])


def check_each(world_size: int, cases: list[tuple[Any, ...]]) -> list[list[oracle.Trace]]:
    """All cases in one job: on two ranks with every architecture, on more with the hybrid one. Servers differ from it
    in who adds up dense gradients, which cases do not depend on (`test_servers`)."""
    architectures = [a for a in ARCHITECTURES if a != "ps"] if world_size == 2 else ["hybrid"]
    return oracle.check_all(world_size, [(_with_architecture, a, *case) for case in cases for a in architectures])


def _with_architecture(world_size: int, architecture: str, make_case: Any, *args: Any) -> Case:
    case = make_case(world_size, *args)
    case.config = {**ARCHITECTURES[architecture], **case.config}
    return case


def filled(module: nn.Module, value: float) -> Any:
    """`module` with every parameter set to one value."""
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(value)
    return module


# -- 1: padding and an empty sparse gradient ----------------------------------------------------------


def padding(world_size: int, sparse: bool, bag: bool = False) -> Case:
    rows = [ids([1, 2]), ids([0, 0]), ids([3, 0]), ids([4, 4])][:world_size]
    nothing = [ids([0, 0])] * world_size
    kind = nn.EmbeddingBag if bag else nn.Embedding
    optimizer = torch.optim.SparseAdam if sparse else torch.optim.Adam
    return Case(
        model=lambda: kind(5, 3, padding_idx=0, sparse=sparse),
        optimizers=lambda model: optimizer(model.parameters(), lr=0.1),
        batches=[rows, nothing, rows[::-1], nothing],
        loss=lambda model, batch: model(batch).square().sum(),
        config={"reduction": "sum"},
    )


@every_world_size
@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
def test_case_1_padding_and_empty_gradients(world_size: int, bag: bool) -> None:
    for traces in check_architectures(world_size, padding, True, bag):
        weights = [w["weight"] for w in traces[0].weights]
        assert torch.equal(weights[2], weights[1])
        assert torch.equal(weights[4], weights[3])
        assert not torch.equal(weights[3], weights[2])
    for traces in check_architectures(world_size, padding, False, bag):
        assert all(torch.equal(w["weight"][0], traces[0].weights[0]["weight"][0]) for w in traces[0].weights)


# -- 2: tables that some ranks, or all, do not use ----------------------------------------------------


class Towers(nn.Module):
    """A batch is a list of (name of a tower, id): each sample uses its tower's table and layer alone."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Embedding(6, 2, sparse=sparse) for name in "abc"})
        self.layers = nn.ModuleDict({name: nn.Linear(2, 1) for name in "abc"})

    def forward(self, samples: list[tuple[str, int]]) -> torch.Tensor:
        total = torch.zeros(())
        for name in sorted({tower for tower, _ in samples}):
            picked = torch.tensor([i for tower, i in samples if tower == name])
            total = total + self.layers[name](self.towers[name](picked)).square().sum()
        return total / len(samples)


def towers(world_size: int, sparse: bool, *steps: str) -> Case:
    """A step names each rank's tower, in turn: "ab" is rank 0 on a, rank 1 on b, rank 2 on a, ..."""
    optimizer = torch.optim.Adagrad if sparse else torch.optim.Adam
    return Case(
        model=lambda: Towers(sparse),
        optimizers=lambda model: optimizer(model.parameters(), lr=0.05),
        batches=[
            [[(step[rank % len(step)], (rank + i) % 6) for i in range(2)] for rank in range(world_size)]
            for step in steps
        ],
        loss=lambda model, batch: model(batch),
    )


@every_world_size
@pytest.mark.parametrize("sparse", [False, True], ids=["dense-grad", "sparse-grad"])
def test_case_2_tables_that_are_not_used(world_size: int, sparse: bool) -> None:
    steps = ("a", "ab", "a", "ab", "ba", "b")
    for traces in check_architectures(world_size, towers, sparse, *steps):
        for trace in traces:
            grads = [seen["grads"] for seen in trace.seen]
            assert grads[0]["towers.b.weight"] is None
            assert grads[2]["towers.b.weight"] is None
            assert all(g["towers.c.weight"] is None and g["layers.c.weight"] is None for g in grads)
            assert torch.equal(trace.weights[2]["towers.b.weight"], trace.weights[3]["towers.b.weight"])
            assert torch.equal(trace.weights[0]["towers.c.weight"], trace.weights[-1]["towers.c.weight"])


@two_and_three
def test_case_2_other_orders(world_size: int) -> None:
    """A different table on each rank in the very first step; one that comes late; one rank that changes."""
    oracle.check_all(world_size, [(towers, False, *s) for s in (("abc", "a", "cba"), ("a", "a", "bc", "abc"))])


# -- 3: every rank's rows reach every rank ------------------------------------------------------------


def own_rows(world_size: int, mode: str) -> Case:
    return Case(
        model=lambda: nn.EmbeddingBag(8, 2, mode=mode, sparse=mode != "max"),
        batches=[[ids([rank]) for rank in range(world_size)]] * 3,
        loss=lambda model, batch: model(batch).sum(1).mean(),
    )


@several_ranks
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_case_3_rows_of_all_ranks_move(world_size: int, mode: str) -> None:
    for traces in check_architectures(world_size, own_rows, mode):
        for trace in traces:
            moved = (trace.weights[1]["weight"] != trace.weights[0]["weight"]).any(1)
            assert moved.tolist() == [row < world_size for row in range(8)]


# -- 4: one rule for the mean -------------------------------------------------------------------------


class Scalar(nn.Module):
    """One number for all samples: as a parameter, or as the row of a table."""

    def __init__(self, table: bool, dense: bool) -> None:
        super().__init__()
        self.table = filled(nn.Embedding(1, 1), 0) if table else None
        self.dense = nn.Parameter(torch.zeros(1)) if dense else None

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        value = torch.zeros(len(y))
        if self.table is not None:
            value = value + self.table(torch.zeros(len(y), dtype=torch.int64))[:, 0]
        return value if self.dense is None else value + self.dense


def scalar(world_size: int, table: bool, dense: bool, targets: list[list[float]], reduction: str) -> Case:
    return Case(
        model=lambda: Scalar(table, dense),
        batches=[[torch.tensor(y) for y in targets]] * 3,
        loss=lambda model, y: F.mse_loss(model(y), y),
        config={"reduction": reduction},
    )


KINDS = [(True, False), (False, True), (True, True)]


def test_case_4_samples_count_alike() -> None:
    cases = [(scalar, *kind, [[1.0, 1.0, 1.0], [5.0]], "mean") for kind in KINDS]
    for traces in oracle.check_all(2, cases):
        for trace in traces:
            grads = [g for g in trace.seen[0]["grads"].values() if g is not None]
            assert grads
            assert all(g.item() == pytest.approx(-4.0) for g in grads)


@two_and_three
def test_case_4_other_sizes(world_size: int) -> None:
    targets = [[float(3 * rank + i) for i in range(1 + (2 * rank) % 5)] for rank in range(world_size)]
    swapped = [[2.0] * 2, [1.0] * 3, [4.0], [0.5, 3.0]][:world_size]
    for case in [(scalar, *kind, t, "mean") for kind in KINDS for t in (targets, swapped)]:
        check_architectures(world_size, *case)


def gradients_of_a_scalar(table: bool, dense: bool, targets: list[list[float]], config: dict[str, Any]) -> Any:
    model = parallax.distribute(Scalar(table, dense), config=parallax.Config(**config))
    y = torch.tensor(targets[parallax.rank()])
    found = []
    for _ in range(3):  # the plan is made after the first
        model.zero_grad()
        F.mse_loss(model(y), y).backward()
        found.append([g.item() for g in oracle.read_gradients(model).values() if g is not None])
    return found


@pytest.mark.parametrize("kind", KINDS, ids=["table", "dense", "both"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_4_sum(kind: tuple[bool, bool], architecture: str) -> None:
    config = {**ARCHITECTURES[architecture], "reduction": "sum"}
    for found in ranks.run(2, gradients_of_a_scalar, *kind, [[1.0, 1.0, 1.0], [5.0]], config):
        assert found == [pytest.approx([-12.0] * sum(kind))] * 3


# -- 5: one row, several times ------------------------------------------------------------------------


def one_row(world_size: int, copies: int, calls: int) -> Case:
    def loss(table: Any, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(batch) for _ in range(calls)]).sum(0).mul(2 / calls).mean()

    return Case(
        model=lambda: filled(nn.Embedding(4, 1), 0),
        optimizers=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
        batches=[[ids(*[1] * copies)] * world_size] * 3,
        loss=loss,
    )


@every_world_size
def test_case_5_rows_are_updated_once(world_size: int) -> None:
    for copies, calls in [(1, 1), (2, 1), (1, 2), (7, 3)]:
        for traces in check_architectures(world_size, one_row, copies, calls):
            for trace in traces:
                assert trace.weights[1]["weight"].flatten().tolist() == pytest.approx([0, -0.1, 0, 0])


def traffic_of_a_step(model: nn.Module, loss: Any, batches: list[Any]) -> parallax.Traffic:
    """Of one step after the plan is made, of this rank."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    batch = batches[parallax.rank()]
    for _ in range(3):
        before = parallax.traffic(model)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        one_step = parallax.traffic(model) - before
    parallax.shutdown()
    return one_step


def traffic_of_copies(copies: int, calls: int) -> parallax.Traffic:
    def loss(table: Any, batch: torch.Tensor) -> torch.Tensor:
        return sum((table(batch).mean() for _ in range(calls)), torch.zeros(()))

    return traffic_of_a_step(nn.Embedding(4, 8), loss, [ids(*[1] * copies)] * 4)


@several_ranks
def test_case_5_ten_thousand_copies_cost_one_row(world_size: int) -> None:
    once = ranks.run(world_size, traffic_of_copies, 1, 1)
    assert ranks.run(world_size, traffic_of_copies, 10_000, 1) == once
    assert ranks.run(world_size, traffic_of_copies, 1, 2) == once
    assert sum(t.table_bytes for t in once) > 0


# -- 6: several optimizers ----------------------------------------------------------------------------


class Scorer(nn.Module):
    """A table, a layer, and a layer that is in no optimizer."""

    def __init__(self, sparse: bool = True, rows: int = 7) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 3, sparse=sparse)
        self.layer = nn.Linear(3, 2)
        self.fixed = nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.fixed(torch.tanh(self.layer(self.table(batch))))


def random_ids(world_size: int, rows: int, num_steps: int = 4, size: int = 4) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(rows, (size,), generator=generator) for _ in range(world_size)] for _ in range(num_steps)]


def score(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def even_steps(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    model.zero_grad()
    case.loss(model, batch).backward()
    for optimizer in optimizers if number % 2 == 0 else optimizers[1:]:
        optimizer.step()


def two_optimizers(world_size: int, every_step: bool, last: bool) -> Case:
    return Case(
        model=Scorer,
        optimizers=lambda model: [
            torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
            torch.optim.Adam(model.layer.parameters(), lr=0.1),
        ],
        batches=random_ids(world_size, 7),
        loss=score,
        step=oracle.train_step if every_step else even_steps,
        optimizers_last=last,
        tolerance={torch.float32: 1e-5},  # Adam divides gradients that nearly cancel by their size
    )


@up_to_three
def test_case_6_two_optimizers(world_size: int) -> None:
    for every_step in (True, False):
        for last in (False, True):
            for traces in check_architectures(world_size, two_optimizers, every_step, last):
                first, final = traces[-1].weights[0], traces[-1].weights[-1]
                assert torch.equal(first["fixed.weight"], final["fixed.weight"])
                assert not torch.equal(first["table.weight"], final["table.weight"])


# -- 7: rows that a dense optimizer moves although they are not looked up -----------------------------


def momentum(world_size: int, optimizer: str) -> Case:
    if optimizer == "Adam":
        make, start, steps = (lambda p: torch.optim.Adam(p, lr=0.1)), 0.0, (1, 2, 2)
    else:
        make, start, steps = (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5)), 1.0, (1,)
    return Case(
        model=lambda: filled(nn.Embedding(3, 1), start),
        optimizers=lambda model: make(model.parameters()),
        batches=[[ids(row)] * world_size for row in steps],
        loss=lambda model, batch: model(batch).mean(),
    )


@up_to_three
def test_case_7_rows_that_were_not_looked_up_move_on(world_size: int) -> None:
    for traces in check_architectures(world_size, momentum, "Adam"):
        weights = torch.cat([w["weight"] for w in traces[0].weights[1:]], dim=1)
        assert weights[1].tolist() == pytest.approx([-0.1, -0.16701, -0.21880], abs=1e-5)
        assert weights[2].tolist() == pytest.approx([0, -0.07441, -0.16026], abs=1e-5)
    for traces in check_architectures(world_size, momentum, "AdamW"):
        assert traces[0].weights[1]["weight"].flatten().tolist() == pytest.approx([0.95, 0.85, 0.95])


# -- 8: tied weights ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.e = nn.Embedding(rows, width)
        self.out = nn.Linear(width, rows, bias=False)
        self.out.weight = self.e.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.out(self.e(batch))


def tied_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), (batch + 1) % model.e.num_embeddings)


def tied_step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    seen = oracle.train_step(case, model, optimizers, batch, number)
    return seen, model.e.weight is model.out.weight, sorted(model.state_dict()), len(optimizers[0].state)


def tied(world_size: int, rows: int) -> Case:
    steps = [[ids(*[(step + rank + i) % rows for i in range(3)]) for rank in range(world_size)] for step in range(5)]
    return Case(
        model=lambda: Tied(rows, 3),
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=steps,
        loss=tied_loss,
        step=tied_step,
    )


@every_world_size
@pytest.mark.parametrize("rows", [5, 8])
def test_case_8_tied_weights(world_size: int, rows: int) -> None:
    for traces in check_architectures(world_size, tied, rows):
        for trace in traces:
            assert all(s[1:] == (True, ["e.weight", "out.weight"], 1) for s in trace.seen)
            assert (trace.weights[-1]["e.weight"] != trace.weights[0]["e.weight"]).any(1).all()


def traffic_of_tied(rows: int, width: int) -> parallax.Traffic:
    return traffic_of_a_step(Tied(rows, width), tied_loss, [ids(0, 1, rank) for rank in range(4)])


@several_ranks
def test_case_8_bytes_of_tied_weights(world_size: int) -> None:
    for rows, width in [(5, 16), (50, 32)]:
        for traffic in ranks.run(world_size, traffic_of_tied, rows, width):
            assert traffic.table_bytes + traffic.dense_bytes <= 2.5 * rows * width * 4


# -- 9: fewer rows than ranks -------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, 2) for rows in (1, 2, 3)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(table(batch % table.num_embeddings) for table in self.tables)


def small(world_size: int) -> Case:
    return Case(
        model=Small,
        optimizers=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
        batches=random_ids(world_size, 6, size=2),
        loss=lambda model, batch: (model(batch) + 5).square().mean(),
        between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )


@every_world_size
def test_case_9_fewer_rows_than_ranks(world_size: int) -> None:
    check_architectures(world_size, small)


def test_case_9_one_worker_is_the_plain_program() -> None:
    """Bit for bit, and without a trace on the model."""
    for make_case in (small, tied_of_5, two_optimizers_together):
        (trace,) = oracle.check(1, make_case)
        assert not oracle.compare(oracle.one_process(make_case(1)), [trace], dict.fromkeys(oracle.TOLERANCE, 0.0))
    assert ranks.run(1, kinds_of_parameters) == [{nn.Parameter}]


def tied_of_5(world_size: int) -> Case:
    return tied(world_size, 5)


def two_optimizers_together(world_size: int) -> Case:
    return two_optimizers(world_size, True, False)


def kinds_of_parameters() -> set[type]:
    model = Small()
    parallax.distribute(model)
    model(ids(0, 1)).sum().backward()
    return {type(p) for p in model.parameters()}


# -- 12: padding rows keep their value ----------------------------------------------------------------


def filled_padding(world_size: int, padding_idx: int) -> Case:
    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        seen = oracle.train_step(case, model, optimizers, batch, number)
        with torch.no_grad():
            return seen, model(ids(0, 1, 2))

    return Case(
        model=lambda: filled(nn.Embedding(3, 1, padding_idx=padding_idx), 5),
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batches=[[ids(0, 1, 2)] * world_size] * 3,
        loss=lambda model, batch: model(batch).mean(),
        step=step,
    )


@up_to_three
@pytest.mark.parametrize(("padding_idx", "row"), [(0, 0), (-1, 2), (1, 1)])
def test_case_12_padding_rows_stay(world_size: int, padding_idx: int, row: int) -> None:
    for traces in check_architectures(world_size, filled_padding, padding_idx):
        for trace in traces:
            assert all(w["weight"][row].item() == 5.0 for w in trace.weights)
            assert all((seen[0]["grads"]["weight"][row] == 0).all() for seen in trace.seen)
            assert all(seen[1][row].item() == 5.0 for seen in trace.seen)
            others = [r for r in range(3) if r != row]
            assert (trace.weights[-1]["weight"][others] < 5).all()


def padding_after_loading() -> list[float]:
    model = nn.Embedding(5, 1, padding_idx=-1)
    parallax.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(ids(0, 4, 4)).mean().backward()
        optimizer.step()
    saved = copy.deepcopy(model.state_dict())
    saved["weight"].copy_(torch.arange(5.0)[:, None])
    model.load_state_dict(saved)
    optimizer.zero_grad()
    model(ids(0, 4, 4)).mean().backward()
    optimizer.step()
    return model.state_dict()["weight"].flatten().tolist()


@two_and_three
def test_case_12_padding_rows_are_saved_and_loaded(world_size: int) -> None:
    for weights in ranks.run(world_size, padding_after_loading):
        assert weights == pytest.approx([-0.1 / 3, 1, 2, 3, 4])


class TiedPadding(Tied):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.e.padding_idx = 0


def tied_padding(world_size: int) -> Case:
    return Case(model=TiedPadding, batches=[[ids(0, 1, 2)] * world_size] * 3, loss=tied_loss)


@up_to_three
def test_case_12_a_tied_padding_row_gets_the_output_gradient(world_size: int) -> None:
    for traces in check_architectures(world_size, tied_padding):
        assert (traces[0].seen[-1]["grads"]["e.weight"][0] != 0).all()


# -- 13: bags -----------------------------------------------------------------------------------------

NO_IDS = torch.empty(0, dtype=torch.int64)
BAGS: list[tuple[torch.Tensor, dict[str, Any]]] = [
    (ids(0, 1), {"offsets": ids(0, 1, 1)}),
    (NO_IDS, {"offsets": ids(0, 0)}),
    (NO_IDS, {"offsets": NO_IDS}),
    (ids(0, 1, 0, 0, 1, 2), {"offsets": ids(0, 2, 4), "padding_idx": 0}),
    (ids(0, 1, 0, 0, 1, 2), {"offsets": ids(0, 2, 4), "padding_idx": -1}),
    (ids([5, 5, 1], [2, 8, 1]), {}),
    (ids([5, 5, 1], [2, 8, 1]), {"padding_idx": 5}),
    (ids(3, 1, 4, 1, 5), {"offsets": ids(0, 0, 3, 5), "include_last_offset": True}),
    (ids(3, 1, 4, 1, 5), {"offsets": ids(0, 0, 3, 5), "include_last_offset": False}),
    (ids(3, 1, 4).int(), {"offsets": ids(0, 2).int()}),
    (ids(3, 1, 4).int(), {"offsets": ids(0, 2)}),
    (torch.empty(0, 3, dtype=torch.int64), {}),
]
WEIGHTED_BAGS: list[tuple[torch.Tensor, dict[str, Any]]] = [
    (ids([5, 5, 1], [2, 8, 1]), {"per_sample_weights": torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, 3.0]])}),
    (ids(0, 1, 0), {"offsets": ids(0, 2), "padding_idx": 0, "per_sample_weights": torch.tensor([2.0, 3.0, 4.0])}),
    (NO_IDS, {"offsets": ids(0, 0), "per_sample_weights": torch.empty(0)}),
    (ids(7, 7, 1), {"offsets": ids(0, 1, 3), "include_last_offset": True, "per_sample_weights": torch.ones(3)}),
]


def make_table(trainable: bool = True) -> torch.Tensor:
    return nn.Parameter(torch.rand(9, 3, generator=torch.Generator().manual_seed(4)) + 0.5, trainable)


class Holder(nn.Module):
    """A table, and a layer that keeps the model trainable when the table is not."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.table = make_table(trainable)
        self.layer = nn.Linear(3, 1)


def bags_against_torch(mode: str, weighted: bool, trainable: bool) -> list[str]:
    """Each rank with another call at the same time; what differs from torch's own function."""
    model = Holder(trainable)
    parallax.distribute(model)
    problems = []
    calls = WEIGHTED_BAGS if weighted else BAGS

    def call(number: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        input, options = calls[number % len(calls)]
        options = dict(options)
        weights = options.pop("per_sample_weights", None)
        if weights is not None:
            weights = options["per_sample_weights"] = weights.clone().requires_grad_()
        return F.embedding_bag(input, table, mode=mode, **options), weights

    def loss(out: torch.Tensor) -> torch.Tensor:
        return (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum()

    for number in range(-2, len(calls)):  # the first two make the plan
        model.zero_grad()
        out, weights = call(number + parallax.rank(), model.table)
        if out.requires_grad:
            (loss(out) + 0 * model.layer.bias.sum()).backward()
        gradient = oracle.read_gradients(model)["table"]

        table = make_table()
        expected, expected_weights = call(number + parallax.rank(), table)
        loss(expected).backward()
        if not torch.allclose(out, expected):
            problems.append(f"call {number}: value {out.tolist()} instead of {expected.tolist()}")
        if weights is not None and not torch.allclose(weights.grad, expected_weights.grad):
            problems.append(f"call {number}: weights' gradient {weights.grad} instead of {expected_weights.grad}")
        if trainable:
            total, num_bags = torch.zeros(9, 3), 0
            for rank in range(parallax.world_size()):
                other = make_table()
                out, _ = call(number + rank, other)
                loss(out).backward()
                total += other.grad * len(out)
                num_bags += len(out)
            if gradient is None or not torch.allclose(gradient, total / max(num_bags, 1)):
                problems.append(f"call {number}: table's gradient {gradient} instead of {total / max(num_bags, 1)}")
    return problems


@up_to_three
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_case_13_bags(world_size: int, mode: str) -> None:
    assert ranks.run(world_size, bags_against_torch, mode, False, True) == [[]] * world_size


@up_to_three
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_case_13_weighted_bags(world_size: int, trainable: bool) -> None:
    assert ranks.run(world_size, bags_against_torch, "sum", True, trainable) == [[]] * world_size


class WeightedTags(nn.Module):
    """Bags in a subclass of nn.EmbeddingBag, whose weights are a table of their own."""

    class Tags(nn.EmbeddingBag):
        def forward(self, input: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
            return super().forward(input, per_sample_weights=importance)

    def __init__(self) -> None:
        super().__init__()
        self.tags = self.Tags(9, 3, mode="sum")
        self.importance = nn.Embedding(9, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.tags(batch, self.importance(batch)[..., 0])


def weighted_tags(world_size: int) -> Case:
    batches = [[b.view(2, 3) for b in step] for step in random_ids(world_size, 9, size=6)]
    return Case(model=WeightedTags, batches=batches, loss=lambda model, batch: (model(batch) - 1).square().mean())


@up_to_three
def test_case_13_weights_that_are_looked_up(world_size: int) -> None:
    check_architectures(world_size, weighted_tags)


def mean_of_padded_bags() -> list[float]:
    bag = nn.EmbeddingBag(3, 1, mode="mean", padding_idx=0)
    bag.weight.data.copy_(torch.tensor([[9.0], [2.0], [4.0]]))
    parallax.distribute(bag)
    for _ in range(3):
        out = bag(ids([0, 1], [0, 0], [1, 2]))
        out.sum().backward()
    return out.flatten().tolist()


@two_and_three
def test_case_13_mean_of_padded_bags(world_size: int) -> None:
    assert ranks.run(world_size, mean_of_padded_bags) == [[2.0, 0.0, 3.0]] * world_size


# -- 14, 15: ids of every form ------------------------------------------------------------------------


def pick_mask(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return table[torch.tensor([1, 0, 0, 1, 0, 0, 0, 0, 1], dtype=dtype)]


LOOKUPS: dict[str, Any] = {
    "int32": lambda t: F.embedding(ids(8, 0, 8).int(), t),
    "0-d": lambda t: F.embedding(torch.tensor(4), t),
    "0-d select": lambda t: t.index_select(0, torch.tensor(4)),
    "none": lambda t: F.embedding(torch.empty(0, 7, dtype=torch.int64), t),
    "3-d": lambda t: F.embedding(ids([[1, 2], [3, 3]]), t),
    "negative": lambda t: t[ids(-1, 0, -9)],
    "2-d index": lambda t: t[ids([-1, 0], [3, 3])],
    "select": lambda t: torch.index_select(t, 0, ids(7, 7, 1)),
    "select from the end": lambda t: t.index_select(-2, ids(7, 1)),
}
WHOLE_USES: dict[str, Any] = {
    "bool mask": lambda t: pick_mask(t, torch.bool),
    "row": lambda t: t[3],
    "last row": lambda t: t[-1],
    "slice": lambda t: t[1:7:2],
    "column": lambda t: t[:, 1],
    "element": lambda t: t[ids(1, 2), ids(0, 2)],
    "columns": lambda t: t.index_select(1, ids(0, 2)),
    "gather": lambda t: t.gather(0, ids([1, 2, 3])),
    "product": lambda t: t @ torch.ones(3, 2),
}


def uses_against_torch(names: list[str]) -> list[str]:
    """Uses of a table that is spread, and of one that is new to the run; what differs from torch."""
    uses = {**LOOKUPS, **WHOLE_USES}
    problems = []
    for name in names:
        model = Holder(True)
        parallax.distribute(model)
        for use in (LOOKUPS["int32"], uses[name], uses[name]) if name in WHOLE_USES else (uses[name],) * 3:
            table = make_table()
            expected, found = use(table), use(model.table)
            model.zero_grad()
            expected.square().sum().backward()
            found.square().sum().backward()
            gradient = oracle.read_gradients(model)["table"]
            if found.shape != expected.shape or found.dtype != expected.dtype or not torch.equal(found, expected):
                problems.append(f"{name}: {found} instead of {expected}")
            if gradient is None or not torch.allclose(gradient, table.grad):
                problems.append(f"{name}: gradient {gradient} instead of {table.grad}")
        parallax.shutdown()
    return problems


@up_to_three
def test_case_14_ids_of_every_form(world_size: int) -> None:
    assert ranks.run(world_size, uses_against_torch, list(LOOKUPS)) == [[]] * world_size


@up_to_three
def test_case_14_masks_and_other_indices_keep_their_meaning(world_size: int) -> None:
    assert ranks.run(world_size, uses_against_torch, list(WHOLE_USES)) == [[]] * world_size


def byte_mask() -> tuple[list[Any], list[Any]]:
    import warnings

    warnings.simplefilter("ignore", UserWarning)  # torch discourages masks of uint8
    model = Holder(True)
    parallax.distribute(model)
    for _ in range(3):
        F.embedding(ids(0, 1), model.table).sum().backward()
        found = pick_mask(model.table, torch.uint8).tolist()
    return found, pick_mask(make_table(), torch.bool).tolist()


@two_and_three
def test_case_14_byte_masks(world_size: int) -> None:
    for found, expected in ranks.run(world_size, byte_mask):
        assert found == expected


@pytest.mark.parametrize("num_rows", [2**33, 2**33 + 5, 2**31, 2**32 - 1])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_case_14_owners_of_more_rows_than_int32_counts(num_rows: int, num_ranks: int) -> None:
    from parallax.partitioning import Partitioning, Places

    partitioning = Partitioning(num_rows, tuple(range(num_ranks)), num_ranks, torch.device("cpu"))
    places = Places([partitioning], num_ranks, torch.device("cpu"))
    rows = torch.tensor([0, 1, 5, 2**31 - 1, num_rows // 2, num_rows - 2, num_rows - 1]).unique()
    keys = places.keys(rows, [(0, len(rows))]).sort().values
    found = []
    for owner, (a, b) in enumerate(places.by_owner(places.cuts(keys))):
        positions = places.positions(keys[a:b])
        found += (positions.long() * num_ranks + owner).tolist()
    assert sorted(found) == rows.tolist()
    assert sum(partitioning.num_held) == num_rows


def negative_ids() -> tuple[list[Any], list[Any], list[Any]]:
    model = nn.ParameterDict({"w": nn.Parameter(torch.arange(6.0).view(3, 2))})
    parallax.distribute(model)
    first = model.w[ids(-1, 0)]
    first.sum().backward()
    second = model.w[ids(-1, 0)]
    second.sum().backward()
    return first.tolist(), second.tolist(), oracle.read_gradients(model)["w"].tolist()


@up_to_three
def test_case_15_negative_ids_count_from_the_end(world_size: int) -> None:
    rows = [[4.0, 5.0], [0.0, 1.0]]
    expected = (rows, rows, [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]])
    assert ranks.run(world_size, negative_ids) == [expected] * world_size


def negative_id_for_embedding(warm_up: int) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.arange(6.0).view(3, 2))})
    parallax.distribute(model)
    for _ in range(warm_up):
        F.embedding(ids(0), model.w).sum().backward()
    F.embedding(ids(-1), model.w)


@up_to_three
@pytest.mark.parametrize("warm_up", [0, 2])
def test_case_15_embedding_refuses_negative_ids(world_size: int, warm_up: int) -> None:
    outcomes = ranks.run(world_size, negative_id_for_embedding, warm_up, expect_errors=True)
    assert [o.error for o in outcomes] == ["IndexError"] * world_size


# -- 17: empty batches --------------------------------------------------------------------------------


def empty_batches(world_size: int, optimizer: str) -> Case:
    def sizes(step: int) -> list[int]:
        if step in (3, 7):
            return [0] * world_size
        return [0 if rank == (step + 1) % world_size else 4 for rank in range(world_size)]

    generator = torch.Generator().manual_seed(5)
    return Case(
        model=lambda: Scorer(sparse=False).double(),
        optimizers=lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=0.1),
        batches=[[torch.randint(7, (n,), generator=generator) for n in sizes(step)] for step in range(9)],
        loss=lambda model, batch: (model(batch) - 1).square().sum() / max(len(batch), 1),
    )


@up_to_three
def test_case_17_empty_batches(world_size: int) -> None:
    check_each(world_size, [(empty_batches, optimizer) for optimizer in ("SGD", "Adam")])


def empty_means(world_size: int) -> Case:
    """A mean over no samples is not a number; it must not count."""
    case = empty_batches(world_size, "SGD")
    case.batches = [step for step in case.batches if any(len(batch) for batch in step)]
    case.loss = score
    return case


@two_and_three
def test_case_17_a_mean_over_nothing_does_not_count(world_size: int) -> None:
    check_architectures(world_size, empty_means)


# -- 18: accumulation ---------------------------------------------------------------------------------


def accumulate(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for micro_batch in batch:
        (case.loss(model, micro_batch) / len(batch)).backward()
    grads = oracle.read_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    return grads


def twice_backward(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = case.loss(model, batch[1])
    loss.backward(retain_graph=True)
    loss.backward()
    grads = oracle.read_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    return grads


def keep_gradients(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
    kept = {name: p.grad for name, p in model.named_parameters()} if number else {}
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    case.loss(model, batch[1]).backward()
    same = all(p.grad is kept[n] for n, p in model.layer.named_parameters(prefix="layer")) if number else True
    grads = oracle.read_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    return grads, same


def accumulation(world_size: int, step: str, sparse: bool, by_rank: bool) -> Case:
    micro = [(ids(1), ids(1, 2), ids(0))] * world_size
    if by_rank:
        micro = [(ids(1 + r), ids(r, 2), ids(3)) for r in range(world_size)]
    steps = {"accumulate": accumulate, "twice": twice_backward, "keep": keep_gradients}
    return Case(
        model=lambda: Scorer(sparse),
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=[micro] * 3,
        loss=score,
        step=steps[step],
    )


@up_to_three
@pytest.mark.parametrize("step", ["accumulate", "twice", "keep"])
def test_case_18_accumulation(world_size: int, step: str) -> None:
    check_each(world_size, [(accumulation, step, *c) for c in [(False, False), (False, True), (True, True)]])


# -- 19: clipping -------------------------------------------------------------------------------------


def clip_two_rows(world_size: int) -> Case:
    def loss(table: Any, batch: torch.Tensor) -> torch.Tensor:
        return (torch.tensor([3.0, 0, 0, 4.0])[batch] * table(batch)[:, 0]).mean()

    return Case(
        model=lambda: filled(nn.Embedding(4, 1), 0),
        batches=[[ids(3 * (rank % 2)) for rank in range(world_size)]] * 3,
        loss=loss,
        between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_case_19_clipping_two_rows(world_size: int) -> None:
    for traces in check_architectures(world_size, clip_two_rows):
        for trace in traces:
            for seen in trace.seen:
                assert seen["between"].item() == pytest.approx(2.5)
                assert seen["grads"]["weight"].flatten().tolist() == pytest.approx([0.6, 0, 0, 0.8], abs=1e-5)


CLIPS: dict[str, Any] = {
    "2": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "1": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1),
    "3": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3.0),
    "inf": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")),
    "for each": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "table alone": lambda model: nn.utils.clip_grad_norm_(model.table.weight, 0.1),
    "layer alone": lambda model: nn.utils.clip_grad_norm_(model.layer.parameters(), 0.1),
    "never": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "by hand": lambda model: [p.grad.mul_(0.5).norm() for p in model.parameters()],
    "total norm": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "twice": lambda model: [nn.utils.clip_grad_norm_(model.parameters(), limit) for limit in (0.5, 0.1)],
}


def clipping(world_size: int, clip: str) -> Case:
    return Case(
        model=lambda: Scorer(sparse=False),
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=random_ids(world_size, 7, num_steps=3),
        loss=score,
        between=CLIPS[clip],
    )


@up_to_three
def test_case_19_clipping(world_size: int) -> None:
    cases = [(_with_architecture, "hybrid", clipping, clip) for clip in CLIPS]
    if world_size == 2:
        cases += [(_with_architecture, a, clipping, clip) for a in ("gather", "dense") for clip in ("2", "twice")]
    oracle.check_all(world_size, cases)


# -- 21: optimizer state with rows --------------------------------------------------------------------


class RowwiseAdagrad(torch.optim.Optimizer):
    """One number of state per row."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros(p.shape[0])
                state["sum"] += p.grad.reshape(p.shape[0], -1).square().mean(1)
                scale = state["sum"].sqrt().add_(1e-10).view(-1, *[1] * (p.dim() - 1))
                p -= group["lr"] * p.grad / scale


def state_with_rows(world_size: int, optimizer: str, last: bool, sparse: bool) -> Case:
    def make(model: Any) -> torch.optim.Optimizer:
        if optimizer == "rowwise":
            return RowwiseAdagrad(model.parameters())
        return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)

    return Case(
        model=lambda: Scorer(sparse),
        optimizers=make,
        batches=random_ids(world_size, 7),
        loss=score,
        optimizers_last=last,
        tolerance={torch.float32: 1e-5 if optimizer == "rowwise" else 1e-6},
    )


@up_to_three
@pytest.mark.parametrize("last", [False, True], ids=["before", "after"])
def test_case_21_state_with_rows(world_size: int, last: bool) -> None:
    for case in [("Adagrad", last, False), ("Adagrad", last, True), ("rowwise", last, False)]:
        check_architectures(world_size, state_with_rows, *case)


def made_in_the_middle(world_size: int, optimizer: str) -> Case:
    """The optimizer is replaced by a new one when tables are spread already."""

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == 2:
            optimizers[:] = [case.optimizers(model)]
        return oracle.train_step(case, model, optimizers, batch, number)

    case = state_with_rows(world_size, optimizer, False, False)
    case.step = step
    return case


@up_to_three
def test_case_21_an_optimizer_made_in_the_middle(world_size: int) -> None:
    for optimizer in ("Adagrad", "rowwise"):
        check_architectures(world_size, made_in_the_middle, optimizer)


# -- 22: groups and a user's own list of parameters ---------------------------------------------------


def table_alone(world_size: int) -> Case:
    return Case(
        model=Scorer,
        optimizers=lambda model: torch.optim.SGD([model.table.weight], lr=0.1),
        batches=random_ids(world_size, 7),
        loss=score,
    )


def groups(world_size: int, regularize_from: int, how: str) -> Case:
    def make_model() -> Scorer:
        model = Scorer(sparse=False)
        model.regularized = [model.table.weight, model.layer.weight]  # a plain list: nothing registers it
        return model

    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        optimizers[0].zero_grad()
        loss = score(model, batch)
        if number >= regularize_from:
            terms = [(p**2).sum() if how == "square" else p.norm() for p in model.regularized]
            loss = loss + 0.1 * sum(terms)
        loss.backward()
        grads = oracle.read_gradients(model)
        optimizers[0].step()
        same = [
            model.regularized[0] is model.table.weight,
            optimizers[0].param_groups[0]["params"][0] is model.table.weight,
            next(model.parameters()) is model.table.weight,
        ]
        return grads, same, [group["lr"] for group in optimizers[0].param_groups]

    return Case(
        model=make_model,
        optimizers=lambda model: torch.optim.SGD(
            [{"params": model.table.parameters(), "lr": 0.1}, {"params": model.layer.parameters(), "lr": 0.01}]
        ),
        batches=random_ids(world_size, 7),
        loss=score,
        step=step,
    )


@up_to_three
def test_case_22_groups(world_size: int) -> None:
    check_architectures(world_size, table_alone)
    for traces in check_each(world_size, [(groups, *c) for c in [(0, "square"), (2, "square"), (2, "norm"), (9, "")]]):
        assert all(seen[1] == [True] * 3 and seen[2] == [0.1, 0.01] for seen in traces[0].seen)


# -- 23: schedulers -----------------------------------------------------------------------------------


def scheduled(world_size: int) -> Case:
    def step(case: Case, model: Any, optimizers: Any, batch: Any, number: int) -> Any:
        if number == 0:
            model.scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.1)
        seen = oracle.train_step(case, model, optimizers, batch, number)
        model.scheduler.step()
        return seen, optimizers[0].param_groups[0]["lr"]

    return Case(model=Scorer, batches=random_ids(world_size, 7, num_steps=4), loss=score, step=step)


@every_world_size
def test_case_23_schedulers(world_size: int) -> None:
    for traces in check_architectures(world_size, scheduled):
        for trace in traces:
            assert [seen[1] for seen in trace.seen] == pytest.approx([0.1, 0.01, 0.01, 0.001])


# -- 24: data -----------------------------------------------------------------------------------------


def epochs(num_samples: int, num_epochs: int, seed: int) -> list[list[int]]:
    loader = parallax.shard(DataLoader(range(num_samples), batch_size=2, shuffle=True), seed=seed)
    return [[int(x) for batch in loader for x in batch] for _ in range(num_epochs)]


@every_world_size
@pytest.mark.parametrize("num_samples", [10, 13])
def test_case_24_each_epoch_has_every_sample_once(world_size: int, num_samples: int) -> None:
    first = ranks.run(world_size, epochs, num_samples, 3, 0)
    orders = []
    for epoch in range(3):
        union = [x for rank in range(world_size) for x in first[rank][epoch]]
        assert sorted(union) == list(range(num_samples))
        orders.append(union)
    assert orders[0] != orders[1] != orders[2]
    if world_size > 1:  # on one worker it is the plain loader, with torch's own seed
        assert ranks.run(world_size, epochs, num_samples, 3, 0) == first
        assert ranks.run(world_size, epochs, num_samples, 3, 1) != first


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


def evaluation(kind: str) -> int:
    if kind == "distributed":
        data = list(range(6))
        loader = DataLoader(data, sampler=DistributedSampler(data, parallax.world_size(), parallax.rank()))
    else:
        loader = DataLoader(Numbers() if kind == "iterable" else range(5), batch_size=2)
    return sum(len(batch) for batch in parallax.shard(loader))


@several_ranks
def test_case_24_evaluation_counts_each_sample_once(world_size: int) -> None:
    assert sum(ranks.run(world_size, evaluation, "map")) == 5
    assert sum(ranks.run(world_size, evaluation, "iterable")) == 5
    share = -(-6 // world_size)  # DistributedSampler pads; a loader that has one is left alone
    assert ranks.run(world_size, evaluation, "distributed") == [share] * world_size


def dropout_and_weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Dropout(0.5))
    parallax.distribute(model)
    return F.dropout(torch.ones(100)), model.state_dict()["0.weight"]


@several_ranks
def test_case_24_dropout_differs_between_ranks(world_size: int) -> None:
    masks, weights = zip(*ranks.run(world_size, dropout_and_weights), strict=True)
    for other in range(1, world_size):
        assert not torch.equal(masks[0], masks[other])
        assert torch.equal(weights[0], weights[other])


# -- 25: uneven data ----------------------------------------------------------------------------------


def train_on_shards(num_samples: int, batch_size: int, form: str, optimizer: str, config: dict[str, Any]) -> Any:
    """Two epochs; the batches that this rank had, and the weights at the end."""
    torch.manual_seed(0)
    model = Scorer(sparse=False).double()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    parallax.distribute(model, made, config=parallax.Config(**config))
    samples = [i % 7 for i in range(num_samples)]
    if form == "loader":
        data = parallax.shard(DataLoader(torch.tensor(samples), batch_size=batch_size))
    else:
        data = parallax.shard([torch.tensor(samples[i : i + batch_size]) for i in range(0, num_samples, batch_size)])
    batches = []
    for _ in range(2):
        epoch = []
        for batch in data:
            epoch.append(batch.tolist())
            made.zero_grad()
            score(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
        batches.append(epoch)
    return batches, oracle.read_weights(model)


@pytest.mark.parametrize("form", ["loader", "list"])
@pytest.mark.parametrize(
    ("world_size", "architecture"), [(2, "hybrid"), (2, "gather"), (2, "dense"), (3, "hybrid"), (4, "hybrid")]
)
def test_case_25_uneven_data(world_size: int, form: str, architecture: str) -> None:
    for num_samples, optimizer in [(5, "SGD"), (4 * world_size + 1, "Adagrad"), (1, "Adam")]:
        args = (num_samples, 2, form, optimizer, ARCHITECTURES[architecture])
        found = ranks.run(world_size, train_on_shards, *args)
        steps = []
        for epoch in range(2):
            longest = max(len(batches[epoch]) for batches, _ in found)
            for step in range(longest):
                parts = [b[epoch][step] for b, _ in found if step < len(b[epoch])]
                steps.append(torch.tensor([x for part in parts for x in part]))
        case = Case(
            model=lambda: Scorer(sparse=False).double(),
            optimizers=lambda model, o=optimizer: getattr(torch.optim, o)(model.parameters(), lr=0.1),
            batches=[],
            loss=score,
            between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        )
        expected = oracle.one_process(case, steps).weights[-1]
        assert sum(len(step) for step in steps) == 2 * num_samples
        for rank, (_, weights) in enumerate(found):
            for name, value in expected.items():
                assert torch.allclose(weights[name], value, rtol=1e-12, atol=1e-12), f"{name} on rank {rank}"
                assert torch.equal(weights[name], found[0][1][name]), f"{name} on rank {rank}"


# -- 28: one start for all ranks ----------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("noise", torch.rand(3))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)


def starting_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    rank = parallax.rank()
    torch.manual_seed(rank)
    model = WithBuffers()
    model.norm.running_mean += rank
    before = oracle.read_weights(model) | {"scratch": model.scratch.clone()}
    parallax.distribute(model)
    return before, oracle.read_weights(model) | {"scratch": model.scratch.clone()}


@several_ranks
def test_case_28_ranks_start_from_rank_0(world_size: int) -> None:
    found = ranks.run(world_size, starting_weights)
    wanted = found[0][0]
    assert not torch.equal(found[1][0]["table.weight"], wanted["table.weight"])
    for _, after in found:
        assert after.keys() == wanted.keys()
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)


# -- 29: bytes follow ids -----------------------------------------------------------------------------


def traffic_of_table(num_rows: int, kind: str) -> parallax.Traffic:
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randint(200, (64,), generator=generator) for _ in range(4)]
    if kind == "bag":
        model: nn.Module = nn.EmbeddingBag(num_rows, 16)
        batches = [batch.view(16, 4) for batch in batches]
    else:
        model = nn.Embedding(num_rows, 16, sparse=kind == "sparse")
    return traffic_of_a_step(model, lambda model, batch: model(batch).square().mean(), batches)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["embedding", "sparse", "bag"])
def test_case_29_bytes_follow_ids_not_rows(world_size: int, kind: str) -> None:
    small = ranks.run(world_size, traffic_of_table, 200, kind)
    large = ranks.run(world_size, traffic_of_table, 20_000, kind)
    for one, other in zip(small, large, strict=True):
        assert other.table_bytes == pytest.approx(one.table_bytes, rel=0.05)
        assert other.round_header_bytes == one.round_header_bytes
        assert other.num_rounds == one.num_rounds
