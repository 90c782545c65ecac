"""Small enough to compare with one device in seconds: `parallax verify examples/lm/verify.py:factory`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from corpus import Corpus
from model import LanguageModel
from train import build, parse_args, quieten_torch

OPTIONS = ["--hidden=32", "--embedding-dim=16", "--projection=16", "--samples=50", "--batch-size=8", "--dropout=0.1"]


def factory() -> tuple[Any, ...]:
    """What `train.py` trains, on a text of random words."""
    quieten_torch()
    tokens = np.random.default_rng(0).zipf(1.3, size=20_000).clip(max=1000).astype(np.int32) - 1
    words = [f"word{number}" for number in range(1000)]
    corpus = Corpus("random words", tokens, held_out=tokens[:0], words=words, num_distinct=len(words))
    return *build(parse_args(OPTIONS), corpus), loss


def loss(model: LanguageModel, batch: Any) -> torch.Tensor:
    torch.manual_seed(0)  # all workers draw the samples of the softmax that one device draws
    return model(*batch)
