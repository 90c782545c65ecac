"""Before the first step: what is known of a model, and whether all ranks start from the same."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from parallax.comm import Comm, DisagreementError, ParallaxError, rank
from parallax.config import Config
from parallax.optimizer import state_summary
from parallax.partitioning import Partitioning
from parallax.plan import ParameterProfile, Use
from parallax.table import Table


def device_of(model: nn.Module) -> torch.device:
    devices = {p.device: name for name, p in model.named_parameters() if not p.is_meta}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ParallaxError(
            f"rank {rank()}: the model's parameters are on several devices ({places}); parallax needs one per worker"
        )
    return next(iter(devices), torch.device("cpu"))


def first_profiles(model: nn.Module) -> dict[str, ParameterProfile]:
    """What is known of each parameter before the first step."""
    profiles = {}
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    renormed = {m.weight for m in embeddings if m.max_norm is not None}
    # not for bags: torch 2.13 divides their gradients by the counts of other rows
    by_frequency = {m.weight for m in embeddings if m.scale_grad_by_freq and isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        plain = type(p) is nn.Parameter and p.dim() > 0 and p.is_floating_point()
        profiles[name] = ParameterProfile(
            name=name,
            shape=tuple(p.shape),
            itemsize=p.dtype.itemsize,
            use=Use.NONE if plain or not p.requires_grad else Use.DENSE,
            trainable=p.requires_grad,
            meta=p.is_meta,
            renormed=p in renormed,
            by_frequency=p in by_frequency,
        )
    return profiles


OWN_SETTINGS = {"init", "timeout"}
"""Fields of a `Config` in which ranks may differ."""


def check_same_config(comm: Comm, config: Config) -> None:
    names = [field.name for field in dataclasses.fields(config) if field.name not in OWN_SETTINGS]
    mine = {name: getattr(config, name) for name in names}
    for other, theirs in enumerate(comm.all_gather(mine)):
        differing = [name for name in names if theirs[name] != mine[name]]
        if differing:
            name = differing[0]
            raise DisagreementError(
                f"rank {comm.rank}: Config.{name} differs from that of rank {other}: {mine[name]!r} here, "
                f"{theirs[name]!r} there. Every rank must give parallax.distribute the same settings"
            )


def check_same_model(comm: Comm, profiles: Mapping[str, ParameterProfile]) -> None:
    mine = [(p.name, p.shape, p.itemsize, p.trainable) for p in profiles.values()]
    for other, theirs in enumerate(comm.all_gather(mine)):
        if theirs != mine:
            differing = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
            example = f"{differing[0][0]} here, {differing[0][1]} there" if differing else "its number of parameters"
            raise DisagreementError(
                f"rank {comm.rank}: the model differs from that of rank {other}: {example}. "
                f"Every rank must build the same model"
            )


def check_same_optimizers(comm: Comm, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    mine = [(type(o).__name__, *state_summary(o)) for o in optimizers]
    for other, theirs in enumerate(comm.all_gather(mine)):
        if repr(theirs) != repr(mine):  # as text, in which NaN equals NaN
            what = "their number, class or settings"
            if [o[:2] for o in theirs] == [o[:2] for o in mine]:
                what = "their state: load a checkpoint on all ranks"
            raise DisagreementError(
                f"rank {comm.rank}: the optimizers given to parallax.distribute differ from those of rank "
                f"{other} in {what}"
            )


def make_rows(comm: Comm, model: nn.Module, table: Table, owners: Sequence[int], config: Config) -> None:
    """Makes this rank's rows of a table that was built on the meta device."""
    table.partitioning = partitioning = Partitioning(table.num_rows, owners, comm.world_size, comm.device)
    rows = torch.empty((table.num_held, *table.row_shape), dtype=table.dtype, device=comm.device)
    module, attribute = _holder(model, table.name)
    devices = [] if comm.device.type == "cpu" else [comm.device]
    with torch.random.fork_rng(devices=devices):
        # Ranks and tables draw different rows.
        torch.manual_seed((torch.initial_seed() + zlib.crc32(f"{table.name} {comm.rank}".encode())) % 2**63)
        if config.init is not None:
            config.init(table.name, rows)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and attribute == "weight":
            rows.normal_()
            if module.padding_idx is not None:
                rows[partitioning.rows_of(comm.rank) == module.padding_idx] = 0
        else:
            raise ParallaxError(
                f"rank {comm.rank}: {table.name!r} was built on the meta device and is not the weight of an "
                f"nn.Embedding; say how its rows are filled: Config(init=function_of_name_and_rows)"
            )
    torch.utils.swap_tensors(table.parameter, nn.Parameter(rows, table.parameter.requires_grad))


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
