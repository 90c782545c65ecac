"""Which file may import which: the files are read in this order, and each builds on earlier ones only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import parallax

SOURCE = Path(__file__).parents[1] / "src" / "parallax"
ORDER = [
    "topology",
    "plan",
    "config",
    "cost",
    "planner",
    "search",
    "simulate",
    "wire",
    "cache",
    "mesh",
    "comm",
    "links",
    "partitioning",
    "ahead",
    "leases",
    "table",
    "message",
    "merging",
    "rounds",
    "foresight",
    "untraced",
    "lookup",
    "whole",
    "parameter",
    "hooks",
    "dense",
    "samples",
    "scalers",
    "joint",
    "optimizer",
    "moves",
    "repeats",
    "startup",
    "profiling",
    "tuning",
    "runtime",
    "data",
    "api",
    "verification",
    "auto",
    "_worker",
    "cli",
    "__init__",
]
MAY_USE_DISTRIBUTED = {
    "comm": ("torch.distributed",),
    "cli": ("torch.distributed.run", "torch.distributed.elastic"),  # starts processes, calls no collective
}
PURE = ["topology", "plan", "config", "cost", "planner", "search", "simulate"]


def _tree(name: str) -> ast.Module:
    return ast.parse((SOURCE / f"{name}.py").read_text())


def _imported(tree: ast.AST) -> set[str]:
    """Dotted names of what is imported anywhere in a file: `from a import b` counts as a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _files(imported: set[str]) -> set[str]:
    """The files of ours among dotted names."""
    return {name.split(".")[1] for name in imported if name.startswith("parallax.")}


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_list_has_every_file() -> None:
    assert sorted(ORDER) == sorted(path.stem for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_earlier_files(name: str) -> None:
    imported = _imported(_tree(name))
    assert "parallax" not in imported, "the package itself imports everything"
    later = _files(imported) - set(ORDER[: ORDER.index(name)])
    assert not later, f"{name}.py imports {sorted(later)}, which come later (or do not exist)"


@pytest.mark.parametrize("name", PURE)
def test_plans_are_made_without_communication(name: str) -> None:
    assert _files(_imported(_tree(name))) <= set(PURE)


@pytest.mark.parametrize("name", ORDER)
def test_only_comm_touches_torch_distributed(name: str) -> None:
    tree = _tree(name)
    allowed = MAY_USE_DISTRIBUTED.get(name, ())
    used = {n for n in _imported(tree) if _is_within(n, "torch.distributed")}
    used |= {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" and name != "comm"
    }
    assert not {n for n in used if not any(_is_within(n, package) for package in allowed)}


@pytest.mark.parametrize("name", ["cli", "_worker"])
def test_the_launcher_imports_torch_only_when_it_starts_workers(name: str) -> None:
    tree = _tree(name)
    at_the_top = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom, ast.If, ast.Try))]
    imported = {n for node in at_the_top for n in _imported(node)}
    assert not {n for n in imported if n.split(".")[0] in ("torch", "parallax", "numpy")}


def test_what_starts_a_worker_needs_only_the_standard_library() -> None:
    assert _imported(_tree("_worker")) == {"__future__.annotations", "ctypes", "os", "signal", "sys"}


def test_public_names_are_the_same_for_python_and_type_checkers() -> None:
    for_checkers = {n.removeprefix("parallax.") for n in _imported(_tree("__init__")) if n.startswith("parallax.")}
    for_python = {f"{file}.{name}" for name, file in parallax._FILE_OF.items()}  # type: ignore[attr-defined]
    assert for_checkers == for_python
    assert {name for name in dir(parallax) if name in parallax._FILE_OF} == set(parallax._FILE_OF)  # type: ignore[attr-defined]
    assert all(getattr(parallax, name).__module__ == f"parallax.{file}" for name, file in parallax._FILE_OF.items())  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'parallax' has no attribute 'distributed'"):
        parallax.distributed  # type: ignore[attr-defined]  # noqa: B018


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, parallax.cli\ntry: parallax.cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
