"""A TCP connection between every two ranks: the small and frequent messages of CPU training.

Gloo offers each message to its receiver before it goes out and hands it from thread to thread; with many ranks and
small messages that is most of a round (docs/design/transport.md has figures). Here a message is one write and two
reads on the caller's thread: bytes wait in the kernel's buffers, which also carry them on while the caller computes.
Messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SEND_AT_ONCE_BYTES = 2**16
"""Messages of this size leave at once; smaller ones with the next message, or when this rank waits."""

_PREFIX = struct.Struct("<qq")  # kind, bytes that follow
_HELLO = struct.Struct("<16sq")  # token of the run, rank
_MOST_PIECES = 512  # in a write; the system takes 1024


class Kind(enum.IntEnum):
    """What a message is for. `Mesh.receive` takes them kind by kind."""

    ROUND = 0
    """Half a round: header and body, or an answer (`Comm.exchange`, `Comm.swap`)."""
    SHARD = 1
    """A rank's part of what is to be summed, to the rank that sums it (`Comm.all_reduce`)."""
    SUM = 2
    """The sum."""
    FAILED = 3
    """The sender has failed; nothing follows."""


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
        self._outgoing: dict[int, collections.deque[memoryview]] = {}
        self._arrived: dict[tuple[int, Kind], collections.deque[torch.Tensor]] = {}
        with _listen() as listener:
            listener.settimeout(timeout)
            token = secrets.token_bytes(16)
            everyone = all_gather((_addresses(), listener.getsockname()[1], token))
            token = everyone[0][2]  # keeps out whoever else finds the port
            for peer in range(rank):
                addresses, port, _ = everyone[peer]
                self._sockets[peer] = _connect(addresses, port, _HELLO.pack(token, rank), peer, timeout)
            while len(self._sockets) < world_size - 1:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(rank + 1, world_size)) - set(self._sockets))
                    raise TimeoutError(f"ranks {missing} do not call") from None
                caller = _greet(connection, token, timeout)
                if caller is not None:
                    self._sockets[caller] = connection
        for peer, connection in self._sockets.items():
            _set_up(connection, timeout)
            self._outgoing[peer] = collections.deque()
            for kind in Kind:
                self._arrived[peer, kind] = collections.deque()

    def send(self, peer: int, kind: Kind, *pieces: torch.Tensor) -> None:
        """Sends the bytes of `pieces` (contiguous, on the CPU) as one message; they must not change until `finish`."""
        views = [_bytes_of(piece) for piece in pieces if piece.numel()]
        num_bytes = sum(map(len, views))
        queue = self._outgoing[peer]
        queue.append(memoryview(_PREFIX.pack(kind, num_bytes)))
        queue.extend(views)
        if num_bytes >= SEND_AT_ONCE_BYTES:
            self._write(peer)

    def receive(self, peer: int, kind: Kind) -> torch.Tensor:
        """The next message of a kind from `peer`: uint8, of any length. What this rank has sent leaves meanwhile.

        Raises:
            FailedError: the peer says that it has failed.
            OSError: the connection is broken.
            TimeoutError: the peer was silent for too long.
        """
        self._write_all()
        arrived = self._arrived[peer, kind]
        while not arrived:
            prefix = bytearray(_PREFIX.size)
            self._read(peer, memoryview(prefix))
            number, num_bytes = _PREFIX.unpack(prefix)
            if number == Kind.FAILED:
                raise FailedError(f"rank {peer} has failed")
            message = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes:
                self._read(peer, _bytes_of(message))
            self._arrived[peer, Kind(number)].append(message)
        return arrived.popleft()

    def finish(self) -> None:
        """Waits until the system has taken over all that was sent."""
        self._write_all()
        while any(self._outgoing.values()):
            self._pump(None)

    def tell_failure(self, seconds: float) -> None:
        """Tells every peer that this rank has failed, as far as that is possible within `seconds`."""
        for peer, queue in self._outgoing.items():
            queue.append(memoryview(_PREFIX.pack(Kind.FAILED, 0)))
            with contextlib.suppress(OSError):
                self._write(peer)
        deadline = time.monotonic() + seconds
        while any(self._outgoing.values()) and time.monotonic() < deadline:
            for peer, queue in self._outgoing.items():
                try:
                    self._write(peer)
                except OSError:
                    queue.clear()  # it is gone
            time.sleep(0.01)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    # -- bytes ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        for peer, queue in self._outgoing.items():
            if queue:
                self._write(peer)

    def _write(self, peer: int) -> None:
        """Hands over as much as the system takes now."""
        queue, connection = self._outgoing[peer], self._sockets[peer]
        while queue:
            pieces = [queue[i] for i in range(min(len(queue), _MOST_PIECES))]
            try:
                num_taken = connection.sendmsg(pieces, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            while queue and num_taken >= len(queue[0]):
                num_taken -= len(queue.popleft())
            if num_taken:
                queue[0] = queue[0][num_taken:]

    def _read(self, peer: int, into: memoryview) -> None:
        connection, num_read = self._sockets[peer], 0
        while num_read < len(into):
            writing = any(self._outgoing.values())
            if writing:
                self._pump(peer)
            try:
                # Sleeps until all of it is there, not packet by packet, unless others wait for this rank meanwhile.
                flags = socket.MSG_DONTWAIT if writing else socket.MSG_WAITALL
                num_new = connection.recv_into(into[num_read:], 0, flags)
            except BlockingIOError:
                if writing:
                    continue
                raise TimeoutError("timed out") from None
            if not num_new:
                raise ConnectionResetError("connection closed by peer")
            num_read += num_new

    def _pump(self, reading: int | None) -> None:
        """Writes until all that was sent is taken over, or there is something to read from `reading`."""
        poll, peers = select.poll(), {}
        for peer, queue in self._outgoing.items():
            events = (select.POLLOUT if queue else 0) | (select.POLLIN if peer == reading else 0)
            if events:
                peers[self._sockets[peer].fileno()] = peer
                poll.register(self._sockets[peer], events)
        ready = poll.poll(self._timeout * 1000)
        if not ready:
            raise TimeoutError("timed out")
        for descriptor, _ in ready:
            self._write(peers[descriptor])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


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


def _connect(addresses: Sequence[str], port: int, hello: bytes, peer: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    errors = []
    for number, address in enumerate(addresses):
        left = max(0.1, deadline - time.monotonic()) / (len(addresses) - number)
        try:
            connection = socket.create_connection((address, port), left)
            connection.sendall(hello)
            if connection.recv(1):  # another process may have that port at an address of its own
                return connection
            connection.close()
            errors.append(f"{address}: another process")
        except OSError as error:
            errors.append(f"{address}: {error}")
    raise OSError(
        f"cannot connect to rank {peer} at port {port} ({'; '.join(errors)}); if its machine has other addresses, name "
        f"the interface in GLOO_SOCKET_IFNAME"
    )


def _greet(connection: socket.socket, token: bytes, timeout: float) -> int | None:
    """The rank that calls; None if it is somebody else."""
    connection.settimeout(min(timeout, 5.0))
    with contextlib.suppress(OSError):
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size:
            theirs, rank = _HELLO.unpack(hello)
            if secrets.compare_digest(theirs, token):
                connection.sendall(b"!")
                return int(rank)
    connection.close()
    return None


def _set_up(connection: socket.socket, timeout: float) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
