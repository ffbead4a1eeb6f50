"""For all tests: one thread each (they run side by side), no test decided by time, and in CI the same examples each time."""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from command import Command
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed.data.federated import FederatedData
from bpfed.engine.compiled_step import Stepper
from bpfed.runs.baselines import Losses, baselines
from bpfed.runs.metadata import fingerprint

#: Folders of tests that make many small runs in which the steps themselves do not matter, and files of them that
#: compare runs with those of other processes.
UNTRACED = ("callbacks", "cli", "data", "prediction", "report", "runs")
TRACED = ("test_interrupts.py", "test_resume.py")

torch.set_num_threads(1)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="module")
def untraced() -> Iterator[None]:
    """Steps are called as they are: tracing them takes longer than a few small rounds."""

    def plain(self: Stepper, function: Callable[..., None], *example: Any) -> Callable[..., None]:
        spec = tree_flatten(example)[1]
        return lambda *flat: function(*tree_unflatten(list(flat), spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "trace", plain)
        yield


@pytest.fixture(scope="module", autouse=True)
def _plain_steps(request: pytest.FixtureRequest) -> None:
    """Tests of what is around the rounds do not trace steps; those of methods, engine, networks and golden runs do."""
    if request.path.parent.name in UNTRACED and request.path.name not in TRACED:
        request.getfixturevalue("untraced")


@pytest.fixture(scope="session", autouse=True)
def _remembered_baselines() -> Iterator[None]:
    """Plain models are fitted once for the same data: many tests train on the same few clients."""
    fitted: dict[Any, tuple[dict[str, Any], dict[str, Losses]]] = {}

    def remembered(data: FederatedData, clients: torch.Tensor, bins: int, losses: dict[str, Losses]) -> dict[str, Any]:
        key = (fingerprint(data), tuple(data.clients), data.task, tuple(clients.tolist()), bins)
        if key not in fitted:
            of_rows: dict[str, Losses] = {}
            fitted[key] = baselines(data, clients, bins, losses=of_rows), of_rows
        found, of_rows = copy.deepcopy(fitted[key])
        losses |= of_rows
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bpfed.runs.baselines.baselines", remembered)
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command on a wide terminal, in an empty folder, on a machine without datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("BPFED_DATA", raising=False)
    return Command(capsys)
