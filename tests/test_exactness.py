"""Every optimizer, architecture, dtype and world size trains as one device does (`oracle`)."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import ranks
import torch
from torch import nn

import parallax

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "gather": {"architecture": "allreduce", "sparse_allreduce": "gather"},
    "dense": {"architecture": "allreduce", "sparse_allreduce": "dense"},
    "ps": {"architecture": "ps"},
}

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "SparseAdam": lambda model: [
        torch.optim.SparseAdam(model.tables(), lr=0.01),
        torch.optim.Adam(model.dense(), lr=0.01),
    ],
}
FOR_SPARSE_GRADIENTS = ("SGD", "momentum", "Adagrad", "SparseAdam")
FOR_DENSE_GRADIENTS = ("SGD", "momentum", "Adagrad", "Adam", "AdamW", "RMSprop")
COMBINATIONS = [(name, False) for name in FOR_DENSE_GRADIENTS] + [(name, True) for name in FOR_SPARSE_GRADIENTS]


class Recommender(nn.Module):
    """Two tables, a bag of a third, and linear layers.

    Weights and inputs are positive and so are all gradients of the loss below: no sum cancels, so that
    optimizers that divide by a gradient's size do not blow up its rounding.
    """

    def __init__(self, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.user = nn.Embedding(13, 4, sparse=sparse, dtype=dtype)
        self.item = nn.Embedding(7, 3, sparse=sparse, dtype=dtype)
        self.tags = nn.EmbeddingBag(11, 4, mode="mean", sparse=sparse, dtype=dtype)
        self.hidden = nn.Linear(4 + 3 + 4 + 2, 5, dtype=dtype)
        self.out = nn.Linear(5, 1, dtype=dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(0.2, 1.0)

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, tags: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        seen = torch.cat([self.user(user), self.item(item), self.tags(tags), features], dim=1)
        return self.out(self.hidden(seen))

    def tables(self) -> list[nn.Parameter]:
        return [self.user.weight, self.item.weight, self.tags.weight]

    def dense(self) -> list[nn.Parameter]:
        return [*self.hidden.parameters(), *self.out.parameters()]


def make_batch(num_samples: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    def ids(num_rows: int, *shape: int) -> torch.Tensor:
        return torch.randint(num_rows, shape, generator=generator)

    features = torch.rand(num_samples, 2, generator=generator).add(0.2).to(dtype)
    return ids(13, num_samples), ids(7, num_samples), ids(11, num_samples, 3), features


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(*batch) + 1).square().mean()


def recommender(
    world_size: int, architecture: str, optimizer: str, sparse: bool, dtype: torch.dtype, num_steps: int = 5
) -> oracle.Case:
    generator = torch.Generator().manual_seed(1)
    return oracle.Case(
        model=lambda: Recommender(sparse, dtype),
        optimizers=OPTIMIZERS[optimizer],
        batches=[[make_batch(4, dtype, generator) for _ in range(world_size)] for _ in range(num_steps)],
        loss=squares,
        reads="parts",
        config=ARCHITECTURES[architecture],
    )


def uneven(world_size: int, architecture: str, optimizer: str) -> oracle.Case:
    """Batches of different sizes: samples count alike, whichever rank they are on."""
    case = recommender(world_size, architecture, optimizer, False, torch.float64)
    generator = torch.Generator().manual_seed(2)
    case.batches = [
        [make_batch(1 + (rank + step) % 3, torch.float64, generator) for rank in range(world_size)] for step in range(5)
    ]
    return case


class SameIds(nn.Module):
    """Tables of which some have the same shape, all looked up with the same ids; and rows that get no gradient."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.few = (
            nn.Embedding(rows, width, sparse=sparse, dtype=torch.float64) for rows, width in ((13, 3), (13, 1), (8, 2))
        )
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(0.2, 1.0)

    def tables(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def dense(self) -> list[nn.Parameter]:
        return []

    def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        self.weight(others)
        return torch.cat([self.weight(ids), self.bias(ids), self.few(ids)], 1).sum(1)


def same_ids(world_size: int, optimizer: str, sparse: bool) -> oracle.Case:
    generator = torch.Generator().manual_seed(3)

    def batch() -> Any:
        return torch.randint(8, (4,), generator=generator), torch.randint(8, (3,), generator=generator)

    makers = {**OPTIMIZERS, "SparseAdam": lambda model: torch.optim.SparseAdam(model.tables(), lr=0.01)}
    return oracle.Case(
        model=lambda: SameIds(sparse),
        optimizers=makers[optimizer],
        batches=[[batch() for _ in range(world_size)] for _ in range(5)],
        loss=squares,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_tables_that_are_looked_up_with_the_same_ids(world_size: int) -> None:
    oracle.check_all(world_size, [(same_ids, "Adam", False), (same_ids, "SparseAdam", True)])


@pytest.mark.parametrize(
    ("world_size", "architecture"),
    [*((n, "hybrid") for n in (1, 2, 3, 4)), (2, "gather"), (3, "gather"), (2, "dense"), (4, "dense"), (3, "ps")],
)
def test_optimizers(world_size: int, architecture: str) -> None:
    oracle.check_all(world_size, [(recommender, architecture, *c, torch.float64) for c in COMBINATIONS])


@pytest.mark.parametrize(("world_size", "architecture"), [(3, "hybrid"), (2, "gather"), (3, "dense")])
def test_optimizers_in_single_precision(world_size: int, architecture: str) -> None:
    oracle.check_all(world_size, [(recommender, architecture, *c, torch.float32) for c in COMBINATIONS])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16(architecture: str) -> None:
    combinations = [("SGD", False), ("SGD", True), ("Adagrad", True), ("Adam", False)]
    oracle.check_all(3, [(recommender, architecture, *c, torch.bfloat16) for c in combinations])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_batches_of_different_sizes(world_size: int) -> None:
    oracle.check_all(world_size, [(uneven, a, "momentum") for a in ARCHITECTURES] + [(uneven, "hybrid", "Adam")])


PLACED: list[dict[str, Any]] = [
    {"placements": {"user.weight": "gather", "item.*": "allreduce"}},
    {"partitions": 1},
    {"partitions": 5, "placements": {"tags.weight": "gather"}},
]


def placed(world_size: int, number: int, optimizer: str, sparse: bool) -> oracle.Case:
    """Placements and numbers of partitions that were chosen by hand."""
    case = recommender(world_size, "hybrid", optimizer, sparse, torch.float64)
    case.config = PLACED[number]
    return case


def test_placements_chosen_by_hand() -> None:
    combinations = [("Adam", False), ("Adagrad", True)]
    oracle.check_all(3, [(placed, number, *c) for number in range(len(PLACED)) for c in combinations])


def plan_of(number: int) -> list[tuple[str, int]]:
    case = placed(2, number, "Adam", False)
    model = case.model()
    optimizer = case.optimizers(model)
    parallax.distribute(model, optimizer, config=parallax.Config(**case.config))
    for batches in case.batches[:2]:
        case.loss(model, batches[parallax.rank()]).backward()
        optimizer.step()
    return [(p.placement.value, len(p.owners)) for p in parallax.explain(model)][:3]


def test_placements_chosen_by_hand_are_those_of_the_plan() -> None:
    assert ranks.run(2, plan_of, 0) == [[("gather", 0), ("allreduce", 0), ("sharded", 2)]] * 2
    assert ranks.run(2, plan_of, 2) == [[("sharded", 5), ("sharded", 5), ("gather", 0)]] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_oracle_sees_a_difference(world_size: int) -> None:
    """A loss that is a sum over samples is not what the mean rule computes: the comparison has to fail."""
    with pytest.raises(AssertionError, match=r"user\.weight after step 1: differs by at most"):
        oracle.check(world_size, wrong)


def wrong(world_size: int) -> oracle.Case:
    case = recommender(world_size, "hybrid", "SGD", False, torch.float64, num_steps=1)
    case.loss = lambda model, batch: (model(*batch) + 1).square().sum()
    return case
