"""The language model of `models.py` with its exchange written by hand: what an unmodified model is compared with.

It trains what `parallax.distribute` makes of `models.LM`, message by message, over the same connections: ids to the
owners of rows, rows back, row gradients with the shards of dense gradients, sums back. But it knows the model: which
tables there are, that each is looked up once, that all ranks do the same, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
import torch.nn.functional as F
from models import LM, Batch

from parallax.comm import Comm
from parallax.mesh import Column


class Rows:
    """A rank's rows of a table: row r of the table is row r // N of rank r mod N."""

    def __init__(self, whole: torch.Tensor, comm: Comm) -> None:
        self.num_ranks = comm.world_size
        self.held = torch.nn.Parameter(whole[comm.rank :: comm.world_size].clone())
        self.stride = -(-len(whole) // self.num_ranks)

    def want(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]], torch.Tensor]:
        """(positions at their owners, int32; which of them belong to each rank; where each id is among them)."""
        keys, inverse = torch.unique(ids % self.num_ranks * self.stride + ids // self.num_ranks, return_inverse=True)
        bounds = torch.arange(1, self.num_ranks) * self.stride
        cuts = [0, *torch.searchsorted(keys, bounds).tolist(), len(keys)]
        return (keys % self.stride).int(), list(itertools.pairwise(cuts)), inverse


class HandWritten:
    def __init__(self, args: argparse.Namespace, lr: float) -> None:
        self.comm = comm = Comm(torch.device("cpu"), timeout=300.0)
        torch.manual_seed(0)
        model = LM(args, True)
        self.lstm, self.projection = model.lstm, model.projection
        self.dense = [*self.lstm.parameters(), *self.projection.parameters()]
        self.tables = [Rows(t.weight.data, comm) for t in (model.embedding, model.softmax_weight, model.softmax_bias)]
        parameters = [*self.dense, *(table.held for table in self.tables)]
        self.optimizer = torch.optim.Adagrad(parameters, lr=lr, initial_accumulator_value=0.1)
        self.buffer = torch.empty(sum(p.numel() for p in self.dense))
        self.views = [
            piece.view(p.shape)
            for p, piece in zip(self.dense, self.buffer.split([p.numel() for p in self.dense]), strict=True)
        ]

    def step(self, batch: Batch) -> torch.Tensor:
        tokens, samples, log_expected = batch
        comm, num_ranks = self.comm, self.comm.world_size
        for p in self.optimizer.param_groups[0]["params"]:
            p.grad = None
        targets = tokens[:, 1:].flatten()
        candidates = torch.cat([targets, samples])
        wanted = [
            table.want(ids)
            for table, ids in zip(self.tables, (tokens[:, :-1].flatten(), candidates, candidates), strict=True)
        ]

        # ids there, rows back
        headers = [[b - a for _, spans, _ in wanted for a, b in (spans[r],)] for r in range(num_ranks)]
        asked: list[Column] = []

        def make_room(headers: list[tuple[int, ...]]) -> list[Column]:
            for numbers in zip(*headers, strict=True):
                asked.append(Column.split(torch.empty(sum(numbers), dtype=torch.int32), numbers))
            return asked

        comm.exchange(headers, [Column(positions, spans) for positions, spans, _ in wanted], make_room)
        answers = [
            Column(table.held.data.index_select(0, ids.tensor), ids.spans)
            for table, ids in zip(self.tables, asked, strict=True)
        ]
        rows = [
            torch.empty(len(positions), table.held.shape[1])
            for table, (positions, *_) in zip(self.tables, wanted, strict=True)
        ]
        comm.swap(answers, [Column(r, spans) for r, (_, spans, _) in zip(rows, wanted, strict=True)])

        # forward and backward: as in models.LM
        for r in rows:
            r.requires_grad_()
        embedded, weight, bias = (F.embedding(inverse, r) for r, (*_, inverse) in zip(rows, wanted, strict=True))
        embedded, bias, n = embedded.view(*tokens[:, :-1].shape, -1), bias.squeeze(1) - log_expected, len(targets)
        hidden = self.projection(self.lstm(embedded)[0]).flatten(0, 1)
        own = (hidden * weight[:n]).sum(1) + bias[:n]
        others = torch.addmm(bias[n:], hidden, weight[n:].T).masked_fill(samples == targets[:, None], -math.inf)
        loss = F.cross_entropy(torch.cat([own[:, None], others], 1), torch.zeros_like(targets))
        loss.backward()

        # gradients there, sums of dense ones back
        torch.cat([p.grad.flatten() for p in self.dense if p.grad is not None], out=self.buffer)
        self.buffer /= num_ranks
        reduction = comm.all_reduce(self.buffer)
        brought = [Column(r.grad, spans) for r, (_, spans, _) in zip(rows, wanted, strict=True) if r.grad is not None]
        arrived = [
            Column(torch.empty(len(ids.tensor), table.held.shape[1]), ids.spans)
            for table, ids in zip(self.tables, asked, strict=True)
        ]
        comm.swap(brought, arrived)
        for table, ids, grads in zip(self.tables, asked, arrived, strict=True):
            touched, slots = torch.unique(ids.tensor, return_inverse=True)
            summed = torch.zeros(len(touched), grads.tensor.shape[1]).index_add_(0, slots, grads.tensor)
            table.held.grad = torch.sparse_coo_tensor(
                touched[None].long(), summed / num_ranks, table.held.shape, is_coalesced=True, check_invariants=False
            )
        comm.wait(reduction)
        for p, view in zip(self.dense, self.views, strict=True):
            p.grad = view
        self.optimizer.step()
        return loss.detach()
