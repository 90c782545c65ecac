"""The only file that calls collectives.

A run has three ways to talk, so that none waits for another: the messages of rounds (`exchange`, `swap`) and small
buckets of dense gradients, which go over a mesh of connections on the CPU and over a process group on NCCL; other
buckets (`all_reduce`), on a process group; and the launcher's store, where a rank that fails leaves word. With one
worker there is no process group and every call is a local copy.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallax.mesh import Column, FailedError, Kind, Mesh, memory_of

T = TypeVar("T")

DIRECT_BYTES = 2**20
"""So much is under way over the mesh at most to be summed, on the CPU: each rank sums a part. It takes 2 messages one
after the other, where a ring takes 2(N-1); a ring goes on while backward computes."""

STORE_SECONDS = 4.0
"""How long a rank that stops tries to learn from the launcher's store what has happened."""


class ParallaxError(RuntimeError):
    """An error of parallax itself: an unsupported use, or ranks that disagree."""


class DisagreementError(ParallaxError):
    """The ranks do different things where they must do the same; raised on all ranks at once."""


class PeerError(ParallaxError):
    """Another rank failed; that rank's own error is the one to read."""


def rank() -> int:
    """This worker's rank; 0 without a launcher."""
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of workers; 1 without a launcher."""
    return dist.get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_initialized() -> bool:
    """The process group is there, whoever made it."""
    return dist.is_available() and dist.is_initialized()


@dataclasses.dataclass
class Sent:
    """Bytes that this rank has sent, by purpose. An AllReduce counts as a ring: 2(N-1)/N of its buffer;
    with a server, as once to it, and from it to each."""

    headers: int = 0
    tables: int = 0
    dense: int = 0
    inside: int = 0
    """To workers of the same machine, to merge what goes to others."""

    @property
    def total(self) -> int:
        return self.headers + self.tables + self.dense


@dataclasses.dataclass(frozen=True)
class Level:
    """Ranks among which a buffer is summed."""

    ranks: Sequence[int]
    server: int | None = None
    """The number of the one that sums all of it; None: each sums a part."""

    def part(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """What the i-th of the ranks sums."""
        if self.server is not None:
            return buffer if i == self.server else buffer[:0]
        size, num_longer = divmod(len(buffer), len(self.ranks))  # as tensor_split, without the other parts
        start = i * size + min(i, num_longer)
        return buffer[start : start + size + (i < num_longer)]


@dataclasses.dataclass(eq=False)
class Reduction:
    """An AllReduce under way: the buffer it owns and the handle to wait for."""

    buffer: torch.Tensor
    work: dist.Work | None = None
    """None: it goes over the mesh, or there is one rank only."""
    server: int | None = None
    """`work` is a sum on this rank, to be handed out."""
    levels: Sequence[Level] = ()
    """Groups of ranks among which it is summed, one after the other."""
    is_summed: bool = False
    """Over the mesh: this rank has sent its sums to the others."""


_runs = itertools.count()


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor's elements, each once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Comm:
    """The ways to talk of one run. All ranks make it together, in the same order as their other runs."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        """
        Args:
            device: where buffers live: "cpu" talks over gloo, "cuda" over NCCL.
            timeout: seconds to wait for a silent rank.
        """
        self.device = device
        self.timeout = timeout
        self.sent = Sent()
        self.seconds = 0.0
        """Time that went into talking, or waiting for others."""
        self.where: Callable[[], str] = lambda: "starting"
        """Says how far this rank's training is, for errors of ranks that wait for each other in vain."""
        self.started_group = False
        if world_size() > 1 and not is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self.started_group = True
        self.rank, self.world_size = rank(), world_size()
        self.peers = [p for p in range(self.world_size) if p != self.rank]
        self._rounds: dist.ProcessGroup | None = None
        self._buckets: dist.ProcessGroup | None = None
        if self.world_size > 1:
            self._check_devices()
            limit = datetime.timedelta(seconds=timeout)
            self._rounds = dist.new_group(timeout=limit)
            self._buckets = dist.new_group(timeout=limit)
        # All ranks look under the same key, whatever runs each process had before.
        self._failed_key = f"parallax/{self.all_gather(next(_runs))}/failed"
        machines = self.all_gather(machine_name())
        self.members = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        """Ranks on this machine."""
        self._places = places = [sum(m == machine for m in machines[:rank]) for rank, machine in enumerate(machines)]
        """Of each rank, its number on its machine."""
        shared = 1 < len(set(machines)) < self.world_size and device.type == "cpu"
        self.agents = tuple(
            places[rank] if rank in self.members else places[rank] % len(self.members)
            for rank in range(self.world_size if shared else 0)
        )
        """For each rank, which worker of this machine (its number in `members`) talks to it for all of them; empty if
        every worker talks to every rank itself."""
        self._levels = [Level(range(self.world_size))]
        """Groups of ranks among which small buckets are summed, one after the other: those of this machine, then one
        of each machine."""
        if shared and all(machines.count(machine) == len(self.members) for machine in machines):
            alike = [rank for rank, place in enumerate(places) if place == places[self.rank]]
            self._levels = [Level(self.members), Level(alike)]
        self._reducing: list[Reduction] = []
        """Over the mesh, those that are under way, oldest first."""
        self._own_posts: collections.deque[tuple[tuple[int, ...], Sequence[memoryview] | None]] = collections.deque()
        """What this rank posted to itself."""
        self._mesh: Mesh | None = None
        if self.world_size > 1 and device.type == "cpu":
            with self._watching("connecting to the other ranks"):
                self._mesh = Mesh(self.rank, self.world_size, timeout, self.all_gather)

    def _check_devices(self) -> None:
        """NCCL cannot run two workers on one device. The store needs no NCCL to ask."""
        if self.device.type == "cpu":
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(f"parallax/device/{self.rank}", f"{socket.gethostname()} {self.device}")
        places = [store.get(f"parallax/device/{rank}").decode() for rank in range(self.world_size)]
        if len(set(places)) < len(places):
            raise DisagreementError(
                f"rank {self.rank}: two workers use the same device ({places}). Choose it before building the model: "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
            )

    @property
    def merges(self) -> bool:
        """Workers of one machine merge before they send; so on all machines, also on those with one."""
        return bool(self.agents)

    @property
    def alive(self) -> bool:
        """There are other ranks, and the program has not taken the process group down."""
        return self.world_size > 1 and is_initialized()

    # -- at the start -------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrites `tensors` in place by those of rank `source`."""
        if self.world_size == 1:
            return
        with self._watching(f"taking over rank {source}'s weights"):
            for tensor in tensors:
                once = _without_repeats(tensor)
                dense = once.contiguous()
                dist.broadcast(dense, src=source, group=self._buckets)
                if dense is not once:
                    once.copy_(dense)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (small, picklable), in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._watching("agreeing with the other ranks"):
            # Between rounds all ranks are at the same place; buckets may be under way on some ranks only.
            dist.all_gather_object(values, value, group=self._rounds)
        return values

    def gather(self, value: Any) -> list[Any]:
        """As `all_gather`, but in the way of rounds, so that the failure of a rank is noticed at once; not counted in
        `sent`."""
        if self._mesh is None:
            return self.all_gather(value)
        sent = dataclasses.replace(self.sent)
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        room: list[Column] = []

        def make_room(headers: Sequence[Sequence[int]]) -> list[Column]:
            sizes = [h[0] for h in headers]
            room.append(Column.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes))
            return room

        self.exchange([[len(mine)]] * self.world_size, [Column.same(mine, self.world_size)], make_room)
        self.sent = sent
        return [pickle.loads(room[0].part(peer).numpy().tobytes()) for peer in range(self.world_size)]

    # -- dense buckets ------------------------------------------------------------------------------

    def all_reduce(self, buffer: torch.Tensor, server: int | None = None) -> Reduction:
        """Starts summing `buffer` over all ranks, in place.

        Args:
            server: the rank that sums all of it, and sends the sum to the others. None: the ranks share the work.
        """
        if self.world_size == 1:
            return Reduction(buffer)
        with self._watching("starting an AllReduce"):
            # All ranks start the same sums in the same order, so they agree in what is under way.
            under_way = sum(reduction.buffer.nbytes for reduction in self._reducing)
            if self._mesh is None or under_way + buffer.nbytes > DIRECT_BYTES:
                if server is not None:
                    self.sent.dense += buffer.nbytes * (len(self.peers) if server == self.rank else 1)
                    plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                    work = dist.reduce(plain, server, group=self._buckets, async_op=True)
                    return Reduction(buffer, work, server)
                self.sent.dense += 2 * buffer.nbytes * (self.world_size - 1) // self.world_size
                return Reduction(buffer, dist.all_reduce(buffer, group=self._buckets, async_op=True))
            # In 16 bits, what a machine has added up would be rounded once more.
            levels = self._levels if buffer.itemsize >= 4 else [Level(range(self.world_size))]
            if server is not None:
                levels = self._served_by(server, levels)
            size = buffer.nbytes
            for level in levels:
                num_others = len(level.ranks) - 1
                if level.server is None:
                    num_bytes, size = 2 * size * num_others // len(level.ranks), size // len(level.ranks)
                elif level.ranks[level.server] == self.rank:
                    num_bytes = size * num_others
                else:
                    num_bytes, size = size, 0
                if level is levels[-1]:
                    self.sent.dense += num_bytes
                else:
                    self.sent.inside += num_bytes
            self._scatter(self._mesh, buffer, levels[0], Kind.SHARD)
            self._reducing.append(Reduction(buffer, levels=levels))
            return self._reducing[-1]

    def _served_by(self, server: int, levels: Sequence[Level]) -> list[Level]:
        """`levels`, with all of it summed by one rank; before that by one of each machine, if there are two levels."""
        if len(levels) == 1:
            return [Level(levels[0].ranks, server)]
        place = self._places[server]
        like_server = [rank for rank, other in enumerate(self._places) if other == place]
        return [Level(levels[0].ranks, place), Level(levels[1].ranks, like_server.index(server))]

    def wait(self, reduction: Reduction) -> torch.Tensor:
        if reduction.work is not None:
            with self._watching("waiting for an AllReduce"):
                reduction.work.wait()
                if reduction.server is not None:
                    dist.broadcast(reduction.buffer, reduction.server, group=self._buckets)
        elif self._mesh is not None:
            with self._watching("waiting for an AllReduce") as waiting:
                self._sum(self._mesh, reduction, waiting)
                self._mesh.finish()
                self._reducing.remove(reduction)
        return reduction.buffer

    def _scatter(self, mesh: Mesh, buffer: torch.Tensor, level: Level, kind: Kind) -> None:
        """To each rank of a level its part of what is to be summed."""
        for i, peer in self._after_me(level.ranks):
            if len(part := level.part(buffer, i)):
                mesh.send(peer, kind, [memory_of(part)])

    def _sum(self, mesh: Mesh, reduction: Reduction, waiting: _Waiting) -> None:
        """Sums what `_scatter` has sent, each part on one rank; on several levels, the sums of groups after that."""
        parts = [reduction.buffer]
        if not reduction.is_summed:
            for level in reduction.levels:
                kind = Kind.SHARD if level is reduction.levels[0] else Kind.MACHINE
                if kind is Kind.MACHINE:
                    self._scatter(mesh, parts[-1], level, kind)
                parts.append(self._reduce(mesh, parts[-1], level, kind, waiting))
            self._send_sum(mesh, parts[-1], reduction.levels[-1])
        for number, level in reversed(list(enumerate(reduction.levels))):
            for i, peer in reversed(self._after_me(level.ranks)):
                if len(part := level.part(parts[number], i)):
                    waiting.on(peer)
                    mesh.receive(peer, Kind.SUM, [memory_of(part)])
            if number:
                self._send_sum(mesh, parts[number], reduction.levels[number - 1])

    def _reduce(self, mesh: Mesh, buffer: torch.Tensor, level: Level, kind: Kind, waiting: _Waiting) -> torch.Tensor:
        """Returns this rank's part of `buffer`, which is summed over a level."""
        me = level.ranks.index(self.rank)
        own = level.part(buffer, me)
        if not len(own):
            return own
        parts = own.new_empty(len(level.ranks), len(own))
        parts[me] = own
        memory, size = memory_of(parts), own.nbytes
        for i, peer in reversed(self._after_me(level.ranks)):
            waiting.on(peer)
            mesh.receive(peer, kind, [memory[i * size : (i + 1) * size]])
        return torch.sum(parts, 0, out=own)  # in rank order; half precision is summed in single

    def _send_sum(self, mesh: Mesh, own: torch.Tensor, level: Level) -> None:
        if len(own):
            memory = memory_of(own)
            for _, peer in self._after_me(level.ranks):
                mesh.send(peer, Kind.SUM, [memory])

    def _sum_what_is_here(self, mesh: Mesh, waiting: _Waiting) -> None:
        """Sums travel with what else is under way, not after it."""
        for reduction in self._reducing:
            if reduction.is_summed:
                continue
            if len(reduction.levels) > 1:
                return
            [level] = reduction.levels
            if len(level.part(reduction.buffer, self.rank)) and not all(mesh.has(p, Kind.SHARD) for p in self.peers):
                return
            self._send_sum(mesh, self._reduce(mesh, reduction.buffer, level, Kind.SHARD, waiting), level)
            reduction.is_summed = True
        mesh.start()

    # -- rounds -------------------------------------------------------------------------------------

    def exchange(
        self,
        headers: Sequence[Sequence[int]],
        outgoing: Sequence[Column],
        make_room: Callable[[list[tuple[int, ...]]], Sequence[Column]],
        members: Sequence[int] = (),
    ) -> list[tuple[int, ...]]:
        """Sends a header and what it announces to each rank, and takes in what each rank sends here.

        Args:
            headers: for each rank, the numbers (64 bits) for it; equally many everywhere.
            outgoing: each rank's part of all of these follows its header.
            make_room: told the headers that came, in rank order, it gives what is filled with what followed them. Both
                ends of a message must agree in the number of its bytes; how columns cut it is each end's own affair.
            members: these ranks only, this one among them; on the CPU.

        Returns:
            The headers that came.
        """
        if self._mesh is None:
            received = [tuple(header) for header in headers]
            if self.world_size > 1:
                self.sent.headers += 8 * len(headers[0]) * len(self.peers)
                mine = torch.tensor(headers, dtype=torch.int64).to(self.device)
                inbox = torch.empty_like(mine)
                with self._watching("exchanging headers"):
                    dist.all_to_all_single(inbox, mine, group=self._rounds)
                received = [tuple(header) for header in inbox.tolist()]
            self.swap(outgoing, make_room(received))
            return received
        ranks = members or range(self.world_size)
        own = self._post(Kind.ROUND, headers, outgoing, ranks)
        return self._collect(Kind.ROUND, ranks, len(headers[0]), make_room, own, tuple(headers[ranks.index(self.rank)]))

    def post(self, headers: Sequence[Sequence[int]], outgoing: Sequence[Column]) -> None:
        """Sends a header and what it announces to each rank, which takes it in later (`collect`); on the CPU."""
        assert self._mesh is not None
        own = self._post(Kind.EARLY, headers, outgoing, range(self.world_size))
        self._own_posts.append((tuple(headers[self.rank]), own))
        self._mesh.start()

    def collect(
        self,
        sources: Sequence[int],
        num_numbers: int,
        make_room: Callable[[list[tuple[int, ...]]], Sequence[Column]],
    ) -> None:
        """Takes in what these ranks posted, from each the first that was not taken in yet.

        Args:
            num_numbers: in a header.
            make_room: as in `exchange`, told the headers of `sources`; its columns have parts for these only.
        """
        header, own = self._own_posts.popleft() if self.rank in sources else ((), None)
        self._collect(Kind.EARLY, sources, num_numbers, make_room, own, header)

    def _post(
        self, kind: Kind, headers: Sequence[Sequence[int]], outgoing: Sequence[Column], ranks: Sequence[int]
    ) -> Sequence[memoryview]:
        """Returns what follows the header for this rank itself."""
        assert self._mesh is not None
        peers = self._after_me(ranks)
        numbers = struct.Struct(f"<{len(headers[0])}q")
        messages = _by_rank(outgoing, len(ranks))
        with self._watching("sending a round") as waiting:
            for i, peer in peers:
                waiting.on(peer)
                self._mesh.send(peer, kind, [numbers.pack(*headers[i]), *messages[i]])
        self._count([messages[i] for i, _ in peers], numbers.size * len(peers), len(ranks) < self.world_size)
        return messages[ranks.index(self.rank)]

    def _collect(
        self,
        kind: Kind,
        sources: Sequence[int],
        num_numbers: int,
        make_room: Callable[[list[tuple[int, ...]]], Sequence[Column]],
        own: Sequence[memoryview] | None,
        own_header: tuple[int, ...] = (),
    ) -> list[tuple[int, ...]]:
        mesh = self._mesh
        assert mesh is not None
        numbers = struct.Struct(f"<{num_numbers}q")
        header = memoryview(bytearray(numbers.size))
        sizes = [0] * len(sources)
        received = [own_header] * len(sources)
        peers = self._after_me(sources)[::-1]
        with self._watching("waiting for a round") as waiting:
            for i, peer in peers:
                waiting.on(peer)
                sizes[i] = mesh.open(peer, kind)
                mesh.read(peer, [header])
                received[i] = numbers.unpack(header)
            if self._reducing and kind is Kind.ROUND:
                self._sum_what_is_here(mesh, waiting)
        room = make_room(received)
        inboxes = _by_rank(room, len(sources))
        with self._watching("waiting for a round's ids and gradients") as waiting:
            for i, peer in peers:
                waiting.on(peer)
                announced = numbers.size + sum(map(len, inboxes[i]))
                if sizes[i] != announced:
                    raise OSError(f"{sizes[i]} bytes came where the header announced {announced}")
                mesh.read(peer, inboxes[i])
            mesh.finish()
        if own is not None:
            _copy(own, inboxes[sources.index(self.rank)])
        return received

    def swap(
        self,
        outgoing: Sequence[Column],
        room: Sequence[Column],
        members: Sequence[int] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sends each rank its part of `outgoing`, and fills `room` with what each sends here. Both ends know how much
        that is; nothing travels between two ranks that have nothing for each other.

        Args:
            members: between these ranks only, this one among them; on the CPU.
            meanwhile: what to do when all is on its way. Then `outgoing` must not change later: it may still leave when
                this returns.
        """
        if self._mesh is None:
            self._all_to_all(outgoing, room)
            if meanwhile is not None:
                meanwhile()
            return
        mesh, ranks = self._mesh, members or range(self.world_size)
        peers = self._after_me(ranks)
        messages = _by_rank(outgoing, len(ranks))
        inboxes = _by_rank(room, len(ranks))
        with self._watching("sending rows") as waiting:
            for i, peer in peers:
                if any(messages[i]):
                    waiting.on(peer)
                    mesh.send(peer, Kind.ROUND, messages[i])
        self._count([messages[i] for i, _ in peers], 0, bool(members))
        own = ranks.index(self.rank)
        _copy(messages[own], inboxes[own])
        if meanwhile is not None:
            meanwhile()
        with self._watching("waiting for rows") as waiting:
            for i, peer in reversed(peers):
                if any(inboxes[i]):
                    waiting.on(peer)
                    mesh.receive(peer, Kind.ROUND, inboxes[i])
            if meanwhile is None:
                mesh.finish()

    def _after_me(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """The others of `ranks` with their numbers among them, in the order in which this rank sends to them, from the
        next on; so they do not all send to the same at a time. Backwards, it is the order in which they send here."""
        peers = [(i, rank) for i, rank in enumerate(ranks) if rank != self.rank]
        first = next((k for k, (_, rank) in enumerate(peers) if rank > self.rank), 0)
        return peers[first:] + peers[:first]

    def _count(self, messages: Sequence[Sequence[memoryview]], num_header_bytes: int, inside: bool) -> None:
        num_bytes = sum(len(piece) for pieces in messages for piece in pieces)
        if inside:
            self.sent.inside += num_header_bytes + num_bytes
        else:
            self.sent.headers += num_header_bytes
            self.sent.tables += num_bytes

    def _all_to_all(self, outgoing: Sequence[Column], room: Sequence[Column]) -> None:
        ranks = range(self.world_size)
        num_sent, num_got = ([sum(c.num_bytes(r) for c in columns) for r in ranks] for columns in (outgoing, room))
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        packed = torch.cat([nothing, *(c.part(r).reshape(-1).view(torch.uint8) for r in ranks for c in outgoing)])
        if self.world_size > 1:
            self.sent.tables += sum(num_sent) - num_sent[self.rank]
            inbox = torch.empty(sum(num_got), dtype=torch.uint8, device=self.device)
            with self._watching("exchanging rows"):
                dist.all_to_all_single(inbox, packed, num_got, num_sent, self._rounds)
            packed = inbox
        parts = [c.part(r) for r in ranks for c in room]
        for part, arrived in zip(parts, packed.split([part.nbytes for part in parts]), strict=True):
            part.view(-1).view(torch.uint8).copy_(arrived)

    @property
    def can_tell(self) -> bool:
        """`tell_failure` works."""
        return self._mesh is not None

    def tell_failure(self, seconds: float) -> None:
        """Whatever the other ranks wait for next from this one, they get to know that it has failed."""
        if self._mesh is not None:
            self._mesh.tell_failure(seconds)

    # -- failures -----------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        """Leaves word of this rank's failure where the other ranks look when their own calls break."""
        if self.world_size == 1:
            return
        word = json.dumps([self.rank, type(error).__name__, str(error)])

        def report() -> None:
            with contextlib.suppress(Exception):  # the store may be gone already; the first failure is the one to show
                store = dist.distributed_c10d._get_default_store()
                if not store.check([self._failed_key]):
                    store.set(self._failed_key, word)

        _within(STORE_SECONDS, report)

    def peer_error(self, otherwise: str, patience: float = 0.0) -> PeerError:
        """The error to raise because another rank failed; waits up to `patience` seconds for its word."""
        found = _within(patience + STORE_SECONDS, lambda: self._word_of_failure(patience))
        return found or PeerError(f"rank {self.rank} stops: {otherwise}")

    def _word_of_failure(self, patience: float) -> PeerError | None:
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(Exception):
                store = dist.distributed_c10d._get_default_store()
                if store.check([self._failed_key]):
                    failed, kind, text = json.loads(store.get(self._failed_key))
                    return PeerError(f"rank {self.rank} stops because rank {failed} failed with {kind}: {text}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    @contextlib.contextmanager
    def _watching(self, doing: str) -> Iterator[_Waiting]:
        """Breakdowns in here are told in our words. What it gives is to be told on which rank it waits."""
        waiting, entered = _Waiting(), time.monotonic()
        try:
            yield waiting
            self.seconds += time.monotonic() - entered
        except FailedError as error:
            raise self.peer_error(str(error), patience=2.0) from None
        except (RuntimeError, OSError) as error:
            if isinstance(error, ParallaxError):
                raise
            waited = time.monotonic() - waiting.started
            who = "another rank" if waiting.peer is None else f"rank {waiting.peer}"
            what = f"is gone ({error})"
            if waited >= self.timeout * 0.9:
                what = f"has been silent for {waited:.0f} s (Config.timeout={self.timeout:g})"
            here = f"was {doing} {self.where()}"

            def find_out() -> PeerError:
                self._leave_word(here)
                return self._word_of_failure(patience=2.0) or PeerError(
                    f"rank {self.rank} stops: {who} {what}. {self._where_all_are()}"
                )

            raise _within(STORE_SECONDS, find_out) or PeerError(
                f"rank {self.rank} stops: {who} {what}. Rank {self.rank} {here}; the launcher's store does not answer "
                f"either: the network of this machine or of rank 0's may be cut"
            ) from error

    def _leave_word(self, text: str) -> None:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._get_default_store().set(f"{self._failed_key}/{self.rank}", text)

    def _where_all_are(self) -> str:
        """Where the ranks are that found out that something is wrong, this one among them."""
        words = []
        for rank in range(self.world_size):
            word = "left no word: it has ended, or waits for no other rank"
            with contextlib.suppress(Exception):
                store, key = dist.distributed_c10d._get_default_store(), f"{self._failed_key}/{rank}"
                if store.check([key]):
                    word = store.get(key).decode()
            words.append(f"Rank {rank} {word}")
        return "; ".join(words)

    def close(self, *, wait: bool = True) -> None:
        """Gives back the process groups that this object made.

        Args:
            wait: for what was sent to arrive; not after a failure, as the others may not take it in any more.
        """
        if self.world_size == 1:
            return
        if self._mesh is not None:
            if wait:
                with contextlib.suppress(OSError, FailedError):
                    self._mesh.finish()
            self._mesh.close()
        for group in (self._rounds, self._buckets):
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
        if self.started_group:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self._rounds = self._buckets = None


def machine_name() -> str:
    """Workers with the same are on one machine, between which messages cost little. PARALLAX_MACHINE overrides it."""
    if "PARALLAX_MACHINE" in os.environ:
        return os.environ["PARALLAX_MACHINE"]
    with contextlib.suppress(OSError):
        return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


class _Waiting:
    """For which rank, and since when."""

    def __init__(self) -> None:
        self.peer: int | None = None
        self.started = time.monotonic()

    def on(self, peer: int) -> None:
        self.peer, self.started = peer, time.monotonic()


def _by_rank(columns: Sequence[Column], num_ranks: int) -> list[tuple[memoryview, ...]]:
    """For each rank, the memory of its parts."""
    return list(zip(*(column.memory() for column in columns), strict=True)) or [()] * num_ranks


def _copy(source: Sequence[memoryview | bytes], target: Sequence[memoryview]) -> None:
    """Copies bytes, however both sides are cut."""
    whole = source[0] if len(source) == 1 else memoryview(b"".join(source))
    for piece in filter(None, target):
        piece[:] = whole[: len(piece)]
        whole = whole[len(piece) :]


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns, or None if that takes longer: calls of the store wait for ever when its machine is silent."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
