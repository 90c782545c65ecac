"""Each row of the table in docs/limits.md is true: what it says happens, on all ranks, within seconds.

A test stands for the row whose first cell it names: `@limit("first cell")`, or an entry of ELSEWHERE. A row without
a test fails, and so does a test whose row is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallax

WITHIN = 10.0
"""Seconds in which all ranks have raised."""

TESTED: dict[str, Callable[..., None]] = {}
"""The test of each row, by the row's first cell."""

ELSEWHERE = {
    "`torch.compile(fullgraph=True)` of something that looks up a table, or of the whole model": (
        "test_compile.py",
        "test_all_in_one_graph_is_an_error_on_all_ranks",
    ),
    "a program that leaves a loop over `shard(...)` early and ends, as by a count of batches, while another rank "
    "trains on": ("test_uneven.py", "test_programs_that_count_batches"),
    "`Config`s that differ between ranks (`timeout` and `init` may)": ("test_wire.py", "test_ranks_that_differ_stop"),
    '`parallax.verify` with `Config(wire_dtype=...)` other than "float32", or `lazy_rows`': (
        "test_wire.py",
        "test_verify_says_that_it_compares_exact_numbers",
    ),
    "a topology (`Config.topology`) for another number of workers, or that cannot be read": (
        "test_profiling.py",
        "test_a_file_that_does_not_fit",
    ),
    "a backward pass of a graph from before a table became reduced whole, or ceased to be, while training "
    "(`retain_graph=True` over a step)": ("test_moves.py", "test_graphs_of_a_table_that_was_whole"),
}
"""Tests that are in other files."""


def limit(first_cell: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a test as that of a row."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        assert first_cell not in TESTED
        TESTED[first_cell] = test
        return test

    return register


def documented() -> list[str]:
    """First cells of the first table in docs/limits.md; the one of `--auto` has its tests in test_auto.py."""
    text = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()
    table = text[text.index("| not supported |") :].split("\n\n")[0]
    return [line.removeprefix("| ").split(" | ")[0] for line in table.splitlines()[2:]]


def test_every_row_has_a_test() -> None:
    rows = set(documented())
    tested = TESTED.keys() | ELSEWHERE.keys()
    assert not rows - tested, "rows without a test"
    assert not tested - rows, "tests whose row is gone"
    for file, test in ELSEWHERE.values():
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()


def check(error: str, *says: str, program: Callable[..., None], args: tuple[Any, ...] = (), by: int | None = 1) -> None:
    """Every rank raises: rank `by` this error, with `says` in its text, and the others are told it; None: all raise it
    by themselves."""
    outcomes = ranks.run(2, program, *args, expect_errors=True)
    for outcome in outcomes:
        assert outcome.error == (error if by in (None, outcome.rank) else "PeerError"), str(outcome)
        assert outcome.seconds < WITHIN, str(outcome)
        for part in says:
            assert part in outcome.text, str(outcome)
        if by is not None:
            assert f"rank {by}" in outcome.text, str(outcome)


class Model(nn.Module):
    """A table, another one with options, and a dense layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.items, self.tags = nn.Embedding(8, 3), nn.Embedding(8, 3, **options)
        self.layer = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.items(ids) + self.tags(ids))


IDS = torch.tensor([1, 2, 5])


def trained(steps: int = 2, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    """A model that has its plan."""
    model = Model(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS).sum().backward()
        optimizer.step()
    return model, optimizer


def on_rank_1(bad: str, steps: int) -> None:
    """Rank 1 does a thing that it should not (`BAD`), in a step of which the others know nothing."""
    model, _ = trained(steps)
    if parallax.rank() == 1:
        BAD[bad](model)
    for _ in range(2):
        model(IDS).sum().backward()


def create_graph(model: Model) -> None:
    warnings.filterwarnings("ignore", "Using backward.*create_graph=True", UserWarning)
    model.items(IDS).square().sum().backward(create_graph=True)


BAD: dict[str, Callable[[Model], Any]] = {
    "max_norm": lambda model: F.embedding(IDS, model.items.weight, max_norm=1.0),
    "frequency": lambda model: F.embedding(IDS, model.items.weight, scale_grad_by_freq=True),
    "create_graph": create_graph,
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "to": lambda model: model.items.to(torch.bfloat16),
}

# -- lookups ------------------------------------------------------------------------------------------


@limit('`max_norm` in a functional lookup, or with `architecture="allreduce"`')
def test_max_norm() -> None:
    check("NotImplementedError", "'items.weight'", "max_norm", program=on_rank_1, args=("max_norm", 0))
    check("ValueError", "'tags.weight'", "max_norm", "hybrid", program=renormed_on_all_ranks, by=None)


def renormed_on_all_ranks() -> None:
    parallax.distribute(Model(max_norm=1.0), config=parallax.Config(architecture="allreduce"))


@limit(
    "`scale_grad_by_freq=True` in bags and functional lookups, twice in a step, in half precision, or on a parameter "
    "that is also used whole"
)
@pytest.mark.parametrize("how", ["functional", "bag", "twice", "half", "whole"])
def test_scale_grad_by_freq(how: str) -> None:
    if how == "functional":
        for steps in (0, 2):
            says = ("'items.weight'", "scale_grad_by_freq")
            check("NotImplementedError", *says, program=on_rank_1, args=("frequency", steps))
    else:
        error = "ValueError" if how == "whole" else "NotImplementedError"
        check(error, "'tags.weight'", "scale_grad_by_freq", program=by_frequency, args=(how,), by=None)


def by_frequency(how: str) -> None:
    model = Model(scale_grad_by_freq=True)
    if how == "bag":
        model.tags = nn.EmbeddingBag(8, 3, scale_grad_by_freq=True)
    if how == "half":
        model.to(torch.bfloat16)
    parallax.distribute(model)
    for _ in range(3):
        if how == "bag":
            model.tags(IDS[:, None]).sum().backward()
        elif how == "twice":
            (model(IDS).sum() + model.tags(IDS).sum()).backward()
        elif how == "whole":
            (model(IDS).sum() + model.tags.weight.sum()).backward()
        else:
            model(IDS).sum().backward()


@limit("a hook on a parameter that changes its gradient, or sits on a table, on some ranks only")
@pytest.mark.parametrize("name", ["items.weight", "layer.weight"])
def test_hooks_on_some_ranks(name: str) -> None:
    check("DisagreementError", "in hooks", "rank", program=hook_on_rank_1, args=(name,), by=None)


def hook_on_rank_1(name: str) -> None:
    model, _ = trained()
    if parallax.rank() == 1:
        dict(model.named_parameters())[name].register_hook(lambda grad: grad * 2)
    for _ in range(2):
        model(IDS).sum().backward()


# -- backward -----------------------------------------------------------------------------------------


@limit("`backward(create_graph=True)` through rows of a table")
def test_create_graph() -> None:
    for steps in (0, 2):
        says = ("'items.weight'", "create_graph=True", "looked-up values")
        check("NotImplementedError", *says, program=on_rank_1, args=("create_graph", steps))


@limit("`checkpoint(..., use_reentrant=True)` with a dense parameter in several segments")
def test_reentrant_checkpoints() -> None:
    check("NotImplementedError", "'layer.", "use_reentrant=False", program=reentrant, by=None)


def reentrant() -> None:
    model = Model()
    model.layer = nn.Linear(3, 3)
    parallax.distribute(model)
    for _ in range(3):
        h = model.items(IDS)
        for _ in range(2):
            h = checkpoint(model.layer, h, use_reentrant=True)
        h.sum().backward()


@limit("`torch.autograd.grad(loss, parameters)`")
def test_autograd_grad_is_local() -> None:
    for dense, error, same in ranks.run(2, autograd_grad):
        assert dense == [[1.0], [2.0]][same]
        assert "used in the graph" in error


def autograd_grad() -> tuple[list[float], str, int]:
    """The gradient of the dense layer for this rank's own input, what is said of a table's, and the rank."""
    model, _ = trained()
    x = torch.full((1, 3), 1.0 + parallax.rank())
    (grad,) = torch.autograd.grad(model.layer(x).sum(), [model.layer.weight])
    try:
        torch.autograd.grad(model(IDS).sum(), [model.items.weight])
    except RuntimeError as error:
        said = str(error)
    model(IDS).sum().backward()  # nothing is left over that would disturb a step
    return grad[0, :1].tolist(), said, parallax.rank()


@limit("two backward passes of one graph across the first step's end, for a table that the plan keeps whole")
def test_two_backward_passes_across_the_first_step() -> None:
    says = ("s.weight'", "finish the first step before the next forward")
    check("NotImplementedError", *says, program=across_the_first_step, by=None)


def across_the_first_step() -> None:
    model = Model()
    parallax.distribute(model, config=parallax.Config(architecture="allreduce", sparse_allreduce="dense"))
    loss = model(IDS).sum()
    loss.backward(retain_graph=True)
    model(IDS)
    loss.backward()


# -- what the model is --------------------------------------------------------------------------------


@limit("`model.float()`, `.half()`, `.to(...)` that changes a table after `distribute`")
def test_converting_tables() -> None:
    for how in ("double", "half", "to"):
        check("NotImplementedError", "'items.weight'", "before parallax.distribute", program=on_rank_1, args=(how, 2))


@limit("parameters that came into the model or an optimizer after `distribute` (`load_state_dict(assign=True)` too)")
@pytest.mark.parametrize("how", ["module", "optimizer", "assign"])
def test_late_parameters(how: str) -> None:
    check("ParallaxError", "after parallax.distribute" if how == "module" else "", program=late_parameters, args=(how,))


def late_parameters(how: str) -> None:
    """On rank 1, parameters that the run does not know."""
    model, optimizer = trained()
    if parallax.rank() == 1:
        if how == "module":
            model.layer = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        elif how == "optimizer":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        else:
            plain = {name: value.clone() for name, value in Model().state_dict().items()}
            model.load_state_dict(plain, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
        model(IDS).sum().backward()


@limit("two calls of `distribute` in one process")
def test_distribute_twice() -> None:
    check("ParallaxError", "rank 1", "was called already", "nn.ModuleList", program=distribute_twice)


def distribute_twice() -> None:
    model, _ = trained()
    if parallax.rank() == 1:
        parallax.distribute(Model())
    model(IDS).sum().backward()


@limit("parameters on several devices in one worker")
def test_several_devices() -> None:
    check("ParallaxError", "several devices", "cuda", "'items.weight'", "rank", program=several_devices, by=None)


def several_devices() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and every rank imports this file

    model = Model()
    with FakeTensorMode():
        model.items = nn.Embedding(8, 3, device="cuda")
    parallax.distribute(model)


@limit('a table on the meta device with `architecture="allreduce"`')
def test_meta_tables_with_allreduce() -> None:
    config = parallax.Config(architecture="allreduce")
    check("ValueError", "'items.weight'", "meta device", "hybrid", program=meta, args=("items", config), by=None)


@limit("a parameter on the meta device that is not an embedding's weight")
def test_meta_parameters() -> None:
    says = ("'layer.weight'", "meta device", "Config(init=")
    check("ParallaxError", *says, program=meta, args=("layer", parallax.Config()), by=None)


def meta(which: str, config: parallax.Config) -> None:
    model = Model()
    getattr(model, which).to("meta")
    parallax.distribute(model, config=config)


# -- optimizers ---------------------------------------------------------------------------------------


@limit(
    "an optimizer that was first seen after the plan was made and does not update row by row (LAMB, Adafactor, Muon on "
    "a table)"
)
def test_an_optimizer_across_rows_that_comes_late() -> None:
    says = ("'items.weight'", "Adafactor", "parallax.distribute(model, optimizer)")
    check("ParallaxError", *says, program=late_optimizer, by=None)


def late_optimizer() -> None:
    model = Model()
    parallax.distribute(model)
    for _ in range(3):
        model(IDS).sum().backward()
    torch.optim.Adafactor([model.items.weight], lr=0.1).step()


@limit("ranks that call `optimizer.step()` a different number of times")
def test_steps_that_one_rank_leaves_out() -> None:
    check("DisagreementError", "rank", "optimizer.step()", program=leave_out, args=("step", True), by=None)


@limit("ranks that run backward or `optimizer.step()` a different number of times, in a model without tables")
@pytest.mark.parametrize("what", ["step", "backward"])
def test_steps_that_one_rank_leaves_out_without_tables(what: str) -> None:
    check("DisagreementError", "rank", "optimizer.step()", program=leave_out, args=(what, False), by=None)


def leave_out(what: str, tables: bool) -> None:
    """Rank 1 leaves out one thing in the fourth step."""
    model: nn.Module = Model() if tables else nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer)
    for step in range(6):
        left_out = what if parallax.rank() == 1 and step == 3 else ""
        if left_out != "backward":
            model(IDS if tables else torch.ones(3)).sum().backward()
        if left_out != "step":
            optimizer.step()


@limit("`Config(lazy_rows=True)` with an optimizer whose update of a row depends on other rows")
def test_lazy_rows_of_an_optimizer_across_rows() -> None:
    check("ParallaxError", "'items.weight'", "Adafactor", "lazy_rows", program=lazy_rows, by=None)


def lazy_rows() -> None:
    model = Model()
    optimizer = torch.optim.Adafactor(model.parameters())
    parallax.distribute(model, optimizer, config=parallax.Config(lazy_rows=True))
    for _ in range(3):
        model(IDS).sum().backward()
        optimizer.step()


@limit("backward inside `parallax.no_sync()` on some ranks only")
@pytest.mark.parametrize("tables", [True, False])
def test_no_sync_on_some_ranks(tables: bool) -> None:
    disagree("no_sync", tables, "parallax.no_sync")


@limit("`optimizer.step()` after a backward inside `parallax.no_sync()`")
def test_a_step_after_no_sync() -> None:
    check("ParallaxError", "rank", "parallax.no_sync", "outside", program=misuse, args=("step", True), by=None)


@limit("`parallax.reduce` on some ranks only, or with different operations or shapes")
def test_reduce_on_some_ranks() -> None:
    for tables in (True, False):
        disagree("reduce", tables, "parallax.reduce")
    for what in ("shapes", "operations"):
        disagree(what, True, "same operation, shape and dtype")


def disagree(what: str, tables: bool, says: str) -> None:
    if tables:
        check("DisagreementError", "rank", says, program=misuse, args=(what, tables), by=None)
    else:  # the timeout notices, and says where each rank is
        check("PeerError", "rank", "Rank 0 was waiting", program=misuse, args=(what, tables), by=None)


def misuse(what: str, tables: bool) -> None:
    """In the third step."""
    model: nn.Module = Model() if tables else nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallax.distribute(model, optimizer, config=parallax.Config(timeout=2.0))
    one = parallax.rank() == 1
    for step in range(4):
        late = step >= 2
        if what == "reduce" and one and late:
            parallax.reduce(1.0)
        if what == "shapes" and late:
            parallax.reduce(torch.zeros(parallax.rank() + 1))
        if what == "operations" and late:
            parallax.reduce(1.0, "sum" if one else "max")
        with parallax.no_sync() if late and (what == "step" or (what == "no_sync" and one)) else nullcontext():
            model(IDS if tables else torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@limit(
    "optimizers that differ between ranks: class, settings or state at `distribute`, settings (learning rate) in a step"
)
@pytest.mark.parametrize("what", ["class", "settings", "state", "step"])
def test_optimizers_that_differ(what: str) -> None:
    check("DisagreementError", "rank", "optimizer", program=different_optimizers, args=(what,), by=None)


def different_optimizers(what: str) -> None:
    """On rank 1."""
    one = parallax.rank() == 1
    model = Model()
    kind = torch.optim.Adagrad if what == "class" and one else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.2 if what == "settings" and one else 0.1)
    if what == "state" and one:
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parallax.distribute(model, optimizer)
    for step in range(4):
        if what == "step" and one and step == 2:
            optimizer.param_groups[0]["lr"] = 0.01
        optimizer.zero_grad()
        model(IDS).sum().backward()
        optimizer.step()


# -- ranks without data -------------------------------------------------------------------------------


@limit("`optimizer.step(closure)`, edits of tables, in a step for which a rank had no data")
def test_what_a_rank_without_data_cannot_repeat() -> None:
    for what, error in [("closure", "ParallaxError"), ("edit", "DisagreementError")]:
        outcomes = ranks.run(2, uneven, what, expect_errors=True)
        for outcome in outcomes:
            assert outcome.error in (error, "PeerError"), str(outcome)
            assert outcome.seconds < WITHIN
            assert f"rank {outcome.rank}" in outcome.text
        assert outcomes[0].error == error


@limit("gradients changed by other than numbers (`p.grad.add_(noise)`) in a step for which a rank had no data")
def test_gradients_that_a_rank_without_data_cannot_repeat() -> None:
    check("ParallaxError", "'items.weight'", "drop_last=True", program=uneven, args=("noise",), by=0)


def uneven(what: str) -> None:
    """Rank 0 has one batch more, with which it does what rank 1 cannot repeat."""
    model, optimizer = trained()
    for number, ids in enumerate(parallax.shard([IDS] * 5)):
        loss = model(ids).sum()
        loss.backward()
        if number == 2 and what == "noise":
            model.items.weight.grad.add_(torch.rand(8, 3))
        if number == 2 and what == "edit":
            model.items.weight.data[0] = 0
        if number == 2 and what == "closure":
            optimizer.step(lambda: 0.0)
        else:
            optimizer.step()


@limit("a loop over `shard(...)` that one rank leaves early while others go on to its end")
def test_a_loop_that_one_rank_leaves_early() -> None:
    check("DisagreementError", "rank", "left early", "to its end", program=leave_early, by=None)


def leave_early() -> None:
    model, optimizer = trained()
    for _ in range(2):
        for number, ids in enumerate(parallax.shard([IDS] * 8)):
            model(ids).sum().backward()
            optimizer.step()
            if parallax.rank() == 1 and number == 1:
                break
