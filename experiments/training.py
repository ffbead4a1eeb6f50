"""Runs of one method side by side, from the first round to the last, and what the experiments have in common."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bpfed._util.console import Say
from bpfed._util.errors import Diverged, UserError
from bpfed._util.files import to_json, write_whole, writing
from bpfed._util.text import duration
from bpfed.callbacks import Callback
from bpfed.config.migrations import came, recipe_with, without_constants
from bpfed.config.settings import Device, Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation, pick_device
from bpfed.engine.simulator import RoundInfo, Simulator
from bpfed.methods.base import Method
from experiments import protocol

if TYPE_CHECKING:
    from bpfed.runs.run import Run

#: Seconds between two words of progress.
PAUSE = 10.0


class Progress:
    """Words on how far a loop is, no more often than one can read.

    Args:
        say: Told.
        what: What is going on, such as ``FedPer on mnist-small``.
        total: Number of passes.
        unit: What a pass is.
    """

    def __init__(self, say: Say, what: str, total: int, unit: str = "round") -> None:
        self.say, self.what, self.total, self.unit = say, what, total, unit
        self.start = self.told = time.perf_counter()

    def done(self, count: int) -> None:
        """After ``count`` passes."""
        now = time.perf_counter()
        if now - self.told >= PAUSE and count < self.total:
            left = (now - self.start) / count * (self.total - count)
            self.say(f"{self.what}: {self.unit} {count} of {self.total}, {duration(left)} left")
            self.told = now


class SaidProgress(Callback):
    """Says now and then how far a run is, and how it stood when it was last tested.

    Args:
        say: Told.
        what: What is trained, in words.
        rounds: Of the run.
    """

    def __init__(self, say: Say, what: str, rounds: int) -> None:
        self.progress, self.what = Progress(say, what, rounds), what

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        """After a round."""
        if record is not None and "accuracy" in record:
            accuracy, ece = (100 * record[name]["pooled"] for name in ("accuracy", "ece"))
            self.progress.what = f"{self.what} (accuracy {accuracy:.2f} %, ECE {ece:.1f} % in round {record['round']})"
        self.progress.done(run.federation.round)


def train(
    method: Method, deals: Sequence[FederatedData], settings: Sequence[Settings], say: Say, what: str
) -> list[Federation]:
    """Train one method on several deals, all their clients stacked along one axis; nothing is evaluated.

    Args:
        method: Of all of them.
        deals: The data of each.
        settings: The settings of each; they may differ in the seed alone.
        say: Told how far it is.
        what: What is trained, in words.
    """
    pairs = zip(deals, settings, strict=True)
    federations = [Federation.start(method, data, of_protocol(own, len(data))) for data, own in pairs]
    simulator, progress = Simulator(federations), Progress(say, what, settings[0].rounds)
    while not all(f.finished for f in federations):
        for info in simulator.round():
            if info is not None and not all(torch.tensor(list(info.values.values())).isfinite()):
                raise Diverged(f"{what}: training diverged in round {federations[0].round}; lower the step size.")
        progress.done(federations[0].round)
    return federations


def of_protocol(settings: Settings, clients: int) -> Settings:
    """The settings with the protocol's ten participants where none are given, or all clients if there are fewer."""
    if settings.participants is not None:
        return settings
    return replace(settings, participants=min(protocol.RUN["participants"], clients))


def settings_of(rounds: int, draws: int, device: Device) -> Settings:
    """The protocol's settings; how many take part depends on how many clients there are (`of_protocol`)."""
    fixed = {name: value for name, value in protocol.RUN.items() if name != "participants"}
    return Settings(rounds=rounds, eval_draws=draws, device=device, **fixed)


def seeded(settings: Settings, seeds: int) -> list[Settings]:
    """The same settings with the seeds from 0 up."""
    return [replace(settings, seed=seed) for seed in range(seeds)]


def record(method: Method, settings: Settings) -> dict[str, Any]:
    """All settings of method and run that a result depends on, as JSON holds them."""
    own = {
        k: v for k, v in asdict(settings).items() if k not in ("seed", "device", "compile", "chunk", "memory", "store")
    }
    return json.loads(to_json({"method": method.settings(), "run": own}))


def read(path: Path) -> dict[str, Any]:
    """A result that was written before; empty if there is none.

    Raises:
        UserError: There is one, but it cannot be read; to measure again and overwrite it could cost hours of work.
    """
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); check the folder of results.") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"'{path}' is damaged; restore or delete it.")
    return found


def check_writable(folder: Path) -> None:
    """Make a folder, and check that results can be written there before they are worked for.

    Raises:
        UserError: They cannot be.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def tests_on(data: FederatedData, device: torch.device) -> FederatedData:
    """The same with its test examples on the device, so that an evaluation copies nothing."""
    test = data.test
    return replace(data, test=Examples(test.x.to(device), test.y.to(device), test.offsets))


class OtherResult(UserError):
    """A finished result is for something else than what is asked for; it is not overwritten."""


def check_same(found: dict[str, Any], asked: dict[str, Any], path: Path, more: bool = True) -> None:
    """Check that a result, if there is one, is for what is asked for, so that it may be gone on with.

    Args:
        found: What there is in ``path``; empty: nothing.
        asked: What it should be of; its ``seeds``, if any, are among those of ``found`` or the other way round.
        path: Where it is.
        more: Whether one of too few seeds may be measured again.

    Raises:
        OtherResult: It is for something else.
    """
    if not found:
        return
    other = [name for name, value in asked.items() if name != "seeds" and not _same(name, found.get(name), value)]
    if not more and not has_seeds(found, asked):
        other.append("seeds")
    if other:
        raise OtherResult(
            f"'{path}' holds results for different {', '.join(other)}; delete it to re-run, or use another --results "
            "folder."
        )


def has_seeds(found: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether there is a result with all seeds that are asked for."""
    return bool(found) and set(asked.get("seeds", ())) <= set(found.get("seeds", ()))


def each(
    methods: Mapping[str, Method],
    where: str,
    done: Callable[[str, Method], bool],
    measure: Callable[[Method], Measured],
    keep: Callable[[str, Method, dict[str, Any]], None],
    say: Say,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Measure methods one after another, and keep what is found of each as soon as it is.

    Args:
        methods: Which, by name.
        where: Where they are measured, in words, such as ``on mnist-small``.
        done: Whether one is there already.
        measure: What is found of one.
        keep: Given a name, its method, and what was found with the ``seconds`` that it took.
        say: Told of each.
        ready: Called before one is measured; its time does not count.
    """
    for name, method in methods.items():
        if done(name, method):
            say(f"{method.title} {where}: done already")
            continue
        ready()
        start = time.perf_counter()
        found = measure(method)
        seconds = round(time.perf_counter() - start, 1)
        keep(name, method, {**found.scores, "seconds": seconds})
        say(f"{method.title} {where}: {found.words}, {duration(seconds)}")


class Measured(NamedTuple):
    """What is found of a method: its scores, and the chief one of them in words."""

    scores: dict[str, Any]
    words: str


class Shared:
    """A file of results with an entry for each method, which all have the same seeds.

    Args:
        path: The file.
        asked: What it should be of; its ``seeds`` become those of the file, where these are more.
        order: Methods in the order of the file; others follow by name.
        settings: Of every run but for the seed.

    Raises:
        OtherResult: The file is of something else than what is asked for.
    """

    def __init__(self, path: Path, asked: dict[str, Any], order: Sequence[str], settings: Settings) -> None:
        found = read(path)
        self.path, self.order, self.settings = path, order, settings
        self.seeds = max(len(asked["seeds"]), len(found.get("seeds", ())))
        self.asked = asked | {"seeds": list(range(self.seeds))}
        check_same(found, self.asked, path, more=False)
        self.methods: dict[str, Any] = found.get("methods", {})

    def check_writable(self) -> None:
        """Check that the file can be written."""
        check_writable(self.path.parent)

    def has(self, name: str, method: Method) -> bool:
        """Whether a method is there with these settings."""
        if name not in self.methods:
            return False
        return not differing(self.methods[name]["settings"], record(method, self.settings))

    def keep(self, name: str, method: Method, found: dict[str, Any]) -> None:
        """Write the file with this entry."""
        device = device_name(self.settings.device)
        done = read(self.path).get("methods", {})  # others may have written meanwhile
        done[name] = {"title": method.title, **found, "settings": record(method, self.settings), "device": device}
        ordered = {n: done[n] for n in (*self.order, *sorted(done)) if n in done}
        devices = ", ".join(dict.fromkeys(entry.get("device", device) for entry in ordered.values()))
        write_whole(self.path, to_json({**self.asked, "device": devices, "methods": ordered}))
        self.methods = done


def _same(name: str, was: Any, now: Any) -> bool:
    return was == now if name != "settings" or was is None else not differing(was, now)


def differing(was: dict[str, Any], now: dict[str, Any]) -> str:
    """What of the settings is no longer as it was, in words.

    One that came later was what it is by default, or what `came` says. One that is a constant now must have its value.
    """
    words = []
    for table in ("method", "run"):
        then = _without_constants(was[table]) if table == "method" else was[table]
        words += [f"{n} {then[n]}, now {now[table].get(n)}" for n in sorted(then) if then[n] != now[table].get(n)]
    return "; ".join(words)


def _without_constants(settings: dict[str, Any]) -> dict[str, Any]:
    """A method's settings as they would be noted now."""
    method = recipe_with(settings)
    if not method or isinstance(settings.get("sigma"), bool):  # since 0.10
        return settings
    return without_constants(method, came(method) | settings)


def device_name(device: Device) -> str:
    """The device's own name, as ``NVIDIA H200``, or ``CPU``."""
    chosen = pick_device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "CPU"
