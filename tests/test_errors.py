"""Wrong input and failing ranks: one clear error on all ranks, in seconds, with nothing changed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import parallax
from parallax import comm
from parallax.mesh import Column
from parallax.runtime import ANNOUNCE_SECONDS

WITHIN = 10.0
"""Seconds in which all ranks leave when one has failed, as promised."""

several_ranks = pytest.mark.parametrize("world_size", [2, 4])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(10, 4)
        self.tags = nn.EmbeddingBag(10, 4)
        self.weight = nn.Parameter(torch.rand(10, 4))
        self.layer = nn.Linear(4, 1)

    def forward(self, user: torch.Tensor, tags: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.user(user) + self.tags(tags[:, None]) + self.weight[ids])


def held(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds of every parameter; no message is needed for them."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, batches: Any, on_step: Any = lambda number: None) -> None:
    """Says it if a step that failed has changed weights."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for number, batch in enumerate(batches, 1):
        before = held(model)
        try:
            on_step(number)
            optimizer.zero_grad()
            model(*batch).sum().backward()
            optimizer.step()
        except Exception:
            changed = len(before) != len(held(model)) or not all(map(torch.equal, before, held(model)))
            print("weights were changed" if changed else "no weight was changed")
            raise


def check_outcomes(outcomes: list[ranks.Outcome], failed: int, error: str) -> None:
    """`failed` has raised its own error; the others say whose error ended them; all are soon gone."""
    for outcome in outcomes:
        assert outcome.error == (error if outcome.rank == failed else "PeerError"), str(outcome)
        assert outcome.seconds < WITHIN, str(outcome)
        if outcome.rank != failed:
            assert f"rank {failed}" in outcome.text
            assert outcomes[failed].text in outcome.text
            assert "Traceback" not in outcome.output  # the first failure's is the one to read


# -- nobody answers ------------------------------------------------------------------------------------


def wait_in_vain(seconds: float) -> tuple[str, float]:
    """Rank 1 is silent, and so is the launcher's store, as for a rank whose machine is cut off."""
    run = comm.Comm(torch.device("cpu"), timeout=1.0)
    if parallax.rank() == 1:
        time.sleep(seconds)
        return "", 0.0

    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(100)
            return False

        set = get = check

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "STORE_SECONDS", 0.5)
        patch.setattr(dist.distributed_c10d, "_get_default_store", Silent)
        started = time.monotonic()
        with pytest.raises(parallax.PeerError) as caught:
            run.swap([], [Column.split(torch.empty(1, dtype=torch.uint8), [0, 1])])
        run.report_failure(caught.value)
        return str(caught.value), time.monotonic() - started


def test_a_store_that_does_not_answer_keeps_no_rank_waiting() -> None:
    text, seconds = ranks.run(2, wait_in_vain, 4.0)[0]
    assert seconds < 4
    assert text == (
        "rank 0 stops: rank 1 has been silent for 1 s (Config.timeout=1). Rank 0 was waiting for rows starting; the "
        "launcher's store does not answer either: the network of this machine or of rank 0's may be cut"
    )


# -- ids out of range ---------------------------------------------------------------------------------


def feed(where: str, wrong_id: int, at_step: int) -> None:
    """Rank 1 feeds a wrong id."""

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        ids = {name: torch.tensor([1, 2, 9]) for name in ("user", "tags", "weight")}
        if number == at_step and parallax.rank() == 1:
            ids[where] = torch.tensor([3, wrong_id, 0])
        return tuple(ids.values())

    train(Model(), map(batch, range(1, 5)))


WRONG_IDS = [("user", 10), ("user", 10**9), ("user", -1), ("tags", 10), ("tags", -1), ("weight", 10), ("weight", -11)]
NAMES = {"user": "user.weight", "tags": "tags.weight", "weight": "weight"}


@pytest.mark.parametrize(("where", "wrong_id"), WRONG_IDS)
@pytest.mark.parametrize("at_step", [1, 3])
def test_an_id_out_of_range_on_one_rank(where: str, wrong_id: int, at_step: int) -> None:
    outcomes = ranks.run(2, feed, where, wrong_id, at_step, expect_errors=True)
    check_outcomes(outcomes, 1, "IndexError")
    text = outcomes[1].text
    assert f"{NAMES[where]!r}" in text
    assert re.search(rf"(?<![\d-]){wrong_id}(?!\d)", text)
    assert "rank 1" in text
    assert ("from -10 to 9" if where == "weight" and wrong_id < 0 else "from 0 to 9") in text
    assert all("no weight was changed" in o.output for o in outcomes)


def test_an_id_out_of_range_among_four_ranks() -> None:
    check_outcomes(ranks.run(4, feed, "user", 10, 3, expect_errors=True), 1, "IndexError")


def test_one_worker_says_what_torch_says() -> None:
    (outcome,) = ranks.run(1, feed_alone, expect_errors=True)
    assert (outcome.error, outcome.text) == ("IndexError", "index out of range in self")


def feed_alone() -> None:
    train(Model(), [(torch.tensor([10]), torch.tensor([0]), torch.tensor([0]))])


# -- a rank that fails --------------------------------------------------------------------------------


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def fail_at(failing_rank: int, at_step: int, how: str, tables: bool) -> None:
    def on_step(number: int) -> None:
        if number == at_step and parallax.rank() == failing_rank:
            if how == "exit":
                os._exit(3)
            if how == "late":
                time.sleep(1.0)
            raise ValueError("boom")

    ids = torch.tensor([1, 2, 3 + parallax.rank()])
    train(Model() if tables else Dense(), [(ids,) * 3 if tables else (torch.rand(3, 4),)] * 5, on_step)


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "dense"])
@pytest.mark.parametrize(
    ("failing_rank", "at_step", "how"), [(1, 3, "raise"), (0, 1, "raise"), (0, 2, "raise"), (1, 4, "late")]
)
def test_an_exception_on_one_rank_is_everyones(tables: bool, failing_rank: int, at_step: int, how: str) -> None:
    outcomes = ranks.run(2, fail_at, failing_rank, at_step, how, tables, expect_errors=True)
    assert outcomes[failing_rank].text == "boom"
    check_outcomes(outcomes, failing_rank, "ValueError")
    assert outcomes[failing_rank].seconds < ANNOUNCE_SECONDS, "it has waited for ranks that do not come"


def fail_together(at_step: int) -> None:
    ids = torch.tensor([1, 2, 3])

    def on_step(number: int) -> None:
        if number == at_step:
            raise ValueError("boom")

    train(Model(), [(ids, ids, ids)] * 5, on_step)


@pytest.mark.parametrize("at_step", [1, 2, 4])
def test_all_ranks_fail_at_once(at_step: int) -> None:
    for outcome in ranks.run(3, fail_together, at_step, expect_errors=True):
        assert (outcome.error, outcome.text) == ("ValueError", "boom"), outcome
        assert outcome.seconds < ANNOUNCE_SECONDS, "it has waited for ranks that do not come"


def test_an_exception_before_the_plan_is_applied() -> None:
    check_outcomes(ranks.run(2, fail_at, 0, 2, "raise", True, expect_errors=True), 0, "ValueError")


def test_an_exception_among_four_ranks() -> None:
    check_outcomes(ranks.run(4, fail_at, 2, 3, "raise", True, expect_errors=True), 2, "ValueError")


@several_ranks
def test_a_rank_that_is_gone(world_size: int) -> None:
    outcomes = ranks.run(world_size, fail_at, 1, 3, "exit", True, expect_errors=True)
    assert (outcomes[1].error, outcomes[1].text) == ("Died", "exit status 3")
    for outcome in outcomes:
        assert outcome.seconds < WITHIN
        if outcome.rank != 1:
            assert outcome.error == "PeerError", str(outcome)


def fail_between(where: str) -> None:
    """Rank 1 fails where it owes the others an answer."""
    model = Model()
    parallax.distribute(model)
    ids = torch.tensor([1, 2, 3])
    for _ in range(3):
        model(ids, ids, ids).sum().backward()
    if parallax.rank() == 1:
        if where == "forward":
            model.user(ids).sum().item()
        if where == "backward":
            model(ids, ids, ids).register_hook(broken).sum().backward()
        raise ValueError("boom")
    if where == "state":
        model.state_dict()
    model(ids, ids, ids).sum().backward()
    model(ids, ids, ids).sum().backward()


def broken(grad: torch.Tensor) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("where", ["forward", "state"])
def test_an_exception_between_rounds(where: str) -> None:
    check_outcomes(ranks.run(2, fail_between, where, expect_errors=True), 1, "ValueError")


def fail_in_backward() -> None:
    model = Model()
    parallax.distribute(model)
    ids = torch.tensor([1, 2, 3])
    for number in range(4):
        out = model(ids, ids, ids)
        if number == 2 and parallax.rank() == 1:
            out.register_hook(broken)
        out.sum().backward()


@several_ranks
def test_an_exception_inside_backward(world_size: int) -> None:
    check_outcomes(ranks.run(world_size, fail_in_backward, expect_errors=True), 1, "ValueError")


def fail_alike() -> None:
    train(Model(), [(torch.tensor([1, 2, 10]),) * 3] * 2)


def test_ranks_that_all_fail_do_not_wait_for_each_other() -> None:
    outcomes = ranks.run(3, fail_alike, expect_errors=True)
    assert [o.error for o in outcomes] == ["IndexError"] * 3
    assert all(o.seconds < 4 for o in outcomes), outcomes


# -- wrong uses ---------------------------------------------------------------------------------------


def distribute_twice(same: bool) -> None:
    model = Dense()
    parallax.distribute(model)
    parallax.distribute(model if same else Dense())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("same", [True, False])
def test_distribute_called_twice(world_size: int, same: bool) -> None:
    for outcome in ranks.run(world_size, distribute_twice, same, expect_errors=True):
        assert outcome.error == "ParallaxError", str(outcome)
        assert "parallax.distribute was called already, for " + ("this" if same else "another") in outcome.text
        assert f"rank {outcome.rank}" in outcome.text


def different_models() -> None:
    parallax.distribute(nn.Linear(2, 3 if parallax.rank() == 0 else 4))


@several_ranks
def test_ranks_with_different_models(world_size: int) -> None:
    for outcome in ranks.run(world_size, different_models, expect_errors=True):
        assert outcome.error == "DisagreementError", str(outcome)
        assert "weight" in outcome.text


def not_distributed(function: str) -> None:
    getattr(parallax, function)(Dense())


@pytest.mark.parametrize("function", ["explain", "traffic"])
def test_a_model_that_was_not_distributed(function: str) -> None:
    with pytest.raises(parallax.ParallaxError, match="was not given to"):
        not_distributed(function)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((nn.Linear(1, 1).weight,), {}),
        ((Dense(), Dense()), {}),
        ((Dense(), ["adam"]), {}),
        ((Dense(),), {"config": {"timeout": 5}}),
    ],
)
def test_arguments_of_other_types(args: Any, options: Any) -> None:
    with pytest.raises(TypeError):
        parallax.distribute(*args, **options)


# -- real programs ------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
import torch
import parallax

what = sys.argv[1]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = torch.nn.Embedding(10, 4)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(self.user(x))

model = Model()
parallax.distribute(model)  # without an optimizer: the first step of one imports half of torch
sys.stdout.write(f"pid {os.getpid()}\\n")  # at once: the ranks share the file
sys.stdout.flush()
for step in range(1, 100):
    x = torch.tensor([step % 10, 3])
    if step == 3 and parallax.rank() == 1:
        print("failing at", time.time(), flush=True)
        if what == "id":
            x = torch.tensor([10])
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    model(x).mean().backward()
"""

LAUNCHERS = {
    "parallax": ["parallax.cli", "run", "--nproc", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@dataclasses.dataclass
class Ended:
    """A run that is over; `pids` of its ranks, and the seconds from the failure to its end."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"^pid (\d+)$", self.stdout, re.MULTILINE)]


starts_programs = pytest.mark.timeout(150)  # two ranks and a launcher, twice, import torch


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All at once: that runs do not disturb each other is one of the promises."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(PROGRAM)
    env = {**ranks.environment(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    started = {}
    for what, launcher in [("id", "parallax"), ("kill", "torchrun")]:
        with open(folder / f"{what}.out", "wb") as out, open(folder / f"{what}.err", "wb") as err:
            command = [sys.executable, "-m", *LAUNCHERS[launcher], str(folder / "train.py"), what]
            started[what] = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
            )
    ended = {}
    deadline = time.monotonic() + 120
    while len(ended) < len(started) and time.monotonic() < deadline:
        for what, process in started.items():
            if what not in ended and process.poll() is not None:
                stdout = (folder / f"{what}.out").read_text()
                failed_at = re.search(r"failing at ([\d.]+)", stdout)
                seconds = time.time() - float(failed_at[1]) if failed_at else float("nan")
                ended[what] = Ended(process.returncode, stdout, (folder / f"{what}.err").read_text(), seconds)
        time.sleep(0.05)
    for process in started.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for what in started:
        if what not in ended:
            ended[what] = Ended(-1, "", f"did not end: {(folder / f'{what}.err').read_text()}", float("inf"))
    return ended


def check_gone(run: Ended) -> None:
    assert len(run.pids) == 2, run.stderr
    assert not [pid for pid in run.pids if Path(f"/proc/{pid}").exists()]


@starts_programs
@pytest.mark.programs
def test_a_program_with_a_wrong_id(programs: dict[str, Ended]) -> None:
    run = programs["id"]
    assert run.status not in (0, -1), run.stderr
    assert run.seconds < WITHIN
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    own = r"^(\[rank1\]: )?IndexError: id 10 is out of range for 'user\.weight'.*from 0 to 9 \(rank 1\)$"
    assert len(re.findall(own, run.stderr, re.MULTILINE)) == 1, run.stderr
    check_gone(run)


@starts_programs
@pytest.mark.programs
def test_a_program_of_which_a_rank_is_killed_under_torchrun(programs: dict[str, Ended]) -> None:
    run = programs["kill"]
    assert run.status not in (0, -1), run.stderr
    assert run.seconds < WITHIN
    assert "exitcode  : -9" in run.stderr, run.stderr
    assert "[rank0]: Traceback" not in run.stderr, run.stderr
    check_gone(run)
