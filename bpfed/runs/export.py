"""A client's model handed over: an ONNX graph, a program of `torch.export`, or its weights as safetensors.

A graph takes raw inputs and gives what `Client.predict` does. Before a file is written, it is run on a few rows and
compared with `Client.predict`.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bpfed import __version__
from bpfed._util.errors import UserError, check_count, unknown
from bpfed._util.files import to_json_line, write_whole
from bpfed.config.registry import shown
from bpfed.data.tabular.table import Categorical, Table
from bpfed.inference import inputs
from bpfed.inference.predictive import (
    CorrelatedPredictive,
    FixedDraws,
    GaussianPredictive,
    How,
    PointPredictive,
    check_how,
    drawn_weights,
)
from bpfed.inference.rng import Purpose
from bpfed.methods.base import rows
from bpfed.runs.graph import (
    MISSING_CODE,
    STACK,
    UNDONE,
    ArrayInputs,
    Column,
    Scorer,
    TableInputs,
    Untouched,
    check_recoding,
    recording,
)

if TYPE_CHECKING:
    from bpfed.runs.client import Client

Format = Literal["onnx", "torch", "safetensors"]
#: Version of what the files say of themselves.
VERSION = 1
#: Rows that a graph is recorded and tried with; a number that few layers have as their size, for a comparison of both
#: would be recorded as it turns out.
TRIED = 13
#: How far a graph's outputs may be from those of prediction.
TOLERANCE = 1e-5
#: The same of times at which a survival curve crosses a level: where it is flat, rounding moves them further.
TOLERANCE_OF_TIMES = 1e-3
#: Bytes of weights above which a graph is not made: an ONNX file must be below 2 GiB.
LARGEST = 1_900_000_000
#: Runs a graph on raw inputs by name.
Runner = Callable[[Mapping[str, Tensor]], list[Tensor]]
#: What each output is, by name.
MEANING = {
    "label": "place of the most probable class in labels",
    "labels": "whether each label is more probable than not",
    "probabilities": "of each of labels",
    "total": "total uncertainty in nats",
    "epistemic": "uncertainty that more data would remove",
    "aleatoric": "uncertainty that more data would not remove",
    "set": "whether each of labels is in the prediction set of this level",
    "surely": "labels that are surely present at this level",
    "possibly": "labels that are possibly present at this level",
    "mean": "in the target's unit",
    "sd": "predictive standard deviation in the target's unit",
    "low": "lower end of the interval of this level",
    "high": "upper end of the interval of this level",
    "rates": "means of the mixture of Poisson (with sizes: negative binomial) distributions",
    "weights": "weights of the mixture",
    "sizes": "1 / dispersion of each distribution of the mixture",
    "risk": "logarithm of the hazard relative to the client's baseline",
    "median": "time until which survival is above one half",
    "survival": "probability that nothing has happened at each of times",
    "times": "in the unit of the tables",
}


def export(
    client: Client,
    format: Format,
    path: str | Path,
    *,
    how: How = "sample",
    draws: int | None = None,
    level: float = 0.9,
    overwrite: bool = False,
) -> Path:
    """Write a client's model to a file; see `Client.export`."""
    path = Path(path)
    if format not in get_args(Format):
        raise unknown("format", str(format), get_args(Format))
    check_how(how)
    if draws is not None:
        check_count("draws", draws)
    if not 0.0 < level < 1.0:
        raise UserError(f"The level is {level}, but must be above 0 and below 1, such as 0.9.")
    if path.exists() and not overwrite:
        raise UserError(f"'{path}' already exists; choose another file, or say that it may be overwritten.")
    if format == "safetensors":
        content = weights_file(client, draws)
    else:
        if client.run.data.preprocessor is not None:
            check_recoding(client.run.data.preprocessor)
        if format == "onnx":
            _check_installed()
        content = graph_file(client, format, how, draws, level)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return path


def _check_installed() -> None:
    if lost := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
        raise UserError(f"ONNX needs the package '{lost[0]}', which is not installed; run: pip install 'bpfed[export]'")


# --- Weights ----------------------------------------------------------------------------------------------------------


def weights_file(client: Client, draws: int | None) -> bytes:
    """The distribution of a client's weights by parameter, as a safetensors file."""
    federation, who = client.run.federation, torch.tensor([client.index])
    model = federation.model
    with torch.no_grad():
        found = federation.method.predictive(model, rows(federation.shared, 1), federation.ready(who))
        tensors: dict[str, Tensor] = {}
        if isinstance(found, GaussianPredictive):
            tensors |= _named("mean", client, found.weights.mean[0]) | _named("sd", client, found.weights.sigma[0])
            form = "independent Gaussians: mean and standard deviation (sd) of each weight"
        elif isinstance(found, PointPredictive):
            tensors |= _named("mean", client, found.weights[0])
            form = "points: mean is the weight itself"
        elif isinstance(found, CorrelatedPredictive):
            tensors |= _named("mean", client, found.mean[0])
            roots = [_named("root", client, column) for column in found.directions[0].T]
            tensors |= {name: torch.stack([root[name] for root in roots], -1) for name in roots[0]}
            form = (
                "a Gaussian with correlations: mean + root · ε, ε of independent standard normals along the last axis"
            )
        else:
            key = federation.keys(0, Purpose.EVALUATION, who)
            count = draws or federation.settings.eval_draws
            drawn = torch.cat(list(drawn_weights(model, found, key, count, STACK)))[:, 0]
            split = [model.one.layout.unflatten(each) for each in drawn]
            tensors |= {f"draws.{name}": torch.stack([each[name] for each in split]) for name in split[0]}
            form = "draws along the first axis"
    trained = set(model.layout.names)
    own = model.module.state_dict()
    tensors |= {f"frozen.{name}": value for name, value in own.items() if model.frozen and name not in trained}
    personal = model.layout.personal_names
    said = {
        **_about(client),
        "form": form,
        "members": model.members,
        "layout": [
            {"name": name, "shape": list(shape), "part": "personal" if name in personal else "shared"}
            for name, shape in zip(model.layout.names, model.layout.shapes, strict=True)
        ],
        "temperature": {"common": federation.calibration_temperature},
    }
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return safetensors.torch.save(plain, {"bpfed": to_json_line(said).strip()})


def _named(kind: str, client: Client, vector: Tensor) -> dict[str, Tensor]:
    """A flat vector by the names of parameters; of several members with a first axis for them."""
    parts = client.run.federation.model.layout.unflatten(vector)
    return {f"{kind}.{name}": part for name, part in parts.items()}


def _about(client: Client) -> dict[str, Any]:
    """What every file says of itself; of other clients nothing is in it."""
    data, federation = client.run.data, client.run.federation
    made = data.preprocessor
    return {
        "version": VERSION,
        "bpfed": __version__,
        "client": client.name,
        "data": shown(data.name),
        "method": federation.method.name,
        "round": federation.round,
        "task": data.task,
        "labels": list(data.class_names),
        "target": None if made is None else {"name": made.target, "mean": made.target_mean, "scale": made.target_scale},
        "preparation": None if made is None else made.alone(client.name).record(),
    }


# --- Graphs -----------------------------------------------------------------------------------------------------------


def graph_file(client: Client, format: Format, how: How, draws: int | None, level: float) -> bytes:
    """The graph from raw inputs to predictions, checked, as the content of a file."""
    scorer = Scorer(client, how, draws, level).eval()
    weight = sum(t.numel() * t.element_size() for t in _tensors(scorer))
    if weight > LARGEST:
        raise UserError(
            f"The weights of the graph would have {weight / 1e9:.1f} GB, and a file holds up to {LARGEST / 1e9:.1f}; use fewer "
            "draws, or how single-pass."
        )
    raw = example(client, scorer.prepare)
    expected = reference(client, scorer, raw, draws)
    program = _recorded(scorer, tuple(raw.values()))
    about = _about(client) | {
        "how": how,
        "draws": scorer.draws if how == "sample" else None,
        "level": level if scorer.scores is not None else None,
        "inputs": _inputs(scorer.prepare, raw),
        "outputs": [{"name": name, "meaning": MEANING.get(name, "")} for name in scorer.outputs],
    }
    if format == "torch":
        content = _torch_file(program, about)
        run = _torch_runner(content)
    else:
        content = _onnx_file(program, scorer, raw, about)
        run = _onnx_runner(content, scorer)
    # One row alone, then all of them.
    for some in (slice(1), slice(None)):
        found = dict(zip(scorer.outputs, run({n: t[some] for n, t in raw.items()}), strict=True))
        _compare(found, [{n: _taken(t, n, some) for n, t in each.items()} for each in expected], scorer, format)
    return content


def _taken(values: Tensor, name: str, some: slice) -> Tensor:
    return values if name == "times" else values[some]


def _tensors(scorer: Scorer) -> Iterator[Tensor]:
    yield from scorer.state_dict().values()
    yield from (leaf for leaf in tree_leaves(scorer.predictive) if isinstance(leaf, Tensor))
    yield from (value for _, value in scorer.model.constants)


def example(client: Client, prepare: nn.Module) -> dict[str, Tensor]:
    """A few raw inputs by name, as a graph takes them: of a table such values as training saw, and missing ones."""
    data, g = client.run.data, torch.Generator().manual_seed(0)
    if isinstance(prepare, TableInputs):
        found: dict[str, Tensor] = {}
        if prepare.numbers:
            found["numbers"] = torch.stack([_numbers(c, prepare, g) for c in prepare.numbers], 1)
        if prepare.words:
            found["codes"] = torch.stack([_codes(c) for c in prepare.words], 1)
        return found
    own, y = data.train.client(client.index)
    known = len(y) > 0  # a loaded run has no examples
    taken = inputs.take(own, torch.arange(TRIED) % len(y)) if known else inputs.each(lambda t: _anything(t, g), own)
    if isinstance(prepare, Untouched):
        named = inputs.parts(taken)
        return {name if isinstance(taken, dict) else f"x{name}": t.cpu() for name, t in named.items()}
    assert isinstance(prepare, ArrayInputs)
    return {"x": taken.cpu() * prepare.spread + prepare.centre}


def _anything(like: Tensor, g: torch.Generator) -> Tensor:
    """Inputs of this shape and type, for want of examples."""
    shape = (TRIED, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=g).to(like.dtype)
    return torch.ones(shape, dtype=like.dtype)


def _numbers(column: Column, prepare: TableInputs, g: torch.Generator) -> Tensor:
    """Numbers near those of training in the unit of the files, one missing and, of codes, some that occur."""
    feature, steps = column.feature, prepare.steps[column.feature.name]
    values = feature.mean + (feature.scale or 1.0) * torch.randn(TRIED, generator=g, dtype=torch.float64)
    if feature.coded:
        categories = torch.tensor([float(category) for category in feature.categories], dtype=torch.float64)
        values[::2] = categories[torch.arange(len(values[::2])) % len(categories)]
    for conversion in reversed(steps):
        for sign, number in reversed(conversion.steps):
            values = UNDONE[sign](values, number)
    values[(column.place + 1) % TRIED] = torch.nan
    return values


def _codes(column: Column) -> Tensor:
    """All kinds of words: missing, unseen, and those of training."""
    count = len(column.feature.categories)
    return (torch.arange(TRIED) + column.place) % (count + 2) + MISSING_CODE


def reference(client: Client, scorer: Scorer, raw: Mapping[str, Tensor], draws: int | None) -> list[dict[str, Tensor]]:
    """What `Client.predict` gives for raw inputs; and twice more, with bounds of sets a little lower and higher."""
    prepare = scorer.prepare
    if isinstance(prepare, TableInputs):
        run, said = client.run, client.run.say
        run.say = lambda sentence: None
        try:
            found = client.predict(client.read(_table(prepare, raw)), draws, scorer.how)
        finally:
            run.say = said
    else:
        given = prepare(*raw.values())
        found = client.predict(given, draws, scorer.how, prepared=client.run.data.preprocessor is not None)
    return [scorer.finished(found, shift) for shift in (0.0, -TOLERANCE, TOLERANCE)]


def _table(prepare: TableInputs, raw: Mapping[str, Tensor]) -> Table:
    """The table that raw inputs are of."""
    columns: dict[str, Any] = {c.name: raw["numbers"][:, c.place].numpy() for c in prepare.numbers}
    columns |= {c.name: Categorical.of(_spelt(c, raw["codes"][:, c.place])) for c in prepare.words}
    return Table("rows to check an exported model with", TRIED, columns)


def _spelt(column: Column, codes: Tensor) -> list[str]:
    """Words that have these codes."""
    words = [*column.feature.categories, "a word that no training row has", ""]  # the last one is missing, code -1
    return [words[code] for code in codes.tolist()]


def _recorded(scorer: Scorer, raw: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """The program, for any number of rows."""
    count = torch.export.Dim("rows", min=1)
    with recording():
        scorer(*raw)  # what is cached must not be made while recording
        try:
            with _quiet():
                return torch.export.export(scorer, raw, dynamic_shapes=(tuple({0: count} for _ in raw),), strict=False)
        except UserError:
            raise
        except Exception as error:
            if isinstance(scorer.predictive, FixedDraws) and not scorer.predictive.looped:
                # Some layers, run for all draws at once, want to know the number of rows.
                scorer.predictive = scorer.predictive._replace(looped=True)
                return _recorded(scorer, raw)
            raise UserError(
                f"The network cannot be recorded for any number of rows ({_first_line(error)}); use format safetensors, or "
                "'bpfed serve'."
            ) from error


def _torch_file(program: torch.export.ExportedProgram, about: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    with _quiet():
        made = _bare(program.run_decompositions({}))
        torch.export.save(made, content, extra_files={"bpfed.json": to_json_line(about)})
    return content.getvalue()


def _bare(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A program without what it was recorded with: rows, which may be of training, and paths of this machine."""
    program._example_inputs = None
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _torch_runner(content: bytes) -> Runner:
    with _quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def run(raw: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(module(*raw.values()))

    return run


def _inputs(prepare: nn.Module, raw: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What is said of the inputs."""
    if not isinstance(prepare, TableInputs):
        scaling = "inside: raw values are expected" if isinstance(prepare, ArrayInputs) and prepare.scaled else "none"
        return [
            {
                "name": name,
                "shape": ["rows", *t.shape[1:]],
                "type": str(t.dtype).removeprefix("torch."),
                "scaling": scaling,
            }
            for name, t in raw.items()
        ]
    found: list[dict[str, Any]] = []
    if prepare.numbers:
        found.append(
            {
                "name": "numbers",
                "shape": ["rows", len(prepare.numbers)],
                "type": "float64",
                "missing": "NaN",
                "columns": [c.name for c in prepare.numbers],
            }
        )
    if prepare.words:
        found.append(
            {
                "name": "codes",
                "shape": ["rows", len(prepare.words)],
                "type": "int64",
                "missing": MISSING_CODE,
                "columns": [
                    {
                        "name": c.name,
                        "codes": {category: code for code, category in enumerate(c.feature.categories)},
                        "any other word": len(c.feature.categories),
                        "words for missing": sorted(word for word, code in c.codes.items() if code == MISSING_CODE),
                    }
                    for c in prepare.words
                ],
            }
        )
    return found


def _compare(found: dict[str, Tensor], expected: list[dict[str, Tensor]], scorer: Scorer, format: str) -> None:
    """Raise a `UserError` unless all outputs are those of prediction."""
    right = expected[0]
    unit = scorer.target.unit
    for name, values in found.items():
        wanted = right[name]
        if values.shape != wanted.shape:
            raise _disagrees(name, f"has shape {list(values.shape)}, not {list(wanted.shape)}", format)
        if values.dtype == torch.bool:
            same = torch.stack([values == each[name] for each in expected]).any(0)
        elif name == "label":
            top = right["probabilities"].topk(2, -1).values
            same = (values == wanted) | (top[..., 0] - top[..., 1] < 2 * TOLERANCE)
        else:
            times = name in ("median", "low") and "survival" in found
            tolerance = TOLERANCE_OF_TIMES if times else TOLERANCE
            scale = unit if "mean" in found or times else 1.0
            same = torch.isclose(values.double(), wanted.double(), tolerance, tolerance * scale, equal_nan=True)
        if not bool(same.all()):
            row = [int(k) for k in (~same).nonzero()[0]]
            differs = f"differs in row {row[0] + 1} ({values[tuple(row)]} instead of {wanted[tuple(row)]})"
            raise _disagrees(name, differs, format)


def _disagrees(name: str, how: str, format: str) -> UserError:
    return UserError(
        f"The {format} graph does not compute what predict does: its output '{name}' {how}, so no file is written; please "
        "report this with the network that you use."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, exporters do not talk of what concerns nobody."""
    known = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in known]
    for logger in known:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(known, before, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:200].rstrip(".")


# --- ONNX -------------------------------------------------------------------------------------------------------------


def _onnx_file(
    program: torch.export.ExportedProgram, scorer: Scorer, raw: Mapping[str, Tensor], about: dict[str, Any]
) -> bytes:
    """As ONNX; a table has one input for each column, by its name, of numbers (double) or words (string)."""
    import onnx

    try:
        with _quiet():
            made = torch.onnx.export(
                _bare(program),
                dynamo=True,
                verbose=False,
                input_names=list(raw),
                external_data=False,
            )
        assert made is not None
        model = made.model_proto
    except Exception as error:
        lacking = re.search(r"op='([A-Za-z0-9_.:]+)'|(?:aten|prims)[:.]+([A-Za-z0-9_.]+)", str(error))
        operator = next((part for part in lacking.groups() if part), "") if lacking else _first_line(error)
        raise UserError(
            f"The network uses an operator that ONNX lacks ({operator}); use format torch instead."
        ) from error
    _rename(model.graph, raw, scorer.outputs)
    if isinstance(scorer.prepare, TableInputs):
        about["inputs"] = _by_column(model, scorer.prepare)
    model.producer_name, model.producer_version = "bpfed", __version__
    onnx.helper.set_model_props(model, {"bpfed": to_json_line(about).strip()})
    model.doc_string = f"Model of client '{about['client']}'; metadata_props has what its inputs and outputs are."
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _rename(graph: Any, given: Collection[str], outputs: Sequence[str]) -> None:
    """Give an ONNX graph these names of outputs, and all within it names that no column is likely to have."""
    final = {value.name: name for value, name in zip(graph.output, outputs, strict=True)}

    def new(name: str) -> str:
        return name if not name or name in given else final.get(name, f"v/{name}")

    def walk(part: Any) -> None:
        for value in (*part.initializer, *part.value_info, *part.output):
            value.name = new(value.name)
        for value in () if part is graph else part.input:
            value.name = new(value.name)
        for node in part.node:
            node.input[:], node.output[:] = ([new(name) for name in side] for side in (node.input, node.output))
            for attribute in node.attribute:
                for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    walk(inner)

    walk(graph)


def _by_column(model: Any, prepare: TableInputs) -> list[dict[str, Any]]:
    """Give an ONNX model an input for each column; returns what is said of them."""
    from onnx import TensorProto, helper

    graph = model.graph
    dimension = graph.input[0].type.tensor_type.shape.dim[0].dim_param or "rows"
    taken = {o for node in graph.node for o in (*node.output, *node.input)} | {t.name for t in graph.initializer}
    taken |= {"numbers", "codes"}
    nodes, given, said = [], [], []
    axis = _free("column_axis", taken)
    for matrix, columns in (("numbers", prepare.numbers), ("codes", prepare.words)):
        parts = []
        for column in columns:
            name, part = _free(column.name, taken), _free(f"{matrix}_{column.place}", taken)
            kind = TensorProto.DOUBLE if column.number else TensorProto.STRING
            given.append(helper.make_tensor_value_info(name, kind, [dimension]))
            about = {"name": name, "column": column.name, "shape": ["rows"]}
            about |= {"type": "double", "missing": "NaN"} if column.number else {"type": "string", "missing": ""}
            said.append(about if column.number else about | {"words": list(column.feature.categories)})
            source = name
            if not column.number:
                known, source = column.codes, _free(f"{part}_code", taken)
                nodes.append(
                    helper.make_node(
                        "LabelEncoder",
                        [name],
                        [source],
                        domain="ai.onnx.ml",
                        keys_strings=list(known),
                        values_int64s=list(known.values()),
                        default_int64=len(column.feature.categories),
                    )
                )
            nodes.append(helper.make_node("Unsqueeze", [source, axis], [part]))
            parts.append(part)
        if parts:
            nodes.append(helper.make_node("Concat", parts, [matrix], axis=1))
    graph.initializer.append(helper.make_tensor(axis, TensorProto.INT64, [1], [1]))
    kept = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *kept])
    del graph.input[:]
    graph.input.extend(given)
    if not any(o.domain == "ai.onnx.ml" for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return said


def _free(name: str, taken: set[str]) -> str:
    """The name, or one like it that nothing in the graph has; it is taken then."""
    while name in taken:
        name += "_input"
    taken.add(name)
    return name


def _onnx_runner(content: bytes, scorer: Scorer) -> Runner:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    prepare = scorer.prepare

    def run(raw: Mapping[str, Tensor]) -> list[Tensor]:
        feed: dict[str, np.ndarray] = {name: t.numpy() for name, t in raw.items()}
        if isinstance(prepare, TableInputs):
            said = json.loads(session.get_modelmeta().custom_metadata_map["bpfed"])["inputs"]
            names = {each["column"]: each["name"] for each in said}
            feed = {names[c.name]: raw["numbers"][:, c.place].numpy() for c in prepare.numbers}
            for c in prepare.words:
                feed[names[c.name]] = np.array(_spelt(c, raw["codes"][:, c.place]), dtype=object)
        return [torch.from_numpy(np.asarray(values)) for values in session.run(None, feed)]

    return run
