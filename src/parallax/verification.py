"""`verify`: the same training steps on several workers and on one device, compared parameter by parameter.

The workers are a program that `parallax run` starts. They write what they saw and what they hold to a folder: the
batch of each step, its loss, and after it this rank's rows of the tables and its copies of the rest. Nothing is
sent for it, so their steps are those of a plain loop. The calling process then takes the steps on the batches put
together. It never calls `distribute`, so that what is checked has no part in the check.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import math
import operator
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from parallax import comm, runtime
from parallax.api import distribute, shutdown
from parallax.comm import ParallaxError
from parallax.config import Config
from parallax.data import shard
from parallax.plan import Placement, Plan, aligned, counted

Dtype = Literal["float64", "keep"]

TOLERANCE: dict[str, float] = {"float64": 1e-7, "keep": 1e-4}
"""By `dtype`; see `verify`."""

ROUNDING = 1e-5
"""Differences below this, relative as in `verify`, may well be rounding in float32."""


# -- the report -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCheck:
    """How one parameter compares, over all steps and ranks."""

    name: str
    shape: tuple[int, ...]
    placement: Placement
    """By the plan after the last step."""
    absolute: float = 0.0
    """The largest difference of an element; infinite if an element is not a finite number."""
    relative: float = 0.0
    """The same relative to max(1, |value on one device|), element by element; the tolerance is for this."""
    moved: float = 0.0
    """How far an element got at most from where it started, on one device. What has moved by no more than the
    tolerance is not verified by these steps."""
    first_step: int | None = None
    """The step after which `relative` was first beyond the tolerance; 0 is before the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCheck:
    """The losses of one step."""

    step: int
    ranks: tuple[float | None, ...]
    """None for a rank without a batch."""
    workers: float
    """The ranks' losses put together by the rule for gradients, `Config.reduction`."""
    one_device: float

    @property
    def relative(self) -> float:
        return _finite(abs(self.workers - self.one_device) / max(1.0, abs(self.one_device)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` has found; print it for a table, the worst parameter first."""

    world_size: int
    num_steps: int
    dtype: Dtype
    tolerance: float
    parameters: tuple[ParameterCheck, ...]
    losses: tuple[LossCheck, ...]
    notes: tuple[str, ...] = ()
    """What was done to the model and what was not verified."""
    hints: tuple[str, ...] = ()
    """What the differences may come from."""

    @property
    def ok(self) -> bool:
        """Whether something was trained, and no parameter and no loss differs by more than the tolerance."""
        return self._trained and not self._deviating and all(loss.relative <= self.tolerance for loss in self.losses)

    @property
    def _deviating(self) -> list[ParameterCheck]:
        return [p for p in self.parameters if p.first_step is not None]

    @property
    def _trained(self) -> bool:
        return any(not p.moved <= self.tolerance for p in self.parameters)

    def __str__(self) -> str:
        numbers = "float64" if self.dtype == "float64" else "the model's own dtypes"
        head = ("", "parameter", "shape", "placement", "difference", "relative", "moved by", "deviates after")
        rows = [
            (
                "" if p.first_step is None else "!",
                p.name,
                "x".join(str(size) for size in p.shape) or "scalar",
                p.placement.value,
                f"{p.absolute:.1e}",
                f"{p.relative:.1e}",
                f"{p.moved:.1e}",
                "" if p.first_step is None else f"step {p.first_step}" if p.first_step else "the start",
            )
            for p in sorted(self.parameters, key=lambda p: -p.relative)
        ]
        loss_head = ("", "loss", "workers", "one device", "relative")
        loss_rows = [
            (
                "!" if x.relative > self.tolerance else "",
                f"step {x.step}",
                *(f"{n:.6g}" for n in (x.workers, x.one_device)),
                f"{x.relative:.1e}",
            )
            for x in self.losses
        ]
        return "\n".join(
            [
                f"{counted(self.num_steps, 'step')} on {counted(self.world_size, 'worker')} against one device, in "
                f"{numbers} (relative: to max(1, |value|); tolerance {self.tolerance:g})",
                *aligned([head, *rows], right=("difference", "relative", "moved by")),
                "",
                *aligned([loss_head, *loss_rows], right=("workers", "one device", "relative")),
                "",
                *(f"note: {note}" for note in self.notes),
                self._verdict(),
                *(f"hint: {hint}" for hint in self.hints),
            ]
        )

    def _verdict(self) -> str:
        if not self._deviating and not self._trained:
            return f"NOTHING VERIFIED: no parameter has moved by more than {self.tolerance:g}; raise the learning rate"
        if self.ok:
            worst = max(self.parameters, key=lambda p: p.relative)
            return (
                f"EQUAL: all of {counted(len(self.parameters), 'parameter')} and the losses are those of one device "
                f"(largest difference {worst.relative:.1e}, in {worst.name!r})"
            )
        if not self._deviating:
            worst_loss = max(self.losses, key=lambda x: x.relative)
            return f"NOT EQUAL: the loss of step {worst_loss.step} differs by {worst_loss.relative:.1e}"
        first = min(p.first_step for p in self._deviating if p.first_step is not None)
        names = [p.name for p in self.parameters if p.first_step == first]
        when = f"after step {first}" if first else "before the first step"
        return (
            f"NOT EQUAL: {len(self._deviating)} of {counted(len(self.parameters), 'parameter')} differ by more than "
            f"{self.tolerance:g}, the first of them {when}: {_some(names)}"
        )


def verify(
    factory: Callable[[], Any] | str,
    *,
    nproc: int = 2,
    steps: int = 5,
    tolerance: float | None = None,
    dtype: Dtype = "float64",
    config: Config | None = None,
    join: Callable[[list[Any]], Any] | str | None = None,
) -> Report:
    """Compares `steps` training steps on `nproc` workers of this machine with one device.

    Each worker calls `factory`, then `parallax.distribute` and `parallax.shard`, and trains in a plain loop:
    zero_grad, loss, backward, step. One device starts from rank 0's parameters, buffers and optimizer state and
    takes the same steps, each on the batches that the workers had in it, put together in rank order; a worker
    without a batch contributes nothing. Every parameter is compared before the first step and after each step, on
    every rank. Buffers are not compared.

    A script calls this under `if __name__ == "__main__":`, because the workers import the file that `factory` is in.
    All that is compared is written to a temporary folder (see `tempfile`) first: a copy of the parameters per step.

    Args:
        factory: returns `(model, optimizer or list of them, loader, loss_fn)`; `loss_fn(model, batch)` returns the
            loss. It has no arguments and is at the top level of a module, or the name of such a function:
            "module:function" or "path/to/file.py:function".
        steps: training steps; fewer if the loader has fewer.
        tolerance: the largest difference that counts as equal, relative to max(1, |value on one device|): absolute
            for small values, because a sum that cancels to nearly zero keeps the rounding of its terms. Default:
            1e-7 in float64. Rounding is 1e-16 there; but where a gradient is zero but for rounding (the bias of an
            attention's keys), Adagrad takes steps of lr * 1e-17 / eps. 1e-4 with "keep".
        dtype: "float64" converts the model, the optimizer's state and floating-point leaves of batches. In
            float32, optimizers that normalise (Adagrad, Adam) blow the rounding of gradients near zero up to
            differences of the size of the learning rate, which mean nothing. "keep" changes nothing.
        config: what the workers give to `parallax.distribute`; `Config.init` is left out.
        join: puts a list of the ranks' batches together; a function, or its name as for `factory`. Default:
            tensors and arrays are joined along dimension 0, tuples and mappings item by item, lists too if there
            are tensors in them; other lists one after the other; plain values must be equal. All tensors of a batch
            must have the same leading dimension.

    Dropout is set to 0 in torch's own modules. What draws random numbers otherwise agrees only if `loss_fn` seeds it.

    Raises:
        ParallaxError: nothing was compared: no such factory, it returns something else, no batch, batches that cannot
            be put together, or a worker that failed (with its traceback).
        ValueError: an argument is out of its range.
    """
    if nproc < 1 or steps < 1:
        raise ValueError(f"parallax.verify: expected at least 1 worker and 1 step, got nproc={nproc}, steps={steps}")
    if dtype not in get_args(Dtype):
        raise ValueError(f"parallax.verify: dtype: expected 'float64' | 'keep', got {dtype!r}")
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"parallax.verify: tolerance: expected a number of at least 0, got {tolerance!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ParallaxError(
            "parallax.verify starts workers and was called in one. In the file of the factory it belongs under "
            '`if __name__ == "__main__":`; with a launcher it is not needed'
        )
    config = dataclasses.replace(config or Config(), init=None)
    if config.lazy_rows:
        raise ValueError("parallax.verify: Config.lazy_rows is other mathematics than one device's; leave it out")
    if config.wire_dtype != "float32":
        raise ValueError(
            "parallax.verify: Config.wire_dtype rounds what travels, so nothing would be equal; leave it out"
        )
    target = factory if isinstance(factory, str) else _name_of(factory)
    put_together = _joined if join is None else _load(join) if isinstance(join, str) else join
    with _in_a_world_of_its_own(), tempfile.TemporaryDirectory(prefix="parallax-verify-") as folder:
        program = _Program.made_by(_load(target) if isinstance(factory, str) else factory, dtype)
        try:
            shard(program.loader)
        except TypeError:
            raise _wrong("a DataLoader or other iterable of batches as the third of four", program.loader) from None
        job = _Job(Path(folder), _absolute(target), nproc, steps, dtype, config)
        (job.folder / "job").write_bytes(pickle.dumps(job))
        _run_workers(job)
        return _compare(job, program, put_together, tolerance)


# -- the program ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Program:
    """What the factory has made."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loader: Any
    loss_fn: Callable[[nn.Module, Any], Any]
    dtype: Dtype
    without_dropout: list[str]
    """Names of modules that had some."""

    @staticmethod
    def made_by(factory: Callable[[], Any], dtype: Dtype) -> _Program:
        made = factory()
        if not isinstance(made, tuple) or len(made) != 4:
            raise _wrong("a tuple (model, optimizer, loader, loss_fn)", made)
        model, optimizer, loader, loss_fn = made
        if not isinstance(model, nn.Module):
            raise _wrong("an nn.Module as the first of four", model)
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for o in optimizers:
            if not isinstance(o, torch.optim.Optimizer):
                raise _wrong("an optimizer or a list of optimizers as the second of four", o)
        if not callable(loss_fn):
            raise _wrong("a function loss_fn(model, batch) as the last of four", loss_fn)
        meta = [name for name, p in model.named_parameters() if p.is_meta]
        if meta:
            raise ParallaxError(
                f"parallax.verify: {meta[0]!r} is on the meta device, where one device has nothing to start from; "
                f"build a smaller model whole"
            )
        program = _Program(model, optimizers, loader, loss_fn, dtype, _remove_dropout(model))
        if dtype == "float64":
            model.double()
            for o in optimizers:
                if o.state:  # loading casts to the parameter's dtype what belongs to it
                    o.load_state_dict(o.state_dict())
            torch.set_default_dtype(torch.float64)  # for what forward makes; `_in_a_world_of_its_own` sets it back
        return program

    def cast(self, batch: Any) -> Any:
        return tree_map(_double, batch) if self.dtype == "float64" else batch

    def step(self, batch: Any) -> float:
        """The user's loop for one batch; returns the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ParallaxError(f"parallax.verify: loss_fn must return the loss, a tensor with one element; got {got}")
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """What a program starts from; `load` takes it over in place."""
        return {
            "tensors": {name: tensor.detach().cpu().clone() for name, tensor in self._tensors()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(state["tensors"][name])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def _wrong(expected: str, got: Any) -> ParallaxError:
    shown = f"{len(got)} items" if isinstance(got, tuple) else type(got).__name__
    return ParallaxError(
        f"parallax.verify: the factory must return (model, optimizer, loader, loss_fn): expected {expected}, "
        f"got {shown}"
    )


def _remove_dropout(model: nn.Module) -> list[str]:
    changed = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, _DropoutNd) else "dropout"
        known = isinstance(module, (_DropoutNd, nn.RNNBase, nn.MultiheadAttention))
        if known and getattr(module, attribute):
            setattr(module, attribute, 0.0)
            changed.append(name or type(module).__name__)
    return changed


def _double(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.double() if leaf.is_floating_point() else leaf
    return leaf.astype(np.float64) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f" else leaf


@contextlib.contextmanager
def _in_a_world_of_its_own() -> Iterator[None]:
    """Leaves the caller's random numbers and default dtype as they were."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_default_dtype(default)


# -- names of functions -----------------------------------------------------------------------------


def _name_of(factory: Any) -> str:
    """By which workers find `factory`."""
    name, module = getattr(factory, "__qualname__", None), getattr(factory, "__module__", None)
    if callable(factory) and name and module and "<" not in name:
        main = sys.modules["__main__"]
        if module != "__main__":
            return f"{module}:{name}"
        if getattr(main, "__spec__", None) is not None:  # python -m
            return f"{main.__spec__.name}:{name}"  # type: ignore[union-attr]
        if getattr(main, "__file__", None):
            return f"{main.__file__}:{name}"
    raise ParallaxError(
        f"parallax.verify: expected a function at the top level of a module, which workers can import, or its name as "
        f"'module:function' or 'path/to/file.py:function'; got {factory!r}"
    )


def _absolute(target: str) -> str:
    where, _, name = target.rpartition(":")
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else target


def _load(target: str) -> Callable[..., Any]:
    """The function that `target` names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ParallaxError(
            f"parallax.verify: expected 'module:function' or 'path/to/file.py:function', got {target!r}"
        )
    try:
        module = _from_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module is there and misses another one
        raise ParallaxError(f"parallax.verify: no module {error.name!r} (for {target!r})") from None
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError:
        raise ParallaxError(f"parallax.verify: there is no {name!r} in {where}") from None
    if not callable(function):
        raise ParallaxError(f"parallax.verify: {target!r}: expected a function, got {type(function).__name__}")
    return function


def _from_file(path: Path) -> Any:
    """Imports a file as `python path` sees it: its folder comes first. It is known by its name, as loader workers
    that unpickle a dataset look it up."""
    if not path.is_file():
        raise ParallaxError(f"parallax.verify: no such file: {path}")
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    if known is not None:
        raise ParallaxError(f"parallax.verify: {path}: another module {path.stem!r} is loaded already; rename the file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None, "it ends in .py"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


# -- on the workers ---------------------------------------------------------------------------------


@dataclasses.dataclass
class _Job:
    """What the workers are told, and where they write."""

    folder: Path
    target: str
    nproc: int
    steps: int
    dtype: Dtype
    config: Config

    def file(self, what: str, rank: int, step: int = 0) -> Path:
        return self.folder / f"{what}-{rank}-{step}.pt"

    def read(self, what: str, rank: int, step: int = 0) -> Any:
        return torch.load(self.file(what, rank, step), map_location="cpu", weights_only=False)

    def ranks(self, what: str, step: int = 0) -> list[int]:
        """The ranks that have written it."""
        return [rank for rank in range(self.nproc) if self.file(what, rank, step).exists()]


@dataclasses.dataclass
class _Held:
    """What a rank holds of each parameter: all of it, or, with owners as in `ParameterPlan`, its rows."""

    plan: Plan
    tensors: dict[str, torch.Tensor]
    loss: float = 0.0
    weight: float = 0.0
    """What the loss counts in the mean."""


def _run_workers(job: _Job) -> None:
    script = job.folder / "worker.py"
    script.write_text(f"from parallax.verification import work\n\nwork({str(job.folder)!r})\n")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "parallax.cli", "run", f"--nproc={job.nproc}", "--", str(script)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        why = " (in float64; dtype='keep', --keep-dtype, leaves the model as it is)" if job.dtype == "float64" else ""
        workers = counted(job.nproc, "worker")
        raise ParallaxError(f"parallax.verify: training on {workers} failed{why}:\n{done.stderr.rstrip()}")
    sys.stderr.write(done.stderr)


def work(folder: str) -> None:
    """What each worker does; `folder` has the job."""
    job: _Job = pickle.loads((Path(folder) / "job").read_bytes())
    with _in_a_world_of_its_own():
        program = _Program.made_by(_load(job.target), job.dtype)
        rank = comm.rank()
        if rank == 0:
            torch.save(program.state(), job.file("start", rank))
        distribute(program.model, program.optimizers, config=job.config)
        run = runtime.current()
        assert run is not None

        def save(what: str, step: int = 0, loss: float = 0.0) -> None:
            torch.save(_Held(run.plan, _held_tensors(run.model), loss, run.samples.latest), job.file(what, rank, step))

        save("held")
        num_steps = 0
        for batch in shard(program.loader):
            num_steps += 1
            batch = program.cast(batch)
            torch.save(batch, job.file("batch", rank, num_steps))  # now: loss_fn may take things out of it
            save("held", num_steps, program.step(batch))
            if num_steps == job.steps:
                break
        if num_steps == job.steps:  # others may be at their end; this rank goes there, too
            run.drain()
        save("end")
        shutdown()


def _held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: p.data.detach().cpu().clone() for name, p in model.named_parameters()}


# -- putting batches together -----------------------------------------------------------------------


def _joined(batches: list[Any]) -> Any:
    """The default for `join`; see `verify`."""
    for batch in batches:
        sizes = {
            (x.shape[0] if x.ndim else None): f"{path} of shape {tuple(x.shape)}" for path, x in _tensors_in(batch)
        }
        if len(sizes) > 1 or None in sizes:
            raise ValueError(
                f"not all tensors of a batch have the samples along dimension 0: {', '.join(sizes.values())}"
            )
    return _join("batch", batches)


def _join(path: str, parts: list[Any]) -> Any:
    first = parts[0]
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{path} has different types: {', '.join(sorted(kind.__name__ for kind in kinds))}")
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list) and not any(True for _ in _tensors_in(parts)):
        return [item for part in parts for item in part]
    if isinstance(first, (list, tuple)):
        if len({len(part) for part in parts}) > 1:
            raise ValueError(f"{path} has different lengths: {', '.join(str(len(part)) for part in parts)}")
        items = [_join(f"{path}[{i}]", list(column)) for i, column in enumerate(zip(*parts, strict=True))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, MutableMapping):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError(f"{path} has different keys")
        joined = copy.copy(first)  # of the same class
        joined.update({key: _join(f"{path}[{key!r}]", [part[key] for part in parts]) for key in first})
        return joined
    if first is None or isinstance(first, (bool, int, float, str, bytes)):
        if any(part != first for part in parts):
            raise ValueError(f"{path} is neither a tensor nor equal on all ranks: {', '.join(map(repr, parts))}")
        return first
    raise ValueError(f"{path} is of type {type(first).__name__}")


def _tensors_in(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, value
    elif isinstance(value, (list, tuple, MutableMapping)):
        items = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        for key, item in items:
            yield from _tensors_in(item, f"{path}[{key!r}]")


# -- comparing --------------------------------------------------------------------------------------


def _compare(job: _Job, program: _Program, join: Callable[[list[Any]], Any], tolerance: float) -> Report:
    """Takes on one device the steps that the workers have left in the job's folder."""
    absent = sorted(set(range(job.nproc)) - set(job.ranks("end")))
    if absent:
        raise ParallaxError(f"parallax.verify: rank {absent[0]} ended before its steps were done, without an error")
    if not job.ranks("batch", 1):
        raise ParallaxError("parallax.verify: the loader gave no batch on any worker; nothing was verified")
    program.load(job.read("start", 0))
    before = torch.get_rng_state()
    start = {name: p.detach().cpu().clone() for name, p in program.model.named_parameters()}
    plan: Plan = job.read("end", 0).plan
    checks = {p.name: ParameterCheck(name=p.name, shape=p.shape, placement=p.placement) for p in plan}
    losses: list[LossCheck] = []

    def look(what: str, step: int, file_step: int) -> list[_Held | None]:
        """Compares what the ranks held after `step`; returns what they wrote."""
        values = {name: p.detach().cpu() for name, p in program.model.named_parameters()}
        for name, value in values.items():
            moved = max(checks[name].moved, _largest(value, start[name]))
            checks[name] = dataclasses.replace(checks[name], moved=moved)
        found: list[_Held | None] = [None] * job.nproc
        for rank in job.ranks(what, file_step):
            held = found[rank] = job.read(what, rank, file_step)
            for name, value in values.items():
                rows = _rows_of(rank, held.plan[name].owners, value)
                checks[name] = _updated(checks[name], step, rows, held.tensors[name], tolerance)
        return found

    look("held", 0, 0)
    num_steps = 0
    while active := job.ranks("batch", num_steps + 1):
        num_steps += 1
        try:
            batch = join([job.read("batch", rank, num_steps) for rank in active])
        except Exception as error:
            if join is not _joined:
                raise
            raise ParallaxError(
                f"parallax.verify: the workers' batches of step {num_steps} cannot be put together: {error}. Say how: "
                f"join=function (--join module:function), which gets the list of the ranks' batches and returns one"
            ) from error
        one_device = program.step(batch)
        found = look("held", num_steps, num_steps)
        losses.append(_check_losses(num_steps, found, one_device, job.config.reduction))
    look("end", num_steps, 0)  # ranks without a batch in the last step as well, and where rows are by the plan
    report = Report(
        world_size=job.nproc,
        num_steps=num_steps,
        dtype=job.dtype,
        tolerance=tolerance,
        parameters=tuple(checks.values()),
        losses=tuple(losses),
        notes=tuple(_notes(job, program, num_steps, checks.values(), tolerance)),
    )
    drew = not torch.equal(before, torch.get_rng_state())
    return report if report.ok else dataclasses.replace(report, hints=tuple(_hints(job, program, report, drew)))


def _rows_of(rank: int, owners: Sequence[int], value: torch.Tensor) -> torch.Tensor:
    if not owners:
        return value
    own = [value[partition :: len(owners)] for partition, owner in enumerate(owners) if owner == rank]
    return torch.cat(own) if own else value[:0]


def _updated(
    check: ParameterCheck, step: int, wanted: torch.Tensor, got: torch.Tensor, tolerance: float
) -> ParameterCheck:
    absolute, relative = _largest(got, wanted), _largest(got, wanted, relative=True)
    first = step if check.first_step is None and relative > tolerance else check.first_step
    return dataclasses.replace(
        check,
        absolute=max(check.absolute, absolute),
        relative=max(check.relative, relative),
        first_step=first,
    )


def _largest(a: torch.Tensor, b: torch.Tensor, relative: bool = False) -> float:
    """The largest difference of an element, relative to max(1, |b|) if asked; infinite where one is not finite."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    distance = (a - b).abs() / b.abs().clamp(min=1.0) if relative else (a - b).abs()
    return _finite(float(distance.max()))


def _finite(distance: float) -> float:
    return math.inf if math.isnan(distance) else distance


def _check_losses(step: int, found: Sequence[_Held | None], one_device: float, reduction: str) -> LossCheck:
    parts = [(held.loss, held.weight) for held in found if held is not None and held.weight]
    if reduction == "sum":
        workers = sum(loss for loss, _ in parts)
    else:
        workers = sum(loss * weight for loss, weight in parts) / (sum(weight for _, weight in parts) or 1.0)
    ranks = tuple(None if held is None else held.loss for held in found)
    return LossCheck(step=step, ranks=ranks, workers=workers, one_device=one_device)


def _notes(
    job: _Job, program: _Program, num_steps: int, checks: Collection[ParameterCheck], tolerance: float
) -> Iterator[str]:
    if num_steps < job.steps:
        yield f"the loader ended after {num_steps} of {counted(job.steps, 'step')}"
    if program.without_dropout:
        yield f"dropout was set to 0 in {_some(program.without_dropout)}: each worker draws its own masks"
    still = [check.name for check in checks if check.moved <= tolerance]
    if still:
        yield f"not verified, for no step moved them by more than {tolerance:g}: {_some(still)}"


def _hints(job: _Job, program: _Program, report: Report, drew: bool) -> Iterator[str]:
    """What may be the cause of differences."""
    norms = [
        name or type(module).__name__
        for name, module in program.model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if norms:
        yield (
            f"{_some(norms)}: batch normalisation takes each worker's own statistics, so it does not agree with one "
            f"device (torch.nn.SyncBatchNorm makes them joint, on GPUs)"
        )
    if drew:
        yield (
            "random numbers were drawn from torch's generator in the steps; workers draw their own. Seed them in "
            "loss_fn, the same on all workers"
        )
    first = report.losses[0]
    if first.relative > report.tolerance and not norms and not drew:
        total = sum(loss for loss in first.ranks if loss is not None)
        mean = job.config.reduction == "mean"
        is_sum = mean and math.isclose(total, first.one_device, rel_tol=ROUNDING)
        yield (
            f"already in step 1 the workers' losses do not make up that of one device: with Config(reduction="
            f"{job.config.reduction!r}) the loss must be a {'mean' if mean else 'sum'} over the samples of the batch"
            + (", or loss_fn must say with parallax.weight(n) how many things it is the mean of" if mean else "")
            + ("; it looks like their sum: Config(reduction='sum'), --reduction sum" if is_sum else "")
        )
    worst = max(check.relative for check in report.parameters)
    if worst < ROUNDING and job.dtype == "float64":
        yield (
            f"no difference is above {worst:.1e}: the model may compute in float32 inside (.float(), autocast), or a "
            f"gradient may be zero but for rounding; --tolerance {ROUNDING:g} would pass"
        )
    if math.isinf(worst):
        yield "some values are not finite numbers; see whether the loss is finite on one device"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
