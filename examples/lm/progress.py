"""How a run shows itself: a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0
SMOOTHING = 0.95


class Training:
    """One training run: counts words, knows when it is over, and shows how it goes.

    Used as a context; the time that passes inside `paused()` is not counted as training.
    """

    def __init__(self, *, steps: int | None, minutes: float, words_per_step: int, show: bool) -> None:
        """
        Args:
            steps: optimizer steps to take, or None to train for `minutes` instead.
            words_per_step: of all workers together.
            show: whether this process prints; one of several workers should.
        """
        self.num_steps = 0
        self._steps, self._seconds = steps, 60 * minutes
        self._words_per_step = words_per_step
        self._console = Console(quiet=not show)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (show and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=steps or self._seconds, status="")
        self._loss = 0.0
        self._started = time.monotonic()
        self._next_line = SECONDS_BETWEEN_LINES
        self._paused_seconds = 0.0

    def __enter__(self) -> Training:
        self._started = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return time.monotonic() - self._started - self._paused_seconds

    @property
    def words_per_second(self) -> float:
        return self.num_steps * self._words_per_step / max(self.seconds, 1e-9)

    @property
    def over(self) -> bool:
        return self.num_steps >= self._steps if self._steps is not None else self.seconds >= self._seconds

    def step(self, loss: float) -> None:
        """A step was taken; `loss` is this worker's."""
        self.num_steps += 1
        weight = max(1 - SMOOTHING, 1 / self.num_steps)
        self._loss += weight * (loss - self._loss)
        status = f"step {self.num_steps:,}  loss {self._loss:.3f}  {self.words_per_second:,.0f} words/s"
        done = self.num_steps if self._steps is not None else self.seconds
        self._bar.update(self._task, completed=done, status=status)
        if self._bar.disable and self.seconds >= self._next_line:
            self._next_line = self.seconds + SECONDS_BETWEEN_LINES
            self.say(f"{self.seconds:6.0f} s  {status}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        since = time.monotonic()
        yield
        self._paused_seconds += time.monotonic() - since
