"""Finished runs whose training data are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import Command
from hospitals import trained


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("classes"), number=False)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("numbers"), number=True, calibration=0.3)


@pytest.fixture
def ward(classes: Path, command: Command) -> Path:
    """A copy of the run and its new patients, in the folder that the command runs in."""
    shutil.copytree(classes, ".", dirs_exist_ok=True)
    return Path()
