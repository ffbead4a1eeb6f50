"""What `--compile auto` costs on a CPU against `off`: whole runs, one that it compiles and one that it does not, in turn.

CPU seconds, those of the compiler included, and wall seconds of a run, from its beginning to its last score. Each run is a
process of its own with an empty cache of compiled code, so that nothing is left from the one before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

REPEATS = 1
#: Rounds of a run that `auto` compiles, just long enough for it, and of one that it does not; of 25 steps each.
ROUNDS = {"compiled": 1200, "not compiled": 600}
_RUN = """
import resource, sys, time
import numpy as np, torch, bpfed
torch.set_num_threads(1)
rounds, how = int(sys.argv[1]), sys.argv[2]
drawn = np.random.default_rng(0)
x = drawn.normal(size=(3 * 100, 20)).astype(np.float32)
y = (x @ drawn.normal(size=(20, 3))).argmax(1)
data = bpfed.data.from_arrays(x, y, np.repeat(np.arange(3), 100).astype(str), task="classification")

def used():
    both = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)

clock = time.perf_counter(), used()
settings = dict(rounds=rounds, epochs=5, batch=10, eval_every=rounds, baselines="off", device="cpu", hidden=16)
bpfed.fit("bpfed", data, compile=how, progress=False, say=lambda sentence: None, **settings)
print(time.perf_counter() - clock[0], used() - clock[1])
"""


def run(repeats: int = REPEATS) -> dict[str, Any]:
    """Medians in seconds, and the ratio of `auto` to `off`, for both runs."""
    found: dict[str, Any] = {}
    for name, rounds in ROUNDS.items():
        taken: dict[str, list[list[float]]] = {"auto": [], "off": []}
        for _ in range(repeats):
            for how, kept in taken.items():
                kept.append(_seconds(rounds, how))
        medians = {
            how: {
                "wall": round(statistics.median(one[0] for one in kept), 1),
                "cpu": round(statistics.median(one[1] for one in kept), 1),
            }
            for how, kept in taken.items()
        }
        ratios = {kind: round(medians["auto"][kind] / medians["off"][kind], 2) for kind in ("wall", "cpu")}
        found[name] = {"rounds": rounds, "seconds": medians, "auto / off": ratios}
    return {"repeats": repeats, "threads": 1, **found}


def _seconds(rounds: int, how: str) -> list[float]:
    """Wall and CPU seconds of a run."""
    with tempfile.TemporaryDirectory() as cache:
        known = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        said = subprocess.run(
            [sys.executable, "-c", _RUN, str(rounds), how], env=known, check=True, capture_output=True, text=True
        )
    return [float(word) for word in said.stdout.split()[-2:]]
