"""How a federation is run: rounds, participation, local work, evaluation, device. Nothing here belongs to one method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from bpfed.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        rounds: Communication rounds.
        participants: Clients drawn at random in each round; None: 10, or all where there are fewer.
        epochs: Local passes over a client's data in a round.
        batch: Mini-batch size; a client's last batch of an epoch may be smaller.
        seed: Of everything random.
        drop_rate: Chance that a drawn client fails to return in a round.
        weighting: ``equal`` (the paper's) or ``size``: weight of an upload in the server's rule.
        schedule: ``constant``, or ``cosine``: the step size falls over the rounds along half a cosine.
        eval_every: Evaluate every so many rounds; 0: about twenty times in the run. The last round always is.
        eval_draws: Weight draws averaged in a prediction.
        eval_clients: Evaluate this many clients, drawn once; None: all, but 1 000 at the most.
        bins: Bins of ECE and MCE.
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
    drop_rate: float = 0.0
    weighting: Literal["equal", "size"] = "equal"
    schedule: Literal["constant", "cosine"] = "constant"
    eval_every: int = 0
    eval_draws: int = 20
    eval_clients: int | None = None
    bins: int = 10
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
        for name in ("rounds", "epochs", "batch", "eval_draws", "bins", "memory"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("eval_clients", "chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}, but must be at least 1, or left out.")
        for name in ("seed", "eval_every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        if self.participants is not None and not 1 <= self.participants <= clients:
            raise UserError(
                f"participants is {self.participants}, but there are {clients} clients; choose 1 to {clients}."
            )
        if not 0.0 <= self.drop_rate < 1.0:
            raise UserError(f"drop_rate is {self.drop_rate}, but must be at least 0 and below 1.")

    def per_round(self, clients: int) -> int:
        """Number of clients drawn in a round."""
        return min(10, clients) if self.participants is None else self.participants

    def evaluated(self, round_: int) -> bool:
        """Whether this round (from 1) is evaluated."""
        every = self.eval_every or max(1, self.rounds // 20)
        return round_ == self.rounds or round_ % every == 0 or round_ == 1
