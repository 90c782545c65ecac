"""Samples per second and bytes on the links, of several ways to train a model, over links of a given bandwidth.

    sudo .venv/bin/python benchmarks/evaluate.py --machines 8 --bandwidth 300Mbit --output benchmarks/results/a.json

Ways ("arms") are parallax's architectures, PyTorch's DDP, computing alone without any exchange, which is the limit, and
other libraries ("peers", each in an environment of its own; see `peers/setup.sh`). They take turns on one cluster
(`cluster.py`): in each repeat, each arm begins anew and takes a turn as `turns.py` says, on the same batches. Arms of
ours share processes, peers are started for their turn, while ours wait. What is stated is the median over the repeats,
and the median of hybrid's speed by the arm's, repeat by repeat, so that a change of the machine's speed meets both.
The loss after the warm-up is equal for arms that compute the same.

Of `--machines`, `--bandwidth` and `--alpha` several values may be given: a run for each of their combinations.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import turns
from arms import ARMS, ONLY_NAMED
from cluster import Cluster, ClusterError, Job, bits_per_second
from least import least_bytes
from models import MODELS, add_options, lm_arrays
from report import as_table, merged, summary, waited

HERE = Path(__file__).parent
PEERS_FOLDER = Path(os.environ.get("PEERS", "~/.cache/peers")).expanduser()
PEER_SECONDS = 900.0
"""After which a peer's turn is given up; with 16 machines on 2 cores they need minutes to start."""


@dataclass(frozen=True)
class Peer:
    """Another library, with a script in `peers/` that takes its turn."""

    environment: str
    """The virtual environment, a folder in `PEERS_FOLDER`."""
    package: str
    script: str
    models: tuple[str, ...]
    has_torch: bool = True
    """Otherwise it is given batches and initial values as arrays."""

    @property
    def python(self) -> Path:
        return PEERS_FOLDER / self.environment / "bin" / "python"

    @property
    def version(self) -> str | None:
        """Of the library, if it is there."""
        found = self.python.parent.parent.glob(f"lib/python*/site-packages/{self.package}-*.dist-info")
        return next((path.stem.split("-")[1] for path in found), None)


PEERS = {
    "torchrec": Peer("torchrec", "torchrec", "torchrec_arm.py", ("lm", "recommender")),
    "horovod": Peer("horovod", "horovod", "horovod_arm.py", ("lm",)),
    "tf-servers": Peer("tf", "tensorflow_cpu", "tf_arm.py", ("lm",), has_torch=False),
}


def main() -> None:
    args, parser = parse()
    runs = []
    for machines, bandwidth, alpha in itertools.product(args.machines, args.bandwidth, args.alpha):
        try:
            run = evaluate(argparse.Namespace(**{**vars(args), **locals_of_run(machines, bandwidth, alpha)}))
        except ClusterError as error:
            parser.exit(2, f"evaluate: {error}\n")
        print(f"\n{machines} machines, {bandwidth}, {args.model}\n{as_table(run)}\n", flush=True)
        runs.append(run)
        if args.output:  # after each run, so that none is lost
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps({**circumstances(), "runs": runs}, indent=1) + "\n")


def locals_of_run(machines: int, bandwidth: str, alpha: float) -> dict[str, Any]:
    return {"machines": machines, "bandwidth": bandwidth, "alpha": alpha}


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[8])
    parser.add_argument("--workers", type=int, default=1, help="per machine")
    parser.add_argument("--bandwidth", nargs="+", default=["300Mbit"], help="of each link")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.01], help="rows that a batch touches (one-table)")
    parser.add_argument("--model", choices=list(MODELS), default="lm")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *PEERS], help="default: all that train the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, about")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    add_options(parser)
    args = parser.parse_args(argv)
    # Peers first and the foremost of ours next, so that what is compared most is close in time.
    able = [arm for arm in [*reversed(PEERS), *ARMS] if arm in ARMS or args.model in PEERS[arm].models]
    if args.model != "lm":
        able.remove("hand-written")
    args.arms = args.arms or [arm for arm in able if arm not in ONLY_NAMED]
    if unable := sorted(set(args.arms) - set(able)):
        parser.error(f"--arms: {', '.join(unable)} cannot train --model {args.model} here")
    args.batch = args.batch or MODELS[args.model].batch
    return args, parser


def missing_peers(arms: Sequence[str]) -> dict[str, str]:
    """Peers among the arms that are not installed, and what to do."""
    wanted = {arm: PEERS[arm] for arm in arms if arm in PEERS}
    return {
        arm: f"no {peer.package} in {peer.python.parent.parent}; benchmarks/peers/setup.sh {peer.environment}"
        for arm, peer in wanted.items()
        if peer.version is None
    }


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """A run: all turns on one cluster, and what follows from them."""
    missing = missing_peers(args.arms)
    arms = [arm for arm in args.arms if arm not in missing]
    # There and back, so that no arm has always the same place in the machine's day.
    order = [(n, arm) for n in range(args.repeats) for arm in (arms if n % 2 == 0 else arms[::-1])]
    settings = {**{k: v for k, v in vars(args).items() if k != "output"}, "lr": MODELS[args.model].lr}
    told, failed = Launcher(settings, order).run()
    kind, num_ranks = MODELS[args.model], args.machines * args.workers
    samples = kind.num_samples(args) * num_ranks
    least = least_bytes(args)
    wire = samples / (least["total"] * 8 / bits_per_second(args.bandwidth)) if least["total"] else None
    waits = waited([fact for fact in told if "waited_for" in fact])
    measured = merged([fact for fact in told if "seconds" in fact], samples)
    return {
        "settings": settings,
        "unit": kind.unit,
        "bits_per_second": bits_per_second(args.bandwidth),
        "least_bytes": least,
        "wire_samples_per_second": wire,
        "arms": summary(measured, least, wire),
        "missing": missing,
        "failed": failed,
        "turns": measured,
        "waits": waits,
    }


def circumstances(script: str = "evaluate.py") -> dict[str, Any]:
    peers = {name: peer.version for name, peer in PEERS.items() if peer.version is not None}
    ours = {name: metadata.version(name) for name in ("torch", "parallax-train")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "machine": f"{cpu()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), **ours, **peers},
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


class Launcher:
    """Starts workers, and does what they ask for: links of another bandwidth, a peer's turn."""

    def __init__(self, settings: dict[str, Any], order: list[tuple[int, str]]) -> None:
        self.settings = {**settings, "order": order}
        self.told: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []

    def run(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Takes all turns; returns what was told, and the turns of peers that failed."""
        machines, bandwidth = self.settings["machines"], self.settings["bandwidth"]
        with Cluster(machines=machines, bandwidth=bandwidth) as self.cluster:
            result = self._job([sys.executable, str(HERE / "arms.py")])
        if isinstance(result, str):
            raise ClusterError(f"workers failed:\n{result}")
        self.told += result
        return self.told, self.failed

    def _run_peer(self, peer: Peer) -> list[dict[str, Any]] | str:
        env = {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
        arrays = {}
        if not peer.has_torch:
            arrays = lm_arrays(
                argparse.Namespace(**self.settings), self.settings["machines"] * self.settings["workers"]
            )
        return self._job([str(peer.python), str(HERE / "peers" / peer.script)], env, arrays, PEER_SECONDS)

    def _job(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        arrays: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[dict[str, Any]] | str:
        """Runs workers to their end; returns what they told, or the last that one who failed said."""
        with tempfile.TemporaryDirectory(prefix="evaluate-") as name:
            folder = Path(name)
            (folder / "settings.json").write_text(json.dumps(self.settings))
            if arrays:
                np.savez(folder / "arrays.npz", **arrays)
            job = self.cluster.start([*command, name], workers=self.settings["workers"], env=env)

            def follow() -> None:
                wish = folder / "wish"
                if wish.exists():
                    self._do(wish.read_text().split(), folder)
                    wish.unlink()

            try:
                result = job.wait(timeout, on_tick=follow)
            except TimeoutError as error:
                return str(error)
            if any(result.exit_codes):
                return _last_words(job, result.exit_codes)
            return [fact for output in result.outputs for fact in turns.told(output)]

    def _do(self, wish: list[str], folder: Path) -> None:
        match wish:
            case ["links", state]:
                self.cluster.set_bandwidth(self.settings["bandwidth"] if state == "limited" else None)
            case ["counters"]:
                (folder / "counters.json").write_text(json.dumps(self.cluster.counters()))
            case ["peer", arm, repeat]:
                result = self._run_peer(PEERS[arm])
                if isinstance(result, str):
                    print(f"{repeat} {arm} failed:\n{result}", flush=True)
                    self.failed.append({"arm": arm, "repeat": int(repeat), "error": result})
                else:
                    self.told += [{"arm": arm, "repeat": int(repeat), **fact} for fact in result]
        print(f"{datetime.datetime.now():%H:%M:%S} {' '.join(wish)}", flush=True)


def _last_words(job: Job, exit_codes: list[int]) -> str:
    rank = next(rank for rank, code in enumerate(exit_codes) if code)
    last = "\n".join(job.outputs[rank].strip().splitlines()[-15:])
    return f"exit codes by rank: {exit_codes}; rank {rank} said last:\n{last}"


if __name__ == "__main__":
    main()
