"""For all tests of deployments."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick(untraced: None) -> None:
    """Steps as they are written: a graph of them pays off after many steps, and these federations take a few."""
