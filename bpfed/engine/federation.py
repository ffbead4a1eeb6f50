"""A federation in progress: the server's state, the clients' states, and one round of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bpfed._util.errors import Diverged, UserError, first_of
from bpfed.aggregation.privacy import Draw, gaussian_epsilon, poisson_epsilon
from bpfed.aggregation.updates import finite, paired, sigmas_of, size_of
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.local import LocalRound, Rows, chunk_size, held_by
from bpfed.engine.server import Judged, Lengths, combined, judged, remembered
from bpfed.engine.state_store import Store, make_store
from bpfed.inference import inputs, rng
from bpfed.inference.likelihoods import Likelihood
from bpfed.inference.rng import Purpose
from bpfed.inference.tasks import get_task
from bpfed.methods.base import AnyMethod, Method, RunShape, State, rows, unfit, untrained
from bpfed.nn.networks import make_model

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Draws of clients, rounds x clients, up to which it is worked out beforehand who will never be drawn.
FORESEEN = 20_000_000

# --- Checks before any example is used --------------------------------------------------------------------------------


def check_data(data: object) -> None:
    """Raise a `UserError` unless this is federated data."""
    if not isinstance(data, FederatedData):
        raise UserError(
            f"The data is a {type(data).__name__}, but must be the name of a dataset or federated data; make such data "
            "of arrays with bpfed.data.from_arrays()."
        )


def suited(method: AnyMethod, settings: Settings, clients: int, own: bool = False) -> Settings:
    """The settings, with the method's defaults for the network and the participants where they are open.

    Args:
        method: The method.
        settings: As they were given.
        clients: Number of clients.
        own: Whether the network is the user's own.
    """
    if settings.network == "auto" and not own:
        settings = replace(settings, network=method.network)
    if settings.participants is None and method.everyone:
        settings = replace(settings, participants=clients)
    return settings


def check_layout(method: AnyMethod, model: Model) -> None:
    """Raise a `UserError` if ``personal`` leaves a method without the shared or personal weights that it needs."""
    layout = model.layout
    found = {"shared": layout.shared, "personal": layout.personal}
    for part in method.needs:
        if not found[part]:
            some = "some but not all" if "shared" in method.needs else "some"
            raise UserError(
                f"personal is {method.personal!r}, which leaves {method.title} without {part} weights; choose {some} "
                f"of the network's parameters: {first_of(layout.names)}."
            )


def check_run(
    method: AnyMethod, settings: Settings, clients: int, task: str | None = None, calibrated: bool = False
) -> None:
    """Raise a `UserError` if method and settings cannot be run together.

    Args:
        method: The method.
        settings: The settings of the run.
        clients: Number of clients.
        task: Name of the task; None: it is not known yet, and what depends on it is not checked.
        calibrated: Whether the data have calibration examples of their own.
    """
    method.check()
    settings.check(clients)
    if method.adds and (settings.trim is not None or settings.compression != "none"):
        option = f"robust is '{settings.robust}'" if settings.trim is not None else "compression is 'half'"
        raise UserError(
            f"{option}, but the server of {method.title} adds up what clients change, and needs each change as it is; "
            "set it to 'none'."
        )
    if settings.sets == "class" and task is not None and not get_task(task).sets_by_class:
        raise UserError(f"sets is 'class', but {get_task(task).phrase} has no sets of classes; use sets = 'pooled'.")
    if settings.scaling == "client" and task is not None and not get_task(task).scalable:
        raise UserError(
            f"scaling fits a temperature to class probabilities, but the targets here are {get_task(task).targets}; "
            "leave it out."
        )
    if (
        task is not None
        and not get_task(task).tempered
        and (settings.calibration_pilots or settings.calibration_temperature != 1.0)
    ):
        raise UserError(
            f"calibration pilots and calibration temperature are a temperature of predictions, which {get_task(task).targets} do not have; "
            "leave both out."
        )
    if settings.scaling == "client" and settings.calibration == 0.0 and not calibrated:
        raise UserError("scaling needs examples to fit a temperature to; set calibration = 0.2 with it.")


def check_updates(method: AnyMethod, model: Model) -> None:
    """Raise a `UserError` if uploads of this method do not have the tensors of the server's state."""
    paired(method, method.init(model).shared, untrained(method, model).upload)


#: Clients whose last states are made and stored at a time.
SETTLED = 1000


@dataclass
class Federation:
    """One method on one dataset with one seed.

    Attributes:
        method: The method.
        data: The data of all clients.
        settings: The settings of the run.
        model: The network as a function of flat weights, on the device.
        device: Where the arithmetic runs.
        shared: The server's state.
        store: The clients' states.
        ids: A hash of each client's name, ``[N]`` uint64, from which the client's random numbers are derived.
        round: Rounds done.
        training: Local training, with what it has traced; made when first needed.
        base: Where this federation's training examples begin among those of ``training``, which others may share.
        taken: A round and how often each client was drawn up to it, ``[N]``; counted when first needed.
        run_of_all: The shape of the whole run, where this is a single site of it; None: all clients are here.
        learnt_temperature: The calibration temperature that calibration pilots found; None: there were none.
        lengths: Norms of the newest accepted updates, by tensor of the server's state.
        computed: Examples, and these as the model takes them (see `inputs`).
    """

    method: AnyMethod
    data: FederatedData
    settings: Settings
    model: Model
    device: torch.device
    shared: State
    store: Store
    ids: np.ndarray
    round: int = 0
    training: LocalRound | None = None
    base: int = 0
    taken: tuple[int, np.ndarray] | None = None
    run_of_all: RunShape | None = None
    learnt_temperature: float | None = None
    lengths: Lengths = field(default_factory=dict)
    computed: list[tuple[Examples, Examples]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        method: AnyMethod,
        data: FederatedData,
        settings: Settings,
        module: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        folder: Path | None = None,
    ) -> Federation:
        """A federation before its first round. ``folder`` is for a file of personal states."""
        if not isinstance(method, Method):
            raise UserError(f"The method is {method!r}, but must be one such as bpfed.methods.BPFed().")
        if why := unfit(type(method)):
            raise UserError(f"The class {type(method).__qualname__} {why}; see bpfed.methods.base for what it needs.")
        check_data(data)
        data.check()
        own = module is not None
        settings = suited(method, settings, len(data), own)
        check_run(method, settings, len(data), data.task, data.calibration is not None)
        if settings.calibration > 0.0:
            data = data.hold_out(settings.calibration, settings.seed)
        device = pick_device(settings.device, settings.tf32)
        for name in ("hidden", "network"):
            if own and getattr(settings, name) not in (None, "auto"):
                raise UserError(
                    f"{name} is for the network that is made where none is given, but one is given as model; leave one "
                    "of the two out."
                )
        tried = inputs.take(data.train.x, _some(len(data.train.y)))
        model = make_model(tried, data.task_type, data.classes, method, settings, module, likelihood).to(device)
        if model.backbone is not None:
            parts = (data.train, data.test, *([data.calibration] if data.calibration is not None else []))
            one = inputs.first(model.features(inputs.take(tried, slice(1))))
            needed = sum(len(part.y) for part in parts) * one.numel() * one.element_size() >> 20
            if needed > settings.memory:
                model = model.uncached(f"its outputs would take {needed} MiB and memory is {settings.memory}")
        if own and settings.members > 1:
            model = replace(
                model,
                notes=(*model.notes, "The first member starts with the module's weights, the others with new ones."),
            )
        return cls.of(method, data, settings, model, folder)

    @classmethod
    def of(
        cls, method: AnyMethod, data: FederatedData, settings: Settings, model: Model, folder: Path | None = None
    ) -> Federation:
        """A federation with the first states of server and clients, on the device of ``model``."""
        settings = settings if settings.members else replace(settings, members=model.members)
        check_layout(method, model)
        if settings.clip > 0.0:
            check_updates(method, model)
        initial, device = method.init(model), model.initial.device
        store = make_store(settings.store, initial.personal, len(data), device, folder, settings.checkpoints)
        return cls(method, data, settings, model, device, initial.shared, store, rng.client_ids(data.clients))

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, examples: Examples) -> Examples:
        """The examples as the model takes them: where its first part is frozen, with the outputs of that, computed once."""
        if self.model.backbone is None:
            return examples
        for raw, found in self.computed:
            if raw is examples:
                return found
        found = replace(examples, x=self.model.features(examples.x))
        self.computed.append((examples, found))
        return found

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.settings.rounds

    def participants(self, round_: int) -> Tensor:
        """Indices of the clients that train and return in this round, in the order of their `ids`, ``[S]``.

        Each client has a random rank in each round, which depends on its name alone. The lowest ranks take part: uniform
        sampling without replacement. With Poisson sampling, all ranks below a threshold take part.
        """
        drawn = self._drawn(round_)
        drawn = drawn[np.argsort(self.ids[drawn], kind="stable")]
        if self.settings.drop_rate > 0.0:
            luck = rng.words(self.settings.seed, round_, Purpose.ABSENCE, self.ids[drawn]) >> np.uint64(11)
            drawn = drawn[luck.astype(np.float64) * 2.0**-53 >= self.settings.drop_rate]
        return torch.from_numpy(drawn.astype(np.int64))

    def _drawn(self, round_: int) -> np.ndarray:
        """Indices of the clients drawn for a round, whoever of them fails to return."""
        ranks = rng.words(self.settings.seed, round_, Purpose.PARTICIPATION, self.ids)
        count = self.settings.per_round(len(self))
        if count == len(self):
            return np.arange(len(self))
        if self.settings.sampling == "poisson":
            return np.flatnonzero((ranks >> np.uint64(11)).astype(np.float64) * 2.0**-53 < count / len(self))
        return np.argpartition(ranks, count - 1)[:count]

    def epsilon(self, secret: bool = True) -> float | None:
        """ε of the rounds so far, for ``settings.delta`` (see `bpfed.aggregation.privacy`); None where no noise is added.

        Args:
            secret: Whether nobody knows the seed, so that Poisson sampling adds to privacy.
        """
        settings, count = self.settings, self.settings.per_round(len(self))
        if settings.noise == 0.0:
            return None
        if settings.sampling == "poisson" and secret:
            return poisson_epsilon(settings.noise, count / len(self), self.round, settings.delta)
        return gaussian_epsilon(settings.noise, int(self.times_drawn().max()), settings.delta)

    def times_drawn(self) -> np.ndarray:
        """How often each client was drawn in the rounds so far, ``[N]``."""
        done, taken = self.taken or (0, np.zeros(len(self), dtype=np.int64))
        if done > self.round:
            done, taken = 0, np.zeros_like(taken)
        for round_ in range(done + 1, self.round + 1):
            taken[self._drawn(round_)] += 1
        self.taken = self.round, taken
        return taken

    def never_drawn(self) -> np.ndarray | None:
        """Indices of the clients that no round of the whole run draws, ``[M]``; None: there are too many rounds to tell.

        Who is drawn follows from the seed, so it is known beforehand.
        """
        if self.settings.per_round(len(self)) == len(self):
            return np.zeros(0, dtype=np.int64)
        if self.settings.rounds * len(self) > FORESEEN:
            return None
        drawn = np.zeros(len(self), dtype=bool)
        for round_ in range(1, self.settings.rounds + 1):
            drawn[self._drawn(round_)] = True
        return np.flatnonzero(~drawn)

    def keys(self, round_: int, purpose: Purpose, clients: Tensor) -> Tensor:
        """Keys of these clients, ``[S, 2]``, on the device."""
        return rng.keys(self.settings.seed, round_, purpose, self.ids[clients.numpy()]).to(self.device)

    def hparams(self, round_: int, clients: Tensor) -> dict[str, Tensor]:
        """Hyperparameters of these clients in a round (from 1), ``[S]`` each, with the scheduled step size."""
        hparams = self.method.hparams_for_run(self.run_shape, self.data.train.sizes[clients])
        hparams["lr"] = self._schedule(round_) * hparams["lr"]
        return {n: values.to(self.device) for n, values in hparams.items()}

    @property
    def calibration_temperature(self) -> float:
        """The temperature of all class probabilities, learnt or given."""
        return self.settings.calibration_temperature if self.learnt_temperature is None else self.learnt_temperature

    @property
    def run_shape(self) -> RunShape:
        """The properties of the run that the method's hyperparameters may depend on."""
        settings, all_here = self.settings, len(self)
        if self.run_of_all is not None:
            return self.run_of_all
        return RunShape(all_here, settings.per_round(all_here), settings.rounds, settings.epochs, settings.batch)

    def _schedule(self, round_: int) -> float:
        """What the step size is multiplied by in this round."""
        schedule = self.method.schedule if self.settings.schedule == "auto" else self.settings.schedule
        if schedule == "cosine":
            return 0.5 * (1.0 + float(np.cos(np.pi * (round_ - 1) / self.settings.rounds)))
        return 1.0

    def personal(self, clients: Tensor) -> State:
        """Personal states of these clients, on the device."""
        return tree_map(lambda t: t.to(self.device), self.store.get(clients))

    @property
    def untuned(self) -> bool:
        """Whether the method's `Method.tuning` is still to be done before a client can predict."""
        return not self.finished and bool(self.method.tuning(self.settings.epochs))

    def ready(self, clients: Tensor) -> State:
        """Personal states of these clients for `Method.predictive`, fine-tuned where the method asks for it."""
        return self.tuned(clients) if self.untuned else self.personal(clients)

    def tuned(self, clients: Tensor) -> State:
        """Personal states of these clients after `Method.tuning` on their own training data; nothing is kept of it."""
        if not len(self.data.train.y):
            raise UserError(
                f"{self.method.title} passes over a client's training data before it predicts, and this run was loaded "
                "without them before its last round; finish it first, with --resume."
            )
        key = self.keys(self.round, Purpose.TUNING, clients)
        hparams = self.method.hparam_rows(len(clients), self.device)
        rows_ = self._rows(clients, hparams, rng.fold(key, 0), rng.fold(key, 1))
        held, settings = held_by(self.method, self.model), self.settings
        chunk = settings.chunk or chunk_size(len(clients), held, self.device, settings.memory)
        phases = self.method.tuning(settings.epochs)
        return self._training().in_chunks(rows_, min(chunk, len(clients)), phases).personal

    def settle(self) -> None:
        """After the last round: store the state that each client predicts with, so that predictions need no data."""
        if self.method.tuning(self.settings.epochs):
            for clients in torch.arange(len(self)).split(SETTLED):
                self.store.put(clients, self.tuned(clients))

    def training_rows(self, clients: Tensor) -> Rows:
        """These clients, about to train in the next round."""
        number = self.round + 1
        shuffle, key = (self.keys(number, purpose, clients) for purpose in (Purpose.SHUFFLE, Purpose.WEIGHTS))
        return self._rows(clients, self.hparams(number, clients), shuffle, key)

    def _rows(self, clients: Tensor, hparams: dict[str, Tensor], shuffle: Tensor, key: Tensor) -> Rows:
        count = len(clients)
        return Rows(
            shared=rows(self.shared, count),
            personal=self.personal(clients),
            hparams=hparams,
            start=(self.data.train.offsets[clients] + self.base).to(self.device),
            size=self.data.train.sizes[clients].to(self.device),
            shuffle=shuffle,
            key=key,
            done=(torch.full((count,), self.round, device=self.device),),
        )

    def _training(self) -> LocalRound:
        if self.training is None:
            self.training = LocalRound.of(self.method, self.model, self.inputs(self.data.train), self.settings)
        return self.training

    def receive(self, clients: Tensor, uploads: State, personal: State) -> dict[str, str]:
        """End a round: the server aggregates the uploads, and each client stores its new personal state.

        A client whose upload is refused keeps its old state, as if it had been away. Without uploads the server's state
        changes by privacy noise alone.

        Returns:
            Why uploads were refused, by client.

        Raises:
            Diverged: No upload can be used, or the server's state would not be finite; everything is as before.
        """
        found = self.judge(uploads) if len(clients) else None
        refused = {} if found is None else {i: why for i, why in enumerate(found.why) if why}
        names = [self.data.clients[i] for i in clients.tolist()]
        if refused and found is not None:
            reasons = [f"client '{names[i]}': {why}" for i, why in refused.items()]
            if len(refused) == len(clients):
                raise self._diverged(f"no upload can be used, {first_of(reasons, ' ', most=1)}")
            kept = torch.tensor(found.accepted)
            clients = clients[kept]
            uploads, personal = tree_map(lambda t: t[kept.to(t.device)], (uploads, personal))
        weights = torch.ones(len(clients), device=self.device)
        if self.by_size:
            weights = self.data.train.sizes[clients].float().to(self.device)
        shared = self.combined(uploads, weights)
        if not finite(shared):
            moved = "" if found is None else f"; client {found.furthest(names)}"
            raise self._diverged(f"the server's state would not be finite{moved}")
        self.shared = shared
        if len(clients):
            self.store.put(clients, personal)
        if found is not None:
            self.lengths = remembered(self.lengths, found)
        self.round += 1
        return {names[i]: why for i, why in refused.items()}

    @property
    def by_size(self) -> bool:
        """Whether uploads are weighted by the clients' numbers of examples, which the server cannot check."""
        settings = self.settings
        if settings.weighting == "auto":
            return self.method.weighting == "size" and settings.noise == 0.0 and settings.trim is None
        return settings.weighting == "size"

    def judge(self, uploads: State) -> Judged:
        """Which uploads of the round in progress, one or more, are accepted, and why others are not."""
        return judged(self.method, self.settings, self.shared, uploads, self.lengths, *self._first)

    @cached_property
    def _first(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """The norm of the weights and means in the server's first state, and the range of each of its tensors of σ."""
        first = self.method.init(self.model).shared
        return size_of(self.method, first), sigmas_of(self.method, first)

    def _diverged(self, why: str) -> Diverged:
        return Diverged(
            f"Training diverged in round {self.round + 1} ({why}); lower the step size, method.lr, or look for extreme "
            "values in the data."
        )

    def combined(self, uploads: State, weights: Tensor, draw: Draw | None = None) -> State:
        """The server's state after the round in progress, from S uploads and their weights ``[S]``.

        ``draw`` gives the noise for privacy; None: it is derived from the seed, as in a simulation. For real privacy,
        use `bpfed.aggregation.privacy.secret_normal`.
        """
        key = rng.key(self.settings.seed, Purpose.PRIVACY, self.round + 1).to(self.device)
        return combined(
            self.method,
            self.settings,
            self.shared,
            uploads,
            weights,
            len(self),
            draw or (lambda count: rng.normal(key, count)),
        )


def _some(count: int) -> list[int]:
    """Indices of a few of ``count`` examples: the first two, and some spread over the rest."""
    return sorted({*range(min(2, count)), *(count * k // 4 for k in range(1, 4)), count - 1} - {-1})


def pick_device(name: str, tf32: bool = True) -> torch.device:
    """The device of that name; ``auto`` is CUDA if there is any. ``tf32`` allows TF32 in matrix products and convolutions.

    Convolutions are deterministic, so that a repeated run on the same GPU gives the same result.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but no CUDA device is available here; use 'cpu' or 'auto'.")
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.deterministic = True
    return device
