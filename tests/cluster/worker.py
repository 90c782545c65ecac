"""What a worker of a cluster does in the tests: `worker.py NAME [FOLDER]`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import oracle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster import link_counters
from oracle import Case
from torch import nn

import parallax

WORDS, LENGTH, STEPS = 40, 5, 4


class SmallLM(nn.Module):
    """An embedding, an LSTM, and a softmax over the targets' and some other words' rows."""

    def __init__(self, words: int = WORDS, dim: int = 6) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(words, dim, sparse=True)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.softmax_weight = nn.Embedding(words, dim, sparse=True)
        self.softmax_bias = nn.Embedding(words, 1, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        targets = tokens[:, 1:].flatten()
        others = torch.arange(0, self.words, 7)
        candidates = torch.cat([targets, others])
        embedded, weight = self.embedding(tokens[:, :-1]), self.softmax_weight(candidates)
        bias = self.softmax_bias(candidates).squeeze(1)
        hidden, n = self.lstm(embedded)[0].flatten(0, 1), len(targets)
        own = (hidden * weight[:n]).sum(1) + bias[:n]
        logits = torch.cat([own[:, None], hidden @ weight[n:].T + bias[n:]], 1)
        return F.cross_entropy(logits, torch.zeros_like(targets))


def language_model(world_size: int) -> Case:
    generator = torch.Generator().manual_seed(1)

    def batch(size: int) -> torch.Tensor:
        return torch.randint(WORDS, (size, LENGTH + 1), generator=generator)

    return Case(
        model=lambda: SmallLM().double(),
        optimizers=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
        batches=[[batch(1 + rank % 3) for rank in range(world_size)] for _ in range(STEPS)],
        loss=lambda model, tokens: model(tokens),
    )


def train(folder: Path) -> None:
    """Leaves the trace of a training in FOLDER."""
    trace = oracle.on_a_rank(language_model(parallax.world_size()))
    torch.save(trace, folder / f"{os.environ['RANK']}.trace")


def count(folder: Path) -> None:
    """Leaves in FOLDER what parallax says that was sent in some steps, and what the link counted."""
    torch.manual_seed(parallax.rank())
    model = SmallLM(words=3000, dim=64)
    parallax.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randint(3000, (16, 20))).backward()
            optimizer.step()

    steps(3)
    dist.barrier()
    sent, on_link = parallax.traffic(model), link_counters()[0]
    steps(10)
    sent = parallax.traffic(model) - sent
    dist.barrier()
    on_link = link_counters()[0] - on_link
    counted = sent.round_header_bytes + sent.table_bytes + sent.dense_bytes
    values = {"counted": counted, "on link": on_link, "rounds": sent.num_rounds}
    (folder / f"{parallax.rank()}.json").write_text(json.dumps(values))


def merge(folder: Path) -> None:
    """Leaves in FOLDER what the link of this machine sent in some steps with large tables, 1200 samples a machine."""
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    model = nn.ModuleList([nn.Embedding(20_000, 32), nn.Embedding(20_000, 1), nn.Linear(32, 512)])
    parallax.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(os.environ["GROUP_RANK"]))

    def steps(number: int) -> None:
        for _ in range(number):
            ids = (torch.rand(1200, generator=generator) ** 3 * 20_000).long()
            ids = ids.chunk(workers)[int(os.environ["LOCAL_RANK"])]
            optimizer.zero_grad()
            (model[2](model[0](ids)) * model[1](ids)).square().mean().backward()
            optimizer.step()

    steps(3)
    dist.barrier()
    on_link = link_counters()[0]
    steps(10)
    dist.barrier()
    on_link = link_counters()[0] - on_link
    (folder / f"{workers} {parallax.rank()}.json").write_text(json.dumps(on_link))


def for_ever() -> None:
    """Trains until something happens."""
    model = SmallLM()
    parallax.distribute(model, config=parallax.Config(timeout=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.randint(WORDS, (2, LENGTH))).backward()
        optimizer.step()
        step += 1
        if step == 3:
            print("is training", flush=True)


if __name__ == "__main__":
    name, *folders = sys.argv[1:]
    {"train": train, "count": count, "merge": merge, "for_ever": for_ever}[name](*map(Path, folders))
