"""The contract of a federated method: small pure functions over stacked clients.

A method never sees loops, devices, chunks or sockets. The engine calls

    init        once:            the server's and a client's first state
    begin       each round:      shared + personal -> local state
    step        each mini-batch: local state -> local state
    finish      each round:      local state -> upload + personal
    aggregate   each round:      uploads -> shared
    predictive  when asked:      shared + personal -> the distribution to predict with

The same `begin`, `step` and `finish` run twice more, on a client's own training data and with nothing uploaded: over
the phases of `tuning` where a method prepares a client for prediction (fine-tuning, say), and over the phases of
`adaptation` where a client that took no part in training joins a finished run.

All states are NamedTuples of tensors whose first axis is the client (``S`` of them), except what the server holds,
which has none. Only an upload can travel: what `finish` returns as ``personal`` stays where it was made.

A part of a state that depends on the method's settings is a tuple of one entry or none, not an optional value: the
trees of torch (`torch.utils._pytree`), by which states are stacked, stored and sent, count None as a leaf.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import check_types
from bpfed.inference.predictive import CorrelatedPredictive as CorrelatedPredictive
from bpfed.inference.predictive import GaussianPredictive as GaussianPredictive
from bpfed.inference.predictive import PointPredictive as PointPredictive
from bpfed.inference.predictive import Predictive
from bpfed.nn.parameters import Personal, number

if TYPE_CHECKING:
    from bpfed.inference.estimators import Batch
    from bpfed.nn.model import Model

#: Name of the phase in which a newcomer learns its personal state and the shared weights are frozen.
ADAPT = "adapt"
#: Name of the phase in which a client fine-tunes all weights before it predicts; the result is a network of its own.
TUNE = "tune"

#: Ranges that a setting may have to be in, by their description.
RANGES: dict[str, Callable[[float], bool]] = {
    "above 0": lambda value: value > 0.0,
    "0 or more": lambda value: value >= 0.0,
    "at least 1": lambda value: value >= 1,
    "from 0 to 1": lambda value: 0.0 <= value <= 1.0,
    "above 0 and at most 1": lambda value: 0.0 < value <= 1.0,
    "between 0 and 1": lambda value: 0.0 < value < 1.0,
    "at least 0 and below 1": lambda value: 0.0 <= value < 1.0,
}

#: Networks that are built where none is given (`bpfed.nn.networks`).
Network = Literal["auto", "mlp", "skip", "linear"]

#: A NamedTuple (of NamedTuples) of tensors, as the engine sees it. It handles states as trees and looks into none.
State: TypeAlias = "tuple[Tensor | State, ...]"

# The states of one method: what the server holds, what a client keeps, a client during a round, and what it uploads.
StateT = TypeVar("StateT", bound=State)
SharedT = TypeVar("SharedT", bound=State)
PersonalT = TypeVar("PersonalT", bound=State)
LocalT = TypeVar("LocalT", bound=State)
UploadT = TypeVar("UploadT", bound=State)


class Phase(NamedTuple):
    """A part of the local round.

    Attributes:
        name: Given to `Method.step`.
        epochs: Passes over the data.
        batches: Number of mini-batches instead, in the order of the examples; 0: whole passes. A round continues where
            the one before it ended.
        repeats: Steps with each of these mini-batches.
    """

    name: str
    epochs: int
    batches: int = 0
    repeats: int = 1


class RunShape(NamedTuple):
    """The properties of a run that a method's hyperparameters may depend on.

    Attributes:
        clients: In the federation, N.
        participants: In a round.
        rounds: Of the run.
        epochs: Passes over the data in a local round.
        batch: Examples in a step.
    """

    clients: int
    participants: int
    rounds: int
    epochs: int
    batch: int

    @property
    def passes(self) -> float:
        """Over a client's data in the whole run, on average."""
        return self.rounds * self.epochs * self.participants / self.clients

    def batches(self, sizes: Tensor) -> Tensor:
        """Steps in one pass over so many examples, ``[S]``; at least 1."""
        return ((sizes + self.batch - 1) // self.batch).clamp(min=1)


class Weights(NamedTuple):
    """Shared weights that are points: ``[P_shared]`` at the server, ``[S, P_shared]`` as uploads."""

    weights: Tensor


class Initial(NamedTuple, Generic[SharedT, PersonalT]):
    """First states: the server's (no client axis) and one client's (no client axis)."""

    shared: SharedT
    personal: PersonalT


class Finished(NamedTuple, Generic[UploadT, PersonalT]):
    """What a client has at the end of a round.

    Attributes:
        upload: Goes to the server. Shared tensors only.
        personal: Stays with the client.
        info: Values to report by name, ``[S]`` each, in nats summed over the client's examples; reported per example.
    """

    upload: UploadT
    personal: PersonalT
    info: dict[str, Tensor]


@dataclass(frozen=True)
class Method(ABC, Generic[SharedT, PersonalT, LocalT, UploadT]):
    """Base of all methods. A subclass is a frozen dataclass: its fields are its settings.

    It is generic in its states: what the server holds, what a client keeps, a client during a round, and its upload.

    Attributes:
        personal: Which parameters stay with the client: ``head``, ``not-head``, ``none``, ``all`` or layers by name.
        lr: Step size of the local steps.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    shared_words: ClassVar[str]
    personal_words: ClassVar[str]
    random_words: ClassVar[str]
    #: Whether a prediction is an average over draws of weights, whatever the settings.
    sampled: ClassVar[bool] = True
    #: Settings that are numbers and may differ between stacked rows (runs with other seeds or settings).
    stackable: ClassVar[tuple[str, ...]] = ("lr",)
    #: Whether the server learns a distribution over personal weights, from what clients upload about theirs.
    population: ClassVar[bool] = False
    #: Default schedule of the step size over the rounds: ``constant`` or ``cosine``.
    schedule: ClassVar[str] = "constant"
    #: Default weight of an upload: ``equal``, or ``size``, the number of the client's examples.
    weighting: ClassVar[str] = "equal"
    #: Default network for flat inputs: ``mlp`` or ``skip``.
    flat_network: ClassVar[str] = "mlp"
    #: Default number of such networks in an ensemble (`bpfed.nn.networks`).
    flat_members: ClassVar[int] = 1
    #: Fields of states that hold standard deviations: what arrives from elsewhere must be above 0 there.
    scales: ClassVar[tuple[str, ...]] = ("sigma",)
    #: Fields of uploads that count examples or are sums of squares: they may differ between clients by any factor, so no
    #: upload is refused for how far they moved.
    counts: ClassVar[tuple[str, ...]] = ()
    #: Whether uploads are changes that the server adds up; then no other rule can be used.
    adds: ClassVar[bool] = False
    #: Default network.
    network: ClassVar[Network] = "auto"
    #: Whether all clients take part in each round by default.
    everyone: ClassVar[bool] = False
    #: Whether a step can be compiled, and recorded as a CUDA graph; not where it factorises matrices.
    recordable: ClassVar[bool] = True
    #: Parts of the network that may not be empty, ``shared`` or ``personal``, whatever ``personal`` says.
    needs: ClassVar[tuple[str, ...]] = ()

    personal: Personal = "head"
    lr: float = 1e-3

    def check(self) -> None:
        """Raise a `UserError` if a setting is of another type or out of range, or settings contradict each other."""
        check_types(self)
        if not self.lr >= 0.0:
            raise UserError(f"lr is {self.lr}, but a step size must be 0 or more.")

    def require(self, **ranges: str) -> None:
        """Raise a `UserError` if one of these settings is not in its range, one of `RANGES`."""
        for name, words in ranges.items():
            if not RANGES[words](getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}, but must be {words}.")

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """The parts of a local round of ``epochs`` passes over the data."""
        return (Phase("all", epochs),)

    def tuning(self, epochs: int) -> tuple[Phase, ...]:
        """Phases of fine-tuning on a client's own training data before it predicts; none for most methods.

        Fine-tuning begins with `begin` from the server's state and ends with `finish`, whose ``personal`` is what
        `predictive` gets.
        """
        return ()

    def adaptation(self, epochs: int) -> tuple[Phase, ...]:
        """Phases in which a newcomer learns its personal state. In `ADAPT`, `step` does not change the shared weights."""
        return self.tuning(epochs) or (Phase(ADAPT, epochs),)

    def adapting(self) -> Self:
        """The method with its settings for newcomers."""
        return self

    def newcomer(self, model: Model, shared: SharedT) -> PersonalT:
        """The personal state of a client without examples, from the server's state (neither has a client axis)."""
        return self.init(model).personal

    def at_temperature(self, temperature: float) -> dict[str, float]:
        """The settings that change when another ``temperature`` is tried: it, and those that depend on it."""
        return {"temperature": temperature}

    def guarded(self, minimum: int) -> Self:
        """The method for a site that releases no statistics of fewer than ``minimum`` training rows."""
        return self

    def held(self, model: Model) -> int:
        """About how many numbers a client's state has; how many clients are stacked depends on it."""
        return model.layout.total

    def whose(self, model: Model) -> str:
        """A sentence on which weights are personal and which shared, and how many are frozen."""
        words = model.layout.words + (f"; frozen: {number(model.frozen)} weights" if model.frozen else "")
        if model.layout.personal or type(self).personal != "none":
            return words
        return words.replace("personal: nothing", f"personal: {self.personal_words}")  # beside weights that all share

    def candidates(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Settings to choose between on held-out data, in stages (`bpfed.runs.pilot`); empty: there is no choice.

        A stage is a tuple of settings to change, all among ``stackable``, those that share most first.
        """
        return ()

    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def trace_key(self) -> tuple[Any, ...]:
        """A key of the traced computation: methods that differ in ``stackable`` settings alone have the same."""
        return (self.name, *((k, str(v)) for k, v in self.settings().items() if k not in self.stackable))

    def hparams(self) -> dict[str, float]:
        """The values of the ``stackable`` settings; `begin` and `step` get them as ``[S]`` tensors."""
        return {n: float(getattr(self, n)) for n in self.stackable}

    @property
    def needs_class_counts(self) -> bool:
        """Whether `begin` and `finish` get a client's examples per class as ``hparams["counts"]``, ``[S, K]``."""
        return False

    def hparam_rows(self, count: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """The values of `hparams`, the same for ``count`` clients, ``[S]`` each."""
        return {name: torch.full((count,), value, device=device) for name, value in self.hparams().items()}

    def hparams_for_run(self, shape: RunShape, sizes: Tensor) -> dict[str, Tensor]:
        """Hyperparameters in the first round of a run, ``[S]`` each; a method may adapt them to the run.

        `tuning` and newcomers use those of `hparams`.

        Args:
            shape: The run.
            sizes: Training examples of each client, ``[S]``.
        """
        return self.hparam_rows(len(sizes))

    @abstractmethod
    def init(self, model: Model) -> Initial[SharedT, PersonalT]:
        """First states from the module's own initial weights."""

    @abstractmethod
    def begin(self, model: Model, shared: SharedT, personal: PersonalT, hparams: dict[str, Tensor]) -> LocalT:
        """Local state at the start of a round, from the server's state (one row per client) and the clients' own."""

    @abstractmethod
    def step(
        self, model: Model, local: LocalT, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[LocalT, Tensor]:
        """One local step: the new local state and the mean −log p of the batch in nats, ``[S]``."""

    @abstractmethod
    def finish(self, model: Model, local: LocalT, hparams: dict[str, Tensor]) -> Finished[UploadT, PersonalT]:
        """What goes to the server and what stays."""

    @abstractmethod
    def aggregate(self, shared: SharedT, uploads: UploadT, weights: Tensor, clients: int) -> SharedT:
        """The server's new state from its old one, S uploads and their weights ``[S]``.

        ``clients`` is the number of clients in the federation, N, of whom S took part in the round.
        """

    @abstractmethod
    def predictive(self, model: Model, shared: SharedT, personal: PersonalT) -> Predictive:
        """The distribution to predict with, for each client."""


#: A method of whatever states, as the engine sees it.
AnyMethod = Method[Any, Any, Any, Any]


def unfit(kind: Any) -> str:
    """Why a class cannot be used as a method, as the end of a sentence; empty: it can."""
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        return "is not a subclass of bpfed.methods.Method"
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"does not define {', '.join(lacking)}"
    arguments = inspect.signature(kind.aggregate).parameters.values()
    if not any(a.name == "clients" or a.kind is a.VAR_KEYWORD for a in arguments):
        return "has an aggregate without the argument 'clients', the number of clients in the federation"
    return ""


def rows(state: StateT, count: int) -> StateT:
    """A state without client axis, repeated for ``count`` clients (views)."""
    made: StateT = tree_map(lambda t: t.expand(count, *t.shape), state)
    return made


def untrained(method: Method[Any, Any, Any, UploadT], model: Model) -> Finished[UploadT, Any]:
    """The result of a round without steps for one client, which has the shapes of every upload and personal state."""
    first = method.init(model)
    hparams = method.hparam_rows(1, model.initial.device)
    with torch.no_grad():
        local = method.begin(model, rows(first.shared, 1), rows(first.personal, 1), hparams)
        return method.finish(model, local, hparams)


def frozen(model: Model, before: Tensor, after: Tensor) -> Tensor:
    """The weights ``after`` a step, ``[S, P]``, with the shared ones as they were ``before``."""
    return torch.cat([before[:, : model.layout.shared], after[:, model.layout.shared :]], -1)
