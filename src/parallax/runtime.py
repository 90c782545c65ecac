"""A run: the phases of a training step on this rank, and what happens when ranks part ways.

    forward    lookups on tables wait until a result is needed, then share a round (`lookup`)
    backward   dense gradients leave in buckets (`dense`); row gradients collect in their tables
    closing    rounds until every rank is done (`rounds`); then `.grad` is what one device would have
    step       the user's optimizer runs, on the rows that live here
    serving    this rank has no data, or has ended: it answers the others and repeats their steps

`distribute` makes one `Runtime` for a model; the hooks below are its only way into the user's program.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten

from parallax.comm import Comm, DisagreementError, ParallaxError, PeerError
from parallax.config import Config, WireDtype
from parallax.dense import Contribution, DenseGradients, Totals, accumulate
from parallax.foresight import Foresight, Trial
from parallax.hooks import ParameterHooks
from parallax.links import find_topology
from parallax.lookup import Lookups
from parallax.message import Flag, Request, Want
from parallax.moves import Moves
from parallax.optimizer import Optimizers, digest, settings_of
from parallax.parameter import ShardedParameter, WatchedParameter, adopt
from parallax.plan import Placement, Plan, Use
from parallax.planner import keeping, make_plan
from parallax.profiling import Clock, Seen, Traffic, note_uses
from parallax.repeats import Repeats, pack, unpack
from parallax.rounds import Round, Rounds
from parallax.samples import Samples
from parallax.scalers import Scalers
from parallax.startup import (
    check_same_config,
    check_same_model,
    check_same_optimizers,
    device_of,
    first_profiles,
    make_rows,
)
from parallax.table import Table, stacked
from parallax.topology import Coefficients, Topology
from parallax.tuning import Tuning
from parallax.untraced import as_it_is
from parallax.whole import Change, WholeReads

LARGE_BYTES = 2**24
"""Tables of this size make it worth while to measure the links."""

ANNOUNCE_SECONDS = 5.0
"""How long a rank that failed waits for the others to come and hear of it."""


class Phase(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSING = "closing"
    STEPPING = "stepping"
    SERVING = "serving"
    ENDED = "ended"


class _ModuleHook:
    """A hook on a module of the run's model. In copies of the module, pickled ones too, it does nothing."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: Any) -> _ModuleHook:
        return _ModuleHook(None)

    def __reduce__(self) -> Any:
        return _ModuleHook, (None,)


_current: Runtime | None = None


def current() -> Runtime | None:
    """The run of this process, if `distribute` was called."""
    return _current


class Runtime:
    """One model in training on all ranks."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config) -> None:
        global _current
        self.model, self.config = model, config
        self.parameters = dict(model.named_parameters())
        self.names = {p: name for name, p in self.parameters.items()}
        self._own_ids = {id(p) for p in self.names}
        self.comm = Comm(device_of(model), config.timeout)
        self.comm.where = lambda: f"in phase {self.phase.value}, after {self._num_steps} backward passes"
        self.phase = Phase.FORWARD
        self.failed: BaseException | None = None
        self._accumulators: list[torch.autograd.graph.Node] = []
        """Kept alive, with our hooks."""
        self._unhook: list[Callable[[], Any]] = []
        self._uncompiled = contextlib.ExitStack()
        """Open while `torch.compile` waits for the first plan."""

        self._wire: WireDtype = config.wire_dtype if self.comm.world_size > 1 else "float32"
        self.rounds = Rounds(self.comm, self._field, self._wire)
        self.rounds.merging.scale = self._merging_scale
        self.lookups = Lookups(
            self._run_round,
            on_backward=self._on_row_gradients,
            on_samples=self._on_samples,
            on_use=self._on_use,
            before_read=self._before_read,
            is_due=self.rounds.is_due,
            fail=self.fail,
        )
        self.reads = WholeReads(self.lookups, self._run_round, lambda: self.rounds.tables, self._on_change)

        self.hooks = ParameterHooks(lambda: self.phase is not Phase.ENDED, self._on_hook)
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients of earlier backward passes, set aside while new ones are reduced."""
        self.exchange_dense = True
        """Not so inside `parallax.no_sync`."""
        self._keeping = False
        """The backward pass that is running sends no bucket before its end."""
        self._kept: dict[nn.Parameter, None] = {}
        """Parameters with a dense gradient in the backward pass that is running, if it is kept."""
        self._updated: set[nn.Parameter] = set()
        """Parameters with a gradient on any rank in the latest backward pass."""
        self._held_back = False
        """Dense gradients of earlier backward passes are this rank's part of a sum over all ranks."""
        self._ever_kept = False
        """A backward pass ran inside `parallax.no_sync`: from then on ranks without data expect rounds."""
        self._loose: dict[nn.Parameter, None] = {}
        """Parameters with a dense gradient that are in no bucket yet, in the order of arrival."""
        self._num_steps = 0
        self._step_depth, self._resume_phase = 0, Phase.FORWARD
        self.asking, self.posting = Trial(), Trial()
        """Of asking for rows ahead; after that, of sending row gradients before the end of a backward pass."""
        self._queued = False
        """`_close` will be called at the end of the backward pass that is running."""
        self._counts = Contribution(scale=0.0, weight=0.0, out=False)
        """How this rank's gradients count in the backward pass that is running."""
        self.samples = Samples()
        self.scalers = Scalers()
        self._reference_samples: float | None = None
        """The usual batch of a rank: weights are relative to it, so that they are usually 1."""
        self._uneven = False
        """A rank was out of data in the latest step: rounds are needed, and steps repeated there."""
        self._stepped = False
        """An optimizer ran since the latest backward."""

        self.tables: dict[str, Table] = {}
        self.optimizers = Optimizers(self.tables)
        self.repeats = Repeats(self.comm.rank, self.parameters, self.tables, self.optimizers, self.reads)
        self.moves = Moves(self.comm, self.tables, self.optimizers, self.lookups, self.reads)
        self.dense = self._buckets([], self.hooks)
        self.clock = Clock(lambda: self.comm.seconds)
        self._others: list[str] = []
        """Names of parameters that are nothing to look up in: of no dimension, complex, of a class of their own."""
        self.profiles = first_profiles(model)
        self.topology: Topology | None = None
        self.tuning = Tuning(
            self.comm,
            config,
            self.moves,
            self.profiles,
            plan=lambda: self.plan,
            make_plan=self._make_plan,
            put=self.put,
            units=lambda: self.samples.latest,
        )
        self._undecided = False
        """What was seen is agreed, and waits for `_settle`."""
        self.plan = Plan(world_size=self.comm.world_size, architecture=config.architecture, parameters=())
        self.plan = self._make_plan()
        _current = self
        if self.comm.world_size == 1 and not config.lazy_rows:
            for p, name in self.names.items():
                if p.is_meta:
                    table = Table(name, p, rank=0, world_size=1, device=self.comm.device)
                    make_rows(self.comm, model, table, (0,), config)
            return
        with self._failing():
            check_same_config(self.comm, config)
            check_same_model(self.comm, self.profiles)
            self.comm.broadcast([p.data for p in self.names if not p.is_meta] + list(model.buffers()))
            self._adopt_parameters()
            self._put_off_compiling()
            if self.comm.rank:  # scripts seed all workers alike; dropout masks and samples should differ
                torch.manual_seed(torch.initial_seed() + self.comm.rank)
            check_same_optimizers(self.comm, optimizers)
            if self.config.topology not in (None, "auto"):
                self.topology = find_topology(self.comm, self.config.topology)
            for optimizer in optimizers:
                self._know(optimizer)
        self._hook_in()

    # -- start --------------------------------------------------------------------------------------

    def _adopt_parameters(self) -> None:
        for p, name in self.names.items():
            profile, plan = self.profiles[name], self.plan[name]
            if type(p) is nn.Parameter and p.dim() > 0 and p.is_floating_point():
                table = Table(name, p, rank=self.comm.rank, world_size=self.comm.world_size, device=self.comm.device)
                table.placement = plan.placement
                table.by_frequency = profile.by_frequency
                table.lazy = self.config.lazy_rows
                self.tables[name] = table
                if p.is_meta:
                    make_rows(self.comm, self.model, table, plan.owners, self.config)
                    adopt(p, ShardedParameter, table, self.lookups, self.reads)
                elif plan.placement is Placement.SHARDED:
                    self.moves.shard(table, plan.owners)
                else:
                    adopt(p, WatchedParameter, table, self.lookups, self.reads)
            elif p.is_floating_point() or p.is_complex():
                self._others.append(name)
            may_train = p.requires_grad or name in self._others
            if may_train and plan.placement is not Placement.SHARDED:
                self._hook_parameter(p)
        self._refresh()

    def _put_off_compiling(self) -> None:
        """Graphs are made when it is known which parameters are tables; those made before know others."""
        torch.compiler.reset()
        if any(table.placement is Placement.WATCHED for table in self.tables.values()):
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
            self._unhook.append(self._uncompiled.close)

    def _hook_parameter(self, p: nn.Parameter) -> None:
        def before_accumulating(grads: Any) -> None:
            if self._is_sharded(self.names[p]):
                self.fail(
                    NotImplementedError(
                        f"{self.names[p]!r}: backward through a graph that was made before its rows moved to owners "
                        f"(rank {self.comm.rank}); run backward before the next step, or fix its place with "
                        f"Config.placements"
                    )
                )
            # A gradient of an earlier backward has been reduced: kept apart.
            if p.grad is not None and self.phase is not Phase.ENDED and not self._has_arrived(p):
                self._before[p] = self._before.get(p, p.grad)
                p.grad = None

        self.hooks.take_over(p, own=self._on_dense_gradient)
        with torch._C.DisableTorchFunctionSubclass():
            frozen = not p.requires_grad
            p.requires_grad_()  # it may be thawed later, unseen
            # On the node, not on the tensor: torch.autograd.grad() runs a tensor's hooks but accumulates nothing.
            node = torch.autograd.graph.get_gradient_edge(p).node
            p.requires_grad_(not frozen)
            self._accumulators.append(node)
            self._unhook.append(node.register_prehook(as_it_is(before_accumulating)).remove)

    def _hook_in(self) -> None:
        self._unhook += [
            self.scalers.watch(),
            register_optimizer_step_pre_hook(self._pre_step).remove,
            register_optimizer_step_post_hook(self._post_step).remove,
        ]
        for p in self.names:
            self.hooks.take_over(p)
        self._unhook.append(self.hooks.let_go)
        for module in _called(self.model):
            hook = _ModuleHook(functools.partial(self._pre_forward, module is self.model))
            self._unhook.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in self.model.modules():
            self._unhook.append(module.register_state_dict_post_hook(_ModuleHook(self._post_state_dict)).remove)
        previous = sys.excepthook

        def on_uncaught(kind: Any, error: Any, traceback: Any) -> None:
            if isinstance(error, PeerError) or (
                isinstance(error, DisagreementError) and self.comm.rank > 0 and self.failed is not None
            ):
                print(f"parallax: {error}", file=sys.stderr, flush=True)
                return
            if not issubclass(kind, KeyboardInterrupt):
                print(f"parallax: rank {self.comm.rank} failed:", file=sys.stderr, flush=True)
            previous(kind, error, traceback)
            sys.stderr.flush()
            if not issubclass(kind, KeyboardInterrupt):
                self._announce(error)
            self.phase = Phase.ENDED

        sys.excepthook = on_uncaught
        atexit.register(self._leave_at_exit)

        def restore() -> None:
            atexit.unregister(self._leave_at_exit)
            if sys.excepthook is on_uncaught:
                sys.excepthook = previous

        self._unhook.append(restore)

    # -- forward ------------------------------------------------------------------------------------

    def _pre_forward(self, by_model: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        # torch.compile takes these lines into its graph, and breaks it when there is something to do.
        if self._undecided or self.samples.wants(by_model):
            self._before_forward(by_model, args, kwargs)

    @as_it_is
    def _before_forward(self, by_model: bool, args: Any, kwargs: Any) -> None:
        if self.phase is Phase.FORWARD:
            self._settle()
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor) and value.dim():
                self._on_samples(value.shape[0], by_model)
                return

    def _on_samples(self, num_samples: int, by_model: bool = False) -> None:
        if torch.is_grad_enabled():
            self.samples.see(num_samples, by_model)

    def _on_use(self, table: Table, lookup: bool) -> None:
        """A parameter is used: what waits for the end of a step happens now."""
        self._check_alive()
        if lookup and self.phase is Phase.STEPPING:
            self.fail(ParallaxError(f"{table.name!r} is looked up inside an optimizer step, or after one that failed"))
        if table.placement is Placement.LOCAL and table.parameter.requires_grad:  # no longer frozen
            table.placement = Placement.WATCHED
            profile = self.profiles[table.name]
            self.profiles[table.name] = dataclasses.replace(profile, trainable=True)
            self._hook_parameter(table.parameter)
        if lookup and self.phase is Phase.FORWARD:
            self._settle()

    def _before_read(self) -> None:
        """A rank may read alone what it wants to see of the model after a step, while the others go on to the next."""
        if self.phase is Phase.FORWARD and self._stepped:
            self._settle()

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise ParallaxError(f"rank {self.comm.rank}: this run has failed before: {self.failed}")

    # -- backward -----------------------------------------------------------------------------------

    def _has_arrived(self, p: nn.Parameter) -> bool:
        return p in self._loose or p in self._kept or self.dense.arrived(p)

    @as_it_is
    def _on_dense_gradient(self, p: nn.Parameter) -> None:
        if self.phase is Phase.ENDED:
            self._check_alive()
            return
        if torch.is_grad_enabled():
            self.fail(
                NotImplementedError(
                    f"{self.names[p]!r}: gradients that are exchanged have no graph, so backward(create_graph=True) is "
                    f"not supported (rank {self.comm.rank}). Use torch.autograd.grad(..., create_graph=True), and "
                    f"backward() on what is made of it"
                )
            )
        if not self._queued:
            self._on_backward()
        self.tuning.see_gradient(p)
        if self._keeping:
            self._kept[p] = None
            return
        try:
            known = self.dense.ready(p, self._counts)
        except NotImplementedError as error:
            self.fail(NotImplementedError(f"rank {self.comm.rank}: {self.names[p]!r}: {error}"))
        if not known:
            self._loose[p] = None

    def _on_backward(self) -> None:
        if not self._queued:
            if self.phase is not Phase.BACKWARD:
                if self._stepped:
                    self._settle()  # nothing in this step's forward pass has done it
                self._counts = self._contribution()
                self._keeping = self._held_back or self._keeps_dense()
            self._queued, self.phase = True, Phase.BACKWARD
            torch.autograd.Variable._execution_engine.queue_callback(self._close)

    def _on_row_gradients(self, table: Table) -> None:
        """A table has got gradients; if they are its last while much is still to come, they leave now."""
        self._on_backward()
        stack = table.stack
        if not self.posting.on or not self._may_post or stack.num_open or not stack.can_push_early:
            return
        if not self.dense.all_launched or any(s.is_large and s.num_open for s in self.rounds.stacks):
            push = stack.collect()
            assert push is not None
            self.rounds.push_early(push)

    @property
    def _may_post(self) -> bool:
        return self.config.overlap and self.rounds.can_post

    @as_it_is
    def _close(self) -> None:
        """The end of a backward pass: from here on `.grad` means what it means on one device."""
        if torch._C._current_autograd_node() is not None:
            # The end of a backward inside a backward (checkpoint with use_reentrant=True): the outer one goes on, and
            # reaches at least the parameter or lookup that made the checkpoint's input require a gradient.
            self._queued = False
            return
        self._queued, self.phase = False, Phase.CLOSING
        with self._failing():
            tables = self._exchanged()
            dropped = {table for table in tables if self.reads.dropped(table)}
            if self._uneven and any(table.sharded and self.reads.changed(table) for table in tables):
                self._share_changes()
            self.reads.forget()
            self.lookups.flush()
            for stack in self.rounds.stacks:
                stale = stack.stale_keys()
                if stale is not None:
                    self.lookups.lease_keys(stack, stale)
            pushes = [push for stack in self.rounds.stacks if (push := stack.collect()) is not None]
            for table in tables:
                table.num_open = 0
            if self.lookups.foresight is not None:
                for stack in self.rounds.stacks:
                    if stack.is_wasteful:
                        self.lookups.foresight.doubt([table.name for table in stack.tables])
            if self._needs_rounds() or self._keeping:
                local = Flag.LOCAL if self._keeps_dense() else 0
                flags = Flag.DONE | self._news() | local
                request = Request(flags=flags, pushes=pushes, weight=self.samples.number, dropped=dropped)
                closing = self._run_round(request)
                while not closing.closes_step:
                    closing = self._run_round(dataclasses.replace(request, pushes=()))
                self._finish_step(closing)
            else:
                if self._loose:
                    names = [self.names[p] for p in self._loose]
                    raise ParallaxError(f"rank {self.comm.rank}: gradients of {names} have no bucket and no round")
                self._updated.clear()
                self._finish_dense(self._contribution())
                self._bring_back()
            if self._uneven or self._held_back or self._undecided:
                self.clock.stop()
            else:  # so on all ranks
                self.tuning.after_backward(self.clock.lap(), self._stepped)
                self.clock.start()
        foresight = self.lookups.foresight
        if self._may_post and (self.asking.is_over or foresight is None or not foresight.is_certain):
            self.posting.step()
        self.samples.end_backward()
        self._stepped = False
        self.phase = Phase.FORWARD
        if not self._undecided:
            self._uncompiled.close()
        if self.hooks.any:
            with torch.no_grad():
                self.hooks.after_accumulation([p for p in self.names if p in self._updated])

    def _keeps_dense(self) -> bool:
        """Whether the dense gradients of a backward pass stay here; hooks want to see each reduced."""
        return not self.exchange_dense and not self.hooks.any

    def _news(self) -> int:
        seen = any(
            (self._is_new(t) and t.seen is not Use.NONE) or not t.seen_layouts <= t.layouts
            for t in self.tables.values()
        )
        new = self._loose or not all(map(self.dense.knows, self._kept))
        return Flag.NEWS if seen or new else 0

    def _is_new(self, table: Table) -> bool:
        """No step has used it so far."""
        return table.placement is Placement.WATCHED or (table.sharded and self.profiles[table.name].use is Use.NONE)

    def _finish_step(self, closing: Round) -> None:
        """All gradients of all ranks have been sent: makes `.grad`."""
        if self._reference_samples is None:
            self._reference_samples = max(closing.weights) or 1.0
        scales = self._scales(closing)
        # Workers of one machine have multiplied with their weights before they added up (`_merging_scale`).
        total = sum(w for w, f in zip(closing.weights, closing.flags, strict=True) if not f & Flag.OUT)
        mean = self.config.reduction == "mean"
        merged_scales = [self._reference_samples / (total or 1.0) if mean else 1.0] * len(scales)
        news = any(f & Flag.NEWS for f in closing.flags)
        keep = self._agreed_to_keep(closing.flags) and not news
        contribution = self._contribution()
        self._uneven = any(f & Flag.OUT for f in closing.flags)
        if keep or self._held_back:
            self._hold_back(scales[self.comm.rank])
        self._updated.clear()
        loose: list[nn.Parameter] = []
        if not news:  # while dense gradients are on their way
            self._add_up(scales, merged_scales)
        if keep:
            self._kept.clear()
            self._num_steps += 1
        else:
            if self._held_back:  # what is here is this rank's part of a sum already
                contribution = dataclasses.replace(contribution, scale=1.0, weight=1.0)
                parts = [p for name, p in self.parameters.items() if not self._is_sharded(name) and p.grad is not None]
            else:
                parts = list(self._kept)
            for p in parts:
                if not self.dense.ready(p, contribution) and p in self._kept:
                    self._loose[p] = None
            self._kept.clear()
            self._held_back = False
            loose = self._finish_dense(contribution, news)
        if news:  # which tables there are is known now
            self._add_up(scales, merged_scales)
        more_to_come = set(loose)
        for table in self._exchanged():
            p = table.parameter
            hook = functools.partial(self._hooked, table) if self.hooks.waits(p) and p not in more_to_come else None
            if table.finish_gradient(hook):
                self._updated.add(p)
        for p in loose:
            if p.grad is not None and self.hooks.waits(p):
                p.grad = self.hooks.on_gradient(p, p.grad)
            accumulate(p, self._before.pop(p, None))
        if not keep:
            self._bring_back()

    def _add_up(self, scales: Sequence[float], merged_scales: Sequence[float]) -> None:
        for stack in self.rounds.stacks:
            stack.add_up(merged_scales if stack.merged else scales)

    def _merging_scale(self, weight: float) -> float:
        return weight / (self._reference_samples or 1.0) if self.config.reduction == "mean" else float(weight > 0)

    def _scales(self, closing: Round) -> list[float]:
        """What each rank's gradients are multiplied with."""
        active = [w if not f & Flag.OUT else 0.0 for w, f in zip(closing.weights, closing.flags, strict=True)]
        if self.config.reduction == "sum":
            return [float(w > 0) for w in active]
        if len(set(active)) == 1:
            return [1 / len(active)] * len(active)
        return [w / (sum(active) or 1.0) for w in active]

    def _agreed_to_keep(self, flags: Sequence[int]) -> bool:
        """Whether the dense gradients of this backward pass stay where they are."""
        keeping = {bool(f & Flag.LOCAL) for f in flags if f & Flag.DONE}
        self._ever_kept |= True in keeping
        if len(keeping) > 1:
            who = [rank for rank, f in enumerate(flags) if f & Flag.LOCAL]
            raise DisagreementError(
                f"rank {self.comm.rank}: every rank must run a backward pass inside parallax.no_sync or none, but only "
                f"ranks {who} did (or the others have hooks on parameters, which want to see each exchanged)"
            )
        return keeping == {True}

    def _hold_back(self, scale: float) -> None:
        """Adds the dense gradients of this backward pass to this rank's part of a sum over all ranks."""
        with torch.no_grad():
            if not self._held_back:  # what was reduced is whole on every rank
                for p in filter(self.dense.knows, self.parameters.values()):
                    if p in self._before:
                        self._before[p] = self._before[p] / self.comm.world_size
                    elif p not in self._kept and p.grad is not None:
                        p.grad = p.grad / self.comm.world_size
                self._held_back = True
            for p in self._kept:
                if p.grad is None:
                    continue
                if scale == 0:  # without samples a gradient may be NaN
                    p.grad = torch.zeros_like(p.grad)
                else:
                    p.grad.mul_(scale)
                if self.dense.knows(p):
                    accumulate(p, self._before.pop(p, None))

    def _on_hook(self) -> None:
        self.rounds.version += 1

    def _hooked(self, table: Table, grad: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what the hooks on a table make of its gradient."""
        if not table.sharded:
            return self.hooks.on_gradient(table.parameter, grad)
        before, table.grad = table.grad, grad
        whole = self.hooks.on_gradient(table.parameter, self.reads.whole(table, "grad"))
        table.grad = before
        own = table.own_rows(whole)
        return own.coalesce() if own.layout == torch.sparse_coo else own

    def _finish_dense(self, contribution: Contribution, news: bool = False) -> list[nn.Parameter]:
        """Returns the parameters that were in no bucket."""
        totals = self.dense.finish(contribution)
        self._updated.update(self.dense.used)
        # after the buckets: some ranks have launched them before they knew
        loose = self._agree(contribution) if news else []
        self._updated.update(loose)
        self._num_steps += 1
        self._check_together(totals)
        if totals is not None and totals.num_out:
            self._uneven = True
        return loose

    def _bring_back(self) -> None:
        """Gradients of earlier backward passes that got nothing new."""
        for p, earlier in self._before.items():
            if p.grad is None:
                p.grad = earlier
        self._before.clear()

    def _check_together(self, totals: Totals | None) -> None:
        if totals is not None and not totals.together:
            self.failed = DisagreementError(
                f"rank {self.comm.rank}: the ranks are not at the same step (here: {self._num_steps} backward passes, "
                f"{self.rounds.version} optimizer steps and other changes; latest settings "
                f"{self.rounds.describe_settings()}): every rank must run backward and optimizer.step() alike, and "
                f"change gradients in hooks on all ranks or none"
            )
            raise self.failed

    def _contribution(self) -> Contribution:
        if self.phase is Phase.SERVING:
            return Contribution(scale=0.0, weight=0.0, out=True, position=self._position())
        weight = self.samples.number / (self._reference_samples or 1.0)
        scale = weight / self.comm.world_size if self.config.reduction == "mean" else float(self.samples.number > 0)
        return Contribution(scale=scale, weight=weight, out=False, position=self._position())

    def _position(self) -> tuple[int, int]:
        settings = digest((self._num_steps, self.rounds.settings))  # other each step: what misses now shows later
        return (self._num_steps + self.rounds.version) % 3 - 1, settings % 3 - 1

    # -- the plan -----------------------------------------------------------------------------------

    def _agree(self, contribution: Contribution) -> list[nn.Parameter]:
        """Puts together what all ranks saw in this step, and reduces gradients that have no bucket yet.

        Returns:
            The parameters of these gradients, which are not added to earlier ones yet.
        """
        mine = {
            name: Seen(t.seen, t.num_rows_touched, t.parameter in self._loose, frozenset(t.seen_layouts))
            for name, t in self.tables.items()
        }
        order = [self.names[p] for p in self._loose]
        everyone = self.comm.all_gather((mine, order))
        loose = {name: None for _, names in everyone for name in names}  # rank 0's order first
        ad_hoc = self._buckets([self.parameters[name] for name in loose], hooks=None)
        for p in self._loose:
            ad_hoc.ready(p, contribution)
        ad_hoc.finish(contribution)
        self._loose.clear()
        self.moves.order += [name for name in loose if name not in self.moves.order]
        for name, table in self.tables.items():
            seen = [m[name] for m, _ in everyone]
            note_uses(table, seen, self.config.lazy_rows)
            if self._is_new(table) or table.use & Use.DENSE:
                self.profiles[name] = dataclasses.replace(
                    self.profiles[name],
                    use=table.use,
                    num_rows_touched=sum(s.num_rows_touched for s in seen) / len(seen),
                )
        if not self._uneven and self.topology is None and self._has_large_tables():
            self.topology = find_topology(self.comm, "auto")
        self._undecided = not self._uneven  # while a rank serves, all keep the plan that they have
        return [self.parameters[name] for name in loose]

    def _has_large_tables(self) -> bool:
        """Whether the links are worth measuring, if it is left to us."""
        sizes = [t.num_rows * t.row_bytes for t in self.tables.values() if t.use is Use.LOOKUP]
        return self.config.topology == "auto" and self.config.architecture == "hybrid" and sum(sizes) >= LARGE_BYTES

    def _settle(self) -> None:
        """Makes the plan from what was agreed and applies it; the same on all ranks, without a message."""
        if not self._undecided:
            return
        self._undecided = False
        for name, table in self.tables.items():
            if table.use is Use.LOOKUP:
                reasons = [how.reason for how in self.optimizers.how_updated(table) if not how.by_rows]
                across_rows = reasons[0] if reasons else ""
                self.profiles[name] = dataclasses.replace(
                    self.profiles[name], across_rows=across_rows, sparse_gradient=table.sparse_grad or table.lazy
                )
        if self.config.lazy_rows:
            for number in range(len(self.optimizers)):
                self._check_by_rows(self.optimizers[number])
        others = [name for name in self._others if name not in self.moves.order]
        self.moves.order += others  # used or not: they are small
        plan = self._make_plan()
        self.put(keeping(self.plan, plan, self.moves.reduced))
        self.tuning.plan_made()

    def put(self, plan: Plan) -> None:
        """Applies a plan, between two steps; if tables are spread already, on all ranks together."""
        self.moves.apply(plan)
        self.plan = plan
        self._refresh()

    def _make_plan(self) -> Plan:
        """From what is known; what is spread or reduced already stays so unless that is clearly slower."""
        decided = [p for p in self.plan if p.placement is not Placement.WATCHED]
        return make_plan(
            list(self.profiles.values()),
            world_size=self.comm.world_size,
            config=self.config,
            topology=self.topology,
            coefficients=Coefficients(bucket_bytes=self.config.bucket_mb * 2**20, merges_machines=self.comm.merges),
            partitions={p.name: len(p.owners) for p in decided if p.owners},
            keep={p.name: p.placement for p in decided},
        )

    def _refresh(self) -> None:
        """Buckets and rounds for the plan as it is."""
        seen = {name: p.num_rows_touched for name, p in self.profiles.items() if p.num_rows_touched and not p.renormed}
        self.rounds.stacks = stacked(list(self.tables.values()), seen, self.comm.agents)
        bucketed = [self.parameters[name] for name in self.moves.order if name not in self.tables]
        servers = {self.parameters[p.name]: p.server for p in self.plan if p.server is not None}
        if [(id(p), b.server) for b in self.dense.buckets for p in b.parameters] != [
            (id(p), servers.get(p)) for p in bucketed
        ]:
            self.dense = self._buckets(bucketed, self.hooks, servers)

    def _buckets(
        self,
        parameters: Sequence[nn.Parameter],
        hooks: ParameterHooks | None,
        servers: Mapping[nn.Parameter, int] | None = None,
    ) -> DenseGradients:
        return DenseGradients(
            self.comm,
            parameters,
            bucket_bytes=self.config.bucket_mb * 2**20,
            wire=self._wire,
            mean=self.config.reduction == "mean",
            sparse=self.moves.sparse,
            before=self._before,
            hooks=hooks,
            servers=servers or {},
        )

    def _exchanged(self) -> list[Table]:
        """Tables whose row gradients travel."""
        return [t for t in self.tables.values() if t.placement is not Placement.LOCAL]

    def _needs_rounds(self) -> bool:
        first = self._reference_samples is None  # nothing is agreed yet
        return (
            first
            or self._uneven
            or self._ever_kept
            or any(t.parameter.requires_grad or t.sharded for t in self._exchanged())
        )

    # -- optimizers ---------------------------------------------------------------------------------

    def _know(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates this model; hooks into its state the first time that it is seen."""
        if optimizer in self.optimizers:
            return True
        members = self.optimizers.members(optimizer).keys()
        if members.isdisjoint(self._own_ids):
            if not members.isdisjoint(map(id, self.model.parameters())):
                self.fail(
                    ParallaxError(
                        f"rank {self.comm.rank}: {type(optimizer).__name__} trains parameters that came into the model "
                        f"after parallax.distribute; build the whole model first, then call distribute"
                    )
                )
            return False
        self.optimizers.add(optimizer)
        self._unhook += [
            optimizer.register_state_dict_post_hook(self._post_optimizer_state_dict).remove,
            optimizer.register_load_state_dict_post_hook(self.optimizers.cut_states).remove,
        ]
        return True

    @as_it_is
    def _pre_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.phase is Phase.ENDED or not self._know(optimizer):
            return None
        with self._failing():
            if self.phase is Phase.BACKWARD:
                raise ParallaxError(
                    f"rank {self.comm.rank}: a backward pass did not come to its end before the optimizer's step: it "
                    f"failed, or all of it ran inside checkpoint(..., use_reentrant=True); use_reentrant=False works"
                )
            strangers = [
                p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and p not in self.names
            ]
            if strangers:
                raise ParallaxError(
                    f"rank {self.comm.rank}: {type(optimizer).__name__} trains a parameter of shape "
                    f"{tuple(strangers[0].shape)} that was not in the model when parallax.distribute was called; its "
                    f"gradient would not be exchanged. Build the whole model first, then call distribute"
                )
            self.lookups.flush()
            if self._held_back and self.phase is not Phase.SERVING:
                raise ParallaxError(
                    f"rank {self.comm.rank}: an optimizer's step after backward passes inside parallax.no_sync, whose "
                    f"gradients have not been exchanged; run the last backward pass of a step outside of it"
                )
            if self._uneven and self.phase is not Phase.SERVING:
                if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
                    raise ParallaxError(
                        f"rank {self.comm.rank}: a step with a closure cannot be repeated by ranks that are out of "
                        f"data; use drop_last=True"
                    )
                self._share_step(optimizer)
            self._check_by_rows(optimizer)
            self.optimizers.cut_states(optimizer)
        settings = settings_of(optimizer)
        self.rounds.settings = digest((self.optimizers.number(optimizer), settings))
        self.rounds.describe_settings = lambda: str(settings)
        self._step_depth += 1
        if self._step_depth > 1:  # an optimizer that steps another one
            return None
        self.rounds.version += 1
        self.clock.begin_update()
        self.optimizers.narrow(optimizer)
        self._resume_phase, self.phase = self.phase, Phase.STEPPING
        self.lookups.stepping = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.optimizers.join(optimizer, self.rounds.stacks)
            return None

        def outside_step(*a: Any, **k: Any) -> Any:
            """The closure runs forward and backward: there, tables are whole."""
            self.optimizers.widen()
            self._leave_step()
            try:
                return self._joint_loss(closure(*a, **k))
            finally:
                self.optimizers.narrow(optimizer)
                self.phase, self.lookups.stepping = Phase.STEPPING, True

        if len(args) > 1:
            return (args[0], outside_step, *args[2:]), kwargs
        return args, {**kwargs, "closure": outside_step}

    def _check_by_rows(self, optimizer: torch.optim.Optimizer) -> None:
        for table in self.tables.values():
            lazy = self.optimizers.is_lazy(optimizer, table)
            if not (lazy or table.sharded) or optimizer not in self.optimizers.of(table):
                continue
            how = self.optimizers.how(optimizer, table)
            if how.by_rows:
                continue
            if lazy:
                raise ParallaxError(
                    f"rank {self.comm.rank}: {table.name!r} is updated with Config.lazy_rows, but {how.reason}; use an "
                    f"optimizer that updates row by row"
                )
            raise ParallaxError(
                f"rank {self.comm.rank}: {table.name!r} is spread by rows, but {how.reason}. Pass this optimizer to "
                f"parallax.distribute(model, optimizer), which then keeps the table whole"
            )

    def _joint_loss(self, loss: Any) -> Any:
        """A closure's loss over all ranks, so that an optimizer that looks at it decides alike everywhere."""
        if loss is None:
            return None
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        parts = self.comm.all_gather((value, self.samples.latest))
        if self.config.reduction == "sum":
            joint = sum(part for part, _ in parts)
        else:
            joint = sum(part * n for part, n in parts if n) / (sum(n for _, n in parts) or 1.0)
        return torch.full_like(loss, joint, requires_grad=False) if isinstance(loss, torch.Tensor) else joint

    @as_it_is
    def _post_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.phase is Phase.ENDED or optimizer not in self.optimizers:
            return
        self._step_depth -= 1
        if not self._step_depth:
            self.optimizers.widen()
            self._leave_step()
            self.phase = self._resume_phase
            self.clock.end_update()
            self._stepped = True
            if not self._undecided:  # before the next round, stacks may change
                self.rounds.bring_updated(self.optimizers.tables_of(optimizer))

    def _leave_step(self) -> None:
        self.phase, self.lookups.stepping = Phase.FORWARD, False
        for stack in self.rounds.stacks:
            if stack.sharded and any(self.optimizers.of(table) for table in stack.tables):
                stack.forget_leases()

    # -- state --------------------------------------------------------------------------------------

    def _field(self, table: Table, field: int) -> torch.Tensor | None:
        """See `Rounds.fields`."""
        return table.grad if field == 1 else self.optimizers.field(table, field - 2)

    def _post_state_dict(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Tables are whole, plain tensors in a state dict."""
        for name, p in module._parameters.items():
            if isinstance(p, ShardedParameter) and prefix + name in state_dict:
                kept = state_dict[prefix + name]
                if not isinstance(kept, nn.Parameter):
                    state_dict[prefix + name] = self.reads.whole(p._table, "data")

    def _post_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Any) -> Any:
        return self.optimizers.whole_state(optimizer, state_dict, self.lookups.read_whole)

    def _on_change(self, table: Table) -> None:
        self.rounds.version += 1
        table.stack.forget_leases()

    # -- rounds and failures ------------------------------------------------------------------------

    def _run_round(self, request: Request) -> Round:
        if self.phase is Phase.ENDED:
            raise ParallaxError(
                f"rank {self.comm.rank}: this run has ended ({self.failed or 'parallax.shutdown was called'}): its "
                f"tables can no longer be reached. Save them before"
            )
        try:
            reads_gradients = request.want is Want.NORMS or request.field == 1
            if reads_gradients and self._uneven and self.reads.changes and self.phase is not Phase.SERVING:
                self._share_changes()
            return self.rounds.run(request)
        except (PeerError, DisagreementError) as error:  # the other ranks know
            self.failed = error
            self.phase = Phase.ENDED
            raise

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks of `error`, then raises it."""
        self._announce(error)
        raise error

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An exception in here is everyone's."""
        try:
            yield
        except BaseException as error:
            if self.failed is None:
                self._announce(error)
            raise

    def _announce(self, error: BaseException) -> None:
        if self.failed is not None or self.comm.world_size == 1:
            return
        self.failed = error
        self.optimizers.widen()
        if isinstance(error, PeerError):  # the rank that failed first has told everyone
            self.phase = Phase.ENDED
            return
        self.comm.report_failure(error)
        if self.phase in (Phase.FORWARD, Phase.CLOSING):
            with contextlib.suppress(Exception):  # the error at hand is the one to tell
                self._settle()  # as the others will, who may need no rounds then
        if self.comm.can_tell or self._needs_rounds():
            # The others hear of it in their next round; a thread, because they may take long to come.
            def tell() -> None:
                with contextlib.suppress(Exception):
                    self.rounds.fail(ANNOUNCE_SECONDS)

            thread = threading.Thread(target=tell, daemon=True)
            thread.start()
            thread.join(ANNOUNCE_SECONDS)
        self.phase = Phase.ENDED

    # -- what the user asks for -------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.exchange_dense = self.exchange_dense, False
        try:
            yield
        finally:
            self.exchange_dense = before

    def give_samples(self, number: float) -> None:
        self._check_alive()
        if self.phase is not Phase.FORWARD:
            raise ParallaxError(
                f"rank {self.comm.rank}: parallax.weight({number:g}) comes too late: call it before backward"
            )
        self.samples.give(number)

    def gather(self, value: Any) -> list[Any]:
        """The `value`s (picklable) of the ranks that have data, in rank order."""
        if self.comm.world_size == 1:
            return [value]
        with self._failing():
            self._check_alive()
            self._before_read()
            request = Request(flags=Flag.REDUCE, blob=pack(value).to(self.comm.device))
            now = self._run_round(request)
            while not all(f & (Flag.REDUCE | Flag.OUT) for f in now.flags):  # the others are on their way
                now = self._run_round(request)
            present = [blob for f, blob in zip(now.flags, now.blobs, strict=True) if f & Flag.REDUCE]
            return list(map(unpack, present))

    # -- ranks that part ways -----------------------------------------------------------------------

    def begin_loop(self) -> int:
        """This rank starts a loop over sharded data, which gets a number."""
        self.rounds.loop += 2 - self.rounds.loop % 2
        return self.rounds.loop

    def batch(self, loop: int, num_samples: int) -> None:
        """A loop of this rank gets a batch of so many samples."""
        self.samples.begin_batch(loop, num_samples)

    @property
    def looks_ahead(self) -> bool:
        """It is of use to know a batch before it is trained with."""
        tables = self.tables.values()
        return self._may_post and any(t.sharded for t in tables)

    def foresee(
        self, foresight: Foresight, batch: Sequence[torch.Tensor], following: Sequence[torch.Tensor] | None
    ) -> None:
        """A loop gets a batch, and knows the next one (or None).

        Args:
            foresight: what is known of the batches of its data.
            batch: its tensors.
        """
        foresight.begin(batch, following)
        self.lookups.foresight = foresight
        if foresight.is_certain and following is not None:
            self.asking.step()
        self.lookups.asks_ahead = self.asking.on

    def end_batches(self, loop: int, *, early: bool) -> None:
        """A loop of this rank is over: it was left early, or has no more data."""
        self.samples.end_batches(loop)
        self.lookups.foresight = None
        if early and loop == self.rounds.loop:
            self.rounds.loop += 1

    def drain(self) -> None:
        """This rank's loop has no more data: serves until every rank's has ended."""
        if self.comm.world_size > 1 and self.phase is not Phase.ENDED:
            self._serve(Flag.OUT)

    def _serve(self, flags: int) -> None:
        with self._failing():
            self._settle()
            self.lookups.flush()
            self.phase = Phase.SERVING
            about = Flag.ACTIVE | (Flag.CLEAN if self._is_clean() else 0)
            while True:
                if self._needs_rounds():
                    now = self._run_round(Request(flags=flags | about, weight=0.0))
                    if all(f & flags == flags for f in now.flags):
                        self._reconcile(now)
                        break
                    if all(f & Flag.OUT for f in now.flags):  # those whose programs go on leave the loop here
                        self._uneven = False
                    if now.closes_step:
                        about = 0
                        self.reads.forget()
                        for table in now.dropped:
                            table.grad = None
                        self._set_aside_stepped()
                        self._finish_step(now)
                    elif any(f & Flag.STEP for f in now.flags):
                        self._repeat_step(now)
                    elif any(f & Flag.CHANGED for f in now.flags):
                        changes = next(b for b, f in zip(now.blobs, now.flags, strict=True) if f & Flag.CHANGED)
                        self.repeats.redo(unpack(changes))
                elif flags & Flag.LEFT:  # without tables, nobody needs a rank that has ended
                    break
                else:
                    earlier = self._set_aside_stepped()
                    totals = self.dense.finish(self._contribution())
                    self._check_together(totals)
                    self._bring_back()
                    if totals is None or totals.num_out == self.comm.world_size:
                        for p, grad in earlier.items():
                            p.grad = grad
                        break
                    self._num_steps += 1
                    self._uneven, about = True, 0
            self._uneven = False
            self.clock.stop()
            self.phase = Phase.FORWARD

    def _is_clean(self) -> bool:
        held = [self.tables[name].grad if name in self.tables else p.grad for p, name in self.names.items()]
        return not any(
            grad is not None and bool(grad.coalesce().values().any() if grad.is_sparse else grad.any()) for grad in held
        )

    def _reconcile(self, last: Round) -> None:
        """The end of a loop in which ranks were served: they take over what the others did outside of steps."""
        if any(f & Flag.LEFT for f in last.flags) or all(f & Flag.ACTIVE for f in last.flags):
            return
        source = next(r for r, f in enumerate(last.flags) if f & Flag.ACTIVE)
        self.comm.broadcast([p.data for p, name in self.names.items() if not self._is_sharded(name)], source)
        mine = pack((self.scalers.states(), self._leftover())) if self.comm.rank == source else None
        scalers, leftover = unpack(self.comm.all_gather(mine)[source])
        if last.flags[self.comm.rank] & Flag.ACTIVE:
            return
        self.scalers.take_over(scalers)
        copies, changes, zeros = leftover
        if last.flags[source] & Flag.CLEAN:
            self._drop_gradients()
            for name in zeros:
                if name in self.tables:
                    self.tables[name].grad = self.tables[name].zero_gradient()
                else:
                    self.parameters[name].grad = torch.zeros_like(self.parameters[name])
            return
        for name, grad in copies.items():
            p = self.parameters[name]
            p.grad = None if grad is None else grad.to(p.device)
        self.repeats.redo(changes)

    def _share_changes(self) -> None:
        """Ranks without data do to the gradients of tables what was done to them here."""
        self.repeats.check()
        changes = self.reads.take_changes()
        self._run_round(Request(flags=Flag.CHANGED, blob=pack(changes).to(self.comm.device)))

    def _leftover(self) -> tuple[dict[str, torch.Tensor | None], dict[str, list[Change]], list[str]]:
        """What is left of gradients that were not stepped with, for ranks that were served: those of copies, and what
        was done to those of tables; or if nothing is left, the names of those that are there and zero."""
        if self._is_clean():
            return {}, {}, [name for p, name in self.names.items() if p.grad is not None]
        if self._stepped:
            return {}, {}, []
        copies = {} if self._held_back else {n: p.grad for n, p in self.parameters.items() if not self._is_sharded(n)}
        return copies, self.reads.changes, []

    def _is_sharded(self, name: str) -> bool:
        return name in self.tables and self.tables[name].sharded

    def _share_step(self, optimizer: torch.optim.Optimizer) -> None:
        blob = self.repeats.record(optimizer).to(self.comm.device)
        self._run_round(Request(flags=Flag.STEP, weight=self.samples.latest, blob=blob))
        for table in self.optimizers.tables_of(optimizer):
            self.reads.changes.pop(table.name, None)  # repeated now

    def _repeat_step(self, now: Round) -> None:
        source = next(r for r, f in enumerate(now.flags) if f & Flag.STEP)
        self.repeats.repeat(now.blobs[source])

    def _set_aside_stepped(self) -> dict[nn.Parameter, torch.Tensor]:
        """Gradients of copies that have been stepped with do not add to those of the next step; returns them."""
        copies = [p for p, name in self.names.items() if self._stepped and not self._is_sharded(name)]
        earlier = {p: p.grad for p in copies if p.grad is not None}
        for p in copies:
            p.grad = None
        self._stepped = False
        return earlier

    def _drop_gradients(self) -> None:
        for p in self.names:
            with torch._C.DisableTorchFunctionSubclass():
                p.grad = None
        self._stepped = False

    def _leave_at_exit(self) -> None:
        try:
            self.leave()
        except ParallaxError as error:
            print(f"parallax: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def leave(self) -> None:
        """This rank's program ends: serves until all have ended, then gives everything back."""
        global _current
        self.optimizers.widen()  # a step may have failed
        try:
            if self.comm.alive and self.phase is not Phase.ENDED and self.failed is None:
                if self.samples.in_loop:
                    self.rounds.loop |= 1
                self._serve(Flag.OUT | Flag.LEFT)
        finally:
            self.phase = Phase.ENDED
            for undo in self._unhook:
                undo()
            self._unhook.clear()
            self.comm.close(wait=self.failed is None)
            if _current is self:
                _current = None

    def explain(self) -> Plan:
        return self.plan

    def traffic(self) -> Traffic:
        sent = self.comm.sent
        return Traffic(self._num_steps, self.rounds.num_rounds, sent.headers, sent.tables, sent.dense, sent.inside)


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what it is likely to call first: training may go through model.loss(...)."""
    yield model
    for child in model.children():
        yield from _called(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else (child,)
