"""How a federation is run: rounds, participation, local work, evaluation, device. Nothing here belongs to one method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bpfed.errors import UserError, unknown

#: The lowest softness and the highest; no probabilities are surer or softer for it than at these.
SUREST, SOFTEST = 0.01, 100.0


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        rounds: Communication rounds.
        participants: Clients drawn at random in each round; None: 10, or all where there are fewer.
        epochs: Local passes over a client's data in a round.
        batch: Mini-batch size; a client's last batch of an epoch may be smaller.
        seed: Of everything random.
        members: Networks, each from first weights of its own, whose predictions are averaged, for as many times the work and the bytes.
            Two bring most of what many would; it is worth most with images, least with small tables.
        hidden: Units in the hidden layer of the network that is made where none is given; None: 100. Noisy labels may want
            fewer. Not for images of 32 x 32, whose network is fixed.
        drop_rate: Chance that a drawn client fails to return in a round.
        sampling: ``fixed``: as many clients as ``participants`` says; ``poisson``: every client by a coin of its own, so many
            on average.
        weighting: ``equal`` (the paper's) or ``size``: weight of an upload in the server's rule.
        schedule: Of the step size over the rounds: ``constant``; ``cosine``, falling along half a cosine; ``auto``, the method's.
        eval_every: Evaluate every so many rounds; 0: about twenty times in the run. The last round always is.
        eval_draws: Weight draws averaged in a prediction.
        eval_clients: Evaluate this many clients, drawn once; None: all, but 1 000 at the most.
        bins: Bins of ECE and MCE.
        calibration: Part of each client's training examples that it does not train on but calibrates its predictions with:
            its prediction sets, and its temperature if asked for. At least one of two or more, of each class alike.
        scaling: ``client``: each client's probabilities become p^(1/T) / Z with a temperature T that is fitted to its
            calibration examples; ``none``: they are left as they are.
        softness: Temperature of all clients' class probabilities, which become p^(1/softness) / Z: below 1 surer, above 1 less
            sure.
        rehearsals: How often to train on four fifths of each client's examples before the run, to learn its softness from the
            others; 3 is a good number, with fewer than 2 000 examples in all more are. Each takes as long as the run. 0: never.
        clip: Norm that a client's update may have, its means and the pre-images ρ of its standard deviations as one vector;
            longer ones are scaled down. 0: any.
        noise: Standard deviation, in units of ``clip``, of the noise on the sum of a round's updates; above 0 the run is
            differentially private for its clients.
        delta: With noise, the δ that ε is reckoned for.
        robust: ``median`` or, say, ``trimmed:0.2``: in every coordinate the server takes the median of the uploads, or the mean
            without that share of them at either end; ``none``: the method's own rule alone.
        compression: ``half``: uploads and the server's state travel with means in half precision and standard deviations as a
            byte each; ``none``: in full.
        device: ``auto``, ``cpu`` or ``cuda``.
        tf32: On CUDA, matrix products and convolutions in TF32 (10-bit mantissa) rather than full float32.
        compile: ``auto``: compile the local step where the run is long enough to repay it; ``on``; ``off``.
        chunk: Clients trained side by side; None: as many as ``memory`` allows and are fast.
        memory: Budget for the state of clients in training, in MiB.
        store: Where personal states live: ``memory``, ``file``, or ``auto``, a file where they would fill over 64 MiB.
    """

    rounds: int = 50
    participants: int | None = None
    epochs: int = 10
    batch: int = 50
    seed: int = 0
    members: int = 1
    hidden: int | None = None
    drop_rate: float = 0.0
    sampling: Literal["fixed", "poisson"] = "fixed"
    weighting: Literal["equal", "size"] = "equal"
    schedule: Literal["auto", "constant", "cosine"] = "auto"
    eval_every: int = 0
    eval_draws: int = 20
    eval_clients: int | None = None
    bins: int = 10
    calibration: float = 0.0
    scaling: Literal["none", "client"] = "none"
    softness: float = 1.0
    rehearsals: int = 0
    clip: float = 0.0
    noise: float = 0.0
    delta: float = 1e-5
    robust: str = "none"
    compression: Literal["none", "half"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tf32: bool = True
    compile: Literal["auto", "on", "off"] = "auto"
    chunk: int | None = None
    memory: int = 2048
    store: Literal["auto", "memory", "file"] = "auto"

    def check(self, clients: int) -> None:
        """Raise a `UserError` if these settings cannot be run with that many clients."""
        for name, kind in get_type_hints(Settings).items():
            value = getattr(self, name)
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if choices and value not in choices:
                raise UserError(f"{name} is {value!r}, but must be one of: {', '.join(choices)}.")
            whole = kind is int or (int in get_args(kind) and value is not None)
            if whole and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{name} is {value!r}, but must be a whole number.")
        for name in ("rounds", "epochs", "batch", "members", "eval_draws", "bins", "memory"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("hidden", "eval_clients", "chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}, but must be at least 1, or left out.")
        for name in ("seed", "eval_every", "rehearsals"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        if self.participants is not None and not 1 <= self.participants <= clients:
            raise UserError(
                f"participants is {self.participants}, but there are {clients} clients; choose 1 to {clients}."
            )
        if not 0.0 <= self.drop_rate < 1.0:
            raise UserError(f"drop_rate is {self.drop_rate}, but must be at least 0 and below 1.")
        if not 0.0 <= self.calibration < 1.0:
            raise UserError(f"calibration is {self.calibration}, but must be at least 0 and below 1.")
        if not SUREST <= self.softness <= SOFTEST:
            raise UserError(f"softness is {self.softness}, but must be from {SUREST:g} to {SOFTEST:g}.")
        if self.scaling == "client" and (self.softness != 1.0 or self.rehearsals):
            asked = "rehearsals learn" if self.rehearsals else "softness is"
            raise UserError(
                f"{asked} a temperature for all clients, but scaling is 'client', one for each; leave one out."
            )
        if self.softness != 1.0 and self.rehearsals:
            raise UserError(f"softness is {self.softness}, but rehearsals are to learn it; leave one of them out.")
        self._check_defence()

    @property
    def trim(self) -> float | None:
        """The share of uploads that the robust rule leaves out at either end, a half for the median; None: there is none."""
        if self.robust in ("none", "median"):
            return 0.5 if self.robust == "median" else None
        kind, _, share = self.robust.partition(":")
        try:
            found = float(share)
        except ValueError:
            found = 0.0
        if kind != "trimmed" or not 0.0 < found < 0.5:
            raise UserError(
                f"robust is {self.robust!r}, but must be none, median, or trimmed with a share below a half, as in trimmed:0.2."
            )
        return found

    def _check_defence(self) -> None:
        """Clipping, noise and robust rules: that they are in range and go together."""
        for name in ("clip", "noise"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        if not 0.0 < self.delta < 1.0:
            raise UserError(f"delta is {self.delta}, but must be above 0 and below 1.")
        if self.noise > 0.0 and self.clip == 0.0:
            raise UserError(f"noise is {self.noise}, but is in units of clip, which is 0; set clip too.")
        if self.noise > 0.0 and self.rehearsals:
            raise UserError(
                "rehearsals train on the same clients once more, which the ε of a run leaves out; leave them out."
            )
        robust = self.trim is not None
        if self.noise > 0.0 and robust:
            raise UserError("noise hides a client in a sum, and robust takes no sum; set one of the two to 0 or none.")
        if self.weighting == "size" and (self.noise > 0.0 or robust):
            option = "noise" if self.noise > 0.0 else "robust"
            raise UserError(
                f"weighting is 'size', but with {option} all uploads count the same, since a size is what a client says of its "
                "data; set it to 'equal'."
            )

    def per_round(self, clients: int) -> int:
        """Number of clients drawn in a round; by coins, the mean number."""
        return min(10, clients) if self.participants is None else self.participants

    def evaluated(self, round_: int) -> bool:
        """Whether this round (from 1) is evaluated."""
        every = self.eval_every or max(1, self.rounds // 20)
        return round_ == self.rounds or round_ % every == 0 or round_ == 1


def changed(settings: Settings, changes: Mapping[str, Any], fixed: Collection[str] = ()) -> Settings:
    """The settings with single ones given by name; those of ``fixed`` cannot be.

    Raises:
        UserError: There is no such setting.
    """
    from bpfed.schema import DataSettings  # which needs this module

    every = {f.name for f in fields(Settings)}
    known, of_data = every - set(fixed), {f.name for f in fields(DataSettings)} - every
    for name in changes:
        if name in of_data:
            raise UserError(f"'{name}' is said of the data; give it to bpfed.data.load, and what that returns as data.")
        if name not in known:
            raise unknown("setting", name, known)
    return replace(settings, **changes)
