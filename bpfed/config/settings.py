"""Settings of the data and of a run, with types, ranges and descriptions; those of a method are its own dataclass.

Flags, keys of TOML files, help texts and sentences about what is wrong follow from the classes here. Nothing needs torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bpfed._util.errors import UserError
from bpfed.config.registry import NETWORKS, TaskName

# --- Types in words ---------------------------------------------------------------------------------------------------

#: The largest number that float32 has, roughly.
LARGEST_FLOAT = 3e38


def words(kind: Any) -> str:
    """A type as a person would say it."""
    if is_union(kind):
        return " or ".join(words(k) for k in get_args(kind) if k is not NoneType)
    if get_origin(kind) is Literal:
        *others, last = (f"'{choice}'" for choice in get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(kind) in (Sequence, list, tuple):
        return f"a list of {words(get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))


def is_union(kind: Any) -> bool:
    """Whether it is one of several types, such as ``int | None``."""
    return get_origin(kind) in (Union, UnionType)


def check_types(settings: Any) -> None:
    """Raise a `UserError` unless every field of a method is of its type; nothing is converted."""
    kinds = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        kind, value = kinds[field.name], getattr(settings, field.name)
        try:
            _adapter(kind).validate_python(value)
        except ValidationError:
            raise UserError(f"{field.name} is {value!r}, but must be {words(kind)}.") from None
        _check_size(field.name, value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, float) and LARGEST_FLOAT < abs(value) < float("inf"):
        raise UserError(f"{name} is {value!r}, which is more than a network can compute with; choose less.")


def _range(field: FieldInfo, error: ErrorDetails) -> str:
    """The range of a setting that is not in it, in words; both ends where the lower one is not just 0 or 1."""
    low = next((m for m in field.metadata if isinstance(m, Ge | Gt)), None)
    high = next((m for m in field.metadata if isinstance(m, Le | Lt)), None)
    if isinstance(low, Ge) and isinstance(high, Le) and low.ge not in (0, 1):
        return f"from {low.ge:g} to {high.le:g}"
    if isinstance(high, Lt):
        return f"{f'at least {low.ge}' if isinstance(low, Ge) else 'above 0'} and below {high.lt}"
    if isinstance(high, Le) and error["type"] == "less_than_equal":
        return f"at most {high.le}"
    at_least = "0 or more" if low == Ge(0) else "at least 1"
    return f"{at_least}, or left unset" if NoneType in get_args(field.annotation) else at_least


#: How settings are checked: nothing is converted (text is no number), and the docstring of an attribute describes it. What
#: checks them is built with the first of them, which a command's help need not wait for.
STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


@dataclass(frozen=True, config=STRICT)
class Checked:
    """Base of settings: what is of another type or out of its range is a `UserError` when they are made."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_a_sentence(cls, given: Any, handler: Any) -> Any:
        try:
            made = handler(given)
        except ValidationError as wrong:
            error = wrong.errors()[0]
            name, known = str(error["loc"][0]), FIELDS[cls]
            if name not in known:
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument '{name}'") from None
            if error["type"] == "value_error":
                allowed = str(error["ctx"]["error"])
            else:
                ranged = error["type"].startswith(("greater", "less", "finite"))
                allowed = _range(known[name], error) if ranged else words(known[name].annotation)
            raise UserError(f"{name} is {error['input']!r}, but must be {allowed}.") from None
        for name in FIELDS[cls]:
            _check_size(name, getattr(made, name))
        return made


# --- Data -------------------------------------------------------------------------------------------------------------

#: Settings that are done to a client's own columns before anything is learnt from them.
RECODING = ("rename", "map", "convert", "dates", "text")


@dataclass(frozen=True, config=STRICT)
class DataSettings(Checked):
    """Which data, and how it is distributed over clients."""

    name: str = "digits"
    """Name of the dataset (see ``bpfed data list``), or ``folder:PATH`` for your own tables or images."""
    clients: int | None = None
    """Number of clients; None: the dataset's own."""
    partition: str | None = None
    """How examples are distributed: ``groups``, ``random:3``, ``dirichlet:0.3``, ``shards:2`` or ``iid``; None:
    ``groups``, but tables come with their own clients."""
    test_fraction: float | None = None
    """Fraction of each client's examples held out for testing; None: 0.5, or 0.3 for tables."""
    seed: Annotated[int | None, Field(ge=0)] = None
    """Random seed of the partition and the test split; None: the run's seed."""
    target: str | None = None
    """For tables: the column to predict; several, separated by commas, for the task multilabel; None: the one called
    target, label or y."""
    event: str | None = None
    """For the task survival: the column that says whether the event was observed (1, yes) or the time in
    ``target`` is censored (0, no)."""
    client_column: str | None = None
    """For a single table: the column that identifies the client."""
    task: TaskName | None = None
    """For tables: the kind of target; None: text and up to 20 distinct whole numbers are classes."""
    standardise: Literal["federated", "local", "none"] = "federated"
    """For tables: scale numbers by statistics of all clients (``federated``), by each client's own (``local``), or
    not at all (``none``)."""
    ignore: str | None = None
    """For tables: columns that are not inputs, separated by commas."""
    missing: str | None = None
    """For tables: words that stand for no value, beside blanks, ``?``, ``NA`` and the like, separated by commas;
    ``age=999`` is one in that column alone."""
    codes: Literal["both", "number"] = "both"
    """For tables: use columns with 3 to 10 different whole numbers as numbers with one more input per value
    (``both``), or as numbers alone (``number``)."""
    holdout: str | None = None
    """For tables: hold out the last rows of each client by a column of numbers or ISO dates (``time:COLUMN``), as they
    are in its file (``last`` or ``last:0.3``), or whole groups of rows (``group:COLUMN``), for the test and wherever
    training rows are held out; None: rows drawn at random."""
    input: Literal["image", "sequence"] | None = None
    """For arrays of three axes in your own files: images ``[n, height, width]`` or sequences ``[n, steps, channels]``;
    None: sequences if the last axis is short and the other long, and they are not bytes."""
    image_size: str | None = None
    """For folders of images: resize all to HEIGHTxWIDTH pixels, such as ``64x64``; None: all have the same size."""
    rename: str | None = None
    """For tables: other names of columns, ``OLD=NEW`` or ``OLD@CLIENT=NEW``, separated by commas."""
    map: str | None = None
    """For tables: other words of a column, ``sex:F=female,M=male`` or ``sex@CLIENT:F=female,M=male``; several are
    separated by semicolons."""
    convert: str | None = None
    """For tables: other units, ``creatinine@CLIENT:/88.4`` or ``temperature:-32/1.8`` (from left to right),
    separated by commas."""
    dates: str | None = None
    """For tables: columns whose dates become year, month, weekday and days since 2000, separated by commas."""
    text: str | None = None
    """For tables: columns of free text, whose words are counted in 256 hashed columns each (``note:64``: in 64),
    separated by commas."""

    @property
    def recoding(self) -> dict[str, Any]:
        """What is said of single columns (`bpfed.data.tabular.recode`)."""
        return {key: getattr(self, key) for key in RECODING}

    @property
    def targets(self) -> str | None:
        """The column to predict, or the columns with commas between them."""
        return with_event(self.target, self.event)


def with_event(target: str | None, event: str | None) -> str | None:
    """The columns of a time to event with a comma between them; the target itself where there is no event column."""
    if event is None or target is None or event in target.split(","):
        return target
    return f"{target},{event}"


# --- Run --------------------------------------------------------------------------------------------------------------

#: The lowest calibration temperature and the highest. It is one number for all clients, which makes predictions more or
#: less confident than the model was trained to be: in classification a temperature T, by which probabilities become
#: p^(1/T) / Z, in regression a scale factor of the predicted standard deviations. Either way 1 changes nothing.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
#: Where a run may be asked to take place; ``auto`` is CUDA where there is one.
Device = Literal["auto", "cpu", "cuda"]
#: Where nothing else is said: so often is a run evaluated at most, beside its first round,
EVALUATIONS = 20
#: and so many of its clients are.
MOST_EVALUATED = 1000
#: Up to so many clients all take part in every round unless something else is said; of more, at least so many.
ALL_TAKE_PART, FEWEST_DRAWN = 200, 10
#: Calibration pilots of a run.
MOST_PILOTS = 1_000
#: A slot of a file of personal states is numbered by a byte.
MOST_CHECKPOINTS = 100
#: Units in the hidden layer of an MLP where nothing is said.
HIDDEN = 100


def _ratio(value: float) -> float:
    if value != 0.0 and not 1.0 < value < float("inf"):
        raise ValueError("above 1, or 0 for no limit")
    return value


#: A number from 0 on, and how many times as large something may be.
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, AfterValidator(_ratio)]


def _network(name: str) -> str:
    if name not in NETWORKS:
        raise ValueError(f"{words(Literal[*NETWORKS])}, or a network of an installed package")
    return name


@dataclass(frozen=True, config=STRICT)
class Settings(Checked):
    """Settings of a run. The largest numbers are more than anybody can mean."""

    rounds: Annotated[int, Field(ge=1, le=999_999)] = 50
    """Communication rounds."""
    participants: int | None = None
    """Clients drawn at random in each round; None: all of up to 200, and of more as many as let each take part
    twice on average, at least 10."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Local passes over a client's data in a round."""
    batch: Annotated[int, Field(ge=1, le=1_000_000_000)] = 50
    """Mini-batch size; the last batch of an epoch may be smaller."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed for the whole run."""
    members: Annotated[int, Field(ge=0, le=1_000)] = 0
    """Networks whose predictions are averaged, each with its own initial weights; multiplies computation and
    traffic. 0: three for flat inputs where the method is ``bpfed-adaptive``, whose networks are small, and else
    one."""
    network: Annotated[str, AfterValidator(_network)] = "auto"
    """Network that is built when none is given: ``auto``, a LeNet for 32 x 32 images, ``conv1d`` for sequences, what
    the method prefers for tables (``mlp`` or ``skip``), and else an MLP with one hidden layer; ``mlp``; ``skip``,
    that MLP and a linear path from inputs to outputs beside it; ``linear``, logistic or linear regression;
    ``conv1d``, two convolutions along time and the mean over time; or that of an installed package, by its name."""
    hidden: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """Units in the hidden layer of the network that is built when none is given; None: 100. Noisy labels may need
    fewer. Not for 32 x 32 images, whose network is fixed."""
    trainable: str | None = None
    """Parameters of the network that are trained, by name or pattern, such as ``lora_*|classifier``; all others are
    frozen, constants that are neither sent nor kept. None: those of the module that have not
    ``requires_grad=False``."""
    cache_features: Literal["auto", "off"] = "auto"
    """``auto``: if the frozen part of the network comes first and has no dropout, compute its outputs once for each
    example and train the rest on them; ``off``: run the whole network in every step."""
    adapt: Literal["auto", "off"] = "auto"
    """``auto``: where a method offers settings that only data can decide between, choose them first, in selection
    pilots on held-out training examples; ``off``: use the method as it is."""
    drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a drawn client fails to return in a round."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """``fixed``: draws exactly ``participants`` clients; ``poisson``: draws each client independently, with that
    many on average."""
    weighting: Literal["auto", "equal", "size"] = "auto"
    """Weight of an upload in the server's rule: ``equal`` (as in the paper); ``size``, the number of a client's
    examples; ``auto``, the method's own."""
    schedule: Literal["auto", "constant", "cosine"] = "auto"
    """Step size over the rounds: ``constant``; ``cosine``, which falls along half a cosine; ``auto``, the method's
    own."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many rounds, and always after the first and the last; 0: ten to twenty times in the run."""
    eval_draws: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Weight draws averaged in a prediction."""
    eval_clients: Annotated[int | None, Field(ge=1)] = None
    """Evaluate this many clients, drawn once among those with test examples; None: all of them, but at most 1 000."""
    bins: Annotated[int, Field(ge=1, le=1_000)] = 10
    """Bins of ECE and MCE."""
    calibration: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each client's training data held back to calibrate predictions (prediction sets, and the
    temperature if ``scaling`` is ``client``), stratified by class; at least one example if the client has two or
    more."""
    sets: Literal["auto", "class", "pooled", "client"] = "auto"
    """How prediction sets and intervals are calibrated: ``client``, from each client's own calibration examples
    alone, so that those of a client with few hold everything; ``pooled``, from these and, as if they were 50 more
    (200 for intervals), those of all clients; ``class``, for each class, so that each is held as often, from ranks
    among what the client's own model predicts, those of all clients as if they were 100 more; ``auto``, by class if
    the clients together have 20 calibration examples of each class, and else pooled."""
    scaling: Literal["none", "client"] = "none"
    """``client``: each client's probabilities become p^(1/T) / Z with a temperature T fitted to its calibration
    examples; ``none``: they stay as they are."""
    calibration_temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    """Temperature T of all clients' class probabilities, which become p^(1/T) / Z; in regression a scale factor of
    all predicted standard deviations. Below 1: more confident; above 1: less."""
    calibrate: str = "none"
    """``pilot:3``: before the run, train three times on four fifths of each client's examples, and fit the
    calibration temperature to the rest (calibration pilots); use more with fewer than 2 000 examples in total. Each
    takes as long as the run. ``none``: no calibration pilots."""
    clip: Amount = 0.0
    """Maximum norm of a client's update (means and ρ as one vector); longer updates are scaled down. 0: no limit."""
    noise: Amount = 0.0
    """Standard deviation of the noise added to the sum of a round's updates, in units of ``clip``; above 0 the run
    is differentially private at the client level."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """With noise, the δ for which ε is computed."""
    robust: str = "none"
    """How the server defends itself against bad uploads: ``median`` takes the median of each coordinate,
    ``trimmed:0.2`` the mean without that share of values at either end, ``none`` just the method's own rule."""
    max_update_ratio: Ratio = 20.0
    """An upload that moved the server's weights or means more than this many times as far as the median of the
    round's and earlier uploads is refused, if that is also further than three times the size of the first weights.
    0: no limit."""
    max_sigma_ratio: Ratio = 100.0
    """An upload is refused if one of its standard deviations is more than this many times the server's, or less
    than the server's divided by it. 0: no limit."""
    compression: Literal["none", "half"] = "none"
    """``half``: uploads and the server's state are sent with means in half precision and standard deviations as one
    byte each; ``none``: in full precision."""
    device: Device = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    tf32: bool = True
    """On CUDA, use TF32 (10-bit mantissa) instead of full float32 for matrix products and convolutions."""
    compile: Literal["auto", "on", "off"] = "auto"
    """``auto``: compile the local step if the run is long enough to repay it; ``on``; ``off``."""
    chunk: Annotated[int | None, Field(ge=1)] = None
    """Clients trained at once; None: chosen for speed within ``memory``."""
    memory: Annotated[int, Field(ge=1)] = 2048
    """Memory for the state of clients in training, in MiB."""
    store: Literal["auto", "memory", "file"] = "auto"
    """Where personal states are kept: ``memory``, ``file``, or ``auto``, a file if they exceed 64 MiB."""
    checkpoints: Annotated[int, Field(ge=2, le=MOST_CHECKPOINTS)] = 5
    """Newest rounds of which a checkpoint is kept, and to which a run can go back (``--back-to``); at least 2."""
    baselines: Literal["auto", "off"] = "auto"
    """``auto``: reports set plain models of scikit-learn beside the run (logistic or ridge regression of each
    client alone and of all rows, and gradient boosting), if inputs are flat vectors and there are at most 50 000
    training rows; ``off``: they do not."""

    def check(self, clients: int) -> None:
        """Raise a `UserError` if these settings contradict each other, or cannot be run with that many clients."""
        if self.participants is not None and not 1 <= self.participants <= clients:
            raise UserError(
                f"participants is {self.participants}, but there are {clients} clients; choose 1 to {clients}."
            )
        pilots, given = self.calibration_pilots, self.calibration_temperature
        if self.scaling == "client" and (given != 1.0 or pilots):
            asked = f"calibrate is '{self.calibrate}'" if pilots else f"calibration_temperature is {given}"
            raise UserError(
                f"{asked}, one temperature for all clients, but scaling is 'client', one for each; use only one of the "
                "two."
            )
        if given != 1.0 and pilots:
            raise UserError(
                f"calibration_temperature is {given}, but calibrate = '{self.calibrate}' would fit it; use only one of "
                "the two (--calibration-temperature 1 undoes that of a file)."
            )
        self._check_defence()

    @property
    def calibration_pilots(self) -> int:
        """How many calibration pilots are run before the run; 0: none."""
        if self.calibrate == "none":
            return 0
        kind, _, count = self.calibrate.partition(":")
        number = int(count) if re.fullmatch("[0-9]{1,6}", count) else 0
        if kind != "pilot" or not 1 <= number <= MOST_PILOTS:
            raise UserError(
                f"calibrate is {self.calibrate!r}, but must be none, or pilot with a number from 1 to {MOST_PILOTS}, e.g. "
                "pilot:3."
            )
        return number

    @property
    def trim(self) -> float | None:
        """The share of uploads that the robust rule drops at either end, a half for the median; None: no such rule."""
        if self.robust in ("none", "median"):
            return 0.5 if self.robust == "median" else None
        kind, _, share = self.robust.partition(":")
        try:
            found = float(share)
        except ValueError:
            found = 0.0
        if kind != "trimmed" or not 0.0 < found < 0.5:
            raise UserError(
                f"robust is {self.robust!r}, but must be none, median, or trimmed with a share below 0.5, e.g. "
                "trimmed:0.2."
            )
        return found

    def _check_defence(self) -> None:
        """Clipping, noise and robust rules: that they go together."""
        if self.noise > 0.0 and self.clip == 0.0:
            raise UserError(f"noise is {self.noise}, in units of clip, but clip is 0; set clip too.")
        if self.noise > 0.0 and self.calibration_pilots:
            raise UserError(
                "Calibration pilots use the same clients again and are not counted in ε; set calibrate to none when noise "
                "is on."
            )
        robust = self.trim is not None
        if self.noise > 0.0 and robust:
            raise UserError(
                "noise hides a client in a sum, but robust rules take no sum; set noise to 0 or robust to none."
            )
        if self.weighting == "size" and (self.noise > 0.0 or robust):
            option = "noise" if self.noise > 0.0 else "robust"
            raise UserError(
                f"weighting is 'size', but with {option} all uploads count the same, since reported sizes cannot be "
                "checked; set it to 'equal'."
            )

    def per_round(self, clients: int) -> int:
        """Number of clients drawn in a round; by coins, the mean number."""
        if self.participants is not None:
            return self.participants
        return clients if clients <= ALL_TAKE_PART else max(FEWEST_DRAWN, -(-2 * clients // self.rounds))

    def evaluated(self, round_: int) -> bool:
        """Whether this round (from 1) is evaluated."""
        every = self.eval_every or -(-self.rounds // EVALUATIONS)
        return round_ == self.rounds or round_ % every == 0 or round_ == 1


#: The fields of both with their descriptions, which pydantic no longer has once it has built the checks.
FIELDS: dict[type, dict[str, FieldInfo]] = {
    kind: dict(vars(kind)["__pydantic_fields__"]) for kind in (DataSettings, Settings)
}
