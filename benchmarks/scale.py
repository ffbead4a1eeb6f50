"""Seconds per round and memory with 1 000 and with 100 000 clients of 20 examples, 50 of them in each round."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROUNDS = 12


def run() -> dict[str, object]:
    """Each size in a process of its own, so that memory is its own."""
    sizes = {n: _measure(n) for n in (1_000, 100_000)}
    ratio = sizes[100_000]["seconds per round"] / sizes[1_000]["seconds per round"]
    return {**{f"{n} clients": v for n, v in sizes.items()}, "ratios": {"100 000 / 1 000 clients": round(ratio, 3)}}


def _measure(clients: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", str(clients)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _child(clients: int) -> None:
    import torch

    from bpfed.config.settings import Settings
    from bpfed.data import synthetic
    from bpfed.engine.federation import Federation
    from bpfed.engine.simulator import Simulator
    from bpfed.methods import BPFed
    from bpfed.runs import checkpoint

    torch.set_num_threads(1)
    data = synthetic(clients, 20)
    before = _resident()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(rounds=ROUNDS, participants=50, store="file", compile="off", device="cpu")
        federation = Federation.start(BPFed(), data, settings, folder=Path(folder))
        simulator = Simulator([federation])
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            simulator.round()
            checkpoint.save(Path(folder) / "checkpoint", federation, {})
            seconds.append(time.perf_counter() - start)
        blocks = sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())
    peak = _resident("VmHWM")
    print(
        json.dumps(
            {
                "seconds per round": round(median(seconds[2:]), 4),
                "resident MiB with the data loaded": round(before),
                "peak resident MiB": round(peak),
                "MiB on disk": round(blocks / 2**20, 1),
                "data MiB": round((data.train.x.nbytes + data.test.x.nbytes) / 2**20),
            }
        )
    )


def _resident(field: str = "VmRSS") -> float:
    """Resident memory of this process now (or at its peak) in MiB; Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


if __name__ == "__main__":
    _child(int(sys.argv[1]))
