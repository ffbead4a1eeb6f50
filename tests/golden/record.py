"""Record what the library computes and says, so that a reorganisation can show that neither has changed.

    python -m tests.golden.record            # write golden.json again, after an intended change
    python -m tests.golden.record --exact    # print SHA-256 hashes, to compare two revisions on one machine

`golden.json` holds texts, which are compared exactly, and numbers, which are compared with a tolerance because the last
bits of a float depend on the CPU. The hashes of ``--exact`` cover every bit of every state and metric.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

GOLDEN = Path(__file__).parent / "golden.json"
TESTS = Path(__file__).parent.parent
for helper in ("scenarios.py", "federations.py", "test_broken_files.py"):  # pytest finds these by itself
    sys.path.append(str(next(TESTS.rglob(helper)).parent))

import federations  # noqa: E402
import scenarios  # noqa: E402
import test_broken_files as broken  # noqa: E402

import bpfed  # noqa: E402
from bpfed.callbacks import Callback  # noqa: E402
from bpfed.methods import METHODS  # noqa: E402

SHORT = {"rounds": 2, "epochs": 2, "batch": 5, "eval_draws": 4, "eval_every": 1, "device": "cpu", "compile": "off"}
#: Terminal that help texts are written for.
TERMINAL = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}


class Outcome(NamedTuple):
    """What one case gave.

    Attributes:
        state: Every tensor that the run learnt.
        metrics: One record for each evaluated round.
        more: Whatever else its records hold; in the hashes alone.
    """

    state: list[torch.Tensor]
    metrics: list[Any]
    more: Any = None


# --- cases with numbers ------------------------------------------------------------------------------------------------


def fit(method: str, data: Any = None, **changes: Any) -> bpfed.Run:
    """A short run on a small federation; the network is smooth, so that rounding errors stay small."""
    data = scenarios.classification() if data is None else data
    chosen = {"progress": False, "say": lambda sentence: None, **SHORT, **changes}
    if data.task == "classification" and METHODS[method].network == "auto":
        chosen.setdefault("model", scenarios.smooth())
    return bpfed.fit(METHODS[method](), data, **chosen)


def outcome(run: bpfed.Run) -> Outcome:
    everyone = torch.arange(len(run.data))
    state = [run.federation.model.initial, run.federation.shared, run.federation.personal(everyone)]
    return Outcome(tree_leaves(state), timeless(run.history), timeless([run.detail(), run.summary_record()]))


def timeless(record: Any) -> Any:
    """The record without durations and the version."""
    if isinstance(record, dict):
        return {k: timeless(v) for k, v in record.items() if k not in ("seconds", "bpfed", "version")}
    return [timeless(v) for v in record] if isinstance(record, list | tuple) else record


def regression(folder: Path) -> Outcome:
    return outcome(fit("bpfed-recipe", scenarios.regression(), hidden=6))


def ensemble(folder: Path) -> Outcome:
    return outcome(fit("bpfed", members=2))


def pilots(folder: Path) -> Outcome:
    """Predictions are calibrated by pilot runs before the run itself."""
    return outcome(fit("bpfed-recipe", scenarios.classification(sizes=(30, 40)), calibrate="pilot:2"))


def calibrated(folder: Path) -> Outcome:
    """Each client keeps examples to calibrate its own predictions."""
    data = scenarios.classification(sizes=(30, 40, 25))
    return outcome(fit("fedper", data, calibration=0.3, scaling="client", sets="client"))


def private(folder: Path) -> Outcome:
    return outcome(fit("bpfed", clip=1.0, noise=0.5, participants=3))


def compressed(folder: Path) -> Outcome:
    return outcome(fit("bpfed", compression="half", robust="median"))


def resumed(folder: Path) -> Outcome:
    """A run that is stopped after its second round and resumed from its folder."""

    class Stop(Callback):
        def round(self, run: Any, info: Any, record: Any) -> None:
            if run.federation.round == 2:
                raise KeyboardInterrupt

    settings = {"rounds": 4, "participants": 3, "out": folder / "run", "baselines": "off"}
    with contextlib.suppress(KeyboardInterrupt):
        fit("bpfed-recipe", callbacks=[Stop()], **settings)
    found = outcome(fit("bpfed-recipe", resume=True, **settings))
    loaded = bpfed.Run.load(folder / "run", model=scenarios.smooth())
    x = scenarios.classification().test.x[:3]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    predicted = [client.predict(x).probs for client in loaded.clients()]
    return Outcome([*found.state, *predicted], [*found.metrics, files], found.more)


def deployed(folder: Path) -> Outcome:
    """A server and its sites in this process; every message is written to bytes and read again."""
    data = scenarios.classification(sizes=(7, 12))
    federation = federations.Deployed(folder, METHODS["bpfed-recipe"](), data, rounds=2)
    server = federation.serve()
    return Outcome(tree_leaves(server.federation.shared), timeless(server.history))


def method_case(name: str) -> Callable[[Path], Outcome]:
    return lambda folder: outcome(fit(name))


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{f"method {name}": method_case(name) for name in METHODS},
    **{f.__name__: f for f in (regression, ensemble, pilots, calibrated, private, compressed, resumed, deployed)},
}


# --- cases with text ---------------------------------------------------------------------------------------------------


def refusals(folder: Path) -> dict[str, str]:
    """What is said of each broken file."""
    found = {}
    for number, (kind, (write, _)) in enumerate(broken.REFUSED.items()):
        sites = folder / f"{number}" / "sites"
        sites.mkdir(parents=True)
        (sites / "a.csv").write_text(broken.GOOD)
        write(sites)
        try:
            bpfed.data.load(f"folder:{sites}", target="y")
        except bpfed.UserError as error:
            found[kind] = re.sub("0x[0-9a-f]{6,}", "ADDRESS", str(error).replace(str(sites), "FOLDER"))
    return found


def helps(folder: Path) -> dict[str, str]:
    """The help of every command, without boxes and line breaks."""
    from typer.main import get_command

    from bpfed.cli import app

    def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        yield path
        for name, one in getattr(command, "commands", {}).items():
            yield from commands(one, (*path, name))

    apps = {"bpfed": app}
    if find_spec("experiments") is not None:  # a package of its own, whose commands are still reached by `bpfed paper`
        apps["bpfed paper"] = import_module("experiments.cli").app
    found = {}
    for program, one in apps.items():
        for path in commands(get_command(one)):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
                one([*path, "--help"], prog_name=program)
            found[" ".join((program, *path))] = " ".join(re.sub("[─-╿]", " ", out.getvalue()).split())
    return found


TEXTS: dict[str, Callable[[Path], dict[str, str]]] = {"refusals": refusals, "help": helps}


# --- comparing ---------------------------------------------------------------------------------------------------------


def summed(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a few numbers: of each tensor its size, sum, sum of absolute values and a projection."""
    state = []
    for tensor in outcome.state:
        flat = tensor.detach().double().flatten()
        direction = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        state.append([len(flat), *(short(float(v)) for v in (flat.sum(), flat.abs().sum(), flat @ direction))])
    return {"state": state, "metrics": short(outcome.metrics)}


def short(value: Any) -> Any:
    """The same with numbers of seven digits; what is no number is left as it is."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(k): short(v) for k, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list | tuple) else value


def hashes(outcome: Outcome) -> dict[str, str]:
    """SHA-256 of every bit of the states and of the metrics."""
    state = hashlib.sha256()
    for tensor in outcome.state:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.detach().contiguous().numpy().tobytes())
    return {"state": state.hexdigest(), "metrics": digest([outcome.metrics, outcome.more])}


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def quiet_machine() -> Iterator[Path]:
    """One thread, a terminal that is always the same, no datasets of this machine, and an empty folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TERMINAL):
        os.environ.pop("BPFED_DATA", None)
        yield Path(folder)
    torch.set_num_threads(threads)


def numbers(name: str) -> Outcome:
    """What a case with numbers gives now."""
    with quiet_machine() as folder:
        return CASES[name](folder)


def texts(name: str) -> dict[str, str]:
    """What a case with text gives now."""
    with quiet_machine() as folder:
        return TEXTS[name](folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__.partition("\n")[0])
    parser.add_argument("--exact", action="store_true", help="print hashes instead of writing golden.json")
    if parser.parse_args().exact:
        for name in CASES:
            for part, value in hashes(numbers(name)).items():
                print(f"{value}  {name}: {part}")
        for name in TEXTS:
            for of, text in sorted(texts(name).items()):
                print(f"{digest(text)}  {name}: {of}")
        return
    found = {name: summed(numbers(name)) for name in CASES}
    said = {f"{name}: {of}": text for name in TEXTS for of, text in texts(name).items()}
    GOLDEN.write_text(f'{{\n"numbers": {lines(found)},\n"texts": {lines(said)}\n}}\n')


def lines(record: dict[str, Any]) -> str:
    """JSON with one line for each entry."""
    entries = (f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in record.items())
    return "{\n" + ",\n".join(entries) + "\n}"


if __name__ == "__main__":
    main()
