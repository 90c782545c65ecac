"""What a placement costs: bytes on the wire, from what was observed of a parameter.

The formulas are those of table 3 of arXiv 1808.02621 (Parallax), with w the bytes of a parameter, alpha the
fraction of its rows that one worker touches in a step, and N the number of workers. The paper counts what a
machine sends *and* receives; here, as in `parallax.traffic`, only what one worker *sends* counts: half of it.
"""

from __future__ import annotations

from parallax.plan import ParameterProfile, Placement

ID_BYTES = 4
"""Bytes of a row's id on the wire."""


def bytes_per_step(profile: ParameterProfile, placement: Placement, world_size: int) -> float:
    """Bytes that one worker sends in one step for a parameter, on average over the workers.

    Args:
        profile: the parameter; `alpha` and whether it is trainable count.
        placement: where it lives.
        world_size: N, at least 1.
    """
    if placement is Placement.ALLREDUCE:
        return allreduce_bytes(profile, world_size)
    if placement is Placement.GATHER:
        return gather_bytes(profile, world_size)
    if placement is Placement.SHARDED:
        return sharded_bytes(profile, world_size)
    return 0.0


def allreduce_bytes(profile: ParameterProfile, world_size: int) -> float:
    """2w(N-1)/N: a ring passes each part of the gradient on N-1 times to add it up, and N-1 times to hand it
    out (arXiv 1808.02621, table 3, dense by AllReduce: 4w(N-1)/N sent and received)."""
    return 2 * profile.num_bytes * (world_size - 1) / world_size


def gather_bytes(profile: ParameterProfile, world_size: int) -> float:
    """alpha·w(N-1), and one id per row: the touched rows of the gradient go to every other worker
    (arXiv 1808.02621, table 3, sparse by AllGather: 2·alpha·w(N-1) sent and received; ids not counted)."""
    return _rows_touched(profile) * (profile.row_bytes + ID_BYTES) * (world_size - 1)


def sharded_bytes(profile: ParameterProfile, world_size: int) -> float:
    """2·alpha·w(N-1)/N, and one id per row (arXiv 1808.02621, table 3, sparse by a parameter server, its rows
    spread evenly: 4·alpha·w(N-1)/N sent and received; ids not counted).

    (N-1)/N of the touched rows live elsewhere. For each of them a worker sends its id, later its gradient
    (which refers to the id that was sent, so it travels without one), and, being an owner itself, a row to
    somebody else. Rows that are not trained have no gradient.
    """
    num_remote = _rows_touched(profile) * (world_size - 1) / world_size
    num_rows_sent = 2 if profile.trainable else 1
    return num_remote * (num_rows_sent * profile.row_bytes + ID_BYTES)


def _rows_touched(profile: ParameterProfile) -> float:
    return profile.alpha * profile.num_rows  # all of them if it is used whole, whatever was looked up
