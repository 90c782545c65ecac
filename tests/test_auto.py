"""`parallax run --auto`, with real processes and programs that do not know parallax."""

from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parallax
from parallax import ParallaxError, auto, cli, comm
from parallax.data import ShardedLoader

LIMIT = 55.0
"""Seconds for one run."""

TRAIN = """
import argparse, os, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

class Words(Dataset):
    def __init__(self, num_words):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(num_words, (61, 4), generator=generator)
        self.y = torch.randint(3, (61,), generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

class Net(nn.Module):
    def __init__(self, num_words):
        super().__init__()
        self.words = nn.Embedding(num_words, 6)
        self.out = nn.Linear(6, 3)
    def loss(self, x, y):  # training does not go through forward
        return nn.functional.cross_entropy(self.out(self.words(x).mean(1)), y)

def evaluate(model, loader):
    num_batches = len(loader)  # asked in training mode, as the tutorial does
    model.eval()
    total = sum(model.loss(x, y).item() for x, y in loader)  # gradients stay enabled
    model.train()
    return total / num_batches

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    unseeded = [random.random(), torch.rand(()).item(), list({"a", "b", "c", "d", "e"})]
    torch.manual_seed(0)
    data = Words(50)
    # 61 = 41 + 20: the last batch of 8 has one sample
    train_data, test_data = random_split(data, [41, 20], generator=torch.Generator().manual_seed(1))
    train = DataLoader(train_data, batch_size=8, num_workers=args.workers)
    test = DataLoader(test_data, batch_size=5, shuffle=True)
    model = Net(50).double()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    print("loss", evaluate(model, test))  # before there is an optimizer
    optimizer = torch.optim.Adam([*model.parameters(), scale], lr=0.05)
    print("loss", evaluate(model, test))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    best = float("inf")
    for epoch in range(3):
        for x, y in train:
            optimizer.zero_grad()
            (model.loss(x, y) * scale).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        loss = evaluate(model, test)
        schedule.step(loss)
        print("loss", loss, len(train), flush=True)
        if loss < best:
            best = loss
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.folder + "/best.pt")
    assert os.path.exists(args.folder + "/best.pt")
    model.load_state_dict(torch.load(args.folder + "/best.pt")["model"])
    print("best", evaluate(model, test))
    with torch.no_grad():
        order = [x.tolist() for x, y in test]
    seen = {"order": order, "unseeded": unseeded, "argv": sys.argv, "path": sys.path[0], "file": __file__}
    with open(f"{args.folder}/seen{os.environ.get('RANK', '')}.pt", "wb") as file:  # that it opens itself, so all do
        torch.save(seen, file)
"""

GAN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

batch_size, out = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
real = DataLoader(TensorDataset(torch.randn(48, 3).double()), batch_size=batch_size, drop_last=True)
sum(len(x) for x, in real)  # statistics before there is an optimizer: of everything
makes, judges = nn.Linear(3, 3).double(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
one = torch.optim.SGD(makes.parameters(), lr=0.1, momentum=0.9)
two = torch.optim.Adam(judges.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.2, epochs=2, steps_per_epoch=len(real))
for epoch in range(2):
    for x, in real:
        two.zero_grad()
        (judges(makes(x).detach()).mean() - judges(x).mean()).backward()
        two.step()
        one.zero_grad()
        (-judges(makes(x)).mean()).backward()
        one.step()
        schedule.step()
        judges.eval()  # and the next loop begins so
        with torch.no_grad():
            counted = sum(len(x) for x, in real)
        judges.train()
torch.save([makes.state_dict(), judges.state_dict(), counted, len(real)], out)
"""

ERRORS = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, folder = os.environ["RANK"], sys.argv[1]
print("printed by", rank)
x = torch.randn(32, 3)
model = nn.Linear(3, 1)
def attempt(fn):
    try:
        fn()
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    print(text, file=open(f"{folder}/{rank}.txt", "a"))
attempt(lambda: model(x).mean().backward())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(x).mean().backward()
    optimizer.step()
attempt(step)
loader = DataLoader(TensorDataset(x), batch_size=4)
with torch.no_grad():
    batches = iter(loader)
    next(batches)
attempt(step)
model.eval()
batches = iter(loader)
next(batches)
attempt(step)
model.train()
del batches
for i, (batch,) in enumerate(loader):
    optimizer.zero_grad()
    model(batch).mean().backward()
    if rank == "1" and i == 2:
        raise KeyError("the cause")
    optimizer.step()
"""

PLATEAU = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.tensor([float(i)])

if __name__ == "__main__":
    loader = DataLoader(Numbers(), 8, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        if batch.min() > 8:  # stands for a training loss: each worker has its own
            schedule.step()
"""


@dataclasses.dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> tuple[int, str, str]:
        """The exit status, and what was printed."""
        status = self.process.wait(LIMIT)
        return status, (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a program on two workers."""
    processes = []

    def start(text: str, *arguments: str) -> Run:
        folder = tmp_path / "auto"
        folder.mkdir()
        (folder / "program.py").write_text(text)
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "parallax.cli", "run", "--nproc=2", "--auto", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
                stdout=stdout,
                stderr=stderr,
            )
        processes.append(process)
        return Run(folder, process)

    yield start
    for process in processes:
        process.kill()  # the workers die with it
        process.wait()


def _plain(folder: Path, text: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a program here, on one device."""
    (folder / "plain.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["plain.py", *args])
    runpy.run_path("plain.py", run_name="__main__")


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            _assert_equal(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            _assert_equal(a, e)
    else:
        assert actual == expected


@pytest.mark.programs
def test_a_program_has_the_numbers_of_one_device(
    start: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = start(TRAIN, "program.py", "--workers", "1", "--folder", ".")
    _plain(tmp_path, TRAIN, "--folder", ".", monkeypatch=monkeypatch)
    expected = capsys.readouterr().out.split()
    status, out, err = run.wait()
    assert (status, err) == (0, "parallax: training Net and parameters on 2 workers\n")
    assert len(out.split()) == len(expected)  # worker 1 prints nothing
    for a, e in zip(out.split(), expected, strict=True):
        assert float(a) == pytest.approx(float(e), rel=1e-12) if e[0].isdigit() else a == e
    _assert_equal(torch.load(run.folder / "best.pt"), torch.load("best.pt"))
    seen = [torch.load(run.folder / f"seen{rank}.pt") for rank in range(2)]
    assert seen[0] == seen[1]
    assert seen[0]["argv"] == ["program.py", "--workers", "1", "--folder", "."]
    assert (seen[0]["path"], seen[0]["file"]) == (str(run.folder), "program.py")


@pytest.mark.programs
def test_several_models_with_whole_batches_on_each_worker(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(GAN, "--scale-batches", "-m", "program", "4", "out.pt")
    _plain(tmp_path, GAN, "8", "out.pt", monkeypatch=monkeypatch)
    assert run.wait() == (0, "", "parallax: training Linear and Sequential on 2 workers\n")
    _assert_equal(torch.load(run.folder / "out.pt"), torch.load("out.pt"))


@pytest.mark.programs
def test_what_is_not_understood_is_an_error_and_shown_once(start: Callable[..., Run]) -> None:
    run = start(ERRORS, "program.py", ".")
    status, out, err = run.wait()
    yourself = (
        "or write the two lines into the program, parallax.distribute(model, optimizer) and parallax.shard(data), and "
        "run it without --auto"
    )
    for rank in range(2):
        steps = f"rank {rank}: --auto: SGD steps, but nothing is distributed: "
        assert (run.folder / f"{rank}.txt").read_text().splitlines() == [
            f"rank {rank}: --auto: a backward pass, but no optimizer was made before, and what the program trains is "
            f"found by its optimizers. Make a torch.optim optimizer first, {yourself}",
            f"{steps}no DataLoader was looped over, and batches that a program cuts by hand cannot be divided among "
            f"the workers. Read them from a DataLoader, {yourself}",
            f"{steps}the loop over the DataLoader began with gradients disabled. Begin it with gradients enabled, "
            f"{yourself}",
            f"{steps}the loop over the DataLoader began with the model in eval mode. Call model.train() before the "
            f"loop, {yourself}",
        ]
    assert (status, out) == (1, "printed by 0\n")
    line = 1 + ERRORS.splitlines().index('        raise KeyError("the cause")')
    assert err.splitlines() == [
        "parallax: training Linear on 2 workers",
        "parallax: rank 0 stops because rank 1 failed with KeyError: 'the cause'",
        "parallax: rank 1 failed:",
        "Traceback (most recent call last):",
        f'  File "program.py", line {line}, in <module>',
        '    raise KeyError("the cause")',
        "KeyError: 'the cause'",
        "parallax run: workers 0 and 1 failed with exit code 1",
    ]


@pytest.mark.programs
def test_decisions_by_a_workers_own_loss_are_noticed(start: Callable[..., Run]) -> None:
    status, _, err = start(PLATEAU, "program.py").wait()
    assert status == 1
    assert err.count("Traceback") == 1
    assert (
        "DisagreementError: rank 0: --auto: lr of SGD (optimizer 0, group 0) is 0.0001 here and 5e-05 on rank 1" in err
    )


# -- without processes --------------------------------------------------------------------------------


def _optimizer(*modules: nn.Module, loose: Sequence[torch.Tensor] = ()) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(p for module in modules for p in module.parameters()), *loose], lr=0.1)


def test_what_is_trained_is_the_outermost_modules_of_the_optimizers() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(2, 1)
    unused, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    found = auto.find_trained([_optimizer(other), _optimizer(model[1], loose=[weight])])
    assert list(found.roots) == [other, model]
    assert {id(m) for m in found.owners} == {id(other), id(model[1])}
    assert [id(p) for p in found.loose] == [id(weight)]
    whole = found.model()
    assert [id(p) for p in whole.parameters()] == [id(p) for p in (*other.parameters(), *model.parameters(), weight)]
    assert unused not in list(whole.modules())
    del whole
    assert auto.find_trained([_optimizer(model)]).model() is model


def test_whether_trained_modules_are_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = _optimizer(model[1])
    assert auto.find_trained([optimizer]).in_training_mode
    model.eval()
    assert not auto.find_trained([optimizer]).in_training_mode
    model[1].train()  # the rest is frozen
    assert auto.find_trained([optimizer]).in_training_mode


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_a_compiled_model_keeps_its_names() -> None:
    model = nn.Linear(2, 1)
    compiled = torch.compile(model)
    assert auto.find_trained([_optimizer(compiled)]).model() is model


def test_what_cannot_be_trained() -> None:
    model = nn.DataParallel(nn.Linear(2, 1))
    model.device_ids = [0, 1]
    optimizer = _optimizer(model)
    with pytest.raises(ParallaxError, match=r"^rank 0: --auto: DataParallel spreads the model over the devices"):
        auto.find_trained([optimizer])
    with pytest.raises(ParallaxError, match=r"a tensor of shape \(3,\) that is no nn.Parameter; make it one: "):
        auto.find_trained([_optimizer(loose=[torch.ones(3, requires_grad=True)])])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[auto.Auto]:
    """What watches a program, on the only rank."""
    (tmp_path / "turn").write_bytes(bytes(8))
    yield auto.Auto(tmp_path, split_batches=False)
    parallax.shutdown()


def _training(watched: auto.Auto, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(1, 1)
    optimizer = _optimizer(model)
    watched._optimizers.append(weakref.ref(optimizer))
    return model, optimizer, DataLoader(torch.arange(8.0)[:, None], batch_size=2, **options)


def test_a_program_that_distributes_itself_is_left_alone(
    watched: auto.Auto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, loader = _training(watched)
    watched.hide(tmp_path / "hidden")
    os.write(1, b"before ")
    parallax.distribute(model)
    assert len(list(watched._loop(loader))) == 4  # without a backward pass, and no error
    watched._pre_step(optimizer, (), {})
    watched._save_once({"a": 1}, tmp_path / "file")
    assert torch.load(tmp_path / "file") == {"a": 1}
    os.write(1, b"after")
    assert (tmp_path / "hidden").read_bytes() == b"before "
    assert capsys.readouterr() == ("", "parallax: the program distributes itself; --auto leaves it alone\n")


def test_a_training_loop_without_backward(watched: auto.Auto) -> None:
    _, _, loader = _training(watched)
    next(watched._loop(loader))  # only looked at
    with pytest.raises(
        ParallaxError, match=r"^rank 0: --auto: a loop over a DataLoader in training mode ended without"
    ):
        list(watched._loop(loader))
    with torch.no_grad():
        assert len(list(watched._loop(loader))) == 4


def test_an_optimizer_of_another_model(watched: auto.Auto) -> None:
    _, optimizer, loader = _training(watched)
    next(watched._loop(loader))
    watched._pre_step(optimizer, (), {})
    with pytest.raises(ParallaxError, match=r"Adam trains parameters that no optimizer had when the first training lo"):
        watched._pre_step(torch.optim.Adam(nn.Linear(1, 1).parameters()), (), {})


def test_a_step_inside_of_an_evaluation(watched: auto.Auto) -> None:
    model, optimizer, loader = _training(watched)
    next(watched._loop(loader))
    model.eval()
    batches = watched._loop(loader)
    next(batches)
    with pytest.raises(
        ParallaxError, match=r"SGD steps, but the loop over the DataLoader began with the model in eval"
    ):
        watched._pre_step(optimizer, (), {})
    batches.close()
    watched._pre_step(optimizer, (), {})


@pytest.mark.parametrize("trains", [True, False])
def test_a_length_that_turns_out_wrong(watched: auto.Auto, monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    monkeypatch.setattr(ShardedLoader, "num_batches", lambda self, rank: 2)  # as with two ranks
    _, _, loader = _training(watched)
    _, _, other = _training(watched)
    next(watched._loop(other))
    with torch.set_grad_enabled(not trains):
        told = watched._length(loader)
    with torch.set_grad_enabled(trains), pytest.raises(ParallaxError) as caught:
        next(watched._loop(loader))
    kind = "a training loop, of which each worker reads its part" if trains else "no training loop"
    assert str(caught.value) == (
        f"rank 0: --auto: len() of a DataLoader said {told} before its first loop; that is {kind}, and has {6 - told} "
        f"batches. What was computed from the length would be wrong. Without --scale-batches both numbers are the same"
    )
    assert (watched._length(other), len(list(watched._iter(other)))) == (2, 4)


def test_a_sampler_that_divides_already(watched: auto.Auto) -> None:
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    _, _, loader = _training(watched, sampler=sampler)
    with pytest.raises(ParallaxError, match=r"the DataLoader's sampler divides its data among ranks already; give it"):
        next(watched._loop(loader))


def test_rank_0_is_waited_for_until_it_has_saved_or_gone_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SAVE_SECONDS", 0.01)
    (tmp_path / "turn").write_bytes(bytes(8))
    first, second = (auto.Turns(tmp_path / "turn", rank) for rank in range(2))

    def is_waited_for() -> bool:
        try:
            second.wait_for_rank_0()
        except ParallaxError:
            return True
        return False

    second.batch()
    second.saved()
    first.batch()
    assert is_waited_for()
    first.saved()
    assert not is_waited_for()
    second.saved()
    assert is_waited_for()
    first.batch()  # it did not save again
    assert not is_waited_for()
    second.loop()
    second.saved()
    first.batch()
    first.saved()
    with pytest.raises(ParallaxError, match=r"^rank 1: waited 0 s for rank 0 to save what this rank would have saved$"):
        second.wait_for_rank_0()
    first.end()
    assert not is_waited_for()


def test_words_are_compared_when_all_have_left_theirs(tmp_path: Path) -> None:
    first, second = (auto.Words(tmp_path, rank, 2) for rank in range(2))
    second.leave(0, {"lr": 0.1}, num_steps=0)
    assert second.disagreement(0) is None  # the other may still come
    assert second.disagreement(1) == "rank 0 has not begun the training loop that is under way here"
    first.leave(0, {"lr": 0.1}, num_steps=0)
    assert first.disagreement(1) is None
    first.leave(1, {"lr": 0.1}, num_steps=1)
    second.leave(1, {"lr": 0.2}, num_steps=1)
    assert first.disagreement(2) == "lr is 0.1 here and 0.2 on rank 1"
    assert first.disagreement(3) is None  # said once


@pytest.mark.parametrize(
    ("files", "exitcodes", "text"),
    [
        ({}, {0: 1, 1: 1}, ""),
        ({"0.error": "A\n", "1.error": "A\n"}, {0: 1, 1: 1}, ""),
        ({"1.error": "A\n", "2.error": "B\n"}, {1: 1, 0: 1}, "parallax: rank 1 failed:\nA\n"),
        ({"1.out": "a\nb\n", "2.out": "c"}, {0: 1, 1: -11}, "parallax run: the last lines of worker 1:\na\nb\n"),
        ({"1.out": "a\n", "2.out": "c"}, {1: 3, 2: 3}, "parallax run: the last lines of worker 1:\na\n"),
        ({"1.out": "a\n" * 99}, {1: 3}, "parallax run: the last lines of worker 1:\n" + "a\n" * 20),
        ({"1.out": "a\n"}, {0: 3, 1: 3}, ""),  # worker 0 has shown the same
        ({"1.out": "a\n"}, {0: 3, 1: -15}, ""),  # ended by the launcher
    ],
)
def test_what_is_shown_of_hidden_workers(
    tmp_path: Path, files: dict[str, str], exitcodes: dict[int, int], text: str
) -> None:
    for time, (name, content) in enumerate(files.items()):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, (time, time))
    ended = {rank for rank, code in exitcodes.items() if code == -15}
    assert cli._hidden_failure(tmp_path, exitcodes, ended) == text


def test_batches_are_scaled_by_option_only_with_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--nproc=2", "--scale-batches", __file__])
    assert "--scale-batches is for --auto; parallax.shard(loader) does it by default" in capsys.readouterr().err


def test_batches_that_cannot_be_divided(watched: auto.Auto, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _training(watched)
    watched._distribute()
    monkeypatch.setattr(comm, "world_size", lambda: 4)
    reading = auto._Reading(DataLoader(torch.ones(6, 2), batch_size=3), split_batches=True, seed=0)
    with pytest.raises(ParallaxError) as caught:
        next(watched._training_loop(reading))
    del kept
    assert str(caught.value) == (
        "rank 0: --auto: parallax.shard: split_batches=True splits each batch over the ranks, but batch_size=3 is less "
        "than the world size 4. With --scale-batches each worker takes whole batches of the DataLoader"
    )


def test_a_rank_is_past_a_batch_before_it_asks_for_the_next(watched: auto.Auto) -> None:
    """Asking may wait for ranks that wait until rank 0 has decided whether to save."""

    class Noting(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            numbers.append(watched._turns._number)
            return torch.ones(1)

    numbers: list[int] = []
    kept = _training(watched)
    batches = watched._loop(DataLoader(Noting()))
    for _ in range(3):
        next(batches)
        numbers.append(watched._turns._number)
    del kept
    asked, got = numbers[::2], numbers[1::2]
    assert [b > a for a, b in zip(got[:-1], asked[1:], strict=True)] == [True, True]
