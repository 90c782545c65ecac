"""TorchRec's turn in `evaluate.py`: models in its types, tables by rows over all ranks, Adagrad fused into backward.

It runs in an environment of its own (`setup.sh`). Ways: the plain loop, and TrainPipelineSparseDist, which sends the
next batch's ids while this one computes; both with ids as they come, and with ids made unique before the lookup.
(TorchRec's own option for that, `use_index_dedup`, has no implementation for CPUs in 1.8.0.)
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from models import LM, MODELS, TABLE_DIM, Batch, Recommender
from torch import nn
from torch_group import torch_group
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable
from turns import Group, settings, take

BIAS_DIM = 4
"""FBGEMM has rows of multiples of 4 elements only; of the softmax's bias the first is used."""


@dataclass
class Input(Pipelineable):
    """A batch as TorchRec takes it: the ids of each feature, where those of the batch are among them, and the rest."""

    ids: KeyedJaggedTensor
    at: dict[str, torch.Tensor]
    rest: tuple[torch.Tensor, ...]

    def to(self, device: torch.device, non_blocking: bool = False) -> Input:
        return self

    def record_stream(self, stream: object) -> None:
        pass


class Rewritten(nn.Module):
    """A model in TorchRec's types.

    Rows are renumbered so that row r lies on rank r mod N, as in parallax: TorchRec cuts tables into blocks, and all
    the frequent words of a vocabulary that is sorted by frequency would be on rank 0.
    """

    def __init__(self, unique: bool) -> None:
        super().__init__()
        self.unique = unique
        self.whole: dict[str, torch.Tensor] = {}

    def collection(self, tables: list[tuple[str, str, torch.Tensor]]) -> EmbeddingCollection:
        """Of tables that are given by name, feature and rows; all rows of one size."""
        n, configs = dist.get_world_size(), []
        for name, feature, rows in tables:
            rows = F.pad(rows.detach(), (0, 0, 0, -len(rows) % n))
            self.whole[name] = rows.view(-1, n, rows.shape[1]).transpose(0, 1).flatten(0, 1)
            configs.append(
                EmbeddingConfig(
                    name=name, num_embeddings=len(rows), embedding_dim=rows.shape[1], feature_names=[feature]
                )
            )
        return EmbeddingCollection(tables=configs)

    def input(self, ids: list[tuple[str, int, torch.Tensor]], rest: tuple[torch.Tensor, ...]) -> Input:
        """Of ids that are given by feature, with the number of rows of its tables."""
        n, values, at = dist.get_world_size(), [], {}
        for feature, num_rows, of_feature in ids:
            of_feature = of_feature % n * -(-num_rows // n) + of_feature // n
            if self.unique:
                of_feature, at[feature] = torch.unique(of_feature, return_inverse=True)
            values.append(of_feature.flatten())
        lengths = torch.tensor([len(v) for v in values], dtype=torch.int32)
        return Input(KeyedJaggedTensor([feature for feature, *_ in ids], torch.cat(values), lengths=lengths), at, rest)

    def load(self) -> None:
        """Gives this rank's rows their values."""
        for module in self.children():
            for key, rows in module.state_dict().items():
                if key.startswith("embeddings."):
                    whole = self.whole[key.split(".")[1]]
                    for shard in rows.local_shards():
                        start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                        shard.tensor.copy_(whole[start : start + size])
        self.whole.clear()


class RewrittenLM(Rewritten):
    """`models.LM`."""

    def __init__(self, plain: LM, unique: bool) -> None:
        super().__init__(unique)
        self.num_rows, self.dim = plain.embedding.weight.shape
        self.tables = self.collection(
            [
                ("embedding", "tokens", plain.embedding.weight),
                ("softmax", "candidates", plain.softmax_weight.weight),
            ]
        )
        bias = F.pad(plain.softmax_bias.weight, (0, BIAS_DIM - 1))
        self.biases = self.collection([("bias", "candidates", bias)])
        self.lstm, self.projection = plain.lstm, plain.projection

    def as_input(self, batch: Batch) -> Input:
        tokens, samples, log_expected = batch
        targets = tokens[:, 1:].flatten()
        ids = [("tokens", self.num_rows, tokens[:, :-1])]
        ids.append(("candidates", self.num_rows, torch.cat([targets, samples])))
        return self.input(ids, (targets, samples, log_expected, tokens))

    def forward(self, batch: Input) -> tuple[torch.Tensor, torch.Tensor]:
        targets, samples, log_expected, tokens = batch.rest[0], batch.rest[1], batch.rest[2], batch.rest[3]
        rows, biases = self.tables(batch.ids), self.biases(batch.ids)
        embedded, weight, bias = rows["tokens"].values(), rows["candidates"].values(), biases["candidates"].values()
        if self.unique:
            embedded, at = embedded[batch.at["tokens"]], batch.at["candidates"]
            weight, bias = weight[at], bias[at]
        embedded = embedded.view(tokens.shape[0], -1, self.dim)
        bias, n = bias[:, 0] - log_expected, targets.shape[0]
        hidden = self.projection(self.lstm(embedded)[0]).flatten(0, 1)
        own = (hidden * weight[:n]).sum(1) + bias[:n]
        others = torch.addmm(bias[n:], hidden, weight[n:].T).masked_fill(samples == targets[:, None], -torch.inf)
        loss = F.cross_entropy(torch.cat([own[:, None], others], 1), torch.zeros_like(targets))
        return loss, loss.detach()


class RewrittenRecommender(Rewritten):
    """`models.Recommender`."""

    def __init__(self, plain: Recommender, unique: bool) -> None:
        super().__init__(unique)
        self.num_rows = [len(table.weight) for table in plain.tables]
        self.tables = self.collection([(f"t{k}", f"f{k}", table.weight) for k, table in enumerate(plain.tables)])
        self.over = plain.over

    def as_input(self, batch: Batch) -> Input:
        features, ids, clicked = batch
        return self.input([(f"f{k}", rows, ids[:, k]) for k, rows in enumerate(self.num_rows)], (features, clicked))

    def forward(self, batch: Input) -> tuple[torch.Tensor, torch.Tensor]:
        found, rows = self.tables(batch.ids), []
        for k in range(len(self.num_rows)):
            of_table = found[f"f{k}"].values()
            rows.append(of_table[batch.at[f"f{k}"]] if self.unique else of_table.view(-1, TABLE_DIM))
        loss = self.over(batch.rest[0], rows, batch.rest[1])
        return loss, loss.detach()


REWRITTEN = {"lm": RewrittenLM, "recommender": RewrittenRecommender}


def take_turn(args, batches: list[Batch], group: Group, unique: bool, pipelined: bool, **facts: object) -> None:
    kind = MODELS[args.model]
    torch.manual_seed(0)
    rewritten = REWRITTEN[args.model](kind.make(args, False), unique)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": kind.lr, "eps": 1e-10}
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    plan = {
        name: construct_module_sharding_plan(
            module,
            {table.name: row_wise(compute_kernel="fused") for table in module.embedding_configs()},
            sharder=sharder,
            local_size=args.workers,
            world_size=dist.get_world_size(),
            device_type="cpu",
        )
        for name, module in rewritten.named_children()
        if isinstance(module, EmbeddingCollection)
    }
    device = torch.device("cpu")
    model = DistributedModelParallel(rewritten, device=device, plan=ShardingPlan(plan), sharders=[sharder])
    rewritten.load()
    for state in model.fused_optimizer.state.values():
        for accumulator in state.values():
            for shard in accumulator.local_shards():
                shard.tensor.fill_(0.1)
    dense = [p for name, p in model.named_parameters() if name.split(".")[0] not in plan]
    optimizer = torch.optim.Adagrad(dense, lr=kind.lr, initial_accumulator_value=0.1)
    data = map(rewritten.as_input, cycle(batches))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = model(next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    if pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
        take(lambda: pipeline.progress(data), group, args.seconds, **facts)
    else:
        take(step, group, args.seconds, **facts)


def main() -> None:
    folder = Path(sys.argv[1])
    args = settings(folder)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    group = torch_group(folder)
    batches = MODELS[args.model].batches(args, group.rank)
    for unique in (False, True):
        for pipelined in (False, True):
            way = ", ".join(["unique ids"] * unique + ["pipelined" if pipelined else "plain loop"])
            take_turn(args, batches, group, unique, pipelined, way=way)
            gc.collect()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
