"""Every file of a run folder, damaged in every way, under every command that reads one.

    python tests/damage.py          # all cases, and a table of what came of them

A case is right if the command refuses in one sentence with exit code 2, or does exactly what it does with a sound
folder: the same predictions, the same report, the same newcomer. Resuming may also mend the folder: then a prediction
afterwards is the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bpfed.cli import main
from bpfed.engine.simulator import Simulator

ROUNDS = 2
QUICK = ("--method", "bpfed", "--rounds", str(ROUNDS), "--epochs", "2", "--eval-draws", "3", "--hidden", "6", "-q")
ASKED = ("--calibration", "0.3", "--calibrate", "pilot:1", "--store", "file", "--compile", "off")
LAST = f"checkpoint/round-{ROUNDS:06d}"
#: The files of a run folder.
FILES = (
    "config.toml",
    "learnt.json",
    "data.json",
    "model.safetensors",
    "calibration.json",
    "evaluation.json",
    "summary.json",
    "metrics.jsonl",
    "manifest.json",
    "report.html",
    f"{LAST}.json",
    f"{LAST}.safetensors",
    "state/personal.f32",
    "adapted/ward.safetensors",
)
DEEP = "[" * 50_000
NUMBER = re.compile(r"(?<=[:=\[,] )-?\d+(\.\d+)?(e-?\d+)?(?=[,\n\]}])")

Damage = Callable[[Path, Path], None]


def _write(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path, other: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _flip(place: float) -> Damage:
    def change(data: bytes) -> bytes:
        made, at = bytearray(data), min(len(data) - 1, int(place * len(data)))
        made[at] ^= 1
        return bytes(made)

    return _write(change)


def _swap(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def _folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _dangling(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _numbers(value: str) -> Damage:
    return _write(lambda data: NUMBER.sub(value, data.decode()).encode())


def _one_number(value: str) -> Damage:
    return _write(lambda data: NUMBER.sub(value, data.decode(), count=1).encode())


#: What can happen to any file.
ANY: dict[str, Damage] = {
    "missing": lambda path, other: path.unlink(),
    "empty": _write(lambda data: b""),
    "half of it": _write(lambda data: data[: len(data) // 2]),
    "last byte lost": _write(lambda data: data[:-2]),
    "a bit flipped at 1 %": _flip(0.01),
    "a bit flipped at 40 %": _flip(0.4),
    "a bit flipped at 90 %": _flip(0.9),
    "zeros": _write(lambda data: bytes(len(data))),
    "not UTF-8": _write(lambda data: b"\xff\xfe" + data),
    "not UTF-8 inside": _write(lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]),
    "junk": _write(lambda data: np.random.default_rng(0).bytes(len(data))),
    "of another run": _swap,
    "a folder": _folder,
    "a link to itself": _loop,
    "a link to nowhere": _dangling,
}
#: What can happen to text that a program reads.
TEXT: dict[str, Damage] = {
    "nested too deeply": _write(lambda data: f'{{"a": {DEEP}'.encode()),
    "a list": _write(lambda data: b"[]"),
    "a number": _write(lambda data: b"5"),
    "null": _write(lambda data: b"null"),
    "an empty table": _write(lambda data: b"{}"),
    "numbers NaN": _numbers("NaN"),
    "numbers 0": _numbers("0"),
    "numbers -1": _numbers("-1"),
    "numbers 1e999": _numbers("1e999"),
    "numbers of 400 digits": _numbers("1" + "0" * 400),
    "numbers true": _numbers("true"),
    "first number nan": _one_number("nan"),
    "first number 0": _one_number("0"),
    "first number 7": _one_number("7"),
}
TOML: dict[str, Damage] = {
    "nested too deeply in TOML": _write(lambda data: b"a = " + DEEP.encode()),
    "half of its lines": _write(lambda data: b"\n".join(data.split(b"\n")[: data.count(b"\n") // 2])),
    "calibration temperature 0": _write(
        lambda data: re.sub(rb"calibration_temperature = .*", b"calibration_temperature = 0.0", data)
    ),
    "calibration temperature 2": _write(
        lambda data: re.sub(rb"calibration_temperature = .*", b"calibration_temperature = 2.0", data)
    ),
    "draws 4": _write(lambda data: re.sub(rb"eval_draws = .*", b"eval_draws = 4", data)),
    "another method": _write(lambda data: data.replace(b'name = "bpfed"', b'name = "fedavg"')),
}


def _both_checkpoints(suffix: str, change: Damage) -> Damage:
    """The same to all checkpoints, so that none is left to fall back to."""

    def damage(path: Path, other: Path) -> None:
        for each in sorted(path.parent.glob(f"round-*{suffix}" if suffix else "round-*")):
            change(each, other.parent / each.name)

    return damage


class Case(NamedTuple):
    """One thing that happens to one file of one kind of folder, and one command."""

    command: str
    file: str
    what: str
    damage: Damage


def cases() -> list[Case]:
    """All of them."""
    found = []
    for command in COMMANDS:
        for file in FILES:
            ways = dict(ANY)
            if file.endswith((".json", ".jsonl", ".toml")):
                ways |= TEXT
            if file.endswith(".toml"):
                ways |= TOML
            found += [Case(command, file, what, damage) for what, damage in ways.items()]
        for suffix in (".json", ".safetensors"):
            for what in ("missing", "empty", "a bit flipped at 40 %", "of another run"):
                damage = _both_checkpoints(suffix, ANY[what])
                found.append(Case(command, f"{LAST}{suffix}", f"all of them: {what}", damage))
        damage = _both_checkpoints("", ANY["of another run"])
        found.append(Case(command, f"{LAST}.json", "all of them and their tensors: of another run", damage))
    return found


class Folders(NamedTuple):
    """What the cases need: two finished runs on tables, one broken off, and new rows.

    Attributes:
        place: Where all is.
        wanted: What each command gives with a sound folder.
    """

    place: Path
    wanted: dict[str, str]

    @classmethod
    def make(cls, place: Path) -> Folders:
        """Train them."""
        g = np.random.default_rng(5)
        (place / "sites").mkdir(parents=True)
        for path in ("sites/bern.csv", "sites/genf.csv", "new.csv"):
            u, v = g.normal(60, 10, 40), g.normal(size=40)
            lines = [f"{a:.2f},{b:.3f},{'ill' if a > 60 + 9 * b else 'well'}" for a, b in zip(u, v, strict=True)]
            (place / path).write_text("\n".join(["u,v,y", *lines, ""]))
        here = ("--data", f"folder:{place / 'sites'}", *QUICK, *ASKED)
        for name, seed in (("run", "0"), ("other", "1")):
            expect(0, "run", *here, "--seed", seed, "--out", str(place / name))
            newcomer = ("--input", str(place / "new.csv"), "--name", "ward", "--steps", "3")
            expect(0, "adapt", str(place / name), *newcomer)
        with _interrupted():
            expect(130, "run", *here, "--seed", "0", "--out", str(place / "broken"))
        wanted = {}
        for command, call in COMMANDS.items():
            wanted[command] = call(sound(place, command))
        return cls(place, wanted)


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C in the last round of a run, after its calibration pilot."""
    real, calls = Simulator.round, []

    def round_(self: Simulator) -> object:
        calls.append(self)
        if len(calls) == 2 * ROUNDS:
            raise KeyboardInterrupt
        return real(self)

    Simulator.round = round_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Simulator.round = real  # type: ignore[method-assign]


def sound(place: Path, command: str) -> Path:
    """A copy of the folder that a command is tried on."""
    source = place / ("broken" if command == "resume one broken off" else "run")
    target = place / "copy"
    if target.is_symlink() or target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(source, target, symlinks=True))


class Refused(Exception):
    """The command gave one sentence and exit code 2."""


class Wrong(Exception):
    """It did anything else but succeed."""


def expect(code: int, *arguments: str) -> str:
    """What the command prints, or an exception if it ends with another code."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(list(arguments))
    except SystemExit as ended:
        found = int(ended.code or 0)
    except BaseException as error:
        trace = traceback.format_exc().splitlines()
        raise Wrong(f"traceback: {type(error).__name__}: {error} {trace[-3].strip()}") from error
    if found == code:
        return out.getvalue()
    said = [line for line in err.getvalue().splitlines() if line.startswith("bpfed: ")]
    if found == 2 and len(said) == 1 and err.getvalue().endswith(said[0] + "\n") and said[0].count(": ") >= 1:
        raise Refused(said[0])
    raise Wrong(f"exit code {found}: {err.getvalue()[-300:]}")


def _predict(folder: Path) -> str:
    rows = str(folder.parent / "new.csv")
    return expect(0, "predict", str(folder), "--client", "genf", "--input", rows)


def _predict_newcomer(folder: Path) -> str:
    return expect(0, "predict", str(folder), "--client", "ward", "--input", str(folder.parent / "new.csv"))


def _report(folder: Path) -> str:
    page = folder.parent / "page.html"
    page.unlink(missing_ok=True)
    return expect(0, "report", str(folder), "--out", str(page)) + page.read_text()


def _adapt(folder: Path) -> str:
    made = folder.parent / "made.safetensors"
    made.unlink(missing_ok=True)
    rows = str(folder.parent / "new.csv")
    shown = expect(0, "adapt", str(folder), "--input", rows, "--name", "n", "--steps", "3", "--out", str(made))
    return shown + made.read_bytes().hex()


def _resume(folder: Path) -> str:
    expect(0, "run", "--out", str(folder), "--resume", "-q")
    # The time that a run took is in its summary, and is another each time.
    report = re.sub(r"\d+(\.\d)? (s|min|h)\b|for [^<\n]* on cpu", "", _report(folder))
    return _predict(folder) + report


COMMANDS: dict[str, Callable[[Path], str]] = {
    "predict": _predict,
    "predict a newcomer": _predict_newcomer,
    "report": _report,
    "adapt": _adapt,
    "resume": _resume,
    "resume one broken off": _resume,
}


def outcome(folders: Folders, case: Case) -> tuple[str, str]:
    """What came of a case, in a word, and what was said: ``same`` and ``refused`` are right."""
    folder = sound(folders.place, case.command)
    broken_off = case.command == "resume one broken off"
    file = case.file.replace(LAST, f"checkpoint/round-{ROUNDS - 1:06d}") if broken_off else case.file
    path = folder / file
    if not path.exists():  # such as the summary of a run that was broken off
        return "no such file", ""
    before = path.read_bytes()
    other = folders.place / "other" / file
    case.damage(path, other)
    with contextlib.suppress(OSError):
        if path.read_bytes() == before and "all of them" not in case.what:
            return "no change", ""
    try:
        found = COMMANDS[case.command](folder)
    except Refused as error:
        return "refused", str(error)
    except Wrong as error:
        return "wrong", str(error)
    return ("same", "") if found == folders.wanted[case.command] else ("changed", "the output is another")


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """How many cases of each file and command were refused or gave the same; what is wrong is in capitals."""
    rows = [["file", *COMMANDS]]
    for file in FILES:
        cells = []
        for command in COMMANDS:
            parts = {word: counts[file, command, word] for word in ("refused", "same", "changed", "wrong")}
            told = [f"{n} {word if word in ('refused', 'same') else word.upper()}" for word, n in parts.items() if n]
            cells.append(", ".join(told) or "-")
        rows.append([file, *cells])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def run_all(folders: Folders, chosen: list[Case]) -> tuple[Counter[tuple[str, str, str]], list[str]]:
    """The counts of all outcomes, and a line for each that is wrong."""
    counts: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for case in chosen:
        word, said = outcome(folders, case)
        counts[case.file, case.command, word] += 1
        if word in ("changed", "wrong"):
            wrong.append(f"{case.command} | {case.file} | {case.what}: {word}; {said}")
        if os.environ.get("BPFED_DAMAGE_SAID") and said:
            print(f"{case.command} | {case.file} | {case.what}: {said}", flush=True)
    return counts, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        every = [case for case in cases() if not sys.argv[1:] or case.command in sys.argv[1:]]
        counted, failures = run_all(Folders.make(Path(made)), every)
    print(table(counted))
    tried = sum(n for (_, _, word), n in counted.items() if word not in ("no such file", "no change"))
    print(
        f"\n{tried} cases: {json.dumps({w: sum(n for (*_, v), n in counted.items() if v == w) for w in ('refused', 'same', 'changed', 'wrong')})}"
    )
    print("\n".join(failures))
    sys.exit(bool(failures))
