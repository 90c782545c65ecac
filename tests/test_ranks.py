"""The harness itself: what it says when a rank fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, (dist.get_rank(), value))
    return values


def process_id() -> int:
    return os.getpid()


def doubled(t: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"twice": 2 * t}


def raise_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("boom")
    return "fine"


def wait_for_ever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def kill(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(rank: int, status: int) -> None:
    if dist.get_rank() == rank:
        os._exit(status)


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_talk(world_size: int) -> None:
    expected = [(r, "x") for r in range(world_size)]
    assert ranks.run(world_size, gather, "x") == [expected] * world_size


def test_processes_are_used_again_until_a_rank_fails() -> None:
    first = ranks.run(3, process_id)
    assert ranks.run(3, process_id) == first
    ranks.run(2, raise_on, 1, expect_errors=True)
    after = ranks.run(3, process_id)
    assert after[2] == first[2]
    assert not set(after[:2]) & set(first[:2])


def test_results_travel_by_value() -> None:
    (result,) = ranks.run(1, doubled, torch.arange(3))
    assert result["twice"].tolist() == [0, 2, 4]


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(ranks.JobFailed, match=r"ValueError on rank 1") as failure:
        ranks.run(2, raise_on, 1)
    text = str(failure.value)
    assert 'raise ValueError("boom")' in text
    assert "rank 1: ValueError: boom" in text


def test_expected_errors_come_back_as_outcomes() -> None:
    good, bad = ranks.run(2, raise_on, 1, expect_errors=True)
    assert (good.error, good.value) == (None, "fine")
    assert (bad.error, bad.text) == ("ValueError", "boom")
    assert "Traceback" in bad.output


def test_a_hang_shows_where_each_rank_is() -> None:
    with pytest.raises(ranks.JobFailed, match="did not end") as failure:
        ranks.run(2, wait_for_ever_on, 1, timeout=1.0, expect_errors=True)
    text = str(failure.value)
    assert "wait_for_ever_on" in text
    assert "barrier" in text or "DistBackendError" in text
    assert ranks.run(2, process_id)


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(ranks.JobFailed, match=r"rank 0: Died: killed by SIGKILL"):
        ranks.run(2, kill, 0)
    outcomes = ranks.run(2, leave, 1, 7, expect_errors=True)
    assert (outcomes[1].error, outcomes[1].text) == ("Died", "exit status 7")


def test_warnings_are_errors_on_ranks() -> None:
    with pytest.raises(ranks.JobFailed, match="UserWarning: careful"):
        ranks.run(1, warn)


def test_a_world_that_cannot_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        ranks.Pool()
    with pytest.raises(ValueError, match="expected 1 to 4, got 5"):
        ranks.run(5, process_id)


def test_ranks_end_with_the_test_process() -> None:
    pids = ranks.run(2, process_id)
    ranks.close()  # what the death of this process does: it closes a socket
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
