"""Tables go where a plan wants them, between two steps: weights, optimizer state and gradients, exactly as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from parallax.comm import Comm, DisagreementError
from parallax.lookup import Lookups
from parallax.mesh import Column
from parallax.optimizer import Optimizers
from parallax.parameter import ShardedParameter, WatchedParameter, adopt, release
from parallax.partitioning import Partitioning, Places
from parallax.plan import REDUCED, ParameterPlan, Placement, Plan, Use
from parallax.table import Table
from parallax.whole import WholeReads


class Moves:
    """Applies plans to the tables of a run."""

    def __init__(
        self,
        comm: Comm,
        tables: dict[str, Table],
        optimizers: Optimizers,
        lookups: Lookups,
        reads: WholeReads,
    ) -> None:
        """
        Args:
            tables: those whose rows travel, by name; a table that is to be reduced whole is taken out.
        """
        self._comm, self.tables, self._optimizers = comm, tables, optimizers
        self._lookups, self._reads = lookups, reads
        self.order: list[str] = []
        """Names of parameters that are reduced whole, in the order in which their gradients arrive."""
        self.sparse: set[nn.Parameter] = set()
        """Those of them whose gradients are COO tensors."""
        self.reduced: dict[str, Table] = {}
        """Tables that are reduced whole, as they were before."""

    def apply(self, plan: Plan) -> None:
        """Every table to its place; all ranks together, if one of them is spread already."""
        for name, table in list(self.reduced.items()):
            if plan[name].placement not in REDUCED:
                del self.reduced[name]
                self.order.remove(name)
                self.sparse.discard(table.parameter)
                self.tables[name] = table
                adopt(table.parameter, WatchedParameter, table, self._lookups, self._reads)
        for name, table in list(self.tables.items()):
            decided = plan[name]
            owners = table.partitioning.owners if table.partitioning else ()
            if (table.placement, owners) != (decided.placement, decided.owners):
                self.place(table, decided)

    def place(self, table: Table, decided: ParameterPlan) -> None:
        p, placement = table.parameter, decided.placement
        if table.placement in (*REDUCED, Placement.GATHER, Placement.SHARDED) and table.placement != placement:
            torch.compiler.reset()  # graphs would not notice that the parameter has another class
        if placement is Placement.SHARDED:
            self.shard(table, decided.owners)
        elif table.sharded:
            move_table(table, None, self._optimizers, self._comm)
            adopt(p, WatchedParameter, table, self._lookups, self._reads)
        table.placement = placement
        if placement in REDUCED:
            release(p)
            if table.sparse_grad and Use.DENSE not in table.use:
                self.sparse.add(p)
            self.reduced[table.name] = self.tables.pop(table.name)
            if table.name not in self.order:
                self.order.append(table.name)

    def shard(self, table: Table, owners: Sequence[int]) -> None:
        """Deals the rows out to `owners`, one for each partition."""
        comm = self._comm
        new = Partitioning(table.num_rows, owners, comm.world_size, comm.device)
        move_table(table, new, self._optimizers, comm)
        table.placement = Placement.SHARDED
        adopt(table.parameter, ShardedParameter, table, self._lookups, self._reads)


def move_table(table: Table, new: Partitioning | None, optimizers: Optimizers, comm: Comm) -> None:
    """Deals the rows of `table` out as `new` says, or makes every rank a copy (None). All ranks call it together.

    What comes along is what has a row per row of the table: the weight, the gradient if there is one, and the state
    of optimizers. A graph that was made before may still be run backward: its leases are translated.

    Raises:
        DisagreementError: (on all ranks) they do not hold the same of it: a gradient was dropped on some only.
    """
    states = []
    for optimizer, key in optimizers.entries(table):
        optimizers.cut_state(optimizer, table)
        state = optimizer.state.get(table.parameter, {})
        if isinstance(state.get(key), torch.Tensor):
            states.append((state, key))
    grad = table.grad
    held = [table.data, *(state[key] for state, key in states), *([] if grad is None else [grad])]
    if table.sharded:  # copies are cut without asking anybody
        kinds = [(str(t.dtype), str(t.layout), tuple(t.shape[1:])) for t in held]
        for other, theirs in enumerate(comm.gather(kinds)):
            if theirs != kinds:
                raise DisagreementError(
                    f"rank {comm.rank}: the rows of {table.name!r} are about to move, but this rank holds {kinds} of "
                    f"them (weight, optimizer state, gradient), and rank {other} {theirs}; drop gradients and load "
                    f"optimizer state on all ranks alike"
                )
    moved = move_rows(held, table.partitioning, new, comm)
    table.grad = None
    table.partitioning = new  # which stack it is in is said when all tables are in their places (`stacked`)
    table.set_data(moved[0])
    for (state, key), value in zip(states, moved[1:], strict=False):
        state[key] = value
    if grad is not None:
        table.grad = moved[-1]


def move_rows(
    held: Sequence[torch.Tensor], old: Partitioning | None, new: Partitioning | None, comm: Comm
) -> list[torch.Tensor]:
    """What this rank holds under partitioning `new` of tensors whose parts under `old` the ranks hold; None is a copy
    on each rank.

    Args:
        held: this rank's parts, shape (rows held, ...), dense or COO; of the same kinds on all ranks.
    """
    if old is None:
        return list(held) if new is None else [_picked(tensor, new.rows_of(comm.rank)) for tensor in held]
    plain = [part for tensor in held for part in _plain(tensor)]
    if new is None:
        rows = torch.cat([old.rows_of(r) for r in range(comm.world_size)])
        outgoing = [Column.same(part, comm.world_size) for part in plain]
        moved = _swapped(outgoing, old.num_held, rows, comm)
    else:
        rows, places = old.rows_of(comm.rank), Places([new], comm.world_size, comm.device)
        keys, order = places.keys(rows, [(0, len(rows))]).sort()
        spans = places.by_owner(places.cuts(keys))
        mine = new.rows_of(comm.rank)
        owners, positions = old.owner_of(mine).sort(stable=True)  # each sends rows in our order
        num_rows = torch.bincount(owners, minlength=comm.world_size).tolist()
        moved = _swapped([Column(part[order], spans) for part in plain], num_rows, positions, comm)
    parts = iter(moved)
    return [_like(tensor, parts) for tensor in held]


def _swapped(
    outgoing: Sequence[Column], num_rows: Sequence[int], positions: torch.Tensor, comm: Comm
) -> list[torch.Tensor]:
    """What the ranks send here of each column: `num_rows` from each, for these `positions`."""
    room = [
        Column.split(column.tensor.new_empty(len(positions), *column.tensor.shape[1:]), num_rows) for column in outgoing
    ]
    comm.swap(outgoing, room)
    return [torch.empty_like(column.tensor).index_copy_(0, positions, column.tensor) for column in room]


def _picked(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    picked = tensor.detach().index_select(0, rows.to(tensor.device))
    return picked.coalesce() if picked.layout == torch.sparse_coo else picked


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor` as contiguous dense tensors; a COO tensor (with dense rows) also as which rows it has."""
    if tensor.layout == torch.strided:
        return [tensor.detach().contiguous()]
    tensor = tensor.detach().coalesce()
    has_row = torch.zeros(tensor.shape[0], dtype=torch.bool, device=tensor.device)
    has_row[tensor.indices()[0]] = True
    return [tensor.to_dense(), has_row]


def _like(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """What `_plain` made `parts` of."""
    dense = next(parts)
    if tensor.layout == torch.strided:
        return dense
    rows = next(parts).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False)
