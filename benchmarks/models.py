"""The models that `evaluate.py` trains, as for one device, with data drawn at random beforehand."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

NUM_BATCHES = 32
"""Batches that are drawn for each worker, and repeated; drawing is not measured."""

Batch = tuple[torch.Tensor, ...]


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--words", type=int, default=50_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=256, help="elements of a row")
    parser.add_argument("--hidden", type=int, default=64, help="of the recurrent layer")
    parser.add_argument("--samples", type=int, default=256, help="of the softmax, in a step")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a worker's batch")
    parser.add_argument("--time", type=int, default=20, help="words in a sequence")


MODELS: dict[str, tuple[Callable[[argparse.Namespace, bool], nn.Module], Callable[..., list[Batch]]]] = {
    "lm": (LM, lm_batches),
}
"""By name: what makes the model (with sparse gradients of its tables or not), and a rank's batches."""
