"""``bpfed paper`` where the experiments are not at hand."""

from __future__ import annotations

import pytest
from command import Command

from bpfed.cli import methods as paper


def test_it_says_where_the_experiments_are(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    assert (
        "in a checkout of the repository run 'python -m experiments"
        in command("paper", "table1", "--seeds", "1").sentence
    )
