"""What is learnt from the ids of a step and the tensors of its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallax import foresight
from parallax.foresight import Foresight, Trial, guess


def batch(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1000, (5, 7), generator=generator), torch.randint(1000, (4,), generator=generator)]


LOOKUPS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "a tensor": lambda b: b[0],
    "all but the last column": lambda b: b[0][:, :-1],
    "all but the first column": lambda b: b[0][:, 1:],
    "a column": lambda b: b[0][:, 3],
    "all but the first row": lambda b: b[0][1:],
    "several": lambda b: torch.cat([b[0][:, 1:].flatten(), b[1], b[0][:, 0]]),
    "another dtype": lambda b: b[1].int(),
}


@pytest.mark.parametrize("how", LOOKUPS)
def test_ids_are_foreseen(how: str) -> None:
    known, ids_of = Foresight(), LOOKUPS[how]
    for step in range(4):
        known.begin(batch(step), batch(step + 1))
        following = known.following()
        if step < 2:  # a guess, and its confirmation
            assert not following
        else:
            assert following["table"].tolist() == ids_of(batch(step + 1)).flatten().tolist()
            assert not known.following(), "once for each batch"
        known.see("table", ids_of(batch(step)).flatten().long())


def test_what_is_not_in_the_batch_is_left_out() -> None:
    known = Foresight()
    for step in range(3):
        b = batch(step)
        known.begin(b, batch(step + 1))
        drawn = torch.arange(9) + 5000 + step
        known.see("table", torch.cat([b[0][:, 1:].flatten(), drawn, b[1]]))
    known.begin(batch(3), batch(4))
    following = known.following()["table"].tolist()
    assert following == torch.cat([batch(4)[0][:, 1:].flatten(), batch(4)[1]]).tolist()


def test_ids_that_have_nothing_to_do_with_the_batch() -> None:
    assert guess(torch.arange(5000, 5010), batch(0)) is None
    known = Foresight()
    for step in range(10):
        known.begin(batch(step), batch(step + 1))
        assert not known.following()
        known.see("table", torch.arange(5) + 5000 * step)


def test_a_guess_that_fails_is_dropped_and_a_table_is_given_up_in_the_end() -> None:
    known, given = Foresight(), 0
    for step in range(60):
        b = batch(step)
        known.begin(b, batch(step + 1))
        if known.following():
            given += 1
            known.doubt(["table"])
        known.see("table", b[1].long())
    assert given == foresight.MOST_GUESSES


def test_batches_of_other_shapes_and_none() -> None:
    known = Foresight()
    for step in range(3):
        known.begin(batch(step), None)
        assert not known.following()
        known.see("table", batch(step)[0][:, 5])
    known.begin(batch(3), [torch.zeros(2, 3, dtype=torch.int64)])
    assert not known.following()


@pytest.mark.parametrize(("with_it", "without"), [(1.0, 2.0), (2.0, 1.0)])
def test_a_trial_keeps_what_is_faster(with_it: float, without: float) -> None:
    now = 0.0
    trial = Trial(clock=lambda: now)
    tried = []
    for _ in range(foresight.NUM_TURNS * foresight.TURN_STEPS + 5):
        trial.step()
        tried.append(trial.on)
        # A step is as long as what the one before has asked for makes it.
        now += with_it if len(tried) > 1 and tried[-2] else without
    size = foresight.TURN_STEPS
    assert tried[: 2 * size] == [True] * size + [False] * size
    assert set(tried[foresight.NUM_TURNS * size :]) == {with_it < without}
