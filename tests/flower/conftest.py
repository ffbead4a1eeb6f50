"""For all tests of deployments."""

import pytest
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed.engine.stepper import Stepper


@pytest.fixture(autouse=True, scope="module")
def untraced():
    """Steps as they are written: a graph of them pays off after many steps, and these federations take a few."""

    def trace(self, function, *example):
        spec = tree_flatten(example)[1]
        return lambda *leaves: function(*tree_unflatten(list(leaves), spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "trace", trace)
        yield
