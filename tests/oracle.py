"""The oracle: N workers compute what one process computes on their batches put together.

A `Case` is a small training program: model, optimizers, batches, loss. `check(4, make_case)` runs it in this
process on the ranks' batches joined in rank order, and on four ranks after `parallax.distribute`, from the
same initial weights. It compares every parameter and every gradient after every step, and the optimizers'
state at the end, and that all ranks hold the same bits. `make_case(world_size, *args)` is a function at the
top level of a test module; the ranks call it too.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ranks
import torch
from torch import nn

import parallax

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-2}
"""By dtype, absolute and relative; in bfloat16, relative to the largest element of a tensor."""


def join(batches: Sequence[Any]) -> Any:
    """Batches put together in order: tensors and lists one after the other, tuples item by item."""
    if isinstance(batches[0], torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(batches[0], list):
        return [item for batch in batches for item in batch]
    return tuple(join(items) for items in zip(*batches, strict=True))


@dataclasses.dataclass
class Case:
    """A training program. All of it is run unchanged on the ranks and in one process."""

    model: Callable[[], nn.Module]
    """Called after torch.manual_seed(0)."""

    batches: Sequence[Sequence[Any]]
    """For each step, each rank's batch."""

    loss: Callable[[Any, Any], torch.Tensor]
    """Of the model and a batch: a mean over its samples."""

    optimizers: Callable[[Any], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    """One optimizer, or a list of them."""

    step: Callable[[Case, Any, list[torch.optim.Optimizer], Any, int], Any] = None  # type: ignore[assignment]
    """One step of the user's loop: `step(case, model, optimizers, batch, number)`. What it returns is
    compared as well, and has to be equal on all ranks. Default: `train_step`."""

    between: Callable[[Any], Any] | None = None
    """What happens between backward and the optimizers' step; returns something to compare, or None."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    join: Callable[[Sequence[Any]], Any] = join

    reads: Literal["whole", "parts"] = "whole"
    """How weights and gradients are read on the ranks: as the user does, one message per table, or, until the
    last step, as the parts that the ranks hold, put together in the test process; that is much faster."""

    optimizers_last: bool = False
    """Make the optimizers after `distribute`, which is then not told of them."""

    tolerance: dict[torch.dtype, float] = dataclasses.field(default_factory=lambda: TOLERANCE)

    def __post_init__(self) -> None:
        if self.step is None:
            self.step = train_step


def train_step(case: Case, model: Any, optimizers: list[torch.optim.Optimizer], batch: Any, number: int) -> Any:
    for optimizer in optimizers:
        optimizer.zero_grad()
    case.loss(model, batch).backward()
    seen = case.between(model) if case.between is not None else None
    parts = case.reads == "parts" and number + 1 < len(case.batches)
    grads = read_parts(model, gradients=True) if parts else read_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    return {"between": seen, "grads": grads}


def read_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole gradients by name; every rank calls this."""
    grads = {}
    for name, p in model.named_parameters():
        grad = None if p.grad is None else p.grad.detach().clone().cpu()
        grads[name] = grad.coalesce().to_dense() if grad is not None and grad.is_sparse else grad
    return grads


def read_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by name; every rank calls this."""
    return {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}


@dataclasses.dataclass
class Part:
    """The rows of a table that one rank holds; partition p, the rows r with r mod P == p, is on `owners[p]`."""

    rank: int
    owners: tuple[int, ...]
    rows: torch.Tensor


def read_parts(model: nn.Module, gradients: bool = False) -> dict[str, Any]:
    """What this process holds of every parameter, or of its gradient, by name; no message is sent."""
    plan = parallax.explain(model) if parallax.world_size() > 1 else None
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():
            held = p.grad if gradients else p.data
            if held is not None:
                held = held.coalesce().to_dense() if held.is_sparse else held.detach().clone()
        owners = plan[name].owners if plan is not None else ()
        found[name] = Part(parallax.rank(), owners, held) if owners and held is not None else held
    return found


def join_parts(parts: Sequence[Part]) -> torch.Tensor:
    """The whole table."""
    owners, first = parts[0].owners, parts[0].rows
    whole = torch.full((sum(len(part.rows) for part in parts), *first.shape[1:]), math.nan, dtype=first.dtype)
    for part in parts:
        at = 0
        for partition in (p for p, owner in enumerate(owners) if owner == part.rank):
            rows = whole[partition :: len(owners)]
            rows.copy_(part.rows[at : at + len(rows)])
            at += len(rows)
    return whole


@dataclasses.dataclass
class Trace:
    """What a run of a case has left: weights before the first and after every step, and what steps return."""

    weights: list[dict[str, torch.Tensor]]
    seen: list[Any]
    state: list[Any]


def one_process(case: Case, batches: Sequence[Any] | None = None) -> Trace:
    """Runs a case on one device, on each step's batches put together."""
    torch.manual_seed(0)
    model = case.model()
    optimizers = _listed(case.optimizers(model))
    trace = Trace([read_weights(model)], [], [])
    for number, batch in enumerate(batches or [case.join(step) for step in case.batches]):
        trace.seen.append(case.step(case, model, optimizers, batch, number))
        trace.weights.append(read_weights(model))
    trace.state = _states(optimizers)
    return trace


def on_a_rank(case: Case) -> Trace:
    """Runs a case on this rank of a world."""
    torch.manual_seed(0)
    model = case.model()
    config = parallax.Config(**case.config)
    if case.optimizers_last:
        parallax.distribute(model, config=config)
        optimizers = _listed(case.optimizers(model))
    else:
        optimizers = _listed(case.optimizers(model))
        parallax.distribute(model, optimizers, config=config)
    read = read_parts if case.reads == "parts" else read_weights
    trace = Trace([read(model)], [], [])
    for number, step in enumerate(case.batches):
        trace.seen.append(case.step(case, model, optimizers, step[parallax.rank()], number))
        trace.weights.append((read if number + 1 < len(case.batches) else read_weights)(model))
    trace.state = _states(optimizers)
    parallax.shutdown()
    return trace


def check(world_size: int, make_case: Callable[..., Case], *args: Any) -> list[Trace]:
    """Compares one case; returns the ranks' traces for further looks."""
    return check_all(world_size, [(make_case, *args)])[0]


def check_all(
    world_size: int, cases: Sequence[tuple[Any, ...]], backend: str = "gloo", timeout: float | None = None
) -> list[list[Trace]]:
    """Compares several cases in one job; each is `(make_case, *args)`. Returns traces by case and rank."""
    by_rank = ranks.run(world_size, _run_all, world_size, list(cases), timeout=timeout, backend=backend)
    problems = []
    for number, (make_case, *args) in enumerate(cases):
        case = make_case(world_size, *args)
        expected = one_process(case)
        for problem in compare(expected, [traces[number] for traces in by_rank], case.tolerance):
            problems.append(f"{_title(make_case, args)}: {problem}")
    assert not problems, f"on {world_size} ranks:\n" + "\n".join(problems)
    return [list(traces) for traces in zip(*by_rank, strict=True)]


def _run_all(world_size: int, cases: Sequence[tuple[Any, ...]]) -> list[Trace]:
    traces = []
    for make_case, *args in cases:
        print(f"now: {_title(make_case, args)}", file=sys.stderr)  # shown if this rank fails
        traces.append(on_a_rank(make_case(world_size, *args)))
    return traces


def _title(make_case: Callable[..., Case], args: Sequence[Any]) -> str:
    return f"{make_case.__name__}({', '.join(getattr(arg, '__name__', str(arg)) for arg in args)})"


# -- comparing ----------------------------------------------------------------------------------------


def compare(expected: Trace, traces: Sequence[Trace], tolerance: dict[torch.dtype, float] = TOLERANCE) -> list[str]:
    """What differs between the oracle's trace and those of the ranks, and between the ranks."""
    problems = []
    wanted = _leaves(expected)
    found = [_leaves(trace) for trace in traces]
    for name in found[0]:
        parts = [leaves.get(name) for leaves in found]
        if all(isinstance(part, Part) for part in parts):
            whole = join_parts(parts)
            for leaves in found:
                leaves[name] = whole
    for rank, leaves in enumerate(found):
        problems += [f"rank {rank}: {p}" for p in _differences(wanted, leaves, tolerance)]
    for rank, leaves in enumerate(found[1:], 1):
        problems += [f"rank {rank} against rank 0: {p}" for p in _differences(found[0], leaves, None)]
    return problems[:12] + ([f"... and {len(problems) - 12} more"] if len(problems) > 12 else [])


def _leaves(trace: Trace) -> dict[str, Any]:
    """Everything that is compared, by a name that says what it is and when."""
    leaves: dict[str, Any] = {}
    for number, weights in enumerate(trace.weights):
        when = f"after step {number}" if number else "before the first step"
        for name, value in weights.items():
            leaves[f"{name} {when}"] = value
    for number, seen in enumerate(trace.seen, 1):
        _flatten(f"step {number}", seen, leaves)
    _flatten("optimizer state", trace.state, leaves)
    return leaves


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        into[path] = value
    else:
        for key, item in items:
            _flatten(f"{path}, {key}", item, into)


def _differences(wanted: dict[str, Any], got: dict[str, Any], tolerance: dict[torch.dtype, float] | None) -> list[str]:
    """Differences beyond the tolerance; None: any."""
    problems = [f"{name}: missing" for name in wanted if name not in got]
    problems += [f"{name}: only here" for name in got if name not in wanted]
    for name, value in wanted.items():
        problem = _difference(value, got[name], tolerance) if name in got else None
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _difference(a: Any, b: Any, tolerance: dict[torch.dtype, float] | None) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if isinstance(a, float) and isinstance(b, float):
            near = a == b or (tolerance and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6))
            return None if near else f"expected {a}, got {b}"
        same = type(a) is type(b) and a == b
        return None if same else f"expected {_brief(a)}, got {_brief(b)}"
    a, b = ((t.to_dense() if t.is_sparse else t).cpu() for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"expected {_brief(a)}, got {_brief(b)}"
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if tolerance is None:
        equal = torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        return None if equal else f"differs by at most {_largest(a, b):.3g}"
    if not a.is_floating_point():
        return None if torch.equal(a, b) else f"expected {a.tolist()}, got {b.tolist()}"
    limit = tolerance[a.dtype]
    if a.dtype is torch.bfloat16 and a.numel():  # sums of few digits: elements near zero have none to trust
        a, b = a.float(), b.float()
        limit *= max(1.0, a.abs().max().item())
    if torch.allclose(a, b, rtol=limit, atol=limit, equal_nan=True):
        return None
    return f"differs by at most {_largest(a, b):.3g} (allowed {limit:g}); expected {_brief(a)}, got {_brief(b)}"


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        content = value.tolist() if value.numel() <= 12 else "..."
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {content}"
    return repr(value)


def _listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    return [optimizer.state_dict() for optimizer in optimizers]
