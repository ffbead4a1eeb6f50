"""For all tests of deployments."""

import logging

import pytest

from bpfed.deploy import logs


@pytest.fixture(autouse=True, scope="module")
def quick(untraced: None) -> None:
    """Steps as they are written: a graph of them pays off after many steps, and these federations take a few."""


@pytest.fixture(autouse=True)
def own_log(monkeypatch):
    """What a part logs is set up by the test that starts it, and by no other."""
    monkeypatch.setenv(logs.LEVEL, "info")
    yield
    logs.logger.handlers[:], logs.logger.filters[:], logs.logger.propagate = [], [], True
    logs.logger.setLevel(logging.NOTSET)
