"""The harness for tests on several ranks: `run(4, fn, *args)` calls `fn(*args)` on ranks 0..3 of one world.

The ranks are processes that live as long as the session. They are forked from a *nursery*, a process that has
imported torch once, so a rank that has failed or hangs is replaced in milliseconds. For each job the ranks
join a new process group (gloo over loopback, found through a file, so no port is guessed). A world of one has
no process group, like `python train.py`.

A job that fails on a rank fails the test with that rank's traceback and output; one that takes too long fails
it with the stack of every rank that is still at work. A nursery that does not start fails the test as well.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import importlib
import io
import json
import multiprocessing.connection
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_WORLD_SIZE = 4
TIMEOUT = 50.0
"""Seconds for a job; below the limit of a test, so that the stacks are shown."""
GRACE = 8.0
"""Seconds that the other ranks have left when one has failed."""

_COMMAND = struct.Struct("<cq")
_REPLY = struct.Struct("<q")


@dataclasses.dataclass
class Outcome:
    """What became of a job on one rank: a value, or the exception that ended it."""

    rank: int
    value: Any = None
    error: str | None = None
    """The exception's type; "Died" for a process that is gone, "Hung" for one that had to be stopped."""
    text: str = ""
    """The exception's text; the exit status of a process that is gone."""
    traceback: str = ""
    seconds: float = 0.0
    output: str = ""
    """What the rank has written to stdout and stderr."""

    def __str__(self) -> str:
        if self.error is None:
            return f"rank {self.rank}: returned after {self.seconds:.1f} s"
        shown = self.output if "Traceback" in self.output else f"{self.traceback}{self.output}"
        return f"rank {self.rank}: {self.error}: {self.text} (after {self.seconds:.1f} s)\n{shown}"


class JobFailed(AssertionError):
    """Some rank failed that should not have; `outcomes` says what became of each."""

    def __init__(self, headline: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join([headline, *map(str, outcomes)]))


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    expect_errors: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Calls `fn(*args)` on every rank of a world and returns the results in rank order.

    Args:
        fn: a function at the top level of a module. What it returns travels by value.
        timeout: seconds; TIMEOUT by default.
        expect_errors: return an `Outcome` per rank, whether it failed or not.

    With RANKS_PER_MACHINE=n in the environment, each n ranks take themselves for one machine, and others for others.

    Raises:
        JobFailed: a rank failed (without `expect_errors`), or did not end in time.
    """
    return _pool().run(world_size, fn, args, timeout or TIMEOUT, expect_errors, backend)


def close() -> None:
    """Ends all rank processes."""
    global _the_pool
    if _the_pool is not None:
        _the_pool.close()
        _the_pool = None


# -- in the test process ------------------------------------------------------------------------------


@dataclasses.dataclass
class _Process:
    pid: int
    connection: Connection
    log: Any
    """The file that the process writes to; read here."""
    log_start: int = 0
    exit_status: str | None = None
    """How it has ended; its pid means nothing any more."""

    def output(self) -> str:
        self.log.seek(self.log_start)
        return self.log.read()


_the_pool: Pool | None = None


def _pool() -> Pool:
    global _the_pool
    if _the_pool is None:
        _the_pool = Pool()
    return _the_pool


class Pool:
    """Rank processes, made when needed and used again while all goes well."""

    def __init__(self) -> None:
        self._nursery, self._control = _start_nursery()
        self._stores = tempfile.TemporaryDirectory()
        self._processes: list[_Process | None] = [None] * MAX_WORLD_SIZE
        self._num_jobs = 0
        atexit.register(self.close)

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        expect_errors: bool,
        backend: str,
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size: expected 1 to {MAX_WORLD_SIZE}, got {world_size}")
        self._num_jobs += 1
        what = f"{fn.__module__}:{fn.__qualname__}"
        processes = [self._ready(rank) for rank in range(world_size)]
        started = time.monotonic()
        try:
            store = os.path.join(self._stores.name, str(self._num_jobs))
            for rank, process in enumerate(processes):
                machine = rank // int(os.environ.get("RANKS_PER_MACHINE", "1000"))
                job = _dumps((store, what, rank, world_size, machine, timeout, backend, _dumps(args)))
                process.connection.send_bytes(job)
            outcomes, hung = self._collect(processes, started + timeout, expect_errors)
            failed = [o for o in outcomes if o.error is not None]
            if not failed:
                self._wait_until_free(processes, what)
        except BaseException:  # an interrupt, or pytest's own time limit: the ranks are in mid-job
            self._discard(world_size)
            raise
        if failed:
            self._discard(world_size)
        if hung:
            raise JobFailed(f"{what} on {world_size} ranks did not end (time limit {timeout:g} s)", outcomes)
        if expect_errors:
            return outcomes
        if failed:
            names = ", ".join(f"{o.error} on rank {o.rank}" for o in failed)
            raise JobFailed(f"{what} on {world_size} ranks: {names}", outcomes)
        return [o.value for o in outcomes]

    def _collect(self, processes: list[_Process], deadline: float, patient: bool) -> tuple[list[Outcome], bool]:
        """The outcome of each rank, and whether a rank had to be stopped although none had failed before."""
        outcomes: dict[int, Outcome] = {}
        started = time.monotonic()
        first_failure: float | None = None
        while len(outcomes) < len(processes):
            waiting: dict[Any, int] = {p.connection: rank for rank, p in enumerate(processes) if rank not in outcomes}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                outcomes[rank] = self._receive(rank, processes[rank], started)
                if outcomes[rank].error is not None and first_failure is None:
                    first_failure = time.monotonic()
                    if not patient:
                        deadline = min(deadline, first_failure + GRACE)
        late = [rank for rank in range(len(processes)) if rank not in outcomes]
        for rank in late:
            os.kill(processes[rank].pid, signal.SIGUSR1)  # faulthandler writes the stacks to the log
        if late:
            time.sleep(0.5)
        for rank in late:
            stacks = processes[rank].output()
            outcomes[rank] = Outcome(
                rank, error="Hung", text="still running, with this stack", seconds=time.monotonic() - started
            )
            outcomes[rank].output = stacks
        hung = bool(late) and (patient or first_failure is None)
        return [outcomes[rank] for rank in range(len(processes))], hung

    def _receive(self, rank: int, process: _Process, started: float) -> Outcome:
        try:
            outcome: Outcome = _loads(process.connection.recv_bytes())
        except (EOFError, ConnectionError):
            outcome = Outcome(rank, error="Died", text=self._wait(process))
        outcome.seconds = time.monotonic() - started
        outcome.output = process.output()
        return outcome

    def _wait_until_free(self, processes: list[_Process], what: str) -> None:
        for rank, process in enumerate(processes):
            if not process.connection.poll(15.0):
                raise JobFailed(f"{what}: rank {rank} returned but did not leave its process group", [])
            try:
                process.connection.recv_bytes()
            except (EOFError, ConnectionError):
                end = f"{self._wait(process)}\n{process.output()}"
                raise JobFailed(f"{what}: rank {rank} died leaving its process group: {end}", []) from None

    def _ready(self, rank: int) -> _Process:
        process = self._processes[rank]
        if process is None:
            process = self._processes[rank] = self._fork()
        process.log.seek(0, os.SEEK_END)
        process.log_start = process.log.tell()
        return process

    def _fork(self) -> _Process:
        here, there = multiprocessing.connection.Pipe()
        log_fd, log = _log()
        try:
            socket.send_fds(self._control, [_COMMAND.pack(b"f", 0)], [there.fileno(), log_fd])
            pid = self._reply()
        except OSError as error:
            raise RuntimeError(f"the nursery of ranks is gone (exit status {self._nursery.poll()})") from error
        finally:
            there.close()
            os.close(log_fd)
        return _Process(pid, here, log)

    def _wait(self, process: _Process) -> str:
        """How a process that is about to end has ended."""
        if process.exit_status is None:
            self._control.sendall(_COMMAND.pack(b"w", process.pid))
            status = self._reply()
            killed = status < 0
            process.exit_status = f"killed by {signal.Signals(-status).name}" if killed else f"exit status {status}"
        return process.exit_status

    def _reply(self) -> int:
        data = self._control.recv(_REPLY.size, socket.MSG_WAITALL)
        if len(data) < _REPLY.size:
            raise OSError("no answer")
        return int(_REPLY.unpack(data)[0])

    def _discard(self, world_size: int) -> None:
        for rank in range(world_size):
            process, self._processes[rank] = self._processes[rank], None
            if process is not None:
                if process.exit_status is None:
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, signal.SIGKILL)
                        self._wait(process)
                process.connection.close()
                process.log.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._control.close()  # the nursery ends the ranks and itself; also when the test process dies
        try:
            self._nursery.wait(10.0)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        for process in filter(None, self._processes):
            process.connection.close()
            process.log.close()
        self._stores.cleanup()


def environment() -> dict[str, str]:
    """Environment for processes of a test: no launcher's variables, one thread each, gloo over loopback."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("TORCHELASTIC_")}
    env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    env["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return env


def _start_nursery() -> tuple[subprocess.Popen[bytes], socket.socket]:
    here, there = socket.socketpair()
    program = "import json, sys; sys.path[:] = json.loads(sys.argv[1]);import ranks; ranks.nursery(int(sys.argv[2]))"
    path = [os.path.dirname(os.path.abspath(__file__)), *sys.path]
    log_fd, log = _log()
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(path), str(there.fileno())],
        pass_fds=[there.fileno()],
        stdout=log_fd,
        stderr=log_fd,
        env=environment(),
        start_new_session=True,  # Ctrl-C reaches the tests alone, which then end the ranks
    )
    os.close(log_fd)
    there.close()
    here.settimeout(60.0)
    with log:
        try:
            ready = len(here.recv(_REPLY.size, socket.MSG_WAITALL)) == _REPLY.size
        except TimeoutError:
            ready = False
        if not ready:
            here.close()
            process.kill()
            raise RuntimeError(f"the nursery of ranks did not start (exit status {process.wait()}):\n{log.read()}")
    return process, here


def _log() -> tuple[int, Any]:
    """A file for what a process writes: (descriptor to write to, file to read from)."""
    fd, path = tempfile.mkstemp()
    reader = open(path, errors="replace")  # noqa: SIM115
    os.unlink(path)
    return fd, reader


# -- in the nursery and the ranks ---------------------------------------------------------------------


def nursery(control_fd: int) -> None:
    """Forks ranks on demand until the test process is gone."""
    control = socket.socket(fileno=control_fd)
    _import_everything()
    control.sendall(_REPLY.pack(0))
    children: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, _COMMAND.size, 2)
        if len(data) < _COMMAND.size:
            break
        command, pid = _COMMAND.unpack(data)
        if command == b"f":
            pid = os.fork()
            if pid == 0:
                control.close()
                _rank_process(*fds)
            for fd in fds:
                os.close(fd)
            children.add(pid)
            control.sendall(_REPLY.pack(pid))
        else:
            control.sendall(_REPLY.pack(_wait_for(pid)))
            children.discard(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _wait_for(pid: int) -> int:
    """Exit status of a child that is about to end; minus the signal that ended it."""
    for _ in range(500):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _import_everything() -> None:
    """What jobs need, so that they find it loaded."""
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns of sparse tensors without a decision
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    torch.optim.Adam([p]).step()  # the first step of any optimizer imports half of torch
    try:
        import parallax  # noqa: F401
    except Exception:
        traceback.print_exc()  # the job that needs it shows it again
    gc.collect()
    gc.freeze()


def _rank_process(connection_fd: int, log_fd: int) -> None:
    """One rank: jobs until the test process is gone. Never returns."""
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    connection = Connection(connection_fd)
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        _do(connection, job)


def _do(connection: Connection, data: bytes) -> None:
    import torch
    import torch.distributed as dist

    path, what, rank, world_size, machine, timeout, backend, packed = _loads(data)
    os.environ["PARALLAX_MACHINE"] = str(machine)
    outcome = Outcome(rank)
    try:
        module, _, name = what.partition(":")
        fn = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        sys.excepthook = sys.__excepthook__  # each process group wraps the one that it finds
        if world_size > 1:
            # A file: connecting to a TCPStore takes 5 seconds now and then.
            store, limit = dist.FileStore(path, world_size), datetime.timedelta(seconds=timeout)
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome.value = fn(*_loads(packed))
            _leave_parallax()
        message = _dumps(outcome)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # an uncaught exception, as in a program of its own
        failure = Outcome(rank, error=type(error).__name__, text=str(error), traceback=traceback.format_exc())
        connection.send_bytes(_dumps(failure))
        sys.stderr.flush()
        os._exit(1)
    connection.send_bytes(message)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    connection.send_bytes(b"free")


def _leave_parallax() -> None:
    """Ends the run that the job has left, if it has; all ranks do."""
    parallax = sys.modules.get("parallax")
    if parallax is not None:
        parallax.shutdown()


def _dumps(value: Any) -> bytes:
    """By value, tensors included: torch's own pickling for pipes would share memory."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loads(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)
