"""Loss scales: `torch.amp.GradScaler` changes its own after each step, which ranks without data do not take part in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.amp import GradScaler


class Scalers:
    """The scalers that this rank has used, in the order of their first use."""

    def __init__(self) -> None:
        self._known: list[GradScaler] = []
        self._waiting: list[dict[str, Any]] = []
        """States for those that this rank has yet to use."""

    def watch(self) -> Callable[[], None]:
        """From here on scalers are noticed; returns what ends it."""
        scale = GradScaler.scale

        @functools.wraps(scale)
        def noticed(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled() and all(known is not scaler for known in self._known):
                self._known.append(scaler)
                if self._waiting:
                    scaler.load_state_dict(self._waiting.pop(0))
            return scale(scaler, outputs)

        def end() -> None:
            GradScaler.scale = scale  # type: ignore[method-assign]

        GradScaler.scale = noticed  # type: ignore[method-assign,assignment]
        return end

    def states(self) -> list[dict[str, Any]]:
        return [scaler.state_dict() for scaler in self._known]

    def take_over(self, states: Sequence[dict[str, Any]]) -> None:
        """Sets the scalers to the `states` of another rank's."""
        for scaler, state in zip(self._known, states, strict=False):
            scaler.load_state_dict(state)
        self._waiting = list(states[len(self._known) :])
