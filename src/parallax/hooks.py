"""Hooks that a user puts on parameters: they run when the gradient is what one device would have.

Autograd runs a parameter's hooks when this rank's own gradient is ready, which has yet to be reduced, and never for
rows of a table, whose gradients go another way. So hooks stay where torch keeps them (their handles remain valid),
but wrapped, and run at the end of the backward pass.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


class _Later:
    """A hook that does nothing when autograd calls it."""

    def __init__(self, hook: Callable[..., Any], holds: Callable[[], bool]) -> None:
        self.hook, self._holds = hook, holds

    def __call__(self, *args: Any) -> Any:
        return None if self._holds() else self.hook(*args)


class _Hooks(collections.OrderedDict[int, Any]):
    """A tensor's hooks by number; each is wrapped as it comes in."""

    def __init__(self, earlier: Mapping[int, Any] | None, run: ParameterHooks) -> None:
        super().__init__()
        self._run = run
        self._earlier, self._numbers = earlier or {}, frozenset(earlier or ())
        for number, hook in self._earlier.items():
            self[number] = hook

    def __setitem__(self, number: int, hook: Any) -> None:
        self._run.registered = True
        super().__setitem__(number, _Later(hook, self._run.hold))

    def set_own(self, number: int, hook: Callable[..., Any]) -> None:
        """Puts in a hook of ours, for autograd to run."""
        super().__setitem__(number, hook)

    def of_user(self) -> list[Callable[..., Any]]:
        def is_there(number: int) -> bool:  # the handle of an earlier hook takes it out of the mapping it was put in
            return number not in self._numbers or number in self._earlier

        return [later.hook for number, later in self.items() if isinstance(later, _Later) and is_there(number)]

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()


class ParameterHooks:
    """The users' hooks on the parameters of a run."""

    def __init__(self, holds: Callable[[], bool], on_change: Callable[[], None]) -> None:
        """
        Args:
            holds: whether the run goes on; when not, autograd runs the hooks again.
            on_change: told when a hook has changed a gradient, which it has to do on all ranks.
        """
        self.hold, self._on_change = holds, on_change
        self.registered = False
        """A hook was put on a parameter, at some time."""
        self._on_gradient: dict[nn.Parameter, _Hooks] = {}
        self._after: dict[nn.Parameter, _Hooks] = {}

    def take_over(self, p: nn.Parameter, own: Callable[[nn.Parameter], None] | None = None) -> None:
        """From now on the hooks of `p` wait; `own` runs when this rank's gradient has been accumulated."""
        with torch._C.DisableTorchFunctionSubclass():
            if p not in self._on_gradient:
                hooks = self._on_gradient[p] = _Hooks(p._backward_hooks, self)
                p._backward_hooks = hooks
                after = self._after[p] = _Hooks(p._post_accumulate_grad_hooks, self)
                p._post_accumulate_grad_hooks = after
            if own is not None:
                self._after[p].set_own(-1, own)

    def waits(self, p: nn.Parameter) -> bool:
        """Whether `p` has hooks that want its gradient."""
        return self.registered and p in self._on_gradient and bool(self._on_gradient[p].of_user())

    @property
    def any(self) -> bool:
        """Whether there are hooks of the user."""
        both = (self._on_gradient, self._after)
        return self.registered and any(hooks.of_user() for kind in both for hooks in kind.values())

    def on_gradient(self, p: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """What the hooks make of a gradient of `p` before it is accumulated."""
        for hook in self._on_gradient[p].of_user():
            version = grad._version
            changed = hook(grad)
            if changed is not None or grad._version != version:
                self._on_change()
            if changed is not None:
                if changed.shape != grad.shape:
                    raise RuntimeError(f"hook {hook!r} has changed the size of value")
                grad = changed
        return grad

    def after_accumulation(self, parameters: Iterable[nn.Parameter]) -> None:
        """Runs the hooks that see a parameter with its new gradient."""
        for p in parameters:
            for hook in self._after[p].of_user():
                hook(p)

    def let_go(self) -> None:
        """The run is over."""
        for hooks in self._after.values():
            hooks.pop(-1, None)
