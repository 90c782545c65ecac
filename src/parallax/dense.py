"""Dense parameters: gradients travel in buckets, by AllReduce, while backward is still running.

A bucket is one flat buffer: the gradients of its parameters, then for each parameter whether this rank had a
gradient, then the weight of this rank in the mean, whether it is out of data, and its position (to notice ranks
that are out of step, as there are no rounds in a model without tables); for a parameter with COO
gradients also which rows have one. So which parameters a step used on any rank, and what to divide by, come
with the gradients and cost no message of their own (but where gradients are rounded for the wire, and these numbers
must not be). Buckets are launched in the plan's order on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from parallax.comm import Comm, Reduction
from parallax.config import WireDtype
from parallax.hooks import ParameterHooks
from parallax.wire import bucket_dtype

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the first AllReduce starts early."""
FINE_NUMEL = 2**15
"""Average size from which copying gradients one by one, while they are in the cache, is faster than together."""

NUM_FACTS = 6
"""Numbers behind the gradients of a bucket, after one for each parameter."""


class Bucket:
    """A flat buffer for gradients of one dtype and device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sparse: Collection[nn.Parameter],
        wire: WireDtype = "float32",
        server: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.server = server
        """The rank that sums it; None: all share the work."""
        first = parameters[0]
        numel = sum(p.numel() for p in parameters)
        num_rows = [p.shape[0] if p in sparse else 0 for p in parameters]
        length = numel + sum(num_rows) + len(parameters) + NUM_FACTS
        self.buffer = torch.empty(length, dtype=first.dtype, device=first.device)
        self.gradients, marks, self.tail = self.buffer.split([numel, sum(num_rows), len(parameters) + NUM_FACTS])
        self.marks = marks.split(num_rows)
        """For a parameter with COO gradients, how many ranks have one in each row; empty for others."""
        self.views = [
            piece.view(p.shape)
            for p, piece in zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True)
        ]
        self.fine = not any(num_rows) and numel < FINE_NUMEL * len(parameters)
        """Many small gradients: copied together when the last is there, not one by one."""
        self.num_missing = len(parameters)
        self.here = [False] * len(parameters)
        self._rounded: torch.Tensor | None = None
        """The gradients as they travel, if not in the buffer."""
        dtype = bucket_dtype(first.dtype, wire)
        if dtype is not first.dtype:
            self._rounded = torch.empty(numel, dtype=dtype, device=first.device)
        self.reductions: list[Reduction] = []

    def fill(self, i: int, scale: float) -> None:
        """The gradient of the i-th parameter into the buffer, times `scale`; zeros if there is none."""
        grad = self.parameters[i].grad
        if grad is not None and grad.layout != torch.strided:
            grad = grad.coalesce()
            self.marks[i].zero_().index_fill_(0, grad.indices()[0], 1)
            grad = self.parameters[i].grad = grad.to_dense()
        if grad is None or not self.here[i] or scale == 0:  # without samples a gradient may be NaN
            self.views[i].zero_()
            if not self.here[i]:
                self.marks[i].zero_()
        else:
            torch.mul(grad, scale, out=self.views[i])

    def complete(self, scale: float) -> None:
        """What is not in the buffer yet."""
        if not self.fine:
            for i, here in enumerate(self.here):
                if not here:
                    self.fill(i, scale)
        elif (
            scale and all(self.here) and all(p.grad is not None and p.grad.is_sparse is False for p in self.parameters)
        ):
            torch.cat([p.grad.reshape(-1) for p in self.parameters if p.grad is not None], out=self.gradients)
            self.gradients.mul_(scale)
        else:
            for i in range(len(self.here)):
                self.fill(i, scale)

    def launch(self, comm: Comm) -> None:
        """Starts the sum over all ranks."""
        if self._rounded is None:
            self.reductions = [comm.all_reduce(self.buffer, self.server)]
        else:
            self._rounded.copy_(self.gradients)
            exact = self.buffer[self.gradients.numel() :]
            self.reductions = [comm.all_reduce(part, self.server) for part in (self._rounded, exact)]

    def wait(self, comm: Comm) -> None:
        """Until the sum, which is the same on all ranks bit by bit, is in the buffer."""
        for reduction in self.reductions:
            comm.wait(reduction)
        if self._rounded is not None:
            self.gradients.copy_(self._rounded)

    def reset(self) -> None:
        self.num_missing = len(self.parameters)
        self.here = [False] * len(self.parameters)
        self.reductions.clear()


@dataclasses.dataclass(frozen=True)
class Contribution:
    """How this rank's gradients count in the step that is running."""

    scale: float
    """Factor for this rank's gradients; 0: it has no samples."""
    weight: float
    """Its part in the sum of weights, which is the world size when all ranks have equal batches."""
    out: bool
    """It is out of data."""
    position: tuple[int, int] = (0, 0)
    """Where this rank is, each -1, 0 or 1: of its backward passes and optimizer steps, and of their settings."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over ranks that came with the buckets."""

    weight: float
    num_out: int
    together: bool
    """All ranks are at the same position."""


class DenseGradients:
    """The buckets of a run's dense parameters."""

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: float,
        wire: WireDtype = "float32",
        mean: bool,
        sparse: Collection[nn.Parameter],
        before: dict[nn.Parameter, torch.Tensor],
        hooks: ParameterHooks | None,
        servers: Mapping[nn.Parameter, int],
    ) -> None:
        """
        Args:
            parameters: in the order in which their gradients are expected; the same on all ranks.
            bucket_bytes: a bucket is full when its gradients reach this size.
            wire: how gradients travel; the same on all ranks.
            mean: divide by the sum of the weights (gradients come scaled by 1 / world size).
            sparse: those whose gradients are COO tensors.
            before: gradients of earlier backward passes, set aside while new ones are on their way.
            hooks: of the user, to run on reduced gradients. None: there is more to come to these gradients, which
                are neither seen by hooks nor added to earlier ones.
            servers: ranks that sum these parameters' gradients alone.
        """
        self._comm, self._mean = comm, mean
        groups = _fill(parameters, bucket_bytes, servers)
        self.buckets = [Bucket(group, sparse, wire, servers.get(group[0])) for group in groups]
        self._place = {id(p): (b, i) for b in self.buckets for i, p in enumerate(b.parameters)}
        self._next = 0
        self._before, self._hooks = before, hooks
        self.used: list[nn.Parameter] = []
        """Those with a gradient on any rank in the backward pass that was finished last."""

    @property
    def all_launched(self) -> bool:
        """Nothing more is expected in the backward pass that is running."""
        return self._next == len(self.buckets)

    def knows(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._place

    def arrived(self, parameter: nn.Parameter) -> bool:
        """A gradient of `parameter` came in the backward pass that is running."""
        place = self._place.get(id(parameter))
        return place is not None and place[0].here[place[1]]

    def ready(self, parameter: nn.Parameter, contribution: Contribution) -> bool:
        """This rank's gradient of `parameter` is complete; off with its bucket when it is full.

        Returns:
            False if the parameter is in no bucket.
        """
        place = self._place.get(id(parameter))
        if place is None:
            return False
        bucket, i = place
        if not bucket.here[i]:
            bucket.here[i] = True
            bucket.num_missing -= 1
        elif bucket.reductions:
            raise NotImplementedError(
                "its gradient came again after it was sent, as that of a parameter used in several segments under "
                "checkpoint(..., use_reentrant=True) does, or after a backward pass that failed; use "
                "checkpoint(..., use_reentrant=False)"
            )
        if not bucket.fine:
            bucket.fill(i, contribution.scale)
        if not bucket.num_missing:
            self._launch_full(contribution)
        return True

    def finish(self, contribution: Contribution) -> Totals | None:
        """End of backward: sends what is left, waits, and sets every `.grad`; None without dense parameters."""
        for bucket in self.buckets[self._next :]:
            bucket.num_missing = 0
        self._launch_full(contribution)
        totals = None
        self.used.clear()
        for bucket in self.buckets:
            bucket.wait(self._comm)
            *num_here, weight, num_out, x, xx, y, yy = bucket.tail.real.tolist()
            n, mine = self._comm.world_size, contribution.position
            together = all(  # no variance
                (total, squares) == (n * p, n * p * p) for p, total, squares in zip(mine, (x, y), (xx, yy), strict=True)
            )
            totals = Totals(weight, round(num_out), together)
            if self._mean and weight not in (0.0, self._comm.world_size):
                bucket.gradients.mul_(self._comm.world_size / weight)
            self._set_gradients(bucket, [n > 0 for n in num_here])
            bucket.reset()
        self._next = 0
        return totals

    def _launch_full(self, c: Contribution) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].num_missing:
            bucket = self.buckets[self._next]
            bucket.complete(c.scale)
            facts = (c.weight, float(c.out), *(float(p**e) for p in c.position for e in (1, 2)))
            tail = torch.tensor([*map(float, bucket.here), *facts], dtype=bucket.tail.dtype)
            bucket.tail.copy_(tail, non_blocking=True)  # on CUDA, a blocking copy would wait for the backward pass
            bucket.launch(self._comm)
            self._next += 1

    def _set_gradients(self, bucket: Bucket, used: Sequence[bool]) -> None:
        into, views = [], []
        for p, view, marks, here, any_rank in zip(
            bucket.parameters, bucket.views, bucket.marks, bucket.here, used, strict=True
        ):
            if any_rank and not here and p.grad is not None:  # of an earlier backward: this rank had none in this one
                self._before.setdefault(p, p.grad)
                p.grad = None
            if any_rank and marks.numel():
                rows = marks.nonzero().squeeze(1)
                p.grad = torch.sparse_coo_tensor(
                    rows[None], view[rows], p.shape, is_coalesced=True, check_invariants=False
                )
            elif here and p.grad is not None:
                into.append(p.grad)
                views.append(view)
            elif any_rank:
                p.grad = view.clone()
        if into:
            torch._foreach_copy_(into, views)
        self.used += [p for p, any_rank in zip(bucket.parameters, used, strict=True) if any_rank]
        if self._hooks is not None:
            for p, any_rank in zip(bucket.parameters, used, strict=True):
                if any_rank and p.grad is not None and self._hooks.waits(p):
                    p.grad = self._hooks.on_gradient(p, p.grad)
                accumulate(p, self._before.pop(p, None))


def accumulate(parameter: nn.Parameter, before: torch.Tensor | None) -> None:
    """Adds the gradient of `parameter` to an earlier one: to the tensor that the user already had, if it is dense."""
    grad = parameter.grad
    if before is not None and grad is not None:
        before = before.add_(grad) if before.layout == torch.strided else before + grad
    if before is not None:
        parameter.grad = before


def _fill(
    parameters: Sequence[nn.Parameter], bucket_bytes: float, servers: Mapping[nn.Parameter, int]
) -> list[list[nn.Parameter]]:
    def kind(p: nn.Parameter) -> tuple[object, ...]:
        return p.dtype, p.device, servers.get(p)

    groups: list[list[nn.Parameter]] = []
    sizes: list[float] = []
    for p in parameters:
        limit = FIRST_BUCKET_BYTES if len(groups) == 1 else bucket_bytes
        fits = groups and sizes[-1] + p.nbytes <= limit
        alike = groups and kind(groups[-1][0]) == kind(p)
        if fits and alike:
            groups[-1].append(p)
            sizes[-1] += p.nbytes
        else:
            groups.append([p])
            sizes.append(p.nbytes)
    return groups
