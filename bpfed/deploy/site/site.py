"""A site: one client of the federation, with its examples and its personal state, that answers what the server asks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch as torch_safetensors
import torch
from flwr.app import RecordDict
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed._util.files import (
    CONFIG,
    PART,
    PILOTS,
    RUN,
    STATES,
    clear_parts,
    from_json,
    lock,
    sync_folder,
    when_full,
    write_whole,
    writing,
)
from bpfed.config.reader import Config, read
from bpfed.config.registry import allowing
from bpfed.data.datasets import names
from bpfed.data.federated import HELD, parted
from bpfed.deploy.logs import fail, warn
from bpfed.deploy.protocol.messages import MOST, HeldOutScore, Reply, Request, fingerprint, shared_of
from bpfed.deploy.protocol.state_schema import RejectedMessage, StateSchemas, Upload, schemas
from bpfed.deploy.settings import Limits, Plan
from bpfed.deploy.site.data import TOLD, File, Part, Source, agreed_preprocessor
from bpfed.deploy.site.limits import LocalPrivacy, Requests, check_candidate, check_request, most_pilots
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.engine.local import LocalRound
from bpfed.engine.simulator import RoundInfo
from bpfed.engine.state_store import Layout
from bpfed.inference.calibration import PLACES, HeldOutSlopes
from bpfed.methods.base import RunShape, State
from bpfed.metrics import Evaluation, Sums
from bpfed.runs.folder import Folder
from bpfed.runs.pilot import as_pilot, selection_settings, with_candidates
from bpfed.runs.run import Run

#: States of earlier rounds that are kept at least, for a server that goes back to an older checkpoint.
KEPT = 3


class States:
    """The personal states of one site in one run, as rows of numbers, by the round after which they were so.

    The server says in which round a site's contribution was last used, and the site goes on from its state of that
    round. So a reply that was lost, or a round that is asked for twice, leaves no trace: as if the site had been away.

    Args:
        folder: Of all runs' states.
        site: Whose they are.
        run: A word for the run.
        kept: States of earlier rounds that are kept: as many as the server keeps checkpoints to go back to.
    """

    def __init__(self, folder: Path, site: str, run: str, kept: int = KEPT) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run):
            raise UserError("The run's name is not a plain word, so nothing is kept for it.")
        self.folder, self.site, self.kept = folder / run, site, max(KEPT, kept)

    def at(self, round_: int) -> tuple[int, Tensor | None]:
        """The newest sound state up to a round and that state's round; 0 and None where there is none."""
        for number in sorted((n for n in self.rounds() if n <= round_), reverse=True):
            row = self._read(number)
            if row is not None:
                return number, row
        return 0, None

    def put(self, round_: int, row: Tensor, counted: int) -> None:
        """Keep the state after a round; of others those that ``counted`` may still point at."""
        clear_parts(self.folder)
        self._write(self._path(round_), round_, row)
        used = sorted(n for n in self.rounds() if n <= counted)
        for number in self.rounds():
            if number != round_ and number not in used[-self.kept :]:
                self._path(number).unlink(missing_ok=True)

    def settle(self, round_: int, row: Tensor) -> None:
        """Keep the state that the site predicts with once the run is finished."""
        self._write(self.folder / "settled.safetensors", round_, row)

    def rounds(self) -> list[int]:
        """Rounds of which there is a file."""
        return [int(path.stem.partition("-")[2]) for path in self.folder.glob("round-*.safetensors")]

    def _path(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}.safetensors"

    def _write(self, path: Path, round_: int, row: Tensor) -> None:
        plain = row.detach().cpu().float().contiguous()
        noted = {"site": self.site, "round": str(round_), "sha256": _digest(plain)}
        with when_full(path, "and the site rejoins by itself"):
            write_whole(path, torch_safetensors.save({"personal": plain}, noted))

    def _read(self, round_: int) -> Tensor | None:
        try:
            data = self._path(round_).read_bytes()
            row = torch_safetensors.load(data)["personal"]
            noted = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        except (OSError, KeyError, ValueError, safetensors.SafetensorError):
            return None
        sound = noted.get("sha256") == _digest(row) and noted.get("round") == str(round_)
        if noted.get("site") != self.site:
            raise UserError(
                f"'{self._path(round_)}' is the state of site '{noted.get('site')}', not of '{self.site}'; give every "
                "site a folder of its own."
            )
        return row if sound and row.dtype == torch.float32 else None


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()


# --- A site's own model -----------------------------------------------------------------------------------------------
#
# A run folder of this client alone, so that it can be used where its data is.


def keep(
    folder: Path, federation: Federation, evaluated: tuple[Evaluation, Tensor], say: Callable[[str], None]
) -> None:
    """Write the finished model of one client, as a finished run is written; the one that was there is kept beside it.

    The old one is in `previous` then, where it replaces an older one. At any moment one of them is whole on the disk.

    Args:
        folder: Where, in the site's own folder: nothing of it is sent.
        federation: Of this client alone, after the last round.
        evaluated: Its test in that round.
        say: Told what the user should know.
    """
    run = Run(federation, say)
    run.deployed = True
    run.evaluation = evaluated
    run.history = [{"round": federation.round, **evaluated[0].record()}]
    Folder(folder, overwrite=True)  # says why, if that is no place for a run
    new = folder.with_name(f".{folder.name}{PART}")
    _remove(new)
    kept = Folder(new)
    try:
        kept.start(run)
        kept.round(run, RoundInfo(0, {}), run.history[0])
        kept.end(run)
        if folder.exists():
            held = lock(folder)
            try:
                _remove(previous(folder))
                with writing(folder):
                    folder.rename(previous(folder))
            finally:
                os.close(held)
        with writing(folder):
            new.rename(folder)
            sync_folder(folder.parent)
    finally:
        kept.stop(run)
        _remove(new)


def previous(folder: Path) -> Path:
    """Where the model is that was in this folder before."""
    return folder.with_name(f"{folder.name}-previous")


def _remove(folder: Path) -> None:
    if folder.exists():
        with writing(folder):
            shutil.rmtree(folder)


# --- The site ---------------------------------------------------------------------------------------------------------


#: Changes what a site is about to send: (upload, the shared state it started from, round) to an upload of the same
#: pattern.
UploadTransform = Callable[[Upload, State, int], Upload]

_ONLY = torch.tensor([0])


class Site:
    """One client of a deployed federation.

    Args:
        folder: Where its personal states are kept.
        name: Its name; all its randomness follows it, as in a simulation.
        config: The configuration, its own copy.
        source: Its examples.
        transform: Applied to every upload before it is sent; None: nothing is.
        say: Called with each message for the site's owner. None of it is sent.
        own: Run folder for the site's own model once the run is finished; None: none is kept.
        limits: What the server may ask, and from how many rows on something is told of them.
        plugins: The packages whose plug-ins may be used, with their versions.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        config: Config,
        source: Source,
        transform: UploadTransform | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        own: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008
        plugins: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.name, self.config, self.source = folder, name, config, source
        self.transform, self.say, self.own, self.limits, self.plugins = transform, say, own, limits, plugins
        self.requests = Requests(folder, limits, most_pilots(config), say)
        self.fingerprint = fingerprint(config)
        self.schemas: StateSchemas | None = None
        self._federation: tuple[tuple[object, ...], Federation] | None = None
        self._work = 0.0
        self._untold = 0
        self._told: set[str] = set()
        self._note_source()

    def answer(self, record: RecordDict) -> RecordDict:
        """What the site sends back; whatever fails, no word of the failure itself leaves the site."""
        start, self._work = time.perf_counter(), 0.0
        request = Request(self.fingerprint, "", 0)
        try:
            request = Request.read(record)
            with allowing(self.plugins):
                return self._written(self._answer(request, record), start)
        except RejectedMessage as refused:
            warn(self.say, f"The server's message was refused: {refused}")
            why = f"it refused the server's message: {refused}"
        except UserError as error:
            fail(self.say, str(error))
            why = "it cannot do its part; its own log says why."
        except Exception:
            fail(self.say, traceback.format_exc())
            why = "it failed; its own log says why."
        return self._written(Reply(self.fingerprint, request.run, request.round, self.name, why), start)

    def _written(self, answer: Reply, start: float) -> RecordDict:
        seconds = round(time.perf_counter() - start, 4)
        answer = replace(answer, seconds=seconds, work=round(self._work, 4))
        return answer.write(self.schemas.upload if self.schemas else None)

    def _answer(self, request: Request, record: RecordDict) -> Reply:
        if request.fingerprint != self.fingerprint:
            raise RejectedMessage(
                "the server's configuration differs from this site's; give both the same config.toml."
            )
        check_candidate(request, self.config, self.limits)
        check_request(request, selection_settings(self.config.run) if request.fold else self.config.run)
        if request.round == 0:
            statement = self.source.data_statement()
            statement["train"] = self.limits.told(statement["train"])
            return self._plain(request, statement=json.dumps(statement, sort_keys=True))
        self.requests.count(request, self._states(request).folder)
        federation = self._placed(request, record)
        # As it told before, with the rows that are left out and without those that have come since: the difference would
        # be the count of a rare class, or of the new rows.
        answer = self._plain(request, train=self.limits.told(self._trained_on(federation) + self._untold))
        if request.evaluate and request.fold:
            answer = replace(answer, score=self._score(federation))
        elif request.evaluate and request.pilot:
            answer = replace(answer, held=self._held(federation))
        elif request.evaluate:
            answer = replace(answer, sums=self._evaluate(federation, request))
        if request.train:
            upload, info = self._train(federation, request)
            answer = replace(answer, upload=upload, info=info)
        return answer

    def _placed(self, request: Request, record: RecordDict) -> Federation:
        """A federation of this client alone, as it was after the round before the one that is asked for."""
        if not request.of_pilot:
            self._forget_pilots()
        wanted = request.common, request.pilot, request.candidate, request.fold
        if self._federation is None or self._federation[0] != wanted:
            self._federation = wanted, self._start(request)
        federation = self._federation[1]
        federation.learnt_temperature = (
            request.calibration_temperature if self.config.run.calibration_pilots and not request.of_pilot else None
        )
        assert self.schemas is not None
        federation.round = request.round - 1
        shared = shared_of(record, self.schemas.down(request.round))
        federation.shared = tree_map(lambda t: t.to(federation.device), shared)
        found, row = self._states(request).at(request.counted)
        if found != request.counted:
            self.say(f"The personal state of round {request.counted} is lost; resuming from that of round {found}.")
        layout = Layout(federation.method.init(federation.model).personal)
        if row is None:
            row = layout.first.cpu()
        if len(row) != layout.width:
            raise UserError(
                f"The personal state of round {found} belongs to another network; move '{self.folder}' away."
            )
        federation.store.put(_ONLY, layout.unpack(row[None]))
        return federation

    def _start(self, request: Request) -> Federation:
        try:
            common: dict[str, Any] = from_json(request.common)
            sites, longest = common["sites"], common["longest"]
        except (ValueError, TypeError, KeyError):
            raise RejectedMessage("what it sent about the sites' data cannot be read.") from None
        if not all(type(n) is int and 1 <= n <= MOST for n in (sites, longest)):
            raise RejectedMessage("the number of sites or of examples that it sent is not valid.")
        try:
            data = self.source.data(common)
        finally:
            self._note_source()
        self._untold = int(self.source.data_statement()["train"]) - int(data.train.sizes[0])
        self._tell(data.notes)
        # No site is told of the scores of others, so that its sets are its own.
        settings = replace(self.config.run, participants=None, eval_clients=None, store="memory", sets="client")
        method = with_candidates(self.config.method, request.candidate).guarded(self.limits.minimum)
        if request.fold:  # with first weights of its own
            settings, seed = selection_settings(settings, request.fold - 1), selection_settings(settings).seed
            data = data.folds(request.fold, HELD, seed)[-1]
        elif request.candidate:
            settings = replace(settings, adapt="off")  # since it is chosen
        federation = Federation.start(method, data, settings)
        if (whose := federation.method.whose(federation.model)) not in self._told:
            self._told.add(whose)
            self.say(f"Weights of this site and of all sites: {whose}.")
        if request.pilot:  # with other examples and another seed, from the same first weights
            settings = as_pilot(settings, request.pilot)
            cut = parted(federation.data, HELD, settings.seed)
            federation = Federation.of(method, cut, settings, federation.model)
        together = self.config.run.per_round(sites)
        federation.run_of_all = RunShape(sites, together, settings.rounds, settings.epochs, settings.batch)
        train = federation.inputs(federation.data.train)  # without what is held back or held out
        # Not compiled unless asked for: no run is long enough at one site. The width is at least the simulator's, for
        # clients of any size, and what is beyond a client's examples counts for nothing; a site that joined late may
        # have more examples than any that told of theirs.
        compiled = settings.compile == "on"
        federation.training = LocalRound.of(
            method, federation.model, train, settings, compiled, longest, settings.rounds
        )
        self.schemas = schemas(method, federation.model, settings.compression == "half")
        return federation

    def _tell(self, notes: Iterable[str]) -> None:
        """Say once what the site's owner should know of its examples."""
        for note in notes:
            self._note(f"{note} Whoever makes the deployment gives that to 'bpfed deploy init', for all sites.")

    def _note(self, sentence: str) -> None:
        """Say something once."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)

    def _note_source(self) -> None:
        """Say what is to be known of the site's examples."""
        for note in self.source.notes:
            self._note(note)

    @staticmethod
    def _trained_on(federation: Federation) -> int:
        return int(federation.data.train.sizes[0])

    def _evaluate(self, federation: Federation, request: Request) -> Sums:
        """Sums over its test examples; as if it had none, where they are too few."""
        start = time.perf_counter()
        if federation.finished:
            federation.settle()
        evaluated = evaluate_clients(federation) if len(federation.data.test.y) else self._untested(federation)
        self._work += time.perf_counter() - start
        if federation.finished:  # what the site predicts with from now on
            self._states(request).settle(federation.round, self._row(federation, federation.store.get(_ONLY)))
            self._keep(federation, evaluated, request)
        if 0 < evaluated[0].sums.examples < self.limits.minimum:
            self._note(
                f"This site has {evaluated[0].sums.examples} test examples, fewer than its minimum of "
                f"{self.limits.minimum}, so its scores are not sent."
            )
            evaluated = self._untested(federation)
        return evaluated[0].sums.cpu()

    def _held(self, federation: Federation) -> HeldOutSlopes:
        """At the end of a calibration pilot, what the server needs to know of the examples held out, and no more."""
        if not federation.finished:
            raise RejectedMessage("it asks for held-out results in the middle of a calibration pilot.")
        start, examples = time.perf_counter(), len(federation.data.test.y)
        federation.settle()
        examples = self._told_of(examples, "calibration")
        found = evaluate_clients(federation)[0].slopes if examples else None
        slopes = found() if found is not None else torch.zeros(PLACES, dtype=torch.float64)
        self._work += time.perf_counter() - start
        return HeldOutSlopes(examples, slopes)

    def _score(self, federation: Federation) -> HeldOutScore:
        """At the end of a selection pilot, the sum of the scores of the examples held out."""
        if not federation.finished:
            raise RejectedMessage("it asks for held-out scores in the middle of a selection pilot.")
        start = time.perf_counter()
        federation.settle()
        examples, nll = self._told_of(len(federation.data.test.y), "selection"), 0.0
        if examples:
            nll = float(evaluate_clients(federation)[0].scores["nll"].clients[0]) * examples
        self._work += time.perf_counter() - start
        return HeldOutScore(examples, nll if math.isfinite(nll) else math.inf)

    def _told_of(self, examples: int, kind: str) -> int:
        """So many examples held out in a pilot, or none, where they are too few to tell of."""
        if 0 < examples < self.limits.minimum:
            self._note(
                f"This site holds out {examples} training examples in a {kind} pilot, fewer than its minimum of "
                f"{self.limits.minimum}, so it tells nothing of them."
            )
            return 0
        return examples

    def _untested(self, federation: Federation) -> tuple[Evaluation, Tensor]:
        """What is said of a site without test examples: nothing, in the form of something."""
        settings = federation.settings
        data, task = federation.data, federation.data.task_type
        form = task.sums_form(data.classes, settings.bins, settings.calibration > 0.0)
        return task.evaluate_sums(Sums.none(form), settings.bins), _ONLY

    def _keep(self, federation: Federation, evaluated: tuple[Evaluation, Tensor], request: Request) -> None:
        """Make this the site's own model, if the site has trained for it."""
        if self.own is None:
            return
        trained = self.requests.trained(request.run)
        if not self._states(request).at(request.counted)[0]:  # only training writes a state
            self.say(
                "This site has had no part in training in this run, so nothing of it becomes its own model; what is in "
                f"'{self.own}' stays."
            )
            return
        if self.requests.model == {"run": request.run, "trained": trained} and self.own.is_dir():
            self.say(f"This site has not trained since its own model was written, so '{self.own}' stays.")
            return
        try:
            there = self.own.is_dir()
            keep(self.own, federation, evaluated, self.say)
            self.requests.keep_model(request.run, trained)
            if there:
                self.say(f"The own model that this site had before is in '{previous(self.own)}'.")
            command = shlex.join(["bpfed", "predict", str(self.own), "--client", self.name, "--input", "FILE"])
            self.say(f"This site's own model is in '{self.own}'; predict with it: {command}")
        except (OSError, UserError) as error:  # the scores are as good without it
            self.say(f"This site's own model could not be kept ({error}).")

    def _train(self, federation: Federation, request: Request) -> tuple[Upload, dict[str, float]]:
        assert federation.training is not None
        start = time.perf_counter()
        finished = federation.training(federation.training_rows(_ONLY))
        self._work += time.perf_counter() - start
        upload = Upload.of(finished)
        if self.transform is not None:
            upload = self.transform(upload, federation.shared, request.round)
        # On the disk before it is sent: a server that counts it may rely on it.
        self._states(request).put(request.round, self._row(federation, finished.personal), request.counted)
        if not request.of_pilot:
            self.requests.train(request.run)
        if self._trained_on(federation) < self.limits.minimum:  # a loss of so few examples tells of each
            return upload, {}
        return upload, {name: float(value[0]) for name, value in finished.info.items()}

    def _row(self, federation: Federation, personal: State) -> Tensor:
        layout = Layout(federation.method.init(federation.model).personal)
        return layout.pack(personal)[0] if layout.width else torch.zeros(0)

    def _states(self, request: Request) -> States:
        folder = self.folder / PILOTS if request.of_pilot else self.folder
        return States(folder, self.name, request.run, self.config.run.checkpoints)

    def _forget_pilots(self) -> None:
        """Once the run itself has begun."""
        if (folder := self.folder / PILOTS).exists():
            with writing(folder):
                shutil.rmtree(folder)

    def _plain(self, request: Request, statement: str = "", train: int = 0) -> Reply:
        return Reply(self.fingerprint, request.run, request.round, self.name, "", statement, train)


def open_site(folder: Path, say: Callable[[str], None], data: str | None = None) -> Site:
    """The site of a deployment's site folder.

    Args:
        folder: The site's.
        say: Called with each message for the site's owner.
        data: What its examples are from now on, remembered once they could be read; None: what is remembered.
    """
    plan = Plan.read(folder)
    if data is not None:
        plan = replace(plan, data=data)
    if not plan.site:
        raise UserError(f"'{folder}' is not the folder of a site; give one such as '{folder.parent / 'site-a'}'.")
    with allowing(plan.plugins):
        return _opened(folder, plan, read(folder / CONFIG), say, data is not None)


def _opened(folder: Path, plan: Plan, config: Config, say: Callable[[str], None], remember: bool) -> Site:
    wanted = plan.data
    source: Source
    limits, agreed = plan.limits, agreed_preprocessor(folder, plan, config)
    if wanted in names():
        if agreed is not None:
            raise UserError(
                f"This deployment has agreed on the preprocessing of files, so '{wanted}' is of no use; give a file."
            )
        if wanted != config.data.name:
            raise UserError(
                f"This federation is on '{config.data.name}', not '{wanted}'; give --data {config.data.name}."
            )
        source, limits = Part(plan.site, plan.sites, config), replace(limits, minimum=1)  # whose rows are public
    elif wanted:
        if not Path(wanted).is_absolute():
            raise UserError(f"'{wanted}' is neither a file nor the name of a dataset; give one with --data.")
        path, told = Path(wanted).expanduser(), folder / STATES / TOLD
        source = File(plan.site, path, config, limits, agreed, told)
    else:
        raise UserError(f"Site '{plan.site}' has no data yet; give it with --data FILE.")
    if remember:
        plan.write(folder)
    local_privacy = None
    if plan.noise > 0.0:
        local_privacy = LocalPrivacy(
            folder / STATES, config.method, plan.clip, plan.noise, plan.delta, plan.epsilon, say
        )
    return Site(folder / STATES, plan.site, config, source, local_privacy, say, folder / RUN, limits, plan.plugins)
