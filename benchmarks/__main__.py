"""python -m benchmarks [cpu] [compiling] [gpu] [kernels] [large] [league] [scale] [novel] [moments] [privacy] [start]: run all, or those named; results: benchmarks/results/."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch

import bpfed
from benchmarks import compiling, cpu, gpu, kernels, large, league, moments, novel, privacy, scale, start

RESULTS = Path(__file__).parent / "results"
ALL = {
    "cpu": cpu.run,
    "compiling": compiling.run,
    "gpu": gpu.run,
    "kernels": kernels.run,
    "large": large.run,
    "league": league.run,
    "scale": scale.run,
    "novel": novel.run,
    "moments": moments.run,
    "privacy": privacy.run,
    "start": start.run,
}


def main(names: list[str]) -> None:
    for name in names or list(ALL):
        print(f"{name}: {sys.modules[f'benchmarks.{name}'].__doc__}", flush=True)
        result = ALL[name]()
        if isinstance(result, str):
            print(f"  {result}")
            continue
        result = {"bpfed": bpfed.__version__, "torch": torch.__version__, "python": platform.python_version(), **result}
        text = json.dumps(result, indent=2, ensure_ascii=False)
        print(text)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    unknown = [n for n in sys.argv[1:] if n not in ALL]
    if unknown:
        sys.exit(f"Unknown benchmark '{unknown[0]}'; known are: {', '.join(ALL)}.")
    main(sys.argv[1:])
