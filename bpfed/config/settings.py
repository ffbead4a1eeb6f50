"""How a federation is run: rounds, participation, local work, evaluation, device; nothing of a single method."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from bpfed._util.errors import UserError
from bpfed.config.migrations import accepts_old_names

if TYPE_CHECKING:
    from pydantic import TypeAdapter


# --- Calibration temperature ------------------------------------------------------------------------------------------
#
# One number for all clients, which makes predictions more or less confident than the model was trained to be. In
# classification it is a temperature T, and probabilities become p^(1/T) / Z. In regression it is a scale factor of the
# predicted standard deviations. Either way 1 changes nothing.

#: The lowest calibration temperature and the highest.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0


# --- Types of settings ------------------------------------------------------------------------------------------------
#
# In words, and whether values are of them. Nothing here needs torch.

#: The largest number that float32 has, roughly.
LARGEST_FLOAT = 3e38


def check_types(settings: Any) -> None:
    """Raise a `UserError` unless every field of a settings dataclass is of its type; nothing is converted."""
    from pydantic import ValidationError

    kinds = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        kind, value = kinds[field.name], getattr(settings, field.name)
        try:
            _adapter(kind).validate_python(value)
        except ValidationError:
            raise UserError(f"{field.name} is {value!r}, but must be {words(kind)}.") from None
        if isinstance(value, float) and LARGEST_FLOAT < abs(value) < float("inf"):
            raise UserError(f"{field.name} is {value!r}, which is more than a network can compute with; choose less.")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter  # here, since a command's help need not wait for it

    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


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


#: Where a run may be asked to take place; ``auto`` is CUDA where there is one.
Device = Literal["auto", "cpu", "cuda"]
#: Where nothing else is said: so often is a run evaluated at most, beside its first round,
EVALUATIONS = 20
#: and so many of its clients are.
MOST_EVALUATED = 1000
#: Up to so many clients all take part in every round unless something else is said; of more, at least so many.
ALL_TAKE_PART, FEWEST_DRAWN = 200, 10
#: More than anybody can mean; a checkpoint's name has six digits for its round.
LARGEST = {
    "rounds": 999_999,
    "epochs": 1_000_000,
    "batch": 1_000_000_000,
    "members": 1_000,
    "hidden": 1_000_000,
    "eval_draws": 1_000_000,
    "bins": 1_000,
}
#: Calibration pilots of a run.
MOST_PILOTS = 1_000
#: A slot of a file of personal states is numbered by a byte.
MOST_CHECKPOINTS = 100


@accepts_old_names("run")
@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        rounds: Communication rounds.
        participants: Clients drawn at random in each round; None: all of up to 200, and of more as many as let each
            take part twice on average, at least 10.
        epochs: Local passes over a client's data in a round.
        batch: Mini-batch size; the last batch of an epoch may be smaller.
        seed: Random seed for the whole run.
        members: Networks whose predictions are averaged, each with its own initial weights; multiplies computation and
            traffic. 0: three for flat inputs where the method is ``bpfed-adaptive``, whose networks are small, and else
            one.
        network: Network that is built when none is given: ``auto``, a LeNet for 32 x 32 images, what the method
            prefers for tables (``mlp`` or ``skip``), and else an MLP with one hidden layer; ``mlp``; ``skip``, that MLP and a linear path from inputs to outputs beside it; ``linear``,
            logistic or linear regression.
        hidden: Units in the hidden layer of the network that is built when none is given; None: 100. Noisy labels may
            need fewer. Not for 32 x 32 images, whose network is fixed.
        trainable: Parameters of the network that are trained, by name or pattern, such as ``lora_*|classifier``; all others
            are frozen, constants that are neither sent nor kept. None: those of the module that have not
            ``requires_grad=False``.
        cache_features: ``auto``: if the frozen part of the network comes first and has no dropout, compute its outputs
            once for each example and train the rest on them; ``off``: run the whole network in every step.
        adapt: ``auto``: where a method offers settings that only data can decide between, choose them first, in selection
            pilots on held-out training examples; ``off``: use the method as it is.
        drop_rate: Probability that a drawn client fails to return in a round.
        sampling: ``fixed``: draws exactly ``participants`` clients; ``poisson``: draws each client independently, with
            that many on average.
        weighting: Weight of an upload in the server's rule: ``equal`` (as in the paper); ``size``, the number of a
            client's examples; ``auto``, the method's own.
        schedule: Step size over the rounds: ``constant``; ``cosine``, which falls along half a cosine; ``auto``, the
            method's own.
        eval_every: Evaluate every so many rounds, and always after the first and the last; 0: ten to twenty times in
            the run.
        eval_draws: Weight draws averaged in a prediction.
        eval_clients: Evaluate this many clients, drawn once among those with test examples; None: all of them, but at
            most 1 000.
        bins: Bins of ECE and MCE.
        calibration: Fraction of each client's training data held back to calibrate predictions (prediction sets, and
            the temperature if ``scaling`` is ``client``), stratified by class; at least one example if the client has
            two or more.
        scaling: ``client``: each client's probabilities become p^(1/T) / Z with a temperature T fitted to its
            calibration examples; ``none``: they stay as they are.
        calibration_temperature: Temperature T of all clients' class probabilities, which become p^(1/T) / Z; in
            regression a scale factor of all predicted standard deviations. Below 1: more confident; above 1: less.
        calibrate: ``pilot:3``: before the run, train three times on four fifths of each client's examples, and fit the
            calibration temperature to the rest (calibration pilots); use more with fewer than 2 000 examples in total.
            Each takes as long as the run. ``none``: no calibration pilots.
        clip: Maximum norm of a client's update (means and ρ as one vector); longer updates are scaled down. 0: no
            limit.
        noise: Standard deviation of the noise added to the sum of a round's updates, in units of ``clip``; above 0 the
            run is differentially private at the client level.
        delta: With noise, the δ for which ε is computed.
        robust: How the server defends itself against bad uploads: ``median`` takes the median of each coordinate,
            ``trimmed:0.2`` the mean without that share of values at either end, ``none`` just the method's own rule.
        max_update_ratio: An upload that moved the server's weights or means more than this many times as far as the
            median of the round's and earlier uploads is refused, if that is also further than three times the size of
            the first weights. 0: no limit.
        max_sigma_ratio: An upload is refused if one of its standard deviations is more than this many times the
            server's, or less than the server's divided by it. 0: no limit.
        compression: ``half``: uploads and the server's state are sent with means in half precision and standard
            deviations as one byte each; ``none``: in full precision.
        device: ``auto``, ``cpu`` or ``cuda``.
        tf32: On CUDA, use TF32 (10-bit mantissa) instead of full float32 for matrix products and convolutions.
        compile: ``auto``: compile the local step if the run is long enough to repay it; ``on``; ``off``.
        chunk: Clients trained at once; None: chosen for speed within ``memory``.
        memory: Memory for the state of clients in training, in MiB.
        store: Where personal states are kept: ``memory``, ``file``, or ``auto``, a file if they exceed 64 MiB.
        checkpoints: Newest rounds of which a checkpoint is kept, and to which a run can go back (``--back-to``); at
            least 2.
        baselines: ``auto``: reports set plain models of scikit-learn beside the run (logistic or ridge regression of each
            client alone and of all rows, and gradient boosting), if inputs are flat vectors and there are at most 50 000
            training rows; ``off``: they do not.
    """

    rounds: int = 50
    participants: int | None = None
    epochs: int = 10
    batch: int = 50
    seed: int = 0
    members: int = 0
    network: Literal["auto", "mlp", "skip", "linear"] = "auto"
    hidden: int | None = None
    trainable: str | None = None
    cache_features: Literal["auto", "off"] = "auto"
    adapt: Literal["auto", "off"] = "auto"
    drop_rate: float = 0.0
    sampling: Literal["fixed", "poisson"] = "fixed"
    weighting: Literal["auto", "equal", "size"] = "auto"
    schedule: Literal["auto", "constant", "cosine"] = "auto"
    eval_every: int = 0
    eval_draws: int = 20
    eval_clients: int | None = None
    bins: int = 10
    calibration: float = 0.0
    scaling: Literal["none", "client"] = "none"
    calibration_temperature: float = 1.0
    calibrate: str = "none"
    clip: float = 0.0
    noise: float = 0.0
    delta: float = 1e-5
    robust: str = "none"
    max_update_ratio: float = 20.0
    max_sigma_ratio: float = 100.0
    compression: Literal["none", "half"] = "none"
    device: Device = "auto"
    tf32: bool = True
    compile: Literal["auto", "on", "off"] = "auto"
    chunk: int | None = None
    memory: int = 2048
    store: Literal["auto", "memory", "file"] = "auto"
    checkpoints: int = 5
    baselines: Literal["auto", "off"] = "auto"

    def check(self, clients: int) -> None:
        """Raise a `UserError` if these settings cannot be run with that many clients."""
        check_types(self)
        for name, most in LARGEST.items():
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at most {most}.")
        if self.members < 0:
            raise UserError(f"members is {self.members}, but must be 0 or more.")
        for name in ("rounds", "epochs", "batch", "eval_draws", "bins", "memory"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("hidden", "eval_clients", "chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}, but must be at least 1, or left unset.")
        for name in ("seed", "eval_every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        if not 2 <= self.checkpoints <= MOST_CHECKPOINTS:
            raise UserError(f"checkpoints is {self.checkpoints}, but must be from 2 to {MOST_CHECKPOINTS}.")
        if self.participants is not None and not 1 <= self.participants <= clients:
            raise UserError(
                f"participants is {self.participants}, but there are {clients} clients; choose 1 to {clients}."
            )
        if not 0.0 <= self.drop_rate < 1.0:
            raise UserError(f"drop_rate is {self.drop_rate}, but must be at least 0 and below 1.")
        if not 0.0 <= self.calibration < 1.0:
            raise UserError(f"calibration is {self.calibration}, but must be at least 0 and below 1.")
        if not MIN_TEMPERATURE <= self.calibration_temperature <= MAX_TEMPERATURE:
            raise UserError(
                f"calibration_temperature is {self.calibration_temperature}, but must be from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}."
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
        """Clipping, noise and robust rules: that they are in range and go together."""
        for name in ("clip", "noise"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        for name in ("max_update_ratio", "max_sigma_ratio"):
            if (value := getattr(self, name)) != 0.0 and not 1.0 < value < float("inf"):
                raise UserError(f"{name} is {value}, but must be above 1, or 0 for no limit.")
        if not 0.0 < self.delta < 1.0:
            raise UserError(f"delta is {self.delta}, but must be above 0 and below 1.")
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


#: Units in the hidden layer of an MLP where nothing is said.
HIDDEN = 100
