"""What rows and gradients look like on the wire (`Config.wire_dtype`): pure functions, on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from parallax.config import WireDtype
from parallax.cost import wire_row

LARGEST = 127
"""int8 is used symmetrically, from -127 to 127."""


def encode(rows: torch.Tensor, wire: WireDtype) -> list[torch.Tensor]:
    """What travels for `rows`, of shape (n, width) and a dtype of floats: one tensor, or two with a row for each row.

    As it is in memory if that is not larger, else (`cost.wire_row` decides) cast to bfloat16 or float16, rounded to the
    nearest (a value beyond the range becomes infinite); or int8: round(row / scale), and the row's scale, max|row| /
    127 in float32, shape (n, 1). What is not finite stays so: in int8, all of its row becomes NaN.
    """
    [(_, dtype), *scale] = _layout(rows.shape[1], rows.dtype, wire)
    if not scale:
        return [rows.to(dtype)]
    # faster than rows.abs().amax(1); NaN shows in it
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    scales = largest.float().div_(LARGEST)
    steps = (rows / scales).nan_to_num_(0.0)  # 0 / 0 in a row of zeros; elsewhere the scale tells
    return [steps.clamp_(-LARGEST, LARGEST).round_().to(dtype), scales]


def new_encoded(
    num_rows: int, width: int, dtype: torch.dtype, wire: WireDtype, device: torch.device
) -> list[torch.Tensor]:
    """Empty tensors for what `encode` makes of so many rows of that width and dtype."""
    return [new_rows(num_rows, (w,), d, device) for w, d in _layout(width, dtype, wire)]


def new_rows(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor of so many rows of `shape`."""
    return torch.empty(num_rows, *shape, dtype=dtype, device=device) if num_rows else _nothing(shape, dtype, device)


@functools.cache  # most of what a message may bring it does not
def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, *shape, dtype=dtype, device=device)


def decode(encoded: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The rows, in their own dtype, of which `encoded` was made."""
    values = encoded[0] if len(encoded) == 1 else encoded[0] * encoded[1]
    return values.to(dtype)


def bucket_dtype(dtype: torch.dtype, wire: WireDtype) -> torch.dtype:
    """In which dense gradients of `dtype` are reduced. There is no int8: sums outgrow the scales of what is summed."""
    if wire == "float32" or not dtype.is_floating_point or dtype.itemsize <= 2:
        return dtype
    return torch.float16 if wire == "float16" else torch.bfloat16


@functools.cache
def _layout(width: int, dtype: torch.dtype, wire: WireDtype) -> list[tuple[int, torch.dtype]]:
    """Width and dtype of each tensor that travels."""
    way, _ = wire_row(width, dtype.itemsize, wire)
    if way == "int8":
        return [(width, torch.int8), (1, torch.float32)]
    return [(width, dtype if way == "float32" else getattr(torch, way))]
