"""A cluster on one machine: hosts with addresses, names and links of their own, on which to measure.

    sudo .venv/bin/python benchmarks/cluster.py --machines 8 --bandwidth 300Mbit -- .venv/bin/python train.py

Each machine of the cluster is a Linux network namespace with a link (`eth0`) to one switch, a bridge, and a host name
(`machine0`, `machine1`, ...) that the others find its address by. What shapes a link is `tc tbf`: what a machine sends
at its own end, what it gets at the switch's. Workers find the variables that torchrun sets, and GLOO_SOCKET_IFNAME.
As a library:

    with Cluster(machines=3, bandwidth="300Mbit") as cluster:
        result = cluster.run([sys.executable, "train.py"], workers=2, timeout=60)
    print(result.exit_codes, result.sent)

It needs root, and Debian's package iproute2. CPUs, memory and files are those of this machine.

**Nothing stays behind.** Namespaces have no names: each, with its links, is gone when the last process in it is. So
the bridge is in a namespace as well; these have one process each that ends when this one does, whatever ends it, and
workers are killed by the kernel when the process that started them dies. Two clusters do not see each other.

**Bandwidth** is that of Ethernet frames, as with hardware: 1448 of 1514 bytes are what TCP carries. `measure` sends a
few seconds' worth from one machine to another and gives frames' bits per second; the tests ask for 5 %. Links
have no latency of their own and lose nothing: the queues are longer than what can be under way, so that no number
depends on when TCP sends again.

**Byte counts** are those of each `eth0`. TCP hands over up to 11 frames as one (segmentation offload), which counts
one header of 66 bytes, while `tbf` counts each frame's. Without offload the packets would take most of the CPUs that
they share with the workers; with all of it (64 KiB) whole messages would pass as one burst, faster than the link.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

INTERFACE = "eth0"
"""A machine's link, by the name it has there."""

FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
"""The largest Ethernet frame, and what TCP carries in it."""

LINGER_SECONDS = 8.0
"""How long workers may take to end by themselves when one has failed; they may have an error to tell."""

GRACE_SECONDS = 2.0
"""How long a worker that was told to end may take before it is killed."""

_OFFLOAD_BYTES = 11 * FRAME_PAYLOAD_BYTES + 66
_QUEUE_BYTES = 256 * 2**20
_FIRST_PORT = 29500
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_PACKAGES |= {"setpriv": "util-linux", "taskset": "util-linux", "mount": "mount"}
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class ClusterError(RuntimeError):
    """A cluster cannot be built here, or a command of the system failed."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command did on the cluster. Lists are by rank or by machine."""

    exit_codes: list[int]
    """By rank; -n if signal n ended the worker."""
    outputs: list[str]
    """By rank: what the worker wrote, stdout and stderr."""
    sent: list[int]
    """By machine: bytes that left its link from start to end."""
    received: list[int]
    """By machine: bytes that came in on its link."""
    seconds: float
    """From the start of the first worker to the end of the last."""
    ended: frozenset[int]
    """Ranks that were still running, and were ended, a while after another rank had failed."""


class Cluster:
    """Machines with a link each to one switch. A context manager: the machines are there inside."""

    def __init__(self, *, machines: int, bandwidth: str | None = None, cores: Sequence[int] = ()) -> None:
        """
        Args:
            machines: number of hosts, 1 to 1000.
            bandwidth: of each link in each direction, such as "300Mbit" or "1Gbit"; None: as fast as it goes.
            cores: workers on machine m run on core `cores[m % len(cores)]` only; empty: on any.

        Raises:
            ValueError: an argument is none of the above.
        """
        if not 1 <= machines <= 1000:
            raise ValueError(f"Cluster: expected 1 to 1000 machines, got {machines}")
        self.machines, self.bandwidth, self.cores = machines, bandwidth, tuple(cores)
        if bandwidth is not None:
            bits_per_second(bandwidth)
        self._switch: subprocess.Popen[str] | None = None
        self._hosts: list[subprocess.Popen[str]] = []
        self._jobs: list[Job] = []
        self._num_runs = 0

    def __enter__(self) -> Cluster:
        _check_system()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _build(self) -> None:
        names = {f"machine{m}": self.address(m) for m in range(self.machines)}
        self._switch = _hold_namespaces("switch", names)
        for name in names:
            self._hosts.append(_hold_namespaces(name, names))
        lines = ["link add switch type bridge", "link set switch addrgenmode none", "link set switch up"]
        offload = f"gso_max_size {_OFFLOAD_BYTES}"
        for m, host in enumerate(self._hosts):
            lines += [
                f"link add port{m} type veth peer name {INTERFACE} netns {host.pid}",
                # No addresses of IPv6, so that nothing is on a link but what workers send.
                f"link set port{m} addrgenmode none {offload} master switch up",
            ]
        _batch(self._switch, "ip", lines)
        for m, host in enumerate(self._hosts):
            link = [f"link set {INTERFACE} addrgenmode none {offload} up", "link set lo up"]
            _batch(host, "ip", [*link, f"address add {self.address(m)}/16 dev {INTERFACE}"])
        if self.bandwidth is not None:
            self._shape(self.bandwidth)

    def set_bandwidth(self, bandwidth: str | None) -> None:
        """Changes that of all links, while workers run as well."""
        if bandwidth != self.bandwidth:
            self._shape(bandwidth)
            self.bandwidth = bandwidth

    def _shape(self, bandwidth: str | None) -> None:
        command, shape = "del", ""
        if bandwidth is not None:
            rate = bits_per_second(bandwidth)
            # A late timer must not cost bandwidth (1 ms), and the largest packet has to pass.
            burst = max(rate // 8 // 1000, _OFFLOAD_BYTES * FRAME_BYTES // FRAME_PAYLOAD_BYTES)
            command, shape = "replace", f"tbf rate {rate}bit burst {burst} limit {_QUEUE_BYTES}"
        assert self._switch is not None
        _batch(self._switch, "tc", [f"qdisc {command} dev port{m} root {shape}" for m in range(self.machines)])
        for host in self._hosts:
            _batch(host, "tc", [f"qdisc {command} dev {INTERFACE} root {shape}"])

    def close(self) -> None:
        """Ends what runs on the machines, and them."""
        for job in self._jobs:
            job.kill()
        keepers = [*self._hosts, *([self._switch] if self._switch else [])]
        for keeper in keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()  # what it waits for
        for keeper in keepers:
            keeper.wait()
            assert keeper.stdout is not None
            keeper.stdout.close()
        self._hosts, self._switch, self._jobs = [], None, []

    def address(self, machine: int) -> str:
        """In the block that RFC 2544 sets aside for benchmarks, so that it is nobody's."""
        return f"198.18.{machine // 250}.{machine % 250 + 1}"

    def run(
        self,
        command: Sequence[str],
        *,
        workers: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        echo: bool = False,
    ) -> Result:
        """Runs `command` on each machine, and waits for its end; see `start` and `Job.wait`."""
        return self.start(command, workers=workers, env=env, echo=echo).wait(timeout)

    def start(
        self, command: Sequence[str], *, workers: int = 1, env: Mapping[str, str] | None = None, echo: bool = False
    ) -> Job:
        """Starts `command` on each machine. Ranks count through machine 0 first, then machine 1.

        Args:
            workers: number of processes on each machine.
            env: variables in addition to this process's and those that torchrun sets.
            echo: print what workers write as it comes, each line behind the worker's rank.
        """
        if self._switch is None:
            raise ClusterError("this cluster is not there: use it inside `with Cluster(...) as cluster:`")
        if workers < 1:
            raise ValueError(f"Cluster: expected at least 1 worker per machine, got {workers}")
        port = _FIRST_PORT + self._num_runs
        self._num_runs += 1
        job = Job(self, echo)
        self._jobs.append(job)
        for rank in range(self.machines * workers):
            machine, local_rank = divmod(rank, workers)
            variables = {
                "RANK": rank,
                "LOCAL_RANK": local_rank,
                "GROUP_RANK": machine,
                "WORLD_SIZE": self.machines * workers,
                "LOCAL_WORLD_SIZE": workers,
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **{k: str(v) for k, v in variables.items()}}
            pinned = ["taskset", "-c", str(self.cores[machine % len(self.cores)])] if self.cores else []
            job.add(
                ["setpriv", "--pdeathsig", "KILL", *_inside(self._hosts[machine]), *pinned, *command],
                {**environment, **(env or {})},
            )
        return job

    def cut(self, machine: int) -> None:
        """Takes a machine's link down: from now on nothing gets through, and nobody is told."""
        self._set_link(machine, "down")

    def restore(self, machine: int) -> None:
        """Undoes `cut`."""
        self._set_link(machine, "up")

    def _set_link(self, machine: int, state: str) -> None:
        if self._switch is None or not 0 <= machine < self.machines:
            raise ValueError(f"Cluster: no machine {machine} here; there are {self.machines}")
        _batch(self._switch, "ip", [f"link set port{machine} {state}"])

    def measure(self, sender: int = 0, receiver: int = 1, seconds: float = 2.0) -> float:
        """Bits per second of Ethernet frames from one machine to another, by a TCP transfer.

        The receiver takes the time and counts from when a quarter has come in to the end; from the payload follow the
        frames that it takes.
        """
        num_bytes = int(seconds * bits_per_second(self.bandwidth or "1Gbit") / 8)
        code = _TRANSFER.format(address=self.address(receiver), n=num_bytes, sender=sender, receiver=receiver)
        result = self.run([sys.executable, "-c", code], timeout=20 * seconds + 30)
        if any(result.exit_codes):
            raise ClusterError("a transfer to measure the bandwidth failed:\n" + "\n".join(result.outputs))
        return float(result.outputs[receiver]) * 8 * FRAME_BYTES / FRAME_PAYLOAD_BYTES

    def counters(self) -> list[tuple[int, int]]:
        """By machine: bytes that its link has sent and received since it exists."""
        return [link_counters(host.pid) for host in self._hosts]


_TRANSFER = """
import os, socket, time
rank, n = int(os.environ["RANK"]), {n}
if rank == {receiver}:
    with socket.create_server(("", 5001)) as server:
        connection = server.accept()[0]
    got, start, first = 0, None, 0
    while data := connection.recv(1 << 20):
        got += len(data)
        if start is None and got >= n // 4:
            start, first = time.perf_counter(), got
    print((got - first) / (time.perf_counter() - start))
elif rank == {sender}:
    for _ in range(200):
        try:
            connection = socket.create_connection(("{address}", 5001))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.sendall(bytes(n))
"""


class Job:
    """A command that runs on a cluster."""

    def __init__(self, cluster: Cluster, echo: bool) -> None:
        self._cluster, self._echo = cluster, echo
        self._workers: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._outputs: list[list[str]] = []
        self._counters = cluster.counters()
        self._started = time.monotonic()

    def add(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the next rank."""
        worker = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the launcher, and a worker's own children go with it
        )
        self._outputs.append([])
        self._workers.append(worker)
        self._readers.append(threading.Thread(target=self._read, args=(len(self._workers) - 1,), daemon=True))
        self._readers[-1].start()

    def _read(self, rank: int) -> None:
        pipe = self._workers[rank].stdout
        assert pipe is not None
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace")
                self._outputs[rank].append(line)
                if self._echo:
                    sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
                    sys.stdout.flush()

    @property
    def outputs(self) -> list[str]:
        """By rank: what workers have written so far."""
        return ["".join(lines) for lines in self._outputs]

    def wait(self, timeout: float | None = None, *, on_tick: Callable[[], object] = lambda: None) -> Result:
        """Waits until all workers have ended. If one fails, the others have `LINGER_SECONDS` to end by themselves.

        Args:
            on_tick: called some 50 times per second while workers run.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the workers are ended.
        """
        deadline = None if timeout is None else self._started + timeout
        end_at: float | None = None
        ended: frozenset[int] = frozenset()
        try:
            while running := [r for r, worker in enumerate(self._workers) if not _has_ended(worker)]:
                now = time.monotonic()
                if deadline is not None and now > deadline:
                    self.kill()
                    raise TimeoutError(f"ranks {running} were still running after {timeout:g} s\n{self._last_lines()}")
                if end_at is not None and now > end_at:
                    ended = frozenset(running)
                    break
                if end_at is None and any(worker.returncode for worker in self._workers):
                    end_at = now + LINGER_SECONDS
                on_tick()
                time.sleep(0.02)
        finally:
            self.kill()
        seconds = time.monotonic() - self._started
        between = zip(self._counters, self._cluster.counters(), strict=True)
        sent, received = zip(*((t1 - t0, r1 - r0) for (t0, r0), (t1, r1) in between), strict=True)
        return Result(
            exit_codes=[worker.returncode for worker in self._workers],
            outputs=self.outputs,
            sent=list(sent),
            received=list(received),
            seconds=seconds,
            ended=ended,
        )

    def kill(self) -> None:
        """Ends the workers that still run, and their children."""
        running = [worker for worker in self._workers if not _has_ended(worker)]
        for worker in running:
            os.killpg(worker.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not all(_has_ended(worker) for worker in running):
            time.sleep(0.02)
        for worker in running:
            if worker.returncode is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        for reader in self._readers:
            reader.join(GRACE_SECONDS)

    def _last_lines(self, number: int = 5) -> str:
        return "\n".join(f"[{r}] {line.rstrip()}" for r, lines in enumerate(self._outputs) for line in lines[-number:])


def _has_ended(worker: subprocess.Popen[bytes]) -> bool:
    """Whether it has; the children that it has left are killed then, before its process id can be another's."""
    if worker.returncode is None and os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    return worker.returncode is not None


def link_counters(process: int | str = "self") -> tuple[int, int]:
    """Bytes that the link of the machine that `process` is on has (sent, received) since it exists."""
    with open(f"/proc/{process}/net/dev") as table:
        fields = next(line.split() for line in table if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[9]), int(fields[1])


def bits_per_second(bandwidth: str) -> int:
    """The number that e.g. "300Mbit" stands for.

    Raises:
        ValueError: it is not a number and one of bit, Kbit, Mbit, Gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", bandwidth.strip().lower())
    value = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 8000 <= value < 2**35:
        raise ValueError(f'bandwidth: expected e.g. "300Mbit", from 8Kbit to 34Gbit, got {bandwidth!r}')
    return int(value)


# -- the system ---------------------------------------------------------------------------------------


def _check_system() -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterError(f"a cluster is made of Linux network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise ClusterError("a cluster needs root, for network namespaces: run this with sudo")
    missing = sorted({package for tool, package in _PACKAGES.items() if shutil.which(tool) is None})
    if missing:
        packages = " ".join(missing)
        raise ClusterError(f"a cluster needs tools that are not here; on Debian: apt-get install {packages}")


def _hold_namespaces(name: str, addresses: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process with a network, a host name and an /etc/hosts of its own.

    It ends when this process closes its stdin or dies; the namespaces are there as long as a process is in them.
    """
    hosts = ["127.0.0.1 localhost", *(f"{a} {h}\n::ffff:{a} {h}" for h, a in addresses.items())]
    with tempfile.NamedTemporaryFile("w", prefix="cluster-hosts-") as file:
        file.write("\n".join(hosts) + "\n")
        file.flush()
        script = "echo $0 > /proc/sys/kernel/hostname && mount --bind $1 /etc/hosts && echo ready && exec cat >&2"
        keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, name, file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
    if said != "ready\n":
        said += keeper.communicate()[0]
        raise ClusterError(f"no namespaces for {name} (a container may need --privileged): {said.strip()}")
    return keeper


def _inside(host: subprocess.Popen[str]) -> list[str]:
    """What makes a command one that runs there, in the folder where this process is."""
    return ["nsenter", "--target", str(host.pid), "--net", "--uts", "--mount", "env", f"--chdir={os.getcwd()}"]


def _batch(host: subprocess.Popen[str], tool: str, lines: Sequence[str]) -> None:
    """Gives lines of commands to `ip` or `tc` on a host."""
    command = [*_inside(host), tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True)
    if done.returncode:
        number = re.search(r"-:(\d+)", done.stderr)
        failed = lines[int(number[1]) - 1] if number else "; ".join(lines)
        raise ClusterError(f"`{tool} {failed}` failed: {done.stderr.strip()}")


# -- the command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: that of the lowest rank that failed by itself."""
    parser = argparse.ArgumentParser(
        description="Runs a command on several machines that are made on this one (see the top of this file).",
        usage="%(prog)s --machines N [--workers N] [--bandwidth 300Mbit] [--cores 0,1] [--timeout S] -- command ...",
    )
    parser.add_argument("--machines", type=int, required=True, metavar="N")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="per machine (default: 1)")
    parser.add_argument("--bandwidth", metavar="B", help="of each link, e.g. 300Mbit (default: no limit)")
    parser.add_argument("--cores", default="", metavar="C,C", help="machine m runs on the m-th of these, in turn")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which all are ended")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given; example: cluster.py --machines 2 -- python train.py")
    try:
        cores = [int(core) for core in args.cores.split(",") if core]
        cluster = Cluster(machines=args.machines, bandwidth=args.bandwidth, cores=cores)
    except ValueError as error:
        parser.error(str(error))
    try:
        with _ended_by_signals(), cluster:
            result = cluster.run(command, workers=args.workers, timeout=args.timeout, echo=True)
    except (ClusterError, TimeoutError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f"\n{shlex.join(command)}: {result.seconds:.1f} s")
    for machine, (sent, received) in enumerate(zip(result.sent, result.received, strict=True)):
        print(f"machine{machine}: {sent:,} bytes sent, {received:,} received")
    failed = [(r, code) for r, code in enumerate(result.exit_codes) if code and r not in result.ended]
    for rank, code in failed:
        fate = f"failed with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        print(f"cluster: rank {rank} {fate}", file=sys.stderr)
    return next((code if code > 0 else 128 - code for _, code in failed), 0)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by way of `finally`, as Ctrl-C does."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
