"""The models that `evaluate.py` trains, as for one device, with data drawn at random beforehand."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

NUM_BATCHES = 32
"""Batches that are drawn for each worker, and repeated; drawing is not measured."""

Batch = tuple[torch.Tensor, ...]

TABLE_TYPES = (nn.Embedding,)


class LM(nn.Module):
    """The language model of the Parallax paper in small: LSTM, projection, sampled softmax, three tables."""

    def __init__(self, args: argparse.Namespace, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.words, args.dim, sparse=sparse)
        self.lstm = nn.LSTM(args.dim, args.hidden, batch_first=True)
        self.projection = nn.Linear(args.hidden, args.dim)
        self.softmax_weight = nn.Embedding(args.words, args.dim, sparse=sparse)
        self.softmax_bias = nn.Embedding(args.words, 1, sparse=sparse)
        for table in (self.embedding, self.softmax_weight):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        nn.init.zeros_(self.softmax_bias.weight)

    def forward(self, tokens: torch.Tensor, samples: torch.Tensor, log_expected: torch.Tensor) -> torch.Tensor:
        """The loss per token.

        Args:
            tokens: int64, shape (batch, time + 1).
            samples: distinct words to tell the targets from, int64, shape (samples,).
            log_expected: log of the odds that each target, then each sample is drawn; (batch * time + samples,).
        """
        targets = tokens[:, 1:].flatten()
        candidates = torch.cat([targets, samples])
        embedded = self.embedding(tokens[:, :-1])
        weight, bias = self.softmax_weight(candidates), self.softmax_bias(candidates).squeeze(1) - log_expected
        hidden, n = self.projection(self.lstm(embedded)[0]).flatten(0, 1), len(targets)
        own = (hidden * weight[:n]).sum(1) + bias[:n]
        others = torch.addmm(bias[n:], hidden, weight[n:].T).masked_fill(samples == targets[:, None], -math.inf)
        return F.cross_entropy(torch.cat([own[:, None], others], 1), torch.zeros_like(targets))


def lm_batches(args: argparse.Namespace, rank: int) -> list[Batch]:
    """Words by Zipf's law, and samples of the log-uniform distribution, as TensorFlow draws them."""
    generator = torch.Generator().manual_seed(1000 + rank)
    number = torch.arange(args.words, dtype=torch.float64)
    zipf, log_uniform = 1 / (number + 1), ((number + 2) / (number + 1)).log() / math.log(args.words + 1)

    def batch() -> Batch:
        tokens = torch.multinomial(zipf, args.batch * (args.time + 1), True, generator=generator)
        tokens = tokens.view(args.batch, args.time + 1)
        draws = torch.multinomial(log_uniform, 8 * args.samples, True, generator=generator).tolist()
        distinct = list(dict.fromkeys(draws))[: args.samples]
        num_draws = draws.index(distinct[-1]) + 1
        samples = torch.tensor(distinct)
        p = log_uniform[torch.cat([tokens[:, 1:].flatten(), samples])]
        return tokens, samples, torch.log(-torch.expm1(num_draws * torch.log1p(-p))).float()

    return [batch() for _ in range(NUM_BATCHES)]


def lm_lookups(batch: Batch) -> list[torch.Tensor]:
    tokens, samples, _ = batch
    return [tokens[:, :-1], torch.cat([tokens[:, 1:].flatten(), samples])]


def lm_arrays(args: argparse.Namespace, num_ranks: int) -> dict[str, np.ndarray]:
    """For those who have no torch: initial values by parameter, and all ranks' batches, rank 0's first."""
    torch.manual_seed(0)
    state = LM(args, False).state_dict()
    batches = [batch for rank in range(num_ranks) for batch in lm_batches(args, rank)]
    data = zip(("tokens", "samples", "log_expected"), zip(*batches, strict=True), strict=True)
    return {name: t.numpy() for name, t in [*state.items(), *((name, torch.stack(of)) for name, of in data)]}


class MLP(nn.Module):
    """A classifier without tables."""

    def __init__(self, args: argparse.Namespace, sparse: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(args.width, args.width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(args.width, 10))

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), classes)


def mlp_batches(args: argparse.Namespace, rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + rank)

    def batch() -> Batch:
        x = torch.randn(args.batch, args.width, generator=generator)
        return x, torch.randint(10, (args.batch,), generator=generator)

    return [batch() for _ in range(NUM_BATCHES)]


TABLE_ROWS = [round(300 * 1000 ** (k / 25)) for k in range(26)]
"""Rows of the recommender's tables, from 300 to 300,000."""

TABLE_DIM, NUM_FEATURES = 16, 13


class Recommender(nn.Module):
    """DLRM (Naumov et al., arXiv 1906.00091) in small: 26 tables, dot products of all pairs, two perceptrons."""

    def __init__(self, args: argparse.Namespace, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, TABLE_DIM, sparse=sparse) for rows in TABLE_ROWS)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.over = Interaction()

    def forward(self, features: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        """The loss per sample, of shapes (batch, 13), (batch, 26) and (batch,)."""
        return self.over(features, [table(ids[:, k]) for k, table in enumerate(self.tables)], clicked)


class Interaction(nn.Module):
    """What is above the recommender's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(NUM_FEATURES, 128), nn.ReLU(), nn.Linear(128, TABLE_DIM), nn.ReLU())
        num_vectors = len(TABLE_ROWS) + 1
        pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(TABLE_DIM + pairs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pair", torch.triu_indices(num_vectors, num_vectors, 1), persistent=False)

    def forward(self, features: torch.Tensor, rows: list[torch.Tensor], clicked: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(features)
        vectors = torch.stack([dense, *rows], 1)
        dots = (vectors @ vectors.transpose(1, 2))[:, self.pair[0], self.pair[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, dots], 1)).squeeze(1), clicked)


def recommender_batches(args: argparse.Namespace, rank: int) -> list[Batch]:
    """Ids by Zipf's law, features and clicks at random."""
    generator = torch.Generator().manual_seed(1000 + rank)
    zipf = [1 / torch.arange(1, rows + 1, dtype=torch.float64) for rows in TABLE_ROWS]
    drawn = [torch.multinomial(p, NUM_BATCHES * args.batch, True, generator=generator) for p in zipf]
    ids = torch.stack(drawn, 1).view(NUM_BATCHES, args.batch, len(TABLE_ROWS))
    features = torch.randn(NUM_BATCHES, args.batch, NUM_FEATURES, generator=generator)
    clicked = torch.randint(2, (NUM_BATCHES, args.batch), generator=generator).float()
    return list(zip(features, ids, clicked, strict=True))


class OneTable(nn.Module):
    """A table of which a batch looks up a given fraction, alpha, for the sweep of sparsity."""

    def __init__(self, args: argparse.Namespace, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(args.words, args.dim, sparse=sparse)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        self.layer = nn.Linear(args.dim, 10)

    def forward(self, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.table(ids).mean(1)), classes)


def one_table_batches(args: argparse.Namespace, rank: int) -> list[Batch]:
    """Each has distinct ids, round(alpha * words) less what does not fill a sample."""
    generator = torch.Generator().manual_seed(1000 + rank)
    num_ids = round(args.alpha * args.words)
    batch_size = min(args.batch, num_ids)

    def batch() -> Batch:
        ids = torch.randperm(args.words, generator=generator)[: num_ids // batch_size * batch_size]
        return ids.view(batch_size, -1), torch.randint(10, (batch_size,), generator=generator)

    return [batch() for _ in range(NUM_BATCHES)]


@dataclass(frozen=True)
class Kind:
    """A model to evaluate."""

    make: Callable[[argparse.Namespace, bool], nn.Module]
    """The model, as for one device; with sparse gradients of its tables or not. It returns its loss."""
    batches: Callable[[argparse.Namespace, int], list[Batch]]
    """A rank's."""
    lookups: Callable[[Batch], list[torch.Tensor]]
    """The ids that a batch looks up; by table, or by tables that are looked up with the same ids."""
    row_elements: Callable[[argparse.Namespace], list[int]]
    """Elements that an id stands for, for each of `lookups`."""
    batch: int
    """Samples in a worker's batch, unless `--batch` says another number."""
    lr: float
    unit: str = "samples"

    def num_samples(self, args: argparse.Namespace) -> int:
        """Of a worker's batch, in `unit`s."""
        return args.batch * args.time if self.unit == "words" else args.batch


MODELS: dict[str, Kind] = {
    "lm": Kind(LM, lm_batches, lm_lookups, lambda args: [args.dim, args.dim + 1], batch=16, lr=0.2, unit="words"),
    "dense": Kind(MLP, mlp_batches, lambda batch: [], lambda args: [], batch=64, lr=0.01),
    "recommender": Kind(
        Recommender,
        recommender_batches,
        lambda batch: list(batch[1].unbind(1)),
        lambda args: [TABLE_DIM] * len(TABLE_ROWS),
        batch=256,
        lr=0.02,
    ),
    "one-table": Kind(OneTable, one_table_batches, lambda batch: [batch[0]], lambda args: [args.dim], batch=16, lr=0.2),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="samples (lm: sequences) in a worker's batch; default by model")
    parser.add_argument("--words", type=int, default=50_000, help="rows of a table (lm, one-table)")
    parser.add_argument("--dim", type=int, default=256, help="elements of a row (lm, one-table)")
    parser.add_argument("--hidden", type=int, default=64, help="of the recurrent layer (lm)")
    parser.add_argument("--samples", type=int, default=256, help="of the softmax, in a step (lm)")
    parser.add_argument("--time", type=int, default=20, help="words in a sequence (lm)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (dense)")
