"""The command `parallax`: `parallax run --nproc 4 train.py` trains on 4 workers of this machine; `verify` compares
with one device; `plan` predicts.

torch.distributed.run starts and watches the workers; what is added here is for somebody at a terminal. The
workers meet on loopback, through a port that the system picks. If one fails, its own traceback is the last
thing to read but for one line, and the others are gone within seconds. However the launcher ends, no worker
outlives it.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

LINGER_SECONDS = 2
"""How long workers may take to end by themselves when one has failed."""

GRACE_SECONDS = 5
"""How long a worker that was told to end may take before it is killed."""

BAD_INPUT = 2
"""Exit status of `parallax plan` for what it does not understand, as for a wrong command line."""

NOT_VERIFIED = 2
"""Exit status of `parallax verify` when there was nothing to compare, as for a wrong command line."""

_DESCRIPTION = """\
Start a training program on several workers of this machine.

Each worker runs the program as `python script.py arg ...` would, with RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT set, which parallax.distribute reads. Runs do not disturb each other."""

_EXAMPLES = """\
examples:
  parallax run --nproc 4 train.py --batch-size 128
  parallax run --nproc 2 -m mypackage.train --epochs 3

OMP_NUM_THREADS is set to the cores per worker, and GLOO_SOCKET_IFNAME to the loopback interface, unless the
environment has them. The exit status is that of the worker that failed first (128 + n if signal n killed it),
130 after Ctrl-C. For several machines, start the same program with torchrun.

--auto trains a program that does not know parallax: loops over a DataLoader in training mode read each worker's
part, everything that optimizers train is distributed, and only worker 0 prints and saves. Evaluation
(model.eval() or torch.no_grad()) sees all data on each worker. What is not understood ends with an error.
  parallax run --auto --nproc 4 train.py
The batch of a step is one batch of the DataLoader, divided among the workers: the numbers of `python train.py`. With
--scale-batches it is N of them, one for each worker."""

NUM_LAST_LINES = 20
"""Lines shown of what a worker printed that died without a traceback."""

_VERIFY_DESCRIPTION = """\
Train a few steps on several workers and the same steps on one device, and compare every parameter.

FACTORY is the name of a function, "module:function" or "path/to/file.py:function", that returns what there is to
train. The workers are started here and meet as with `parallax run`. All runs in float64, without dropout."""

_VERIFY_EXAMPLES = """\
example, in check.py:
  def factory():
      torch.manual_seed(0)
      model = Model(num_words=1000)  # small is enough
      optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
      loader = DataLoader(dataset, batch_size=32, shuffle=True)
      return model, optimizer, loader, lambda model, batch: model(*batch)  # the loss

  parallax verify check.py:factory
  parallax verify mypackage.check:factory --nproc 4 --steps 20

The exit status is 0 if all is equal, 1 if something differs by more than the tolerance, and 2 if nothing could be
compared."""


_PLAN_DESCRIPTION = """\
Predict the step of a model on machines that you may not have.

For the hybrid (what parallax.distribute would choose), servers for every parameter (ps), and AllReduce with the rows
of tables gathered (allreduce): seconds of a step, throughput, and bytes that the busiest machine sends. The model is a
profile saved by a run, one of the models of arXiv 1808.02621, or a description in a file."""

_PLAN_EXAMPLES = """\
examples:
  parallax plan --model lm --machines 8 --workers 6 --bandwidth 100Gbit --latency 20us
  parallax plan --model lm --bandwidth 10Gbit --sweep machines=1..64 --plot lm.png

from a run of your own: parallax.explain(model).save("plan.json") after the first step, then
  parallax plan --profile plan.json --compute 80ms --machines 16 --bandwidth 25Gbit

a description:
  {"name": "mine", "unit": "words", "units_per_worker": 2560, "compute_seconds": 0.08, "parameters": [
    {"name": "lstm", "elements": 9400000},
    {"name": "embedding", "rows": 793470, "row_elements": 512, "alpha": 0.0087}]}
alpha is the fraction of the rows that one worker touches in a step; compute_seconds is forward and backward alone.
Optional: itemsize (4); for tables alpha_by_machine (of the workers of one machine together) and sparse_gradient;
for the model coefficients (fields of parallax.topology.Coefficients).

The exit status is 2 if something is not understood. docs/paper.md compares predictions with published figures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: `sys.argv[1:]`) and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="parallax",
        description="Data-parallel training of unmodified PyTorch models with sparse parameters.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a program on several workers of this machine",
        usage="parallax run --nproc N [--auto [--scale-batches]] [-m] [--] script.py [arg ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--nproc", type=_positive, required=True, metavar="N", help="number of workers")
    run.add_argument("--auto", action="store_true", help="distribute a program that does not know parallax")
    run.add_argument(
        "--scale-batches", action="store_true", help="with --auto: each worker takes whole batches of the program"
    )
    run.add_argument("-m", "--module", action="store_true", help="the program is a module, as in `python -m`")
    run.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    _add_verify(commands)
    _add_plan(commands)
    args = parser.parse_args(argv)
    if args.command == "verify":
        return _verify(args)
    if args.command == "plan":
        return _plan(args)
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        run.error("no program given; example: parallax run --nproc 4 train.py")
    if not args.module and not Path(program[0]).exists():
        run.error(f"no such file: {program[0]}")
    if args.scale_batches and not args.auto:
        run.error("--scale-batches is for --auto; parallax.shard(loader) does it by default")
    worker_options = ["-m"] if args.module else []
    try:
        if args.auto:
            return _launch_auto(
                args.nproc, [*(["--scale-batches"] if args.scale_batches else []), *worker_options, "--", *program]
            )
        return _launch(args.nproc, [sys.executable, "-u", *worker_options, *program])
    except KeyboardInterrupt:  # before there were workers
        return 128 + signal.SIGINT


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a few steps on several workers with one device",
        description=_VERIFY_DESCRIPTION,
        epilog=_VERIFY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("factory", metavar="FACTORY", help="returns (model, optimizer, loader, loss_fn)")
    verify.add_argument("--nproc", type=_positive, default=2, metavar="N", help="number of workers (default: 2)")
    verify.add_argument(
        "--steps",
        type=lambda text: _positive(text, "steps"),
        default=5,
        metavar="N",
        help="training steps (default: 5)",
    )
    verify.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference, relative to max(1, |value|) (default: 1e-7, with --keep-dtype 1e-4)",
    )
    verify.add_argument("--keep-dtype", action="store_true", help="leave the model in its own dtype")
    verify.add_argument(
        "--join", metavar="FUNCTION", help="module:function that puts a list of the workers' batches together"
    )
    verify.add_argument(
        "--architecture", choices=["hybrid", "allreduce", "ps"], default="hybrid", help="(default: hybrid)"
    )
    verify.add_argument("--reduction", choices=["mean", "sum"], default="mean", help="(default: mean)")


def _verify(args: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    from parallax.comm import ParallaxError
    from parallax.config import Config
    from parallax.verification import verify

    try:
        report = verify(
            args.factory,
            nproc=args.nproc,
            steps=args.steps,
            tolerance=args.tolerance,
            dtype="keep" if args.keep_dtype else "float64",
            config=Config(architecture=args.architecture, reduction=args.reduction),
            join=args.join,
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ParallaxError as error:
        print(error, file=sys.stderr, flush=True)
        return NOT_VERIFIED
    except Exception:  # the user's own, with its place
        traceback.print_exc()
        return NOT_VERIFIED
    print(report)
    return 0 if report.ok else 1


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict step time and bytes on other machines",
        description=_PLAN_DESCRIPTION,
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="NAME|FILE", help="lm, nmt, resnet50, inception3, or a description (JSON)")
    source.add_argument("--profile", metavar="FILE", help="what parallax.explain(model).save(FILE) wrote")
    where = plan.add_argument_group("machines (what is not said is taken from --topology, or from the profile)")
    where.add_argument("--topology", metavar="FILE", help="machines and measured links (JSON)")
    where.add_argument("--machines", type=lambda text: _positive(text, "machines"), metavar="N", help="(default: 1)")
    where.add_argument("--workers", type=_positive, metavar="N", help="on each machine (default: 1)")
    where.add_argument("--bandwidth", metavar="B", help="what a machine sends, such as 100Gbit (default: 10Gbit)")
    where.add_argument("--latency", metavar="T", help="of a message between machines, such as 20us (default: 50us)")
    where.add_argument("--inside-bandwidth", metavar="B", help="what a worker sends inside its machine (default: 5GB)")
    where.add_argument("--inside-latency", metavar="T", help="of a message inside a machine (default: 10us)")
    what = plan.add_argument_group("the step")
    what.add_argument("--compute", metavar="T", help="forward and backward of a step, such as 80ms")
    what.add_argument("--units", type=float, metavar="N", help="samples that a worker trains on in a step")
    what.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="PATTERN=PLACEMENT",
        help="fix the hybrid's placement of parameters: allreduce, gather or sharded; may be repeated",
    )
    shown = plan.add_argument_group("output")
    shown.add_argument("--sweep", metavar="WHAT=A..B", help="machines=1..64 (doubling), or workers=1,2,6")
    shown.add_argument("--plot", metavar="FILE", help="with --sweep: a picture of the throughput (needs matplotlib)")
    shown.add_argument("--json", action="store_true", help="print JSON")


def _plan(args: argparse.Namespace) -> int:
    try:
        return _show_plan(args)
    except (ValueError, OSError) as error:
        print(f"parallax plan: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT


def _show_plan(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from parallax import simulate
    from parallax.config import Config
    from parallax.plan import Plan
    from parallax.topology import Topology, parse_seconds

    if args.plot and not args.sweep:
        raise ValueError("--plot shows a sweep; give --sweep too, such as --sweep machines=1..64")
    compute = None if args.compute is None else parse_seconds(args.compute, "--compute")
    known = None
    if args.profile:
        saved = _read(args.profile, Plan.from_json)
        known = saved.topology
        model = simulate.model_of_plan(saved, args.profile, compute_seconds=compute, units_per_worker=args.units)
    else:
        given = {"compute_seconds": compute, "units_per_worker": args.units}
        model = dataclasses.replace(
            simulate.load_model(args.model), **{k: v for k, v in given.items() if v is not None}
        )
    if args.topology:
        known = _read(args.topology, Topology.from_json)
    topology = _topology(args, known)
    pairs = [place.rpartition("=") for place in args.place]
    for (pattern, _, _), place in zip(pairs, args.place, strict=True):
        if not pattern:
            raise ValueError(f"--place: expected PATTERN=PLACEMENT, such as 'embed*=gather', got {place!r}")
    config = Config(placements={pattern: placement for pattern, _, placement in pairs})
    if args.sweep:
        field, numbers = simulate.parse_sweep(args.sweep)
        found = simulate.sweep(model, topology, field, numbers, config)
        if args.plot:
            simulate.plot(model, field, found, args.plot)
        if args.json:
            print(json.dumps({"sweep": [{field: n, **simulate.as_json(found[n])} for n in numbers]}))
        else:
            _print_table(f"{model.name}, predicted", simulate.sweep_as_rows(model, field, found), left=())
        return 0
    predictions = simulate.simulate(model, topology, config)
    if args.json:
        print(json.dumps(simulate.as_json(predictions)))
        return 0
    title = f"{model.name} on {topology.machines} x {topology.workers} workers, predicted"
    _print_table(title, simulate.as_rows(model, predictions), left=("architecture",))
    print(f"\n{simulate.plan(model, topology, config)}")
    return 0


def _read(path: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _topology(args: argparse.Namespace, known: Any) -> Any:
    """What the options say, on top of what is known."""
    import dataclasses

    from parallax.topology import Links, Topology

    words = {k: getattr(args, k) for k in ("bandwidth", "latency", "inside_bandwidth", "inside_latency")}
    words = {k: v for k, v in words.items() if v is not None}
    counts = {k: getattr(args, k) for k in ("machines", "workers") if getattr(args, k) is not None}
    said = Topology.of(**words, **counts)
    if known is None:
        return said
    changes: dict[str, Any] = dict(counts)
    for side, prefix in (("between", ""), ("inside", "inside_")):
        fields = [field for field in ("latency", "bandwidth") if prefix + field in words]
        link = {field: getattr(getattr(said, side).rounds, field) for field in fields}
        links = {way: dataclasses.replace(old, **link) for way, old in vars(getattr(known, side)).items()}
        changes[side] = Links(**links)
    return dataclasses.replace(known, **changes)


def _print_table(title: str, rows: Sequence[Sequence[str]], left: Collection[str]) -> None:
    """For a terminal, or in plain text for a log; the first of `rows` names the columns."""
    if not sys.stdout.isatty():
        from parallax.plan import aligned

        print("\n".join([title, *aligned(rows, right=[name for name in rows[0] if name not in left])]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        versions = []
        for name in ("parallax-train", "torch"):
            try:
                versions.append(metadata.version(name))
            except metadata.PackageNotFoundError:  # run from a source tree that is not installed
                versions.append("not installed")
        print(f"parallax {versions[0]} (torch {versions[1]})")
        parser.exit()


def _positive(text: str, what: str = "workers") -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of {what}, at least 1, got {text!r}")
    return number


def _launch_auto(nproc: int, arguments: Sequence[str]) -> int:
    """Runs a program on workers of `parallax.auto`, which see what they share in one folder."""
    seed = secrets.randbelow(2**32)
    if os.environ.get("PYTHONHASHSEED", "random") == "random":  # a vocabulary made from a set is the same everywhere
        os.environ["PYTHONHASHSEED"] = str(seed)
    with tempfile.TemporaryDirectory(prefix="parallax-") as folder:
        (Path(folder) / "turn").write_bytes(bytes(8))
        command = [sys.executable, "-u", "-m", "parallax.auto", "--folder", folder, "--seed", str(seed), *arguments]
        return _launch(nproc, command, Path(folder))


def _launch(nproc: int, command: Sequence[str], hidden: Path | None = None) -> int:
    """Runs `command` on `nproc` workers to the end and returns the exit status.

    Args:
        hidden: the folder where workers other than 0 print to.
    """
    _set_defaults(nproc)
    # torch takes seconds to import; `parallax run --help` does not wait for it
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # what torchrun logs of a failure is said in one line below
    ended = _end_workers_gently_but_soon()
    options = torchrun.parse_args(
        [
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",  # no name has to resolve; the system picks a free port
            "--rdzv-conf=is_host=1",
            "--local-addr=127.0.0.1",
            f"--rdzv-id=parallax-{os.getpid()}",
            "--max-restarts=0",
            f"--log-dir={os.devnull}",  # nothing is redirected; without this each run leaves a folder in /tmp
            "--no-python",
            sys.executable,
        ]
    )
    worker = ["-I", "-S", str(Path(__file__).with_name("_worker.py")), str(os.getpid()), *command]
    # torchrun substitutes ${local_rank} and $$ in arguments; ours have to arrive as they are.
    options.training_script_args = [argument.replace("$", "$$") for argument in worker]
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        exitcodes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        line, status = _describe(exitcodes, ended)
        if hidden is not None:
            print(_hidden_failure(hidden, exitcodes, ended), end="", file=sys.stderr, flush=True)
        print(f"parallax run: {line}", file=sys.stderr, flush=True)
        return status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _set_defaults(nproc: int) -> None:
    """Environment that the workers inherit, where the user has not set it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _end_workers_gently_but_soon() -> set[int]:
    """Changes how torchrun ends the workers once one has failed: SIGTERM at once, SIGKILL 30 s later, and no
    option for either. Returns a set that will hold the ranks that had to be ended.

    When one rank fails the others notice and fail as well, and any of them may be the first to be gone: there
    is time for the one with the cause to print its traceback.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close
    ended: set[int] = set()

    def close_soon(self: PContext, death_sig: signal.Signals | None = None, timeout: int = GRACE_SECONDS) -> None:
        def running() -> set[int]:
            return {rank for rank, pid in self.pids().items() if _is_running(pid)}

        deadline = time.monotonic() + LINGER_SECONDS
        while death_sig is None and running() and time.monotonic() < deadline:
            time.sleep(0.05)
        ended.update(running())
        close(self, death_sig, min(timeout, GRACE_SECONDS))

    PContext.close = close_soon  # type: ignore[method-assign]
    return ended


def _is_running(pid: int) -> bool:
    """Whether child `pid` runs; its exit status is left for torchrun to collect."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _describe(exitcodes: Mapping[int, int], ended: Collection[int]) -> tuple[str, int]:
    """One line on what became of the workers, and the exit status.

    Args:
        exitcodes: by rank, of the workers that did not end well, in the order in which they were seen; -n for
            one that signal n killed.
        ended: ranks that the launcher ended because others had failed.
    """
    failed = {rank: code for rank, code in exitcodes.items() if rank not in ended} or dict(exitcodes)
    killed = {rank: code for rank, code in failed.items() if code < 0}
    code = next(iter((killed or failed).values()))  # that one was killed is why the others failed
    ranks = sorted(rank for rank in failed if failed[rank] == code)
    others = sorted(rank for rank in failed if failed[rank] != code)
    line = f"{_workers(ranks)} {_fate(code, len(ranks))}"
    if others:
        line += f"; {_workers(others)} failed too"
    return line, code if code > 0 else 128 - code


def _hidden_failure(folder: Path, exitcodes: Mapping[int, int], ended: Collection[int]) -> str:
    """What has to be read of workers whose output is hidden: the first traceback, unless worker 0 printed one of its
    own, else the last lines of a worker that came to another end than worker 0."""
    errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    if errors:
        first = errors[0]
        if (folder / "0.error") in errors:
            return ""
        return f"parallax: rank {first.stem} failed:\n{first.read_text()}"
    for rank, code in exitcodes.items():
        file = folder / f"{rank}.out"
        if rank not in ended and code != exitcodes.get(0) and file.exists():
            lines = file.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
            return "\n".join([f"parallax run: the last lines of worker {rank}:", *lines, ""])
    return ""


def _workers(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def _fate(exitcode: int, num_workers: int) -> str:
    if exitcode > 0:
        return f"failed with exit code {exitcode}"
    name = next((s.name for s in signal.Signals if s == -exitcode), f"signal {-exitcode}")
    return f"{'was' if num_workers == 1 else 'were'} killed by {name}"


if __name__ == "__main__":
    sys.exit(main())
