"""Horovod's turn in `evaluate.py`: the language model, unmodified, and `hvd.DistributedOptimizer`.

It runs in an environment of its own (`setup.sh`). Ways: sparse gradients gathered as they come, and ids made unique
before the lookup, so that a row's gradient is gathered once from each rank.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from itertools import cycle
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from models import MODELS, Batch
from torch import nn
from turns import Group, settings, take

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK, LOCAL_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
MACHINE, NUM_MACHINES = RANK // LOCAL_SIZE, SIZE // LOCAL_SIZE


def start() -> None:
    """Joins the ranks, with what `horovodrun` tells them."""
    os.environ.update(
        HOROVOD_RANK=str(RANK),
        HOROVOD_SIZE=str(SIZE),
        HOROVOD_LOCAL_RANK=str(LOCAL_RANK),
        HOROVOD_LOCAL_SIZE=str(LOCAL_SIZE),
        HOROVOD_CROSS_RANK=str(MACHINE),
        HOROVOD_CROSS_SIZE=str(NUM_MACHINES),
        HOROVOD_HOSTNAME=f"machine{MACHINE}",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=os.environ["MASTER_ADDR"],
        HOROVOD_GLOO_RENDEZVOUS_PORT=os.environ["MASTER_PORT"],
        HOROVOD_GLOO_IFACE=os.environ["GLOO_SOCKET_IFNAME"],
        HOROVOD_GLOO_TIMEOUT_SECONDS="600",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    if RANK == 0:
        serve()
    hvd.init()


def serve() -> None:
    """Where ranks find each other, as `horovodrun` has it."""
    hosts = parse_hosts(",".join(f"machine{m}:{LOCAL_SIZE}" for m in range(NUM_MACHINES)))
    server = RendezvousHTTPServer(("", int(os.environ["MASTER_PORT"])), RendezvousHandler, 0)
    server.init(get_host_assignments(hosts, SIZE))
    threading.Thread(target=server.serve_forever, daemon=True).start()


class UniqueEmbedding(nn.Module):
    """Looks each row up once."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        unique, at = torch.unique(ids, return_inverse=True)
        return self.table(unique)[at]


def take_turn(args, batches: list[Batch], group: Group, unique: bool, **facts: object) -> None:
    kind = MODELS[args.model]
    torch.manual_seed(0)
    model = kind.make(args, True)
    if unique:
        for name, table in list(model.named_children()):
            if isinstance(table, nn.Embedding):
                setattr(model, name, UniqueEmbedding(table))
    plain = torch.optim.Adagrad(model.parameters(), lr=kind.lr)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    for state in optimizer.state.values():
        state["sum"].fill_(0.1)  # the wrapper makes Adagrad anew, and forgets an initial value that it was given
    data = cycle(batches)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    take(step, group, args.seconds, **facts)


def main() -> None:
    folder = Path(sys.argv[1])
    args = settings(folder)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    start()

    def largest(value: float) -> float:
        return float(hvd.allgather(torch.tensor([value], dtype=torch.float64)).max())

    group = Group(folder, RANK, hvd.barrier, largest)
    batches = MODELS[args.model].batches(args, RANK)
    for unique in (False, True):
        take_turn(args, batches, group, unique, way="unique ids" if unique else "plain")
        gc.collect()
    hvd.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
