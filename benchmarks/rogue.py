"""A member of a deployment that spoils its next answer when told to, by a word in the file ``spoil`` of its folder.

    python -m benchmarks.rogue FOLDER

It has a key and a SuperNode as any site has; what it sends travels as all does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from bpfed.deploy.site import site
from bpfed.deploy.ops import flower, supervise
from bpfed.deploy.settings import Plan
from bpfed.deploy.site import worker
from bpfed.deploy.site.site import Site

GIGABYTE = 1 << 30


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], None]:
    def spoil(record: RecordDict) -> None:
        upload = record["upload"]
        assert isinstance(upload, ArrayRecord)
        old = upload[name]
        new = change(np.frombuffer(old.data, "<f4").copy())
        record["upload"] = ArrayRecord(dict(upload) | {name: Array("float32", new.shape, old.stype, new.tobytes())})

    return spoil


def _first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[0] = value
        return values

    return change


def _old(record: RecordDict) -> None:
    answer = record["answer"]
    assert isinstance(answer, ConfigRecord)
    record["answer"] = ConfigRecord(dict(answer) | {"round": int(answer["round"]) - 1})  # type: ignore[arg-type]


SPOIL: dict[str, Callable[[RecordDict], None]] = {
    "nan": _tensor("mean", _first(np.nan)),
    "shape": _tensor("mean", lambda values: values[:-1]),
    "sigma": _tensor("sigma", _first(0.0)),
    "beyond": _tensor("mean", _first(1e20)),
    "wide": _tensor("sigma", lambda values: np.full_like(values, 3e38)),
    "old": _old,
    # Of random bytes: Flower sends equal pieces of an array once.
    "gigabyte": _tensor("mean", lambda values: np.frombuffer(os.urandom(GIGABYTE), "<f4")),
}


def spoiling(site: Site, file: Path) -> Site:
    """A site that looks for a word in a file before each answer with an upload."""
    answer = site.answer

    def spoilt(record: RecordDict) -> RecordDict:
        made = answer(record)
        if "upload" in made and file.exists():
            SPOIL[file.read_text()](made)
            file.unlink()
        return made

    site.answer = spoilt  # type: ignore[method-assign]
    return site


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    plan = Plan.read(folder)

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    honest = site.open_site
    site.open_site = lambda folder, say, data=None: spoiling(honest(folder, say, data), folder / "spoil")
    threading.Thread(target=worker.work, args=(folder, say), daemon=True).start()
    env = supervise.environment(folder / "flwr", plan)
    supervise.watch("The SuperNode", lambda: flower.supernode_command(folder, plan), env, say, lambda: None)


if __name__ == "__main__":
    main()
