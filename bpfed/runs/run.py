"""A run: a federation trained from the first round to the last, and what can be asked of it afterwards."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bpfed._util import text
from bpfed._util.console import to_stderr
from bpfed._util.errors import Diverged, UserError, unknown
from bpfed._util.files import to_toml
from bpfed.callbacks import Callback
from bpfed.config.settings import Settings
from bpfed.data.federated import FederatedData
from bpfed.data.tabular.rows import read_rows
from bpfed.engine.evaluate import calibrate, evaluate_clients, tested_clients
from bpfed.engine.federation import Federation
from bpfed.inference.calibration import Calibration
from bpfed.inference.likelihoods import Likelihood
from bpfed.inference.predictive import How
from bpfed.metrics import Evaluation, Score
from bpfed.metrics.registry import BUILT_IN, shown_at
from bpfed.report import RunRecord
from bpfed.report.record import temperature_name, temperature_words
from bpfed.runs import metadata
from bpfed.runs.client import Client

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.runs.adapt import NewClient
    from bpfed.runs.baselines import Losses
    from bpfed.runs.export import Format
    from bpfed.runs.load import LoadedRun

#: Clients without test examples that are noted by name.
UNTESTED = 100
#: Uploads of a round that were refused, of which more is said than that.
SAID = 5


class Run:
    """A trained federation, and what can be asked of it. `fit` makes one, and `Run.load` reads one back.

    Attributes:
        federation: The state of the server and of all clients.
        history: One record for each evaluated round, as in ``metrics.jsonl``.
        evaluation: The evaluation of the last evaluated round, and the clients that took part in it.
        seconds: Seconds of training, those before a resume included.
        compiled: Whether the local step is compiled. Known once training has begun.
        calibration: The calibration that the run folder holds, for a run that is loaded without its data.
        say: Function that is called with each message for the user.
        deployed: Whether this is one site of a deployment, which has its own rows alone.
        fitted: Baselines that are fitted already, with the losses of each test row. Runs on the same data may share them.
    """

    def __init__(self, federation: Federation, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.federation = federation
        self.say = say
        self.history: list[dict[str, Any]] = []
        self.evaluation: tuple[Evaluation, Tensor] | None = None
        self.seconds = 0.0
        self.compiled = False
        self.calibration: Calibration | None = None
        self.deployed = federation.data.protocol == metadata.DEPLOYED
        self.fitted: dict[Any, tuple[dict[str, Any], dict[str, Losses]]] = {}
        self._calibrated: tuple[tuple[int, How, int], Calibration] | None = None
        self._diagnosed: tuple[int, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        federation = self.federation
        done = f"{federation.round} of {text.many(self.settings.rounds, 'round')}"
        return f"<run of {federation.method.name} on '{self.data.name}': {text.many(len(self.data), 'client')}, {done}>"

    @property
    def data(self) -> FederatedData:
        """The data that the run is trained and tested on."""
        return self.federation.data

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.federation.settings

    @property
    def calibration_temperature(self) -> float:
        """The temperature that divides the logits of all predictions. Above 1 makes them less confident."""
        return self.federation.calibration_temperature

    def calibrated(self, how: How, draws: int) -> Calibration:
        """The calibration of all clients, from their calibration examples, for one way of predicting."""
        wanted = (self.federation.round, how, draws)
        if self._calibrated is None or self._calibrated[0] != wanted:
            self._calibrated = wanted, calibrate(self.federation, None, how, draws)
        return self._calibrated[1]

    def train(self, callbacks: Sequence[Callback] = ()) -> Run:
        """Train for the rounds that are left."""
        return train_together([self], [callbacks])[0]

    def _after(self, info: RoundInfo, elapsed: float, callbacks: Sequence[Callback]) -> None:
        start = time.perf_counter()
        for sentence in _refusals(self.federation.round, info.refused):
            self.say(sentence)
        if info.participants and not all(math.isfinite(v) for v in info.values.values()):
            raise self._diverged("its loss is not finite")
        record = None
        if self.settings.evaluated(self.federation.round):
            record = self._evaluate(info, callbacks)
            if record["nll"]["pooled"] is None:  # the loss is that of each step's start: the last step is not in it
                raise self._diverged("it predicts what is not a number")
        self.seconds += elapsed + time.perf_counter() - start
        if record is not None:
            record["seconds"] = round(self.seconds, 3)
        for callback in callbacks:
            callback.round(self, info, record)

    def _diverged(self, why: str) -> Diverged:
        return Diverged(
            f"Training diverged in round {self.federation.round} ({why}); lower the step size, method.lr, or look for "
            "extreme values in the data."
        )

    def _evaluate(self, info: RoundInfo, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
        self.evaluation = evaluate_clients(self.federation)
        plain = [self._given(callback) for callback in callbacks]
        record: dict[str, Any] = {"round": self.federation.round, **self.evaluation[0].record()}
        record |= {f"train_{name}": value for name, value in info.values.items()}
        record["participants"] = info.participants
        for given in plain:
            record |= given
        if info.refused:
            record["refused"] = sorted(info.refused)
        if (epsilon := self.federation.epsilon()) is not None:
            record["epsilon"] = epsilon
        self.history.append(record)
        return record

    def _given(self, callback: Callback) -> dict[str, Any]:
        """A callback's numbers for the line of metrics; its scores of clients are added to the evaluation."""
        assert self.evaluation is not None
        (found, clients), numbers = self.evaluation, {}
        for name, value in callback.metrics(self).items():
            who = f"The callback {type(callback).__name__} gives the metric '{name}'"
            if name in BUILT_IN or name in found.more:
                raise UserError(f"{who}, which there is already; give it another name.")
            if isinstance(value, Score):
                if value.clients.shape != (len(clients),):
                    raise UserError(f"{who} of {len(value.clients)} clients, but {len(clients)} are tested.")
                found.more[name] = value
            elif isinstance(value, int | float):
                numbers[name] = {"pooled": float(value) if math.isfinite(value) else None, "mean": None, "worst": None}
            else:
                raise UserError(f"{who} as {type(value).__name__}, but it must be a number or a bpfed.metrics.Score.")
        return numbers

    def client(self, name: str) -> Client:
        """The client of that name."""
        if not isinstance(name, str):
            example = str(name) if str(name) in self.data.clients else self.data.clients[0]
            raise UserError(
                f"The client is {name!r}, but clients are named by text; use run.client('{example}'), or run.clients() "
                "for all of them in order."
            )
        if name not in self.data.clients:
            raise unknown("client", str(name), self.data.clients)
        return Client(self, self.data.clients.index(name))

    def clients(self) -> list[Client]:
        """All clients, in the order of the data."""
        return [Client(self, i) for i in range(len(self.data))]

    def export_adapter(self, client: str, folder: str | Path) -> Path:
        """Write the adapter of a client's model to a new folder in the format of peft (see `Client.export_adapter`)."""
        return self.client(client).export_adapter(folder)

    def export(
        self,
        client: str,
        format: Format,
        path: str | Path,
        *,
        how: How = "sample",
        draws: int | None = None,
        level: float = 0.9,
        overwrite: bool = False,
    ) -> Path:
        """Write a client's model to a file that can be used without bpfed (see `Client.export`)."""
        return self.client(client).export(format, path, how=how, draws=draws, level=level, overwrite=overwrite)

    def adapt(
        self,
        x: Any = None,
        y: Any = None,
        *,
        steps: int | None = None,
        lr: float | None = None,
        name: str = "newcomer",
        target: str | None = None,
        columns: Sequence[str] | None = None,
        prepared: bool = False,
    ) -> NewClient:
        """Let a client that took no part in training join: it learns personal weights; shared ones stay as they are.

        Args:
            x: Its labelled rows; one example is enough. The path of a file; for a run on tables also a data frame, a
                mapping of columns, or an array with ``columns``; for a run on arrays inputs ``[n, ...]``, scaled as
                those of training were. Without examples it predicts from what the run knows of clients in general.
            y: Its targets, ``[n]``. For arrays a class is its place in ``data.labels``. For rows of a table they are as
                the tables have them, and None if they are in the column ``target``. With a path they are in the file.
            steps: Local steps, rounded up to whole passes over its examples; None: five hundred. Methods with a
                fine-tuning of their own (FedAvg: none; Per-FedAvg, FedBABU) ignore it.
            lr: Step size; None: the method's.
            name: Its name, from which its random numbers are derived.
            target: The column of a file's or a table's targets; None: the one that the run predicts.
            columns: For a run on tables, the names of an array's columns: they are scaled as in training.
            prepared: For a run on tables, whether ``x`` and ``y`` are prepared already, as ``data.train`` is.
        """
        from bpfed.runs.adapt import adapt

        preprocessor = None
        in_file, tables = isinstance(x, str | Path), self.data.preprocessor is not None
        if in_file and y is not None:
            raise UserError(f"The targets are in '{x}'; leave y out.")
        if in_file or columns is not None or (x is not None and tables and not prepared):
            if prepared:
                raise UserError("Only arrays without column names can be prepared already; omit prepared.")
            read = read_rows(self.data, x, name, self.say, labelled=True, target=target, columns=columns, y=y)
            x, y, preprocessor = read.x, read.y, read.preprocessor
        made = adapt(self.federation, x, y, steps=steps, lr=lr, name=name, preprocessor=preprocessor)
        made.run.say = self.say
        if made.remark:
            self.say(made.remark)
        return made

    def newcomer(self, path: str | Path) -> NewClient:
        """A client that `adapt` made and `NewClient.save` kept."""
        from bpfed.runs.adapt import load_newcomer

        made = load_newcomer(self.federation, Path(path))
        made.run.say = self.say
        return made

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        say: Callable[[str], None] | None = None,
    ) -> LoadedRun:
        """A run from its folder, without its data: `client`, `clients`, `adapt`, `summary` and `report` work on it.

        Args:
            folder: Of a finished run; of one that was broken off, what its last checkpoint holds.
            model: The module it was trained with, where that was given.
            likelihood: The likelihood it was trained with, where that is not in `bpfed.inference.likelihoods`.
            say: Called with each message for the user; None: these go to stderr.
        """
        from bpfed.runs.load import load_run

        return load_run(Path(folder), model, likelihood, say or to_stderr)

    def config(self) -> dict[str, Any]:
        """All that is needed to repeat the run, as in ``config.toml``."""
        return metadata.config(self.federation)

    def detail(self) -> dict[str, Any]:
        """Per-client metrics and reliability of the last evaluated round, as in ``evaluation.json``."""
        if self.evaluation is None:
            self.evaluation = evaluate_clients(self.federation)
        evaluation, clients = self.evaluation
        names = [self.data.clients[i] for i in clients.tolist()]
        train, held = self.data.train.sizes[clients].tolist(), self.data.calibration
        kept = held.sizes[clients].tolist() if held is not None else None
        found = metadata.detail(self.federation, evaluation, names, train, kept)
        if untested := (self.data.test.sizes == 0).nonzero().flatten().tolist():
            found["untested"] = [self.data.clients[i] for i in untested[:UNTESTED]]
        return found

    def baselines(self) -> dict[str, Any]:
        """Plain models of scikit-learn on the same test rows, as in ``evaluation.json`` (see
        `bpfed.runs.baselines.baselines`).

        Empty where they are off or the inputs are no flat vectors, and for a deployed site, which has its own rows alone.
        """
        return self._baselines()[0]

    def _baselines(self) -> tuple[dict[str, Any], dict[str, Losses]]:
        if self.settings.baselines == "off" or self.deployed:
            return {}, {}
        from bpfed.runs.baselines import baselines, wanted  # predictions need none

        if not wanted(self.data):
            return {}, {}
        clients, bins = tested_clients(self.federation), self.settings.bins
        key = (metadata.fingerprint(self.data), tuple(clients.tolist()), bins)
        if key not in self.fitted:
            losses: dict[str, Losses] = {}
            self.fitted[key] = baselines(self.data, clients, bins, losses=losses), losses
        return self.fitted[key]

    def diagnostics(self) -> dict[str, Any]:
        """What the report says beyond metrics, as in ``evaluation.json`` (see `bpfed.runs.diagnostics`)."""
        from bpfed.runs.diagnostics import diagnostics

        if self.evaluation is None:
            self.evaluation = evaluate_clients(self.federation)
        if self._diagnosed is None or self._diagnosed[0] != self.federation.round:
            found = diagnostics(self.federation, *self.evaluation, self._baselines()[1])
            self._diagnosed = self.federation.round, found
        return self._diagnosed[1]

    def summary_record(self) -> dict[str, Any]:
        """The run in figures, as in ``summary.json``; accuracy and ECE as fractions."""
        return metadata.summary(self.federation, self.history, self.seconds)

    def summary(self) -> str:
        """The last round in a few lines of text."""
        record = self.summary_record()
        members = f", {text.many(record['members'], 'member')}" if "members" in record else ""
        head = (
            f"{self.federation.method.title}{members} on {record['data']}: {text.many(record['clients'], 'client')}, "
            f"round {record['rounds']}"
        )
        lines = [f"{head}, seed {record['seed']}, {record['seconds']:.1f} s"]
        lines.append(f"  {self.federation.method.whose(self.federation.model)}")
        for name in shown_at("progress", "comparison"):
            if isinstance(value := record.get(name), dict):
                last, worst = ("n/a" if value[k] is None else f"{value[k]:.4f}" for k in ("last", "worst_client"))
                lines.append(f"  {name:<9} {last}   (worst client {worst})")
        if "calibration_temperature" in record:
            number, way = temperature_words(record["calibration_temperature"]).split(" ", 1)
            lines.append(f"  {temperature_name(self.data.task)} {number}   {way}")
        if "epsilon" in record:
            lines.append(f"  epsilon   {text.epsilon(record['epsilon'], 4)}   (of a client, delta {record['delta']:g})")
        return "\n".join(lines)

    def record(self) -> RunRecord:
        """The run in plain data, as its folder holds it."""
        config = tomllib.loads(to_toml(self.config()))
        evaluation = self.detail()
        more = {"baselines": self.baselines(), "diagnostics": self.diagnostics()}
        evaluation |= {name: found for name, found in more.items() if found}
        return RunRecord(config, self.history, evaluation, self.summary_record())

    def report(self, path: str | Path) -> Path:
        """Write the report, one self-contained HTML page."""
        from bpfed.report import write

        return write(self.record(), Path(path))


def _refusals(round_: int, refused: Mapping[str, str]) -> list[str]:
    """Messages on uploads of a round that were refused, a few at most."""
    found = [f"Round {round_}: the upload of client '{name}' was not used: {why}" for name, why in refused.items()]
    more = f"Round {round_}: {len(found) - SAID} more uploads were not used."
    return [*found[:SAID], *([more] if len(found) > SAID else [])]


def train_together(runs: Sequence[Run], callbacks: Sequence[Sequence[Callback]]) -> list[Run]:
    """Run the rounds that are left of several runs side by side; ``callbacks`` are each run's own."""
    from bpfed.engine.simulator import Simulator

    pairs = list(zip(runs, callbacks, strict=True))
    try:
        simulator = Simulator([run.federation for run in runs])
        for run, own in pairs:
            run.compiled = simulator.train.compiled
            for callback in own:
                callback.start(run)
        while not all(run.federation.finished for run in runs):
            start = time.perf_counter()
            infos = simulator.round()
            elapsed = (time.perf_counter() - start) / sum(info is not None for info in infos)
            for (run, own), info in zip(pairs, infos, strict=True):
                if info is not None:
                    run._after(info, elapsed, own)
        for run, own in pairs:
            for callback in own:
                callback.end(run)
    finally:
        for run, own in pairs:
            for callback in own:
                callback.stop(run)
    return list(runs)


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Tell a sentence the first time only: what is true of one run is often true of all that are made together."""
    told: set[str] = set()

    def tell(sentence: str) -> None:
        if sentence not in told:
            told.add(sentence)
            say(sentence)

    return tell
