"""Workers of one machine merge before they send: a row crosses a machine's link once in each direction.

For the rows of each rank on another machine, one worker here, the *agent*, talks to that rank on behalf of all workers
of the machine (an owner on this machine is asked itself). What is a round otherwise then has five parts: the workers
tell agents which rows they want and what gradients they have; agents put the wishes together and add the gradients up;
agents run the round; rows are leased on to the workers that asked. To an owner, an agent is a worker like any other.
What stays on the machine is not rounded for the wire (`Config.wire_dtype`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from parallax.comm import Comm
from parallax.mesh import Column
from parallax.message import Arrival, Ask, Request, Want, bits, number, of_stacks, pack
from parallax.table import Push, Stack

Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Merging:
    """The workers of this machine, as one of them sees them."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.scale: Callable[[float], float] = lambda weight: weight
        """By what a worker's gradients are multiplied, given its weight, so that they can be added up."""

    def run(self, request: Request, stacks: Sequence[Stack], exchange: Callable[[Request], Rows]) -> Rows:
        """One round of all workers.

        Args:
            request: what this worker brings.
            exchange: runs a round between all ranks, and gives the rows of each of its asks.

        Returns:
            The rows of each ask of `request`.
        """
        merged = [stack for stack in stacks if stack.merged]
        while True:
            arrivals = self._tell(request, merged)
            agencies = [_Agency(arrival) for arrival in arrivals]
            asks = [ask for agency in agencies if (ask := agency.ask()) is not None]
            pushes = [push for agency in agencies if (push := agency.push()) is not None]
            direct = [ask for ask in request.asks if not ask.merged]
            # A header has one place for what is wanted of a stack: a read of its own waits until nobody wants rows.
            waits = (bool(direct) or request.want is not Want.ROWS) and bool(asks or pushes)
            if waits:
                rows = exchange(Request(asks=asks, pushes=pushes))
            else:
                own_pushes = [push for push in request.pushes if not push.stack.merged]
                rows = exchange(dataclasses.replace(request, asks=[*asks, *direct], pushes=[*pushes, *own_pushes]))
            found = dict(zip((ask.stack for ask in [*asks, *direct]), rows, strict=not waits))
            leased_on = self._lease_on(request, agencies, found)
            if not waits:
                return [leased_on[ask.stack] if ask.merged else found[ask.stack] for ask in request.asks]

    def _tell(self, request: Request, stacks: Sequence[Stack]) -> list[Arrival]:
        """What the workers of this machine want of this one as their agent, and bring."""
        mine = Request(
            asks=[ask for ask in request.asks if ask.merged],
            pushes=[push for push in request.pushes if push.stack.merged],
        )
        weight = bits(self.scale(request.weight))
        headers, columns = pack(mine, stacks, [weight], len(self._comm.members))
        arrivals: list[Arrival] = []

        def make_room(headers: Sequence[Sequence[int]]) -> list[Column]:
            scales = [number(h[0]) for h in headers]
            for stack, parts in zip(stacks, of_stacks(headers, 1), strict=True):
                arrivals.append(Arrival(stack, parts, torch.int64, scales=scales))
            return [column for arrival in arrivals for column in arrival.columns]

        self._comm.exchange(headers, columns, make_room, self._comm.members)
        return arrivals

    def _lease_on(
        self,
        request: Request,
        agencies: Sequence[_Agency],
        found: dict[Stack, tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[Stack, tuple[torch.Tensor, torch.Tensor]]:
        """Hands the workers the rows that they wanted of this agent; returns those that this worker wanted."""
        answers = [column for agency in agencies for column in agency.answer(found.get(agency.stack))]
        room: list[Column] = []
        rows = {}
        wanted = {ask.stack: ask for ask in request.asks if ask.merged}
        for agency in agencies:
            ask = wanted.get(agency.stack)
            if ask is not None:
                like = agency.stack.window.rows
                both = [
                    Column(like.new_empty(len(c.tensor), like.shape[1]), c.spans) for c in (ask.leased, ask.unleased)
                ]
                rows[ask.stack] = both[0].tensor, both[1].tensor
                room += both
        self._comm.swap(answers, room, self._comm.members)
        return rows


class _Agency:
    """This worker as agent for one stack, in one round."""

    def __init__(self, arrival: Arrival) -> None:
        self.stack = arrival.stack
        assert self.stack.agent is not None
        self._agent, self._arrival = self.stack.agent, arrival
        self._new = self._extra = arrival.ids.tensor[:0]
        self._spans: Sequence[tuple[int, int]] = ()

    def ask(self) -> Ask | None:
        """For the rows that are wanted and not here."""
        if not len(self._arrival.ids.tensor):
            return None
        window = self._agent.window
        leased, unleased = self._arrival.leased()
        keys = torch.unique(leased)
        self._new = keys[~window.find(keys)[1]]
        others = torch.unique(unleased)
        here = window.find(others)[1] | torch.isin(others, self._new)
        self._extra = others[~here]
        renorms = self._arrival.renorms | ({window.renorm} if len(window) else set())
        if len(renorms) > 1:
            raise NotImplementedError(
                f"{self.stack.name!r} is looked up in one step with different max_norm by workers of one machine "
                f"(max_norm, norm_type: {renorms}); use one for all lookups"
            )
        if not len(self._new) and not len(self._extra):
            return None
        window.renorm = renorms.pop()
        ask = Ask.by_keys(self.stack, self._new, self._extra, window.renorm)
        self._spans = ask.leased.spans
        return ask

    def push(self) -> Push | None:
        """The gradients of all workers, added up by row."""
        brought = self._arrival.gradients(self._agent.leases)
        return None if brought is None else self.stack.merge(self._agent.window, *brought)

    def answer(self, rows: tuple[torch.Tensor, torch.Tensor] | None) -> list[Column]:
        """The rows for each worker, given those that this agent asked for."""
        if not len(self._arrival.ids.tensor):
            return []
        window = self._agent.window
        if len(self._new):
            assert rows is not None
            window.add(self._new, rows[0], self._spans)
        here = window.rows
        extra = rows[1] if rows is not None else here[:0]
        slots, known = window.find(self._arrival.ids.tensor)
        if len(extra):
            at = torch.searchsorted(self._extra, self._arrival.ids.tensor) + len(here)
            slots, here = torch.where(known, slots, at), torch.cat([here, extra])
        self._arrival.lease(slots, self._agent.leases)
        return [Column(here.index_select(0, slots), self._arrival.ids.spans)]
