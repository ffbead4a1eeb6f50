"""Seconds per round of the CNN that pfl-research times its simulator with: 1 000 clients of 50 images, 50 in each round.

One epoch with batch 10; FedAvg with SGD 0.1, as there, BPFed and the recipe as they are. The pixels and labels are made
up, so this says how long a round takes and nothing about what is learnt. Rounds are not evaluated. Each method is timed
with our convolution kernels and with PyTorch's alone (``BPFED_KERNELS=off``), in a process of its own.

``python -m benchmarks.league --rounds 20 --methods fedavg,bpfed --kernels on`` times some of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.methods import BPFed, FedAvg, Recipe
from bpfed.methods.base import Method

METHODS: dict[str, Method] = {
    "fedavg": FedAvg(optimiser="sgd", momentum=0.0, lr=0.1),
    "bpfed": BPFed(),
    "bpfed-recipe": Recipe(),
}
CLIENTS, IMAGES, TAKING_PART = 1_000, 50, 50
ROUNDS = 100


def run() -> dict[str, object] | str:
    """All methods, with our kernels and without."""
    if not torch.cuda.is_available():
        return "no CUDA device here; skipped"
    return {"device": torch.cuda.get_device_name(), **measured(ROUNDS, list(METHODS), ["on", "off"])}


def measured(rounds: int, methods: list[str], kernels: list[str], clients: int = CLIENTS) -> dict[str, Any]:
    """Figures by method and by whether our kernels are on."""
    found = {}
    for name in methods:
        for word in kernels:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.league",
                    "--alone",
                    name,
                    f"--rounds={rounds}",
                    f"--clients={clients}",
                ],
                env={**os.environ, "BPFED_KERNELS": word},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[f"{name}, kernels {word}"] = json.loads(done.stdout.splitlines()[-1])
            print(f"  {name}, kernels {word}: {found[f'{name}, kernels {word}']}", flush=True)
    return found


def network() -> nn.Module:
    """Two convolutions and two linear layers; 1.63 million weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def made_up(clients: int) -> FederatedData:
    """Clients with images of noise."""
    torch.manual_seed(0)
    names = tuple(f"client {i}" for i in range(clients))
    count = clients * IMAGES
    offsets = torch.arange(0, count + 1, IMAGES)
    train = Examples(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)), offsets)
    test = Examples(train.x[:clients], train.y[:clients], torch.arange(clients + 1))
    return FederatedData("made up", names, train, test, "classification", 10)


def alone(name: str, rounds: int, clients: int) -> dict[str, Any]:
    """One method in this process."""
    settings = Settings(rounds=rounds, participants=min(TAKING_PART, clients), epochs=1, batch=10)
    torch.manual_seed(0)
    federation = Federation.start(METHODS[name], made_up(clients), settings, network())
    simulator, seconds = Simulator([federation]), []
    for _ in range(rounds):
        start = time.perf_counter()
        (info,) = simulator.round()
        assert info is not None  # its figures have been read from the device, so the round is over
        seconds.append(time.perf_counter() - start)
    cuda = federation.device.type == "cuda"
    return {
        "seconds per round": round(median(seconds[1:] or seconds), 5),
        "slowest after the first": round(max(seconds[1:] or seconds), 5),
        "first round": round(seconds[0], 2),
        "rounds": rounds,
        "peak MiB": round(torch.cuda.max_memory_allocated() / 2**20) if cuda else None,
        "weights": federation.model.layout.total,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--kernels", default="on,off")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--alone", choices=list(METHODS))
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(alone(given.alone, given.rounds, given.clients)))
    else:
        print(json.dumps(measured(given.rounds, given.methods.split(","), given.kernels.split(","), given.clients)))
