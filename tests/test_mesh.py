"""Connections between ranks: every byte arrives, in order and without a deadlock, or an error says why not."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ranks
import torch

from parallax import comm, mesh
from parallax.mesh import Column, FailedError, Kind, Mesh

MIB = 2**20
several_ranks = pytest.mark.parametrize("world_size", [2, 3, 4])


def gathering(world_size: int, meanwhile: Callable[[list[Any]], object] = lambda values: None) -> Callable[..., Any]:
    """An all_gather between threads; `meanwhile` runs before anyone gets the values."""
    values: dict[int, Any] = {}
    barrier = threading.Barrier(world_size, action=lambda: meanwhile([values[r] for r in range(world_size)]))

    def gather(rank: int, value: Any) -> list[Any]:
        values[rank] = value
        barrier.wait(10)
        return [values[r] for r in range(world_size)]

    return gather


def at_once(world_size: int, do: Callable[[int], Any]) -> list[Any]:
    """`do(rank)` of all ranks, each in a thread."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(do, range(world_size)))


def connect(
    world_size: int, timeout: float = 10.0, meanwhile: Callable[[list[Any]], object] = lambda values: None
) -> list[Mesh]:
    gather = gathering(world_size, meanwhile)
    return at_once(world_size, lambda rank: Mesh(rank, world_size, timeout, lambda value: gather(rank, value)))


@contextlib.contextmanager
def connected(world_size: int, timeout: float = 10.0) -> Iterator[list[Mesh]]:
    meshes = connect(world_size, timeout)
    yield meshes
    for one in meshes:
        one.close()


def message(sender: int, receiver: int, num_bytes: int) -> bytes:
    return bytes((sender * 7 + receiver * 3 + i) % 251 for i in range(256)) * (num_bytes // 256)


def cut(data: bytes | bytearray, sizes: Iterator[int]) -> list[memoryview]:
    """All of `data`, in pieces."""
    view, pieces, at = memoryview(data), [], 0
    while at < len(view):
        size = next(sizes)
        pieces.append(view[at : at + size])
        at += size
    return pieces


# -- messages -----------------------------------------------------------------------------------------


@several_ranks
@pytest.mark.parametrize("num_bytes", [8 * MIB, 2**16 - 256])
def test_all_may_send_before_any_receives(world_size: int, num_bytes: int) -> None:
    """8 MiB are more than the buffers of a connection hold."""

    def exchange(rank: int) -> None:
        peers = [p for p in range(world_size) if p != rank]
        for turn in range(2):
            for peer in peers:
                meshes[rank].send(peer, Kind.ROUND, [memoryview(message(rank, peer + turn, num_bytes))])
            for peer in peers:
                inbox = bytearray(num_bytes)
                meshes[rank].receive(peer, Kind.ROUND, [memoryview(inbox)])
                assert inbox == message(peer, rank + turn, num_bytes)
            meshes[rank].finish()

    with connected(world_size) as meshes:
        at_once(world_size, exchange)


def test_all_may_wait_for_each_other_before_any_receives() -> None:
    """More is under way between each two than the buffers of a connection hold."""

    def exchange(rank: int) -> None:
        peers = [p for p in range(3) if p != rank]
        for peer in peers:
            meshes[rank].send(peer, Kind.SHARD, [memoryview(message(rank, peer, 20 * MIB))])
        meshes[rank].finish()
        for peer in peers:
            inbox = bytearray(20 * MIB)
            meshes[rank].receive(peer, Kind.SHARD, [memoryview(inbox)])
            assert inbox == message(peer, rank, 20 * MIB)

    with connected(3) as meshes:
        at_once(3, exchange)


def test_a_ring_in_which_each_waits_for_the_next() -> None:
    """Rank 0 takes in nothing of rank 2 until rank 1, which first waits for rank 2, has sent."""

    def around(rank: int) -> None:
        after, before = (rank + 1) % 3, (rank + 2) % 3
        inbox = bytearray(8 * MIB)
        for peer in (before, after):
            meshes[rank].send(peer, Kind.SHARD, [memoryview(message(rank, peer, 8 * MIB))])
        for peer in (after, before):
            meshes[rank].receive(peer, Kind.SHARD, [memoryview(inbox)])
            assert inbox == message(peer, rank, 8 * MIB)
        meshes[rank].finish()

    with connected(3) as meshes:
        at_once(3, around)


def test_many_pieces_cut_otherwise_at_the_other_end() -> None:
    """More than the system takes in one call (1024)."""
    data, inbox = message(0, 1, 2**16), bytearray(2**16)
    with connected(2) as (a, b):
        a.send(1, Kind.ROUND, [b"", *cut(data, itertools.cycle([1, 2, 30])), memoryview(b"")])
        a.finish()
        b.receive(0, Kind.ROUND, [memoryview(b""), *cut(inbox, itertools.cycle([5, 1, 1, 16]))])
    assert inbox == data


def test_empty_messages_count() -> None:
    with connected(2) as (a, b):
        a.send(1, Kind.SHARD, [])
        a.send(1, Kind.SHARD, [memoryview(b"")])
        a.send(1, Kind.SHARD, [b"x"])
        a.finish()
        assert [b.open(0, Kind.SHARD) for _ in range(3)] == [0, 0, 1]


def test_small_messages_leave_when_their_sender_waits() -> None:
    with connected(3, timeout=0.3) as (a, b, _):
        a.send(1, Kind.ROUND, [b"small"])
        with pytest.raises(TimeoutError):
            b.open(0, Kind.ROUND)
        with pytest.raises(TimeoutError):
            a.open(2, Kind.ROUND)
        assert b.open(0, Kind.ROUND) == 5


def test_messages_of_other_kinds_wait_in_their_order() -> None:
    inbox = [bytearray(2), bytearray(4)]
    with connected(2) as (a, b):
        for kind, text in [(Kind.SHARD, b"first"), (Kind.SUM, b"sum"), (Kind.SHARD, b"then"), (Kind.ROUND, b"a round")]:
            a.send(1, kind, [text])
        a.finish()
        assert b.open(0, Kind.ROUND) == 7
        b.read(0, [memoryview(bytearray(7))])
        a.send(1, Kind.ROUND, [b"again"])
        a.finish()
        assert b.open(0, Kind.SHARD) == 5
        b.read(0, [memoryview(inbox[0])])  # in parts
        b.read(0, [memoryview(bytearray(3))])
        assert b.open(0, Kind.SHARD) == 4
        b.read(0, [memoryview(b""), memoryview(inbox[1])])
        assert b.open(0, Kind.ROUND) == 5
        b.read(0, [memoryview(bytearray(5))])
        b.receive(0, Kind.SUM, [memoryview(bytearray(3))])
    assert inbox == [b"fi", b"then"]


def test_a_wrong_size_is_named() -> None:
    with connected(2) as (a, b):
        a.send(1, Kind.ROUND, [b"12345"])
        a.finish()
        with pytest.raises(OSError, match=r"^5 bytes came where 4 were expected$"):
            b.receive(0, Kind.ROUND, [memoryview(bytearray(4))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex128, torch.int8, torch.bool])
def test_columns_are_the_memory_of_tensors(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(6, 2, 2).to(dtype)
    column = Column.split(tensor, [1, 0, 5])
    assert [column.num_bytes(r) for r in range(3)] == [len(m) for m in column.memory()]
    assert [bytes(m) for m in column.memory()] == [
        bytes(tensor.view(torch.uint8)[a:b].numpy()) for a, b in column.spans
    ]


# -- failures -----------------------------------------------------------------------------------------


def test_a_peer_that_is_gone_in_the_middle_of_a_message() -> None:
    with connected(2) as (a, b):
        a.send(1, Kind.ROUND, [bytes(50 * MIB)])
        a.close()
        b.open(0, Kind.ROUND)
        with pytest.raises(ConnectionResetError):
            b.read(0, [memoryview(bytearray(50 * MIB))])


@pytest.mark.parametrize("queued", [0, 1, 20 * MIB])
def test_a_peer_that_says_it_has_failed(queued: int) -> None:
    """What it sent before does not hide it."""
    with connected(3) as (a, b, c):
        if queued:
            a.send(1, Kind.SHARD, [bytes(queued)])
        teller = threading.Thread(target=a.tell_failure, args=(5.0,))
        teller.start()
        for kind, other in ((Kind.ROUND, b), (Kind.SUM, c)):
            with pytest.raises(FailedError, match=r"^rank 0 has failed$"):
                other.open(0, kind)
        teller.join()


def test_telling_of_a_failure_is_in_vain_where_nobody_listens() -> None:
    with connected(3) as (a, b, c):
        b.close()
        a.send(2, Kind.SHARD, [bytes(50 * MIB)])
        started = time.monotonic()
        a.tell_failure(0.3)
        assert time.monotonic() - started < 2
        c.close()


def test_a_failure_is_heard_of_though_what_is_sent_there_is_lost() -> None:
    with connected(2) as (a, b):
        a.tell_failure(1.0)
        a.close()
        for _ in range(3):  # the first is answered by a reset
            b.send(0, Kind.ROUND, [bytes(2**17)])
            b.finish()
            time.sleep(0.02)
        with pytest.raises(FailedError):
            b.open(0, Kind.ROUND)


def test_a_peer_that_is_gone_is_not_taken_for_another() -> None:
    """Rank 2 is gone; what rank 1 says arrives all the same."""
    with connected(3) as (a, b, c):
        c.close()
        b.send(0, Kind.ROUND, [b"here"])
        b.finish()
        for _ in range(3):
            a.send(2, Kind.ROUND, [bytes(20 * MIB)])
            a.receive(1, Kind.ROUND, [memoryview(bytearray(4))])
            b.send(0, Kind.ROUND, [b"here"])
            b.finish()
        with pytest.raises(ConnectionError):
            a.open(2, Kind.ROUND)


@pytest.mark.parametrize("sent", [0, 5, 20 * MIB], ids=["nothing", "half", "while sending"])
def test_a_silent_peer(sent: int) -> None:
    with connected(2, timeout=0.3) as (a, b):
        if sent == 5:
            a._sockets[1].sendall(mesh._PREFIX.pack(Kind.ROUND, 10) + b"12345")
        elif sent:
            b.send(0, Kind.ROUND, [bytes(sent)])
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            b.receive(0, Kind.ROUND, [memoryview(bytearray(10))])
        assert 0.25 < time.monotonic() - started < 3


def test_a_peer_that_takes_nothing_in() -> None:
    with connected(2, timeout=0.3) as (a, _):
        a.send(1, Kind.ROUND, [bytes(50 * MIB)])
        with pytest.raises(TimeoutError):
            a.finish()


# -- the start ----------------------------------------------------------------------------------------


def test_strangers_at_the_door() -> None:
    """One says nothing, one the wrong thing, one hangs up; nobody waits for them or takes them for a rank."""
    strangers: list[socket.socket] = []

    def meanwhile(everyone: list[Any]) -> None:
        for _, port, _ in everyone:
            for said in (None, mesh._HELLO.pack(b"?" * 16, 1), b"GET / HTTP/1.1\r\n\r\n" * 3, b""):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                if said is not None:
                    strangers[-1].sendall(said)
                    if not said:
                        strangers[-1].close()

    started = time.monotonic()
    a, b, c = connect(3, meanwhile=meanwhile)
    assert time.monotonic() - started < 3
    a.send(2, Kind.ROUND, [b"rank 0"])
    a.finish()
    assert c.open(0, Kind.ROUND) == 6
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError), stranger:
            if stranger.fileno() >= 0:
                assert stranger.recv(10) == b""
    for one in (a, b, c):
        one.close()


def test_a_rank_that_does_not_call() -> None:
    gather = gathering(3)

    def start(rank: int) -> Any:
        if rank == 1:
            return gather(rank, mesh_of_nobody())
        with pytest.raises(OSError, match=r"call|connect") as caught:
            Mesh(rank, 3, 0.5, lambda value: gather(rank, value))
        return str(caught.value)

    first, _, last = at_once(3, start)
    assert first == "ranks [1] do not call"
    assert last.startswith("cannot connect to rank 1 at port ")
    assert "(127.0.0.1: [Errno 111] Connection refused); if its machine has other addresses, name the" in last


def mesh_of_nobody() -> tuple[list[str], int, bytes]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return ["127.0.0.1"], port, b"" * 16


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n", None], ids=["other words", "silence"])
def test_another_process_at_one_of_the_addresses(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "TRY_SECONDS", 0.3)
    token, deadline = b"t" * 16, time.monotonic() + 10
    with socket.create_server(("127.0.0.3", 0)) as right, ThreadPoolExecutor(2) as pool:
        port = right.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)) as wrong:

            def other() -> None:
                with wrong.accept()[0] as connection, contextlib.suppress(OSError):
                    if answer is not None:
                        connection.sendall(answer)
                    while connection.recv(100):  # until it is left
                        pass

            pool.submit(other)
            found: dict[int, socket.socket] = {}
            taken = pool.submit(mesh._take_calls, right, token, {5}, deadline, found)
            addresses = ["127.0.0.4", "127.0.0.2", "127.0.0.3"]  # nobody, another, and it
            with mesh._connect(addresses, port, mesh._HELLO.pack(token, 5), 0, deadline) as called:
                taken.result()
                called.sendall(b"it is me")
                with found[5] as caller:
                    assert caller.recv(100) == b"it is me"


def test_a_rank_that_is_slow_to_answer_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that were given up are not taken for connections."""
    monkeypatch.setattr(mesh, "TRY_SECONDS", 0.1)
    token, deadline = b"t" * 16, time.monotonic() + 10
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        call = mesh._HELLO.pack(token, 1)
        called = pool.submit(mesh._connect, ["127.0.0.1"], listener.getsockname()[1], call, 0, deadline)
        time.sleep(0.35)
        found: dict[int, socket.socket] = {}
        mesh._take_calls(listener, token, {1}, deadline, found)
        with found[1] as caller, called.result() as connection:
            connection.sendall(b"here")
            assert caller.recv(4) == b"here"


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert mesh._addresses() == ["127.0.0.1"]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("", "no-such-interface"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert mesh._addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert mesh._addresses() == ["127.0.0.1"]


# -- AllReduce ----------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64]
SIZES = [0, 1, 2, 3, 4, 5, 1000, 1001]


def bucket(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) - 1).to(dtype)
    return (1000 * values).to(dtype) if dtype is torch.int64 else values.to(dtype)


def reduce_all(sizes: list[int], served: bool, direct_bytes: int) -> list[list[torch.Tensor]]:
    """All buckets are under way at once."""
    comm.DIRECT_BYTES = direct_bytes
    try:
        run = comm.Comm(torch.device("cpu"), timeout=20.0)
        under_way = []
        for size in sizes:  # dtypes take turns: what has 16 bits is not added up by machines first
            for dtype in DTYPES:
                server = len(under_way) % run.world_size if served else None
                under_way.append(run.all_reduce(bucket(run.rank, size, dtype), server))
        found = [run.wait(reduction) for reduction in under_way]
        run.close()
    finally:
        comm.DIRECT_BYTES = 2**20
    return [found[number :: len(DTYPES)] for number in range(len(DTYPES))]


on_machines = pytest.mark.parametrize(("world_size", "per_machine"), [(2, 2), (3, 3), (4, 4), (4, 2)])
"""The last sums inside of each machine first."""


@on_machines
@pytest.mark.parametrize(("served", "direct_bytes"), [(False, 2**20), (True, 2**20), (True, 4000)])
def test_small_buckets_of_all_dtypes_and_sizes(
    world_size: int, per_machine: int, served: bool, direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", str(per_machine))
    found = ranks.run(world_size, reduce_all, SIZES, served, direct_bytes)
    for number, dtype in enumerate(DTYPES):
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
        for i, size in enumerate(SIZES):
            parts = [bucket(rank, size, dtype).to(wide) for rank in range(world_size)]
            total = torch.stack(parts).sum(0).to(dtype)
            for result in found:
                assert torch.equal(result[number][i], found[0][number][i])
                torch.testing.assert_close(result[number][i], total, rtol=4 * eps(dtype), atol=4 * eps(dtype))


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def ways_of_buckets() -> list[bool]:
    """Whether buckets go over the mesh: of half of what it takes, and after they have been waited for."""
    run = comm.Comm(torch.device("cpu"), timeout=20.0)
    found = []
    for _ in range(2):
        under_way = [run.all_reduce(torch.ones(comm.DIRECT_BYTES // 8), server) for server in (None, 1, None, 1)]
        found += [reduction.work is None for reduction in under_way]
        assert all(bool((run.wait(reduction) == 2).all()) for reduction in under_way)
    run.close()
    return found


def test_so_much_is_under_way_over_the_mesh_at_most() -> None:
    assert ranks.run(2, ways_of_buckets) == [[True, True, False, False] * 2] * 2


def reduce_around_rounds() -> list[Any]:
    """Buckets, some large enough for the process group, that are under way during rounds of large columns."""
    run = comm.Comm(torch.device("cpu"), timeout=20.0)
    n, found = run.world_size, []
    for turn in range(4):
        small, large = torch.full((4000 + turn,), float(run.rank)), torch.full((MIB // 2,), float(run.rank))
        under_way = [run.all_reduce(b) for b in (small, large, small + 1)]
        rows = torch.full((n * 300_000,), 10.0 * run.rank + turn)
        inbox = torch.empty(n * 300_000)
        headers = [[turn, run.rank, peer] for peer in range(n)]
        received = run.exchange(
            headers,
            [Column.split(rows, [300_000] * n)],
            lambda headers, inbox=inbox: [Column.split(inbox, [300_000] * n)],
        )
        found.append(received == [(turn, peer, run.rank) for peer in range(n)])
        first = run.wait(under_way[0])
        run.swap([Column.split(inbox, [300_000] * n)], [Column.split(rows, [300_000] * n)])  # back
        found += [bool((b == sum(range(n)) + add).all()) for b, add in [(first, 0), (run.wait(under_way[1]), 0)]]
        found.append(bool((run.wait(under_way[2]) == sum(range(n)) + n).all()))
        found.append(bool((rows == 10.0 * run.rank + turn).all()))
    run.close()
    return found


@on_machines
def test_buckets_and_rounds_do_not_mix(world_size: int, per_machine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_PER_MACHINE", str(per_machine))
    for found in ranks.run(world_size, reduce_around_rounds):
        assert all(found)
        assert len(found) == 20


def lose_a_rank(how: str) -> None:
    """Rank 2 ends while all exchange large columns and buckets."""
    run = comm.Comm(torch.device("cpu"), timeout=20.0)
    rows = torch.zeros(3 * MIB)
    for turn in range(20):
        if run.rank == 2 and turn == 10:
            run.all_reduce(torch.zeros(100))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            error = ValueError("no luck")
            run.report_failure(error)
            run.tell_failure(3.0)
            raise error
        reduction = run.all_reduce(torch.zeros(1000))
        run.exchange(
            [[0]] * 3, [Column.split(rows, [MIB] * 3)], lambda _: [Column.split(torch.empty_like(rows), [MIB] * 3)]
        )
        run.wait(reduction)


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_rank_that_is_gone_is_named(how: str) -> None:
    outcomes = ranks.run(3, lose_a_rank, how, expect_errors=True)
    for outcome in outcomes[:2]:
        assert (outcome.error, outcome.seconds < 12) == ("PeerError", True), str(outcome)
        if how == "failed":
            assert outcome.text == f"rank {outcome.rank} stops because rank 2 failed with ValueError: no luck"
        else:
            assert outcome.text.startswith(f"rank {outcome.rank} stops: rank 2 is gone ("), outcome.text
    assert outcomes[2].error == ("Died" if how == "killed" else "ValueError")


def test_the_name_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which workers know that they share one, and merge."""
    monkeypatch.setenv("PARALLAX_MACHINE", "left")
    assert comm.machine_name() == "left"
    monkeypatch.delenv("PARALLAX_MACHINE")
    assert comm.machine_name().startswith(socket.gethostname())


class Connection:
    """Takes down what is set."""

    def __init__(self, default: bytes) -> None:
        self.algorithm = default

    def setblocking(self, flag: bool) -> None: ...

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self.algorithm.ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            if value == b"cubic" and self.algorithm == b"bbr, alone":
                raise OSError("no such algorithm")
            self.algorithm = value


@pytest.mark.parametrize(
    ("default", "taken"),
    [(b"bbr", b"cubic"), (b"bbr2", b"cubic"), (b"bbr, alone", b"reno"), (b"dctcp", b"dctcp"), (b"cubic", b"cubic")],
)
def test_connections_do_not_use_bbr(default: bytes, taken: bytes) -> None:
    connection: Any = Connection(default)
    mesh._set_up(connection, 5.0)
    assert connection.algorithm == taken


def reduce_around_a_round(late: int) -> tuple[list[bool], bool]:
    """Two AllReduces before a round, on rank `late` the second one after it; returns which were summed in the round,
    and whether the numbers are right."""
    run = comm.Comm(torch.device("cpu"), timeout=20.0)
    try:
        numbers = [torch.arange(1001.0) * (run.rank + 1), torch.full((70_000,), float(run.rank))]
        under_way = [run.all_reduce(numbers[0])]
        if run.rank != late:
            under_way.append(run.all_reduce(numbers[1]))
        rows, room = torch.full((run.world_size, 50_000), run.rank), torch.empty(run.world_size, 50_000)
        one_each = [1] * run.world_size
        run.exchange(
            [[7]] * run.world_size, [Column.split(rows.float(), one_each)], lambda _: [Column.split(room, one_each)]
        )
        summed = [reduction.is_summed for reduction in under_way]
        if run.rank == late:
            under_way.append(run.all_reduce(numbers[1]))
        first, second = map(run.wait, under_way)
        n = run.world_size
        right = torch.equal(first, torch.arange(1001.0) * (n * (n + 1) / 2))
        right &= bool((second == n * (n - 1) / 2).all()) and torch.equal(room[:, 0], torch.arange(float(n)))
        return summed, right
    finally:
        run.close()


@several_ranks
def test_sums_travel_with_a_round(world_size: int) -> None:
    """But nobody waits for parts that come after it."""
    assert ranks.run(world_size, reduce_around_a_round, -1) == [([True, True], True)] * world_size
    for summed, right in ranks.run(world_size, reduce_around_a_round, 1):
        assert (summed[0], any(summed[1:]), right) == (True, False, True)
