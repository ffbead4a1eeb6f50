"""For all tests: one thread each (they run side by side), no test decided by time, and in CI the same examples each time."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from command import Command
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed.engine.compiled_step import Stepper

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


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command on a wide terminal, in an empty folder, on a machine without datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("BPFED_DATA", raising=False)
    return Command(capsys)
