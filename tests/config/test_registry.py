"""Names are known before what they name is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bpfed.aggregation.rules import RULES
from bpfed.config import registry
from bpfed.config.reader import METHOD, TABLES
from bpfed.data.datasets import names as loaded
from bpfed.data.partition import KINDS
from bpfed.data.tabular.table import TableFormat
from bpfed.methods import METHODS, Recipe


def test_they_are_those_that_exist() -> None:
    assert {kind.name: kind for kind in METHODS.values()} == METHODS
    assert loaded() == registry.DATASETS.own
    assert Recipe.name == METHOD
    assert set(registry.MODELS.values()) <= set(METHODS)
    assert tuple(f".{name}" for name in registry.FORMATS.own) == TABLES
    assert all(isinstance(registry.FORMATS.load_own(name), TableFormat) for name in registry.FORMATS.own)
    assert tuple(KINDS) == registry.PARTITIONS.own
    assert tuple(RULES) == registry.RULES.own


@pytest.mark.parametrize(
    "arguments",
    [
        "run --data digitz",
        "run --method bpfd",
        "run --model lineer",
        "run --model linear --method fedavg",
        "run --rounds many",
        "run --set run.seed=x",
        "run --set rounds",
        "compare --methods all,bpfd",
        "compare --methods fedpr+laplace",
        "compare --data digitz",
        "data inspect digitz",
        "data fetch digitz",
        "data export digitz out",
        "methods bpfd",
        "deploy init a --method bpfd",
        "deploy demo --data digitz",
    ],
)
def test_a_misspelt_one_is_refused_before_torch_is_imported(arguments: str) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'flwr'))\n"
        "from bpfed.cli import main\n"
        "main(sys.argv[1].split())"
    )
    done = subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("bpfed: ")
    assert done.stderr.count("\n") == 1
