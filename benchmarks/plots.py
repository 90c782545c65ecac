"""A page of figures and tables from what `evaluate.py` has written.

    .venv/bin/python benchmarks/plots.py benchmarks/results/*.json

The page, README.md, and its figures are put next to the first of the files. It needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from report import HYBRID, as_table, time_split

SWEEPS = {"machines": "machines", "alpha": "alpha, the fraction of the table that a batch touches"}
"""Settings of which a file may have several values, and how an axis is called."""

NAMES = ["hybrid", "torchrec", "horovod", "tf-servers", "ddp-sparse", "ddp-dense"]
NAMES += ["ps", "ps-naive", "allreduce-gather", "allreduce-dense", "compute-only"]
"""In the order of their colours."""

matplotlib.rcParams.update({"svg.hashsalt": "evaluate", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what evaluate.py has written")
    files = parser.parse_args().files
    folder = files[0].parent
    page = ["# Results", "", "Made by `make plots` from the JSON files here; `../README.md` says what is measured.", ""]
    for file in sorted(files):
        report = json.loads(file.read_text())
        if "runs" in report:  # other benchmarks write there too
            page += section(file.stem, report, folder)
    (folder / "README.md").write_text("\n".join(page))
    print(folder / "README.md")


def section(name: str, report: Mapping[str, Any], folder: Path) -> list[str]:
    """A file's part of the page, in Markdown; its figures are written."""
    runs = report["runs"]
    figures = {}
    for setting, label in SWEEPS.items():
        if len({run["settings"][setting] for run in runs}) > 1:
            for quantity in ("throughput", "bytes"):
                figures[f"{quantity}-by-{setting}"] = lines(runs, setting, label, quantity)
            bars = {f"{run['settings'][setting]:g}": time_split(run, HYBRID) for run in runs if HYBRID in run["arms"]}
            figures[f"time-by-{setting}"] = split_bars(bars, f"{HYBRID}, by {setting}")
    figures["time"] = split_bars({arm: time_split(runs[-1], arm) for arm in runs[-1]["arms"]}, title(runs[-1]))
    paths = [save(figure, folder / f"{name}-{of}.svg") for of, figure in figures.items() if figure is not None]
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    page = [f"## {name}", "", f"{report['date']}, {report['machine']}; {versions}", "", f"    {report['command']}", ""]
    page += ["".join(f"![{path.stem}]({path.name})" for path in paths), ""]
    for run in runs:
        page += [f"{title(run)}:", "", "```", as_table(run), "```", ""]
    return page


def title(run: Mapping[str, Any], without: str = "") -> str:
    settings = run["settings"]
    parts = [settings["model"]]
    if settings["model"] == "one-table" and without != "alpha":
        parts.append(f"alpha {settings['alpha']:g}")
    if without != "machines":
        parts.append("1 machine" if settings["machines"] == 1 else f"{settings['machines']} machines")
    return ", ".join([*parts, settings["bandwidth"]])


def lines(runs: Sequence[Mapping[str, Any]], setting: str, label: str, quantity: str) -> Any:
    """An arm's figure by a setting, a line for each arm; and for bytes the least that is possible."""
    figure, axes = plt.subplots(figsize=(5, 3.4))
    for arm in dict.fromkeys(arm for run in runs for arm in run["arms"]):
        of_arm = [(run["settings"][setting], run["arms"][arm]) for run in runs if arm in run["arms"]]
        if quantity == "bytes":
            points = [(at, figures["sent_mb"]) for at, figures in of_arm if figures.get("sent_by_least", 0) > 0.5]
        else:
            points = [(at, figures["samples_per_second"]) for at, figures in of_arm]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm, color=color(arm))
    if quantity == "bytes":
        least = [(run["settings"][setting], run["least_bytes"]["total"] / 1e6) for run in runs]
        axes.plot(*zip(*[p for p in least if p[1]], strict=True), "k:", label="least")
    values = [run["settings"][setting] for run in runs]
    axes.set(xscale="log", xlabel=label, xticks=values, title=title(runs[-1], without=setting))
    axes.set_ylabel("MB sent by a machine in a step" if quantity == "bytes" else f"{runs[0]['unit']}/s")
    if quantity == "bytes" or setting == "alpha":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticklabels([f"{value:g}" for value in values])
    axes.xaxis.minorticks_off()
    axes.legend(fontsize=7)
    return figure


def color(arm: str) -> str:
    return f"C{NAMES.index(arm)}" if arm in NAMES else "k"


def split_bars(parts: Mapping[str, Mapping[str, float] | None], title: str) -> Any:
    """Where a step's time goes; None if it is not known."""
    known = {name: split for name, split in parts.items() if split is not None}
    if not known:
        return None
    figure, axes = plt.subplots(figsize=(5, 1.2 + 0.3 * len(known)))
    left = [0.0] * len(known)
    for part, of_part in zip(("computing", "wire", "waiting"), ("tab:green", "tab:blue", "tab:orange"), strict=True):
        widths = [split[part] for split in known.values()]
        axes.barh(range(len(known)), widths, left=left, color=of_part, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(known)), list(known))
    axes.set_title(title)
    axes.set_xlabel("ms of a step", loc="right")
    axes.invert_yaxis()
    figure.legend(fontsize=7, ncols=3, loc="lower left", frameon=False)
    return figure


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
