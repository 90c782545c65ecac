"""Config: what may be set, and what is said when it may not."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest

from parallax.config import Config


def test_defaults() -> None:
    assert dataclasses.asdict(Config()) == {
        "architecture": "hybrid",
        "sparse_allreduce": "gather",
        "reduction": "mean",
        "wire_dtype": "float32",
        "lazy_rows": False,
        "overlap": True,
        "timeout": 600.0,
        "bucket_mb": 25.0,
        "placements": {},
        "partitions": None,
        "min_partitions": 1,
        "search_share": 0.05,
        "topology": "auto",
        "init": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "allreduce"),
        ("sparse_allreduce", "dense"),
        ("reduction", "sum"),
        ("wire_dtype", "bfloat16"),
        ("wire_dtype", "float16"),
        ("wire_dtype", "int8"),
        ("lazy_rows", True),
        ("timeout", 1),
        ("bucket_mb", 0.001),
        ("placements", {"embed*": "gather", "head.bias": "allreduce", "table": "sharded"}),
        ("partitions", 3),
        ("partitions", "search"),
        ("min_partitions", 2),
        ("search_share", 1),
        ("topology", None),
        ("topology", "measure"),
        ("topology", Path("links.json")),
        ("init", lambda name, rows: rows.zero_()),
    ],
)
def test_allowed(field: str, value: Any) -> None:
    assert getattr(Config(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("architecture", "horovod", "Config.architecture: expected 'hybrid' | 'allreduce' | 'ps', got 'horovod'"),
        ("architecture", None, "Config.architecture: expected 'hybrid' | 'allreduce' | 'ps', got None"),
        ("sparse_allreduce", "Gather", "Config.sparse_allreduce: expected 'gather' | 'dense', got 'Gather'"),
        ("reduction", ["mean"], "Config.reduction: expected 'mean' | 'sum', got ['mean']"),
        (
            "wire_dtype",
            "float64",
            "Config.wire_dtype: expected 'float32' | 'bfloat16' | 'float16' | 'int8', got 'float64'",
        ),
        ("lazy_rows", "Adam", "Config.lazy_rows: expected True or False, got 'Adam'"),
        ("timeout", 0, "Config.timeout: expected a number greater than 0, got 0"),
        ("timeout", -1.5, "Config.timeout: expected a number greater than 0, got -1.5"),
        ("timeout", True, "Config.timeout: expected a number greater than 0, got True"),
        ("timeout", float("inf"), "Config.timeout: expected a number greater than 0, got inf"),
        ("timeout", float("nan"), "Config.timeout: expected a number greater than 0, got nan"),
        ("timeout", "60", "Config.timeout: expected a number greater than 0, got '60'"),
        ("bucket_mb", 0.0, "Config.bucket_mb: expected a number greater than 0, got 0.0"),
        ("bucket_mb", None, "Config.bucket_mb: expected a number greater than 0, got None"),
        (
            "placements",
            {"w": "shard"},
            "Config.placements['w']: expected 'allreduce' | 'gather' | 'sharded', got 'shard'",
        ),
        ("placements", {3: "gather"}, "Config.placements: expected patterns of names as keys, got 3"),
        ("placements", "gather", "Config.placements: expected a dict of name patterns, got 'gather'"),
        ("partitions", 0, "Config.partitions: expected a whole number, at least 1, 'search' or None, got 0"),
        ("partitions", 1.5, "Config.partitions: expected a whole number, at least 1, 'search' or None, got 1.5"),
        ("partitions", True, "Config.partitions: expected a whole number, at least 1, 'search' or None, got True"),
        ("partitions", "auto", "Config.partitions: expected a whole number, at least 1, 'search' or None, got 'auto'"),
        ("min_partitions", 0, "Config.min_partitions: expected a whole number, at least 1, got 0"),
        ("min_partitions", None, "Config.min_partitions: expected a whole number, at least 1, got None"),
        ("search_share", 0, "Config.search_share: expected a number greater than 0, got 0"),
        ("search_share", 1.1, "Config.search_share: expected at most 1, got 1.1"),
        ("topology", 3, "Config.topology: expected 'auto' | 'measure', the path of a file, or None, got 3"),
        ("init", "zeros", "Config.init: expected a function of (name, rows) or None, got 'zeros'"),
    ],
)
def test_not_allowed(field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole text is compared
        Config(**{field: value})
    assert str(caught.value) == text


def test_lazy_rows_must_know_which_rows_were_looked_up() -> None:
    with pytest.raises(ValueError, match="which rows were looked up; use sparse_allreduce='gather'"):
        Config(lazy_rows=True, architecture="allreduce", sparse_allreduce="dense")


def test_a_number_of_partitions_that_is_below_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"Config.partitions: expected at least Config.min_partitions=4, got 3"):
        Config(partitions=3, min_partitions=4)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="'arch'"):
        Config(arch="hybrid")  # type: ignore[call-arg]


def test_positions_are_not_accepted() -> None:
    with pytest.raises(TypeError, match="positional"):
        Config("hybrid")  # type: ignore[call-arg]


def test_it_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout = 1.0  # type: ignore[misc]


def test_every_field_has_a_docstring() -> None:
    body = ast.parse(inspect.getsource(Config)).body[0].body  # type: ignore[attr-defined]
    documented = {
        ast.unparse(statement.target)
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(Config)}
