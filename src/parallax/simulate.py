"""`parallax plan`: what a step would take on machines that one does not have.

From a model (a saved plan, or a description: elements, alpha, compute time) and a topology, the predicted step of the
hybrid, of servers for everything (PS), and of AllReduce. The costs are those of `cost`, the placements of the hybrid
those of `planner`: what is simulated is what a run would decide.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallax.config import Config, WireDtype
from parallax.cost import parameter_cost, shared_cost
from parallax.plan import ParameterProfile, Placement, Plan, Use, format_bytes, format_seconds
from parallax.planner import make_plan
from parallax.topology import Coefficients, Topology

ARCHITECTURES = ("hybrid", "ps", "allreduce")

_MODELS = Path(__file__).with_name("models")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What there is to know of a model in order to predict its step.

    `compute_seconds` is what forward and backward of a step take a worker, without exchange and optimizer;
    `units_per_worker` the samples (of the kind `unit`) that it trains on meanwhile.
    """

    name: str
    unit: str
    units_per_worker: float
    compute_seconds: float
    profiles: tuple[ParameterProfile, ...]
    coefficients: Coefficients = dataclasses.field(default_factory=Coefficients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of one architecture. `bytes_per_machine` is what the busiest machine sends to the others (or takes)."""

    step_seconds: float
    throughput: float
    bytes_per_machine: float
    placements: Mapping[str, Placement]


# -- what is simulated --------------------------------------------------------------------------------


def model_names() -> list[str]:
    """The models whose descriptions come with parallax."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def load_model(name: str | os.PathLike[str]) -> Model:
    """A model that comes with parallax, by name, or a description in a file.

    A description is a JSON object: `name`, `unit` ("words"), `units_per_worker`, `compute_seconds`, `parameters`, and
    optionally `coefficients` (fields of `topology.Coefficients`). A dense parameter is `{"name", "elements"}`, a table
    `{"name", "rows", "row_elements", "alpha"}`; either may have `itemsize` (4), a table `alpha_by_machine` and
    `sparse_gradient`.

    Raises:
        ValueError: there is no such model, or the description is not one; names the field.
    """
    shipped = _MODELS / f"{name}.json"
    path = shipped if shipped.exists() and os.sep not in str(name) else Path(name)
    if not path.is_file():
        raise ValueError(f"model: expected {' | '.join(model_names())} or a file with a description, got {str(name)!r}")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    where = "model description" if path == shipped else str(path)
    given = _object(
        data, where, ("name", "unit", "units_per_worker", "compute_seconds", "parameters"), ("coefficients", "about")
    )
    if not isinstance(given["parameters"], list) or not given["parameters"]:
        raise ValueError(f"{where}: parameters: expected a list of objects, got {given['parameters']!r}")
    profiles = tuple(_profile(row, f"{where}: parameters[{i}]") for i, row in enumerate(given["parameters"]))
    fields = [field.name for field in dataclasses.fields(Coefficients)]
    coefficients = _object(given.get("coefficients", {}), f"{where}: coefficients", (), fields)
    try:
        return Model(
            name=str(given["name"]),
            unit=str(given["unit"]),
            units_per_worker=_number(given["units_per_worker"], "units_per_worker"),
            compute_seconds=_number(given["compute_seconds"], "compute_seconds"),
            profiles=profiles,
            coefficients=Coefficients(**coefficients),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def model_of_plan(
    plan: Plan, name: str, *, compute_seconds: float | None = None, units_per_worker: float | None = None
) -> Model:
    """The model of a saved plan.

    Args:
        name: of the file, for messages.
        compute_seconds, units_per_worker: instead of what was measured.

    Raises:
        ValueError: the plan does not say what it was made from, or nobody says how long a step computes.
    """
    if not plan.profiles:
        raise ValueError(f"{name}: this plan has no profile of its parameters; save it again with this version")
    compute = plan.compute_seconds if compute_seconds is None else compute_seconds
    if compute is None:
        raise ValueError(f"{name}: the profile does not say how long a step computes; give --compute, such as 20ms")
    units = plan.units_per_worker if units_per_worker is None else units_per_worker
    return Model(
        name=name,
        unit="steps" if units is None else "samples",
        units_per_worker=1 if units is None else units,
        compute_seconds=compute,
        profiles=plan.profiles,
        coefficients=plan.coefficients or Coefficients(),
    )


# -- the simulation -----------------------------------------------------------------------------------


def simulate(model: Model, topology: Topology, config: Config | None = None) -> dict[str, Prediction]:
    """A prediction for each of ARCHITECTURES.

    Args:
        config: of the hybrid: `placements` and `partitions` count.

    Raises:
        ValueError: as `make_plan`.
    """
    whole = Config(architecture="allreduce")
    servers = Placement.SHARDED if topology.world_size > 1 else Placement.LOCAL
    chosen: dict[str, dict[str, Placement]] = {
        "hybrid": {p.name: p.placement for p in plan(model, topology, config)},
        "ps": {p.name: servers if p.trainable else Placement.LOCAL for p in model.profiles},
        "allreduce": {p.name: p.placement for p in plan(model, topology, whole)},
    }
    return {name: predict(model, topology, chosen[name]) for name in ARCHITECTURES}


def plan(model: Model, topology: Topology, config: Config | None = None) -> Plan:
    """The plan that a run of `model` would make on these machines; raises as `make_plan`."""
    return make_plan(
        model.profiles,
        world_size=topology.world_size,
        config=config or Config(),
        topology=topology,
        coefficients=model.coefficients,
    )


def predict(
    model: Model, topology: Topology, placements: Mapping[str, Placement], wire: WireDtype = "float32"
) -> Prediction:
    """The step of a model with given placements, and `Config.wire_dtype`.

    What a worker computes with has to be there first: rows are pulled before, and so is a dense parameter that lives
    on servers. Dense gradients travel while it computes (`Coefficients.overlap`); what is left of their time then is
    waited for. Gradients of rows, which come last, are pushed after it.
    """
    c = model.coefficients
    total = shared_cost([(p, placements[p.name]) for p in model.profiles], topology, c)
    reduced = [p for p in model.profiles if Use.DENSE in p.use and placements[p.name] is Placement.ALLREDUCE]
    hideable = shared_cost([(p, Placement.ALLREDUCE) for p in reduced], topology, c).wire
    for profile in model.profiles:
        placement = placements[profile.name]
        cost = parameter_cost(profile, placement, topology, c, wire=wire)
        total += cost
        if Use.DENSE in profile.use:
            hideable += cost.wire if placement is Placement.ALLREDUCE else cost.wire / 2
    seconds = model.compute_seconds + total.seconds - min(hideable, c.overlap * model.compute_seconds)
    return Prediction(
        step_seconds=seconds,
        throughput=topology.world_size * model.units_per_worker / seconds,
        bytes_per_machine=total.bytes_per_machine,
        placements=placements,
    )


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """What to vary, and the numbers: "machines=1..64" means 1, 2, 4, and so on to 64; "workers=1,2,6" these.

    Raises:
        ValueError: it is neither.
    """
    field, _, values = text.partition("=")
    first, dots, last = values.partition("..")
    parts = [first, last] if dots else values.split(",")
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if field not in ("machines", "workers") or min(numbers) < 1 or (dots and numbers[0] > numbers[1]):
        raise ValueError(f"--sweep: expected e.g. machines=1..64 or workers=1,2,6, got {text!r}")
    if dots:
        low, high = numbers
        numbers = [low * 2**i for i in range((high // low).bit_length()) if low * 2**i < high] + [high]
    return field, numbers


def sweep(
    model: Model, topology: Topology, field: str, numbers: Sequence[int], config: Config | None = None
) -> dict[int, dict[str, Prediction]]:
    """`simulate` for each number of machines, or of workers on each (`field`)."""
    counts = {"machines": topology.machines, "workers": topology.workers}
    return {
        n: simulate(model, Topology(**{**counts, field: n}, between=topology.between, inside=topology.inside), config)
        for n in numbers
    }


# -- what is printed ----------------------------------------------------------------------------------


def as_json(predictions: Mapping[str, Prediction]) -> dict[str, Any]:
    """`{"architectures": {"hybrid": {"step_seconds", "throughput", "bytes_per_machine"}, "ps": ..., "allreduce": ...},
    "placements": {name: placement}}`; the placements are the hybrid's."""
    fields = ("step_seconds", "throughput", "bytes_per_machine")
    return {
        "architectures": {name: {f: getattr(p, f) for f in fields} for name, p in predictions.items()},
        "placements": {name: way.value for name, way in predictions["hybrid"].placements.items()},
    }


def as_rows(model: Model, predictions: Mapping[str, Prediction]) -> list[tuple[str, ...]]:
    """A table of the architectures; the first row has the columns' names."""
    head = ("architecture", "step", f"{model.unit}/s", "bytes/machine")
    return [
        head,
        *(
            (name, format_seconds(p.step_seconds), _rate(p.throughput), format_bytes(p.bytes_per_machine))
            for name, p in predictions.items()
        ),
    ]


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def sweep_as_rows(model: Model, field: str, found: Mapping[int, Mapping[str, Prediction]]) -> list[tuple[str, ...]]:
    """A table of a sweep: throughput and bytes of each architecture; the first row has the columns' names."""
    head = [field, *(f"{name} {model.unit}/s" for name in ARCHITECTURES), *(f"{n} bytes" for n in ARCHITECTURES)]
    rows = [
        (
            str(n),
            *(_rate(predictions[name].throughput) for name in ARCHITECTURES),
            *(format_bytes(predictions[name].bytes_per_machine) for name in ARCHITECTURES),
        )
        for n, predictions in found.items()
    ]
    return [tuple(head), *rows]


def plot(model: Model, field: str, found: Mapping[int, Mapping[str, Prediction]], path: str) -> None:
    """Throughput over machines (or workers) as a picture.

    Raises:
        ValueError: matplotlib is not installed, or does not know the kind of file.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")  # draws to a file, on machines without a screen
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    figure, axes = pyplot.subplots()
    for name in ARCHITECTURES:
        axes.plot(list(found), [p[name].throughput for p in found.values()], marker="o", label=name)
    axes.set(xlabel=field, ylabel=f"{model.unit}/s", title=f"{model.name}, predicted", xscale="log", yscale="log")
    axes.set_xticks(list(found), labels=[str(n) for n in found])
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


# -- descriptions -------------------------------------------------------------------------------------


def _profile(row: Any, where: str) -> ParameterProfile:
    if isinstance(row, dict) and "elements" in row:
        given = _object(row, where, ("name", "elements"), ("itemsize",))
        shape: tuple[int, ...] = (_count(given["elements"], f"{where}.elements"),)
        return ParameterProfile(
            name=str(given["name"]),
            shape=shape,
            itemsize=_count(given.get("itemsize", 4), f"{where}.itemsize"),
            use=Use.DENSE,
        )
    given = _object(
        row, where, ("name", "rows", "row_elements", "alpha"), ("itemsize", "alpha_by_machine", "sparse_gradient")
    )
    rows = _count(given["rows"], f"{where}.rows")
    by_machine = given.get("alpha_by_machine")
    return ParameterProfile(
        name=str(given["name"]),
        shape=(rows, _count(given["row_elements"], f"{where}.row_elements")),
        itemsize=_count(given.get("itemsize", 4), f"{where}.itemsize"),
        use=Use.LOOKUP,
        num_rows_touched=_alpha(given["alpha"], f"{where}.alpha") * rows,
        num_rows_by_machine=None if by_machine is None else _alpha(by_machine, f"{where}.alpha_by_machine") * rows,
        sparse_gradient=bool(given.get("sparse_gradient", False)),
    )


def _object(data: Any, where: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    names = ", ".join([*required, *(f"[{name}]" for name in optional)])
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with {names}, got {data!r}")
    for name in required:
        if name not in data:
            raise ValueError(f"{where}: {name!r} is missing; expected {names}")
    for name in data:
        if name not in required and name not in optional:
            raise ValueError(f"{where}: {name!r} is unknown; expected {names}")
    return data


def _count(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: expected a whole number, at least 1, got {value!r}")
    return value


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{field}: expected a number greater than 0, got {value!r}")
    return float(value)


def _alpha(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{field}: expected a fraction between 0 and 1, got {value!r}")
    return float(value)
