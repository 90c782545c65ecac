"""How many samples are behind a rank's loss: its weight in the mean over all ranks."""

from __future__ import annotations


class Samples:
    """The number of samples of this rank's next backward pass, by what is most certain of it.

    That is: what the user said (`parallax.weight`), the batch of the loop over `parallax.shard`, the leading
    dimension of what the model's latest forward got, that of what was seen first (a child module's input, a lookup).
    """

    def __init__(self) -> None:
        self.latest = 1.0
        """The number behind the latest backward pass."""
        self._given: float | None = None
        self._batches: dict[int, float] = {}
        """By loop under way, its latest batch; the newest last."""
        self._seen = 1.0
        self._seen_any = False

    @property
    def number(self) -> float:
        if self._given is not None:
            return self._given
        return next(reversed(self._batches.values()), self._seen)

    def give(self, number: float) -> None:
        """The user says it, for the next backward pass."""
        self._given = number

    def begin_batch(self, loop: int, number: int) -> None:
        self._batches.pop(loop, None)
        self._batches[loop] = float(number)

    def end_batches(self, loop: int) -> None:
        """The loop is over or was left: its last batch says nothing of what comes; that of a loop around it does."""
        self._seen = self._batches.pop(loop, self._seen)
        self._seen_any = False

    @property
    def in_loop(self) -> bool:
        """A loop is under way."""
        return bool(self._batches)

    def wants(self, by_model: bool) -> bool:
        """Whether there is something to `see`."""
        return not self._batches and (by_model or not self._seen_any)

    def see(self, number: int, by_model: bool) -> None:
        if by_model or not self._seen_any:
            # An empty lookup is an empty batch, unless another lookup has something.
            self._seen, self._seen_any = float(number), by_model or number > 0

    def end_backward(self) -> None:
        self.latest = self.number
        self._given = None
        self._seen_any = False
