"""`torch.compile`: its graphs end where they meet a table, and what happens there runs as it is.

See docs/design/compile.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

C = TypeVar("C", bound=type[torch.Tensor])
F = TypeVar("F", bound=Callable[..., Any])


def as_it_is(function: F) -> F:
    """Keeps `function` and what it calls out of compiled graphs: they break where it is called."""
    reason = "parallax communicates here, which no graph can do: compile without fullgraph=True, see docs/limits.md"
    disabled = torch.compiler.disable(function, reason=reason)

    @functools.wraps(disabled)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Where nothing is compiled, which is usual, there is nothing to switch off: that takes as long as what we do.
        return function(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)

    found = cast(Any, run)
    skip_code(found.__code__)  # it is no graph of its own
    return cast(F, found)


def untraced(cls: C) -> C:
    """Makes graphs break at tensors of class `cls`, and keeps what these do out of them."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)
    for name in ("__torch_function__", "__torch_dispatch__"):
        method: Any = vars(cls).get(name)
        if isinstance(method, classmethod):
            setattr(cls, name, classmethod(as_it_is(method.__func__)))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
        # torch 2.13: tracing `x += 1` for such an x does not end, unless it meets a function that it may not enter.
        setattr(cls, f"__i{name}__", as_it_is(getattr(cls, f"__i{name}__")))
    return cls


def uncompiled(model: Any) -> Any:
    """The module that `torch.compile(module)` has made `model` of; `model` itself if it has not."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
