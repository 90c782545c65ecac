"""`parallax run`, with real processes. The programs do not import torch, and all runs go on at once: that two
can is one of the things to test."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from parallax import cli

LIMIT = 50.0
"""Seconds for one run; importing torch in several launchers at once takes a while on two cores."""

ENDED_WITHIN = 10.0
"""Seconds after which no worker may be left, as promised."""

PROGRAM = """
import json, os, signal, sys, time
what, folder = sys.argv[1], sys.argv[2]
rank = os.environ["RANK"]
with open(f"{folder}/{rank}.tmp", "w") as file:
    seen = {
        "pid": os.getpid(),
        "argv": sys.argv[3:],
        "executable": sys.executable,
        "name": __name__,
        "path": sys.path[0],
        **{key: os.environ.get(key) for key in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
            "GLOO_SOCKET_IFNAME")},
    }
    json.dump(seen, file)
os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.json")
others = [f"{folder}/{r}.json" for r in range(int(os.environ["WORLD_SIZE"]))]
while not all(map(os.path.exists, others)):
    time.sleep(0.02)
def fail():
    raise KeyError("the cause")
if what == "fail" and rank == "1":
    fail()
if what == "fail":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "status":
    sys.exit(7 if rank == "0" else 0)
if what in ("fail", "wait"):
    time.sleep(100)
"""


@dataclasses.dataclass
class Run:
    """A run of `parallax run` under way; workers write what they see to `folder`."""

    folder: Path
    process: subprocess.Popen[bytes]
    nproc: int

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def workers(self) -> list[dict[str, object]]:
        """What the workers saw, by rank; waits for them to come up."""
        import json

        files = [self.folder / f"{rank}.json" for rank in range(self.nproc)]
        _wait_for(lambda: all(f.exists() for f in files) or self.process.poll() is not None, LIMIT)
        assert all(f.exists() for f in files), self.stderr()
        return [json.loads(f.read_text()) for f in files]

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_alive(pid: object) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _start(folder: Path, what: str, nproc: int = 2, module: bool = False, args: Sequence[str] = ()) -> Run:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    program = ["-m", "program"] if module else ["--", str(folder / "program.py")]
    command = [sys.executable, "-m", "parallax.cli"]
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(
            [*command, "run", f"--nproc={nproc}", *program, what, str(folder), *args],
            cwd=folder,
            env={**environment, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # so that signals of the test reach the launcher only
        )
    return Run(folder, process, nproc)


ARGUMENTS = ("--lr", "0.1", "--", "--nproc", "9", "-m", "$$a ${local_rank} $b", "two words", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    root = tmp_path_factory.mktemp("runs")
    started = {
        "arguments": _start(root / "arguments", "end", args=ARGUMENTS),
        "module": _start(root / "module", "end", nproc=3, module=True),
        "fail": _start(root / "fail", "fail", nproc=3),
        "status": _start(root / "status", "status"),
        "interrupt": _start(root / "interrupt", "wait"),
        "kill": _start(root / "kill", "wait"),
    }
    yield started
    for run in started.values():
        run.process.kill()  # the workers die with it
        run.process.wait()


@pytest.mark.programs
def test_workers_see_what_a_program_started_by_hand_sees(runs: dict[str, Run]) -> None:
    run = runs["arguments"]
    assert (run.wait(), run.stderr()) == (0, "")
    for rank, seen in enumerate(run.workers()):
        assert seen["argv"] == list(ARGUMENTS)
        assert (seen["name"], seen["path"]) == ("__main__", str(run.folder))
        assert seen["executable"] == sys.executable
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert str(seen["GLOO_SOCKET_IFNAME"]).startswith("lo")
        assert int(str(seen["OMP_NUM_THREADS"])) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.programs
def test_a_module_is_run_like_python_m(runs: dict[str, Run]) -> None:
    run = runs["module"]
    assert (run.wait(), run.stderr()) == (0, "")
    assert [seen["RANK"] for seen in run.workers()] == ["0", "1", "2"]


@pytest.mark.programs
def test_runs_at_once_have_their_own_ports(runs: dict[str, Run]) -> None:
    names = ("arguments", "module", "kill")
    ports = [{seen["MASTER_PORT"] for seen in runs[name].workers()} for name in names]
    assert all(len(p) == 1 for p in ports)
    assert len(set.union(*ports)) == len(names)


@pytest.mark.programs
def test_the_exit_status_is_the_failing_workers(runs: dict[str, Run]) -> None:
    run = runs["status"]
    assert run.wait() == 7
    assert run.stderr() == "parallax run: worker 0 failed with exit code 7\n"


@pytest.mark.programs
def test_a_workers_traceback_is_not_buried_and_the_others_end(runs: dict[str, Run]) -> None:
    run = runs["fail"]
    workers = run.workers()
    started = time.monotonic()
    assert run.wait() == 1
    assert time.monotonic() - started < ENDED_WITHIN
    assert not [seen for seen in workers if _is_alive(seen["pid"])]  # though two ignore SIGTERM
    *traceback, last = run.stderr().splitlines()
    lines = PROGRAM.splitlines()
    call, fault = 1 + lines.index("    fail()"), 1 + lines.index('    raise KeyError("the cause")')
    assert "\n".join(t for t in traceback if "^" not in t) == textwrap.dedent(
        f"""\
        Traceback (most recent call last):
          File "{run.folder}/program.py", line {call}, in <module>
            fail()
          File "{run.folder}/program.py", line {fault}, in fail
            raise KeyError("the cause")
        KeyError: 'the cause'"""
    )
    assert last == "parallax run: worker 1 failed with exit code 1"


@pytest.mark.programs
def test_ctrl_c_ends_all(runs: dict[str, Run]) -> None:
    run = runs["interrupt"]
    workers = run.workers()
    run.process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert run.wait() == 130
    assert time.monotonic() - started < ENDED_WITHIN
    assert not [seen for seen in workers if _is_alive(seen["pid"])]
    assert "parallax/cli.py" not in run.stderr()  # the launcher has no traceback to show
    assert "torch" not in run.stderr()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with a killed parent")
@pytest.mark.programs
def test_no_worker_outlives_a_launcher_that_is_killed(runs: dict[str, Run]) -> None:
    run = runs["kill"]
    workers = run.workers()
    run.process.kill()
    run.wait()
    _wait_for(lambda: not any(_is_alive(seen["pid"]) for seen in workers), ENDED_WITHIN)
    assert not [seen for seen in workers if _is_alive(seen["pid"])]


@pytest.mark.parametrize(
    ("exitcodes", "ended", "line", "status"),
    [
        ({1: 3}, set(), "worker 1 failed with exit code 3", 3),
        ({1: 1, 0: -15, 2: -9}, {0, 2}, "worker 1 failed with exit code 1", 1),
        ({0: 1, 1: 1, 3: 1}, set(), "workers 0, 1 and 3 failed with exit code 1", 1),
        ({0: 2, 1: 1}, set(), "worker 0 failed with exit code 2; worker 1 failed too", 2),
        ({0: 1, 1: -9, 2: 1}, set(), "worker 1 was killed by SIGKILL; workers 0 and 2 failed too", 137),
        ({0: -11, 1: -11}, set(), "workers 0 and 1 were killed by SIGSEGV", 139),
        ({2: -15}, set(), "worker 2 was killed by SIGTERM", 143),
        ({2: -15}, {2}, "worker 2 was killed by SIGTERM", 143),
        ({2: -40}, set(), "worker 2 was killed by signal 40", 168),
    ],
)
def test_what_is_said_of_workers_that_failed(
    exitcodes: dict[int, int], ended: set[int], line: str, status: int
) -> None:
    assert cli._describe(exitcodes, ended) == (line, status)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["run", "train.py"], "the following arguments are required: --nproc"),
        (["run", "--nproc", "2"], "no program given; example: parallax run --nproc 4 train.py"),
        (["run", "--nproc", "2", "--"], "no program given; example: parallax run --nproc 4 train.py"),
        (["run", "--nproc", "2", "nowhere/train.py"], "no such file: nowhere/train.py"),
        *(
            (["run", f"--nproc={n}", "x.py"], f"expected a whole number of workers, at least 1, got '{n}'")
            for n in ("0", "-1", "2.5", "two", "")
        ),
    ],
)
def test_wrong_command_lines(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["run", "--help"], "parallax run --nproc 4 train.py --batch-size 128"),
        (["--help"], "start a program on several workers of this machine"),
        (["--version"], "(torch 2."),
    ],
)
def test_help(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert text in capsys.readouterr().out


def test_the_users_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    cli._set_defaults(nproc=64)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"]) == ("5", "eth7")
