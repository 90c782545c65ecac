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
        self._batch: float | None = None
        self._seen = 1.0
        self._seen_any = False

    @property
    def number(self) -> float:
        if self._given is not None:
            return self._given
        return self._seen if self._batch is None else self._batch

    def give(self, number: float) -> None:
        """The user says it, for the next backward pass."""
        self._given = number

    def begin_batch(self, number: int) -> None:
        self._batch = float(number)

    def end_batches(self) -> None:
        """The loop is over or was left: its last batch says nothing of what comes."""
        if self._batch is not None:
            self._seen, self._batch = self._batch, None
        self._seen_any = False

    def wants(self, by_model: bool) -> bool:
        """Whether there is something to `see`."""
        return self._batch is None and (by_model or not self._seen_any)

    def see(self, number: int, by_model: bool) -> None:
        if by_model or not self._seen_any:
            # An empty lookup is an empty batch, unless another lookup has something.
            self._seen, self._seen_any = float(number), by_model or number > 0

    def end_backward(self) -> None:
        self.latest = self.number
        self._given = None
        self._seen_any = False
