"""A TCP connection between every two ranks: the small and frequent messages of CPU training.

Gloo offers each message to its receiver before it goes out and hands it from thread to thread; with many ranks and
small messages that is most of a round (docs/design/transport.md has figures). Here a message is one write and two
reads on the caller's thread: bytes wait in the kernel's buffers, which also carry them on while the caller computes.
Messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import fcntl
import functools
import itertools
import math
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

SEND_AT_ONCE_BYTES = 2**16
"""Messages of this size leave at once; smaller ones with the next message, or when this rank waits."""

CONNECT_SECONDS = 60.0
"""At most: all ranks are there, each with its port, when they begin to connect."""

TRY_SECONDS = 5.0
"""How long one address is tried before the next."""

STALL_SECONDS = 0.1
"""After that, who waits for the system to take over messages reads what has come."""

_PREFIX = struct.Struct("<qq")  # kind, bytes that follow
_HELLO = struct.Struct("<16sq")  # token of the run, rank
_WELCOME = b"!"  # answer to a hello, and the caller's to that
_MOST_CALLS = 32  # at a time
_MOST_PIECES = 512  # in a write; the system takes 1024


class Kind(enum.IntEnum):
    """What a message is for. `Mesh.receive` takes them kind by kind."""

    ROUND = 0
    """Half a round: header and body, or an answer (`Comm.exchange`, `Comm.swap`)."""
    SHARD = 1
    """A rank's part of what is to be summed, to the rank that sums it (`Comm.all_reduce`)."""
    SUM = 2
    """The sum."""
    EARLY = 3
    """Gradients that need not wait for the next round, which tells of them (`Comm.post`)."""
    MACHINE = 4
    """A part of what a machine has added up, to the rank that sums it over machines. It has a kind of its own: what is
    not added up by machines first leaves sooner, also if it was begun later."""
    FAILED = 5
    """The sender has failed; nothing follows."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A tensor of which each rank gets, or brings, some rows: `tensor[a:b]` with `(a, b) = spans[rank]`."""

    tensor: torch.Tensor
    """Contiguous, of any shape and dtype, with rows."""
    spans: Sequence[tuple[int, int]]

    @classmethod
    def split(cls, tensor: torch.Tensor, num_rows: Iterable[int]) -> Column:
        """The first `num_rows[0]` rows belong to rank 0, the next to rank 1, and so on."""
        ends = list(itertools.accumulate(num_rows))
        return cls(tensor, list(zip([0, *ends], ends, strict=False)))

    @classmethod
    def same(cls, tensor: torch.Tensor, world_size: int) -> Column:
        """All of it belongs to every rank."""
        return cls(tensor, [(0, len(tensor))] * world_size)

    def part(self, rank: int) -> torch.Tensor:
        a, b = self.spans[rank]
        return self.tensor[a:b]

    def num_bytes(self, rank: int) -> int:
        a, b = self.spans[rank]
        return (b - a) * self.row_bytes

    @functools.cached_property
    def row_bytes(self) -> int:
        return self.tensor.itemsize * math.prod(self.tensor.shape[1:])

    def memory(self) -> list[memoryview]:
        """The bytes of each rank's part, where they are (on the CPU)."""
        whole, size = memory_of(self.tensor), self.row_bytes
        return [whole[a * size : b * size] for a, b in self.spans]


class FailedError(RuntimeError):
    """A peer says that it has failed."""


class Mesh:
    """The connections of this rank. Not for two threads at once."""

    def __init__(self, rank: int, world_size: int, timeout: float, all_gather: Callable[[Any], list[Any]]) -> None:
        """Connects all ranks, which call this together.

        Args:
            timeout: seconds to wait for a silent peer.
            all_gather: every rank's value, in rank order.

        Raises:
            OSError: a rank cannot be reached.
            TimeoutError: or does not call.
        """
        self._timeout = timeout
        self._sockets: dict[int, socket.socket] = {}
        with _listen() as listener, concurrent.futures.ThreadPoolExecutor(_MOST_CALLS) as pool:
            mine = _addresses(), listener.getsockname()[1], secrets.token_bytes(16)
            everyone = all_gather(mine)
            token = everyone[0][2]  # keeps out whoever else finds the port
            deadline = time.monotonic() + min(timeout, CONNECT_SECONDS)
            # Threads: each takes calls while it calls itself, so that nobody waits in a row.
            calls = [
                pool.submit(_connect, addresses, port, _HELLO.pack(token, rank), peer, deadline)
                for peer, (addresses, port, _) in enumerate(everyone[:rank])
            ]
            try:
                _take_calls(listener, token, set(range(rank + 1, world_size)), deadline, self._sockets)
                self._sockets |= enumerate(call.result() for call in calls)
            except BaseException:
                self._sockets |= {peer: call.result() for peer, call in enumerate(calls) if call.exception() is None}
                self.close()
                raise
        for connection in self._sockets.values():
            _set_up(connection, timeout)
        self._outgoing: dict[int, collections.deque[memoryview | bytes]] = {
            p: collections.deque() for p in self._sockets
        }
        """Per peer, what the system has not taken over yet."""
        self._waiting: set[int] = set()
        """Peers for which there is something in `_outgoing`."""
        self._early: dict[tuple[int, int], collections.deque[memoryview]] = collections.defaultdict(collections.deque)
        """Per peer and kind, messages that came before this rank asked for one of their kind."""
        self._open: dict[int, memoryview | None] = {}
        """Per peer, what is left of the message that is being read; None: it is in the connection."""

    def send(self, peer: int, kind: Kind, pieces: Sequence[memoryview | bytes]) -> None:
        """Sends `pieces` as one message; they must not change until `finish`."""
        num_bytes = sum(map(len, pieces))
        queue = self._outgoing[peer]
        queue.append(_PREFIX.pack(kind, num_bytes))
        queue.extend(piece for piece in pieces if piece)
        self._waiting.add(peer)
        if num_bytes >= SEND_AT_ONCE_BYTES:
            self._write(peer)

    def has(self, peer: int, kind: Kind) -> bool:
        """A message of that kind has been read before it was asked for."""
        return bool(self._early.get((peer, kind)))

    def open(self, peer: int, kind: Kind) -> int:
        """Waits for the next message of a kind from `peer`, to be taken in by `read`. What was sent leaves meanwhile.

        Returns:
            Its number of bytes.

        Raises:
            FailedError: the peer says that it has failed.
            OSError: the connection is broken.
            TimeoutError: the peer was silent for too long.
        """
        if self._waiting:
            self._write_all()
        early = self._early[peer, kind]
        if early:
            self._open[peer] = early.popleft()
            return len(self._open[peer] or b"")
        self._open[peer] = None
        while True:
            number, num_bytes = self._next(peer)
            if number == kind:
                return num_bytes
            self._keep(peer, number, num_bytes)

    def _next(self, peer: int) -> tuple[int, int]:
        """Kind and bytes of the next message in the connection."""
        prefix = bytearray(_PREFIX.size)
        self._receive(peer, [memoryview(prefix)])
        number, num_bytes = _PREFIX.unpack(prefix)
        if number == Kind.FAILED:
            raise FailedError(f"rank {peer} has failed")
        return number, num_bytes

    def _keep(self, peer: int, kind: int, num_bytes: int) -> None:
        """Takes in a message for which nobody has asked yet."""
        message = memoryview(bytearray(num_bytes))
        self._receive(peer, [message])
        self._early[peer, kind].append(message)

    def read(self, peer: int, into: Sequence[memoryview]) -> None:
        """Takes in the next bytes of the message that was opened; raises as `open` does."""
        message = self._open[peer]
        if message is None:
            self._receive(peer, into)
            return
        for view in filter(None, into):
            view[:] = message[: len(view)]
            message = message[len(view) :]
        self._open[peer] = message

    def receive(self, peer: int, kind: Kind, into: Sequence[memoryview]) -> None:
        """Takes in a whole message of that size; if there is one already (`has`), while another is open."""
        opened = self._open.get(peer)
        num_bytes, expected = self.open(peer, kind), sum(map(len, into))
        if num_bytes != expected:
            raise OSError(f"{num_bytes} bytes came where {expected} were expected")
        self.read(peer, into)
        self._open[peer] = opened

    def start(self) -> None:
        """Sends what waits for the next message, as far as the system takes it now."""
        self._write_all()

    def finish(self) -> None:
        """Waits until the system has taken over all that was sent; no message is open. If it does not get on, takes in
        what peers have sent: they may be waiting for that."""
        self._write_all()
        deadline = time.monotonic() + self._timeout
        while self._waiting:
            if self._pump(None, STALL_SECONDS) or self._take_in():
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise TimeoutError("timed out")

    def _take_in(self) -> bool:
        """Takes in a message of each peer that is sending one; returns whether there was any."""
        sending = []
        for peer, connection in self._sockets.items():
            with contextlib.suppress(OSError):  # gone: who needs it learns that
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    sending.append(peer)
        for peer in sending:
            self._keep(peer, *self._next(peer))
        return bool(sending)

    def tell_failure(self, seconds: float) -> None:
        """Tells every peer that this rank has failed, as far as that is possible within `seconds`."""
        for peer, queue in self._outgoing.items():
            queue.append(_PREFIX.pack(Kind.FAILED, 0))
            self._waiting.add(peer)
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            self._write_all()
            if self._waiting:
                time.sleep(0.01)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    # -- bytes ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        for peer in list(self._waiting):
            self._write(peer)

    def _write(self, peer: int) -> None:
        """Hands over as much as the system takes now."""
        queue, connection = self._outgoing[peer], self._sockets[peer]
        while queue:
            pieces = list(itertools.islice(queue, _MOST_PIECES))
            try:
                num_taken = connection.sendmsg(pieces, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                queue.clear()  # it is gone; who reads from it learns that, and why if it has said so
                break
            _drop(queue, num_taken)
        self._waiting.discard(peer)

    def _receive(self, peer: int, into: Sequence[memoryview]) -> None:
        connection, left = self._sockets[peer], collections.deque(view for view in into if view)
        while left:
            writing = bool(self._waiting)
            if writing and not self._pump(peer, self._timeout):
                raise TimeoutError("timed out")
            try:
                # Sleeps until all of it is there, not packet by packet, unless others wait for this rank meanwhile.
                flags = socket.MSG_DONTWAIT if writing else socket.MSG_WAITALL
                if len(left) == 1:
                    num_read = connection.recv_into(left[0], 0, flags)
                else:
                    num_read = connection.recvmsg_into(list(itertools.islice(left, _MOST_PIECES)), 0, flags)[0]
            except BlockingIOError:
                if writing:
                    continue
                raise TimeoutError("timed out") from None
            if not num_read:
                raise ConnectionResetError("connection closed by peer")
            _drop(left, num_read)

    def _pump(self, reading: int | None, seconds: float) -> bool:
        """Waits until something that was sent can leave, or there is something to read from `reading`, for `seconds` at
        most; returns whether there was."""
        poll, peers = select.poll(), {}
        for peer in self._waiting | ({reading} if reading is not None else set()):
            events = (select.POLLOUT if peer in self._waiting else 0) | (select.POLLIN if peer == reading else 0)
            peers[self._sockets[peer].fileno()] = peer
            poll.register(self._sockets[peer], events)
        ready = poll.poll(seconds * 1000)
        for descriptor, _ in ready:
            if peers[descriptor] in self._waiting:
                self._write(peers[descriptor])
        return bool(ready)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor (contiguous, on the CPU), where they are."""
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype is torch.bfloat16:  # which NumPy does not know
        tensor = tensor.view(torch.int16)
    array: Any = tensor.detach().numpy()
    return memoryview(array).cast("B")


def _drop(views: collections.deque[Any], num_bytes: int) -> None:
    """Takes the first bytes off a row of memories."""
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views.popleft())
    if num_bytes:
        views[0] = memoryview(views[0])[num_bytes:]


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _addresses() -> list[str]:
    """Where the others may find this machine, the likeliest first: the interface that GLOO_SOCKET_IFNAME names, as
    with gloo, or else the one that leads to the launcher, then what the machine's name means."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            SIOCGIFADDR = 0x8915
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return [socket.inet_ntoa(answer[20:24])]
    found: dict[str, None] = {}
    launcher = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(launcher, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                found[probe.getsockname()[0]] = None
    with contextlib.suppress(OSError):
        found |= {address[0]: None for *_, address in socket.getaddrinfo(socket.gethostname(), None)}  # type: ignore[misc]
    return list(found) or ["127.0.0.1"]


def _connect(addresses: Sequence[str], port: int, hello: bytes, peer: int, deadline: float) -> socket.socket:
    while True:
        errors = {}
        for address in addresses:
            left = max(0.1, min(TRY_SECONDS, deadline - time.monotonic()))
            try:
                connection = socket.create_connection((address, port), left)
            except OSError as error:
                errors[address] = str(error)
                continue
            try:
                connection.sendall(hello)
                if connection.recv(1) == _WELCOME:
                    connection.sendall(_WELCOME)
                    return connection
                errors[address] = "another process"  # that has the same port at an address of its own
            except OSError as error:
                errors[address] = str(error)
            connection.close()
        if time.monotonic() >= deadline or "timed out" not in errors.values():
            tried = "; ".join(f"{address}: {error}" for address, error in errors.items())
            raise OSError(
                f"cannot connect to rank {peer} at port {port} ({tried}); if its machine has other addresses, name the "
                f"interface in GLOO_SOCKET_IFNAME"
            )


def _take_calls(
    listener: socket.socket, token: bytes, ranks: set[int], deadline: float, found: dict[int, socket.socket]
) -> None:
    """Adds the connections of `ranks`, which call, to `found`. Others that call are turned away, or wait while they say
    nothing."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as strangers:
        selector.register(listener, selectors.EVENT_READ)
        while missing := ranks - found.keys():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise TimeoutError(f"ranks {sorted(missing)} do not call")
            for key, _ in ready:
                caller: Any = key.fileobj
                if caller is listener:
                    with contextlib.suppress(OSError):
                        stranger, _ = listener.accept()
                        strangers.push(stranger)
                        selector.register(stranger, selectors.EVENT_READ, bytearray())
                elif (rank := _greet(caller, key.data, token)) is not None:
                    selector.unregister(caller)
                    if rank in ranks - found.keys():
                        found[rank] = caller.dup()  # `caller` is closed with the strangers
                    else:
                        caller.close()


def _greet(caller: socket.socket, said: bytearray, token: bytes) -> int | None:
    """Takes in what a caller says: its hello, then that it has got our answer, and so will not call again.

    Returns:
        Its rank; -1 if it is somebody else, or has hung up; None: it has not said all yet.
    """
    try:
        more = caller.recv(_HELLO.size + len(_WELCOME) - len(said), socket.MSG_DONTWAIT)
        said += more
        if not more or not secrets.compare_digest(said[:16], token[: len(said)]):
            return -1
        if len(said) == _HELLO.size:
            caller.sendall(_WELCOME)
    except OSError:
        return -1
    return int(_HELLO.unpack(said[: _HELLO.size])[1]) if len(said) > _HELLO.size else None


def _set_up(connection: socket.socket, timeout: float) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # BBR paces a flow by what it carried before, which was less when its rank was computing: waves take half as long
    # again, or more (docs/design/transport.md). Cubic is Linux's default; "reno" is allowed everywhere.
    if (option := getattr(socket, "TCP_CONGESTION", None)) is not None:
        for other in (b"cubic", b"reno"):
            with contextlib.suppress(OSError):
                if connection.getsockopt(socket.IPPROTO_TCP, option, 16).startswith(b"bbr"):
                    connection.setsockopt(socket.IPPROTO_TCP, option, other)
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
