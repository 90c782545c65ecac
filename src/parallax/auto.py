"""`parallax run --auto`: trains a program that has never heard of parallax. Each worker runs it through this file.

    python -m parallax.auto --folder FOLDER --seed SEED [--scale-batches] [-m] script.py arg ...

What the program is taken for:

- A loop over a DataLoader, begun with gradients enabled, when there is an optimizer and the modules that it trains are
  in training mode, is a *training loop*: it reads this rank's part. Before the first one, what all optimizers train is
  distributed. Every other loop (evaluation) reads everything, on all ranks in the same order.
- `torch.save` to a path is rank 0's; the others wait until the file is there.
- What ranks other than 0 print is hidden; the launcher shows it when they fail.

A step or a backward pass for which this is not enough is an error. As ranks see other batches they may come to other
decisions (a learning rate that follows the training loss): they leave word of what they are about to do in FOLDER at
the start of each training loop, and each looks at the others' after the next backward pass.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import mmap
import os
import random
import runpy
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from parallax import comm, runtime
from parallax.api import distribute
from parallax.comm import DisagreementError, ParallaxError, PeerError
from parallax.data import RankSampler, RankStream, ShardedLoader, shard
from parallax.optimizer import settings_of, trials
from parallax.runtime import Phase, Runtime

SAVE_SECONDS = 600.0
"""How long a rank waits for rank 0 to write a file."""

_YOURSELF = (
    "or write the two lines into the program, parallax.distribute(model, optimizer) and parallax.shard(data), and run "
    "it without --auto"
)


# -- what is trained ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """What optimizers train, as found among all modules of the process."""

    optimizers: Sequence[torch.optim.Optimizer]
    roots: Sequence[nn.Module]
    """The outermost modules that have trained parameters, in the order of the first of these in the optimizers."""
    owners: Sequence[nn.Module]
    """The modules that trained parameters are attributes of."""
    loose: Sequence[nn.Parameter]
    """Trained parameters of no module."""

    @property
    def in_training_mode(self) -> bool:
        return not self.owners or any(module.training for module in self.owners)

    def model(self) -> nn.Module:
        """One module with all of it."""
        if len(self.roots) == 1 and not self.loose:
            return self.roots[0]
        return nn.ModuleList([*self.roots, *([nn.ParameterList(self.loose)] if self.loose else [])])


def find_trained(optimizers: Sequence[torch.optim.Optimizer]) -> Trained:
    """Finds the modules whose parameters `optimizers` have.

    Raises:
        ParallaxError: an optimizer trains a tensor that is no nn.Parameter, or a model inside nn.DataParallel.
    """
    gc.collect()  # modules that are no longer in use could be taken for roots
    trained = {p: None for o in optimizers for group in o.param_groups for p in group["params"]}
    place = {id(p): i for i, p in enumerate(trained)}
    parents: dict[int, list[nn.Module]] = collections.defaultdict(list)
    owners = []
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # not isinstance: proxies answer for what they stand for
            continue
        children = vars(module).get("_modules") or {}
        if "_orig_mod" in children:  # torch.compile's wrapper would put its prefix before all names
            continue
        for child in children.values():
            parents[id(child)].append(module)
        if any(id(p) in place for p in (vars(module).get("_parameters") or {}).values()):
            owners.append(module)
    roots = {}
    above = list(owners)
    seen: set[int] = set()
    while above:
        module = above.pop()
        if id(module) not in seen:
            seen.add(id(module))
            above += parents[id(module)]
            if not parents[id(module)]:
                roots[id(module)] = module
    if wrapper := next((m for m in roots.values() if isinstance(m, nn.DataParallel) and m.device_ids), None):
        raise ParallaxError(
            f"rank {comm.rank()}: --auto: {type(wrapper).__name__} spreads the model over the devices that parallax "
            f"gives to other workers; leave it out"
        )

    def first(root: nn.Module) -> tuple[int, str]:
        return min(place[id(p)] for p in root.parameters() if id(p) in place), type(root).__qualname__

    owned = {id(p) for module in owners for p in module.parameters(recurse=False)}
    loose = [p for p in trained if id(p) not in owned]
    strange = next((p for p in loose if not isinstance(p, nn.Parameter)), None)
    if strange is not None:
        raise ParallaxError(
            f"rank {comm.rank()}: --auto: an optimizer trains a tensor of shape {tuple(strange.shape)} that is no "
            f"nn.Parameter; make it one: nn.Parameter(tensor)"
        )
    return Trained(optimizers, sorted(roots.values(), key=first), owners, loose)


# -- what ranks leave for each other ------------------------------------------------------------------


class Turns:
    """Where a rank is in its program, as a number that grows alike on all ranks; rank 0's can be seen by all.

    From the highest bits: training loops begun and ended; batches since; files saved since.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self._rank = rank
        with open(file, "r+b") as opened:
            self._shared = memoryview(mmap.mmap(opened.fileno(), 8)).cast("q")  # one store, never seen half done
        self._number = 0

    def loop(self) -> None:
        self._set((self._number >> 40) + 1 << 40)

    def batch(self) -> None:
        self._set((self._number >> 16) + 1 << 16)

    def saved(self) -> None:
        self._set(self._number + 1)

    def end(self) -> None:
        self._set(2**63 - 1)

    def wait_for_rank_0(self) -> None:
        """Waits until rank 0 is where this rank is, or further: it may have decided not to save.

        Raises:
            ParallaxError: that takes longer than SAVE_SECONDS.
        """
        deadline = time.monotonic() + SAVE_SECONDS
        while self._shared[0] < self._number:
            if time.monotonic() > deadline:
                raise ParallaxError(
                    f"rank {self._rank}: waited {SAVE_SECONDS:.0f} s for rank 0 to save what this rank would have saved"
                )
            time.sleep(0.002)

    def _set(self, number: int) -> None:
        self._number = number
        if self._rank == 0:
            self._shared[0] = number


class Words:
    """What each rank is about to train with, for the others to compare; files in the launcher's folder."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._pending: list[tuple[str, str, int]] = []
        self._written: collections.deque[Path] = collections.deque()

    def leave(self, loop: int, word: dict[str, Any], num_steps: int) -> None:
        """
        Args:
            loop: number of the loop that begins.
            num_steps: backward passes so far. After one more, all ranks have left this word.
        """
        name, text = f"word-{loop}", json.dumps(word)
        file = self._folder / f"{name}-{self._rank}"
        file.write_text(text)
        self._pending.append((name, text, num_steps))
        self._written.append(file)
        if len(self._written) > 16:
            self._written.popleft().unlink()

    def disagreement(self, num_steps: int) -> str | None:
        """What is different on another rank, of words that all must have left before backward pass `num_steps`."""
        due = [word for word in self._pending if word[2] < num_steps]
        self._pending = [word for word in self._pending if word[2] >= num_steps]
        for (name, mine, _), peer in itertools.product(due, range(self._world_size)):
            file = self._folder / f"{name}-{peer}"
            if not file.exists():
                return f"rank {peer} has not begun the training loop that is under way here"
            if (theirs := file.read_text()) != mine:
                return _difference(json.loads(mine), json.loads(theirs), peer)
        return None


def _difference(mine: dict[str, Any], theirs: dict[str, Any], peer: int) -> str:
    key = next(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
    return f"{key} is {mine.get(key)} here and {theirs.get(key)} on rank {peer}"


# -- the program's loops, steps and files ---------------------------------------------------------------


class _Reading:
    """How one DataLoader is read."""

    def __init__(self, loader: DataLoader[Any], split_batches: bool, seed: int) -> None:
        self.loader, self.seed = loader, seed
        self._split_batches = split_batches
        self.told: int | None = None
        """What len() said before the first loop."""
        self.uses: set[bool] = set()
        """Whether loops were training loops."""

    @functools.cached_property
    def part(self) -> Any:
        return shard(self.loader, split_batches=self._split_batches, seed=self.seed)

    @functools.cached_property
    def whole(self) -> ShardedLoader:
        return ShardedLoader(self.loader, split_batches=False, seed=self.seed)


class _Nowhere:
    """A file to write to."""

    def write(self, data: Any) -> int:
        return len(data)

    def flush(self) -> None:
        pass


class Auto:
    """What stands between the program and torch on one rank. At most one in a process."""

    def __init__(self, folder: Path, *, split_batches: bool) -> None:
        self.rank, self.world_size = comm.rank(), comm.world_size()
        self._split_batches = split_batches
        self._pid = os.getpid()  # a loader's worker is a copy of this process
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._trained: Trained | None = None
        self._run: Runtime | None = None
        self._aside = False
        self._ended = False
        self._seed = 0
        self._num_loops = 0
        self._open: dict[bool, int] = {True: 0, False: 0}
        """Loops under way that are training loops, and others."""
        self._why_whole = (
            "no DataLoader was looped over, and batches that a program cuts by hand cannot be divided among the "
            "workers. Read them from a DataLoader"
        )
        self._turns = Turns(folder / "turn", self.rank)
        self._words = Words(folder, self.rank, self.world_size)
        self._output = [(fd, os.dup(fd)) for fd in (1, 2)]
        self._iter, self._len, self._save = DataLoader.__iter__, DataLoader.__len__, torch.save
        self._backward = torch.autograd.backward

    def hide(self, file: Path) -> None:
        """What this process prints goes to `file`."""
        with open(file, "ab") as hidden:
            for fd, _ in self._output:
                os.dup2(hidden.fileno(), fd)

    def install(self) -> None:
        """From here on the program is watched."""
        make_optimizer = torch.optim.Optimizer.__init__

        @functools.wraps(make_optimizer)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make_optimizer(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))

        @functools.wraps(self._iter)
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._iter(loader) if self._is_foreign(loader) else self._loop(loader)

        @functools.wraps(self._len)
        def length(loader: DataLoader[Any]) -> int:
            return self._len(loader) if self._is_foreign(loader) else self._length(loader)

        @functools.wraps(self._save)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self._save_once(obj, f, *args, **kwargs)

        @functools.wraps(self._backward)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._pre_backward()
            self._backward(*args, **kwargs)

        torch.optim.Optimizer.__init__ = init  # type: ignore[assignment,method-assign]
        DataLoader.__iter__ = iterate  # type: ignore[assignment,method-assign]
        DataLoader.__len__ = length  # type: ignore[method-assign]
        torch.save = save
        torch.autograd.backward = backward
        register_optimizer_step_pre_hook(self._pre_step)

    def finish(self) -> None:
        """The program has come to its end."""
        self._turns.end()
        if self._run is None and not self._is_aside() and self.rank == 0:
            print("parallax: nothing was trained: every worker did the same work", file=sys.stderr, flush=True)

    # -- loops --------------------------------------------------------------------------------------

    def _is_foreign(self, loader: DataLoader[Any]) -> bool:
        """Not a loader of the program itself, or none to look after."""
        return (
            os.getpid() != self._pid
            or isinstance(loader.dataset, RankStream)
            or isinstance(loader.sampler, RankSampler)
            or isinstance(loader.batch_sampler, RankSampler)
            or self._is_aside()
        )

    def _is_aside(self) -> bool:
        """The program knows of ranks: it runs as it would without --auto."""
        if not self._aside and self._run is None and (runtime.current() is not None or comm.is_initialized()):
            self._aside = True
            for fd, own in self._output:
                os.dup2(own, fd)
            if self.rank == 0:
                print("parallax: the program distributes itself; --auto leaves it alone", file=sys.stderr, flush=True)
        return self._aside

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        found = [(o, ref) for ref in self._optimizers if (o := ref()) is not None and o not in trials]
        self._optimizers = [ref for _, ref in found]
        return [o for o, _ in found]

    def _why_not_training(self) -> str | None:
        """Why a loop that begins now is not a training loop; None if it is one."""
        optimizers = self._live_optimizers()
        if not optimizers:
            return (
                "the loop over the DataLoader began before an optimizer was made. Make model and optimizer before "
                "the loop"
            )
        if not torch.is_grad_enabled():
            return "the loop over the DataLoader began with gradients disabled. Begin it with gradients enabled"
        if not (self._trained or find_trained(optimizers)).in_training_mode:
            return "the loop over the DataLoader began with the model in eval mode. Call model.train() before the loop"
        return None

    def _reading(self, loader: DataLoader[Any]) -> _Reading:
        """Kept by the loader itself, for its lifetime; a copy of a loader is a loader of its own."""
        reading = vars(loader).get("_parallax_reading")
        if reading is None or reading.loader is not loader:
            # Not the same order again for a loader that is made anew for each epoch.
            reading = _Reading(loader, self._split_batches, self._seed + self._num_loops)
            vars(loader)["_parallax_reading"] = reading
        return reading

    def _loop(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """A loop of the program; what kind is decided when its first batch is asked for."""
        if self._is_aside():
            yield from self._iter(loader)
            return
        why_whole = self._why_not_training()
        training = why_whole is None
        if why_whole is None and self._run is None:
            self._distribute()
        elif why_whole is not None:
            self._why_whole = why_whole
            if self._run is None:
                yield from self._iter(loader)
                return
        reading = self._reading(loader)
        self._check_told(reading, training)
        reading.uses.add(training)
        self._open[training] += 1
        try:
            yield from self._training_loop(reading) if training else reading.whole.whole()
        finally:
            self._open[training] -= 1

    def _training_loop(self, reading: _Reading) -> Iterator[Any]:
        run, loop = self._running(), self._num_loops
        problem: str | None = None
        try:
            part = reading.part
            batches = iter(part)
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            run.fail(
                ParallaxError(
                    f"rank {self.rank}: --auto: {problem}. With --scale-batches each worker takes whole batches of the "
                    f"DataLoader"
                )
            )
        if not isinstance(part, ShardedLoader):
            run.fail(
                ParallaxError(
                    f"rank {self.rank}: --auto: the DataLoader's sampler divides its data among ranks already; give "
                    f"it an ordinary sampler, {_YOURSELF}"
                )
            )
        self._num_loops += 1
        self._turns.loop()
        self._leave_word(reading, loop)
        num_steps, taken = run.traffic().num_steps, 0
        for batch in batches:
            taken += 1
            yield batch
            self._turns.batch()  # before the next one is asked for, which may wait for ranks that wait for this
        self._turns.loop()
        if taken and run.traffic().num_steps == num_steps:
            run.fail(
                ParallaxError(
                    f"rank {self.rank}: --auto: a loop over a DataLoader in training mode ended without a backward "
                    f"pass. What was computed in it is of this worker's part of the data only. For all of the data, "
                    f"use torch.no_grad() or model.eval(); to train, call backward() inside the loop"
                )
            )

    def _leave_word(self, reading: _Reading, loop: int) -> None:
        run = self._running()
        word: dict[str, Any] = {"the order's seed": reading.seed}
        with contextlib.suppress(TypeError):
            word["the number of batches"] = self._len(reading.loader)
        for number, optimizer in enumerate(run.optimizers[i] for i in range(len(run.optimizers))):
            for g, group in enumerate(settings_of(optimizer)):
                where = f"{type(optimizer).__name__} (optimizer {number}, group {g})"
                word.update({f"{key} of {where}": value for key, value in group.items()})
        self._words.leave(loop, word, run.traffic().num_steps)

    def _distribute(self) -> None:
        trained = find_trained(self._live_optimizers())
        model = trained.model()
        distribute(model, trained.optimizers)
        self._trained, self._run = trained, runtime.current()
        self._seed = self._running().comm.all_gather(torch.initial_seed())[0]
        atexit.register(self._at_exit)  # runs before the run's own, which serves the others
        if self.rank == 0:
            names = [*(type(root).__name__ for root in trained.roots), *(["parameters"] if trained.loose else [])]
            what = " and ".join(names)
            print(f"parallax: training {what} on {self.world_size} workers", file=sys.stderr, flush=True)

    def _running(self) -> Runtime:
        assert self._run is not None
        return self._run

    def _at_exit(self) -> None:
        self._ended = True

    # -- len() --------------------------------------------------------------------------------------

    def _length(self, loader: DataLoader[Any]) -> int:
        """Batches in the next loop; with batches that are not split, training loops are shorter."""
        whole = self._len(loader)
        if self._split_batches:
            return whole
        reading = self._reading(loader)
        training = next(iter(reading.uses)) if len(reading.uses) == 1 else self._why_not_training() is None
        number = self._num_batches(reading, training)
        if not reading.uses:
            reading.told = number
        return number

    def _num_batches(self, reading: _Reading, training: bool) -> int:
        # Rank 0 has the most: all ranks count on the same number.
        return reading.part.num_batches(0) if training else self._len(reading.loader)

    def _check_told(self, reading: _Reading, training: bool) -> None:
        if reading.uses or reading.told is None:
            return
        if (number := self._num_batches(reading, training)) != reading.told:
            kind = "a training loop, of which each worker reads its part" if training else "no training loop"
            self._running().fail(
                ParallaxError(
                    f"rank {self.rank}: --auto: len() of a DataLoader said {reading.told} before its first loop; that "
                    f"is {kind}, and has {number} batches. What was computed from the length would be wrong. Without "
                    f"--scale-batches both numbers are the same"
                )
            )

    # -- steps --------------------------------------------------------------------------------------

    def _pre_backward(self) -> None:
        if self._run is None and os.getpid() == self._pid and not self._is_aside() and not self._live_optimizers():
            raise ParallaxError(
                f"rank {self.rank}: --auto: a backward pass, but no optimizer was made before, and what the program "
                f"trains is found by its optimizers. Make a torch.optim optimizer first, {_YOURSELF}"
            )

    def _pre_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid or optimizer in trials or self._is_aside():
            return
        run, name = self._run, type(optimizer).__name__
        if run is None:
            raise ParallaxError(
                f"rank {self.rank}: --auto: {name} steps, but nothing is distributed: {self._why_whole}, {_YOURSELF}"
            )
        if run.phase is Phase.ENDED:
            return
        if run.phase is Phase.SERVING:
            if self._ended:
                self._disagree("the program has ended here, and other ranks go on training")
            return
        if all(p not in run.names for group in optimizer.param_groups for p in group["params"]):
            run.fail(
                ParallaxError(
                    f"rank {self.rank}: --auto: {name} trains parameters that no optimizer had when the first training "
                    f"loop began. Make all models and optimizers before it, {_YOURSELF}"
                )
            )
        if self._open[False] and not self._open[True]:
            run.fail(ParallaxError(f"rank {self.rank}: --auto: {name} steps, but {self._why_whole}, {_YOURSELF}"))
        if (text := self._words.disagreement(run.traffic().num_steps)) is not None:
            self._disagree(text)

    def _disagree(self, text: str) -> None:
        self._running().fail(
            DisagreementError(
                f"rank {self.rank}: --auto: {text}. A training loss is that of a worker's own batches: decide by what "
                f"is computed in model.eval() or torch.no_grad(), which is the same on all workers, {_YOURSELF}"
            )
        )

    # -- files --------------------------------------------------------------------------------------

    def _save_once(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() != self._pid or not isinstance(f, (str, os.PathLike)) or self._is_aside():
            self._save(obj, f, *args, **kwargs)
        elif self.rank == 0:
            try:
                self._save(obj, f, *args, **kwargs)
            finally:
                self._turns.saved()
        else:
            nowhere: Any = _Nowhere()
            self._save(obj, nowhere, *args, **kwargs)  # pickling a table fetches it, which takes all ranks
            self._turns.saved()
            self._turns.wait_for_rank_0()


# -- the worker -----------------------------------------------------------------------------------------


_variables: dict[str, Any] = {}
"""Those of the program, which live until the process ends."""


def main() -> None:
    """Runs a program as `python script.py arg ...` would, under an `Auto` if there are several workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scale-batches", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    auto = Auto(options.folder, split_batches=not options.scale_batches) if comm.world_size() > 1 else None
    if auto is not None:
        # What a program does not seed must still be the same on all ranks: its weights, how it divides its data.
        torch.manual_seed(options.seed)
        random.seed(options.seed)
        np.random.seed(options.seed)
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)
        if auto.rank:
            auto.hide(options.folder / f"{auto.rank}.out")
        auto.install()
    sys.argv = program
    try:
        if options.module:
            result = runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
                sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
            result = runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if auto is not None and not end.code:
            auto.finish()
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        error = _without_our_frames(error)
        if not isinstance(error, PeerError):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            (options.folder / f"{comm.rank()}.error").write_text(text)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    if auto is not None:
        auto.finish()
    _variables.update(result)


def _without_our_frames(error: BaseException) -> BaseException:
    """`error` with a traceback that begins in the program."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in own:
        tb = tb.tb_next
    return error.with_traceback(tb or error.__traceback__)


if __name__ == "__main__":
    main()
