"""Gradients that leave while backward goes on (`Config.overlap`): the same numbers, and they do leave early."""

from __future__ import annotations

from typing import Any

import ranks
import torch
from torch import nn

import parallax
from parallax import foresight, table
from parallax.rounds import Rounds


class Model(nn.Module):
    """Backward reaches the table of classes first, then the layer, then the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(50, 6), nn.Embedding(40, 5)
        self.layer = nn.Linear(6, 5)
        self.double()

    def forward(self, words: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.layer(self.words(words))) * self.classes(classes)).sum(1).square().mean()


def train(overlap: bool, num_turns: int = 0, num_steps: int = 6) -> tuple[list[torch.Tensor], list[int], int]:
    """(weights, what left early in which order, rounds)"""
    table.EARLY_BYTES, foresight.NUM_TURNS = 1, num_turns
    early: list[int] = []
    plain = Rounds.push_early

    def push_early(self: Rounds, push: Any) -> None:
        early.append(self.stacks.index(push.stack))
        plain(self, push)

    Rounds.push_early = push_early  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        parallax.distribute(model, optimizer, config=parallax.Config(overlap=overlap))
        generator = torch.Generator().manual_seed(parallax.rank())
        before = parallax.traffic(model)
        for _ in range(num_steps):
            optimizer.zero_grad()
            batch = (torch.randint(n, (12,), generator=generator) for n in (50, 40))
            model(*batch).backward()
            optimizer.step()
        sent = parallax.traffic(model) - before
        return [p.detach().clone() for p in model.state_dict().values()], early, sent.num_rounds
    finally:
        Rounds.push_early, table.EARLY_BYTES, foresight.NUM_TURNS = plain, 2**16, 4  # type: ignore[method-assign]


def test_gradients_leave_early_and_change_nothing() -> None:
    for (weights, early, num_rounds), (expected, none, num_expected) in zip(
        ranks.run(3, train, True), ranks.run(3, train, False), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
        assert num_rounds == num_expected
        assert early == [1, 0] * 5, "classes, then words, in each step but the first, in which the plan is made"
        assert not none


def test_it_is_tried_whether_that_pays() -> None:
    size = foresight.TURN_STEPS
    for (weights, early, _), (expected, _, _) in zip(
        ranks.run(2, train, True, 2, 1 + 2 * size), ranks.run(2, train, False, 2, 1 + 2 * size), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
        assert early == [1, 0] * size, "after the first step, a turn with it and one without"
