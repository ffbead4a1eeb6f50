"""Results and texts are those recorded in ``golden.json``; after an intended change run ``python -m tests.golden.record``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

spec = importlib.util.spec_from_file_location("golden_record", Path(__file__).parent / "record.py")
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)

GOLDEN = json.loads(record.GOLDEN.read_text())


def close(new: Any, old: Any, where: str) -> None:
    """Fail at the first entry of two records that differs by more than rounding."""
    if isinstance(old, dict):
        assert new.keys() == old.keys(), where
        for key in old:
            close(new[key], old[key], f"{where} {key}")
    elif isinstance(old, list):
        assert len(new) == len(old), where
        for at, (one, other) in enumerate(zip(new, old, strict=True)):
            close(one, other, f"{where} [{at}]")
    elif isinstance(old, float):
        assert new == pytest.approx(old, rel=1e-4, abs=1e-5), where
    else:
        assert new == old, where


def test_every_case_is_recorded() -> None:
    assert [*GOLDEN["numbers"]] == [*record.CASES]
    assert {key.partition(": ")[0] for key in GOLDEN["texts"]} == {*record.TEXTS}


@pytest.mark.parametrize("name", record.CASES)
def test_numbers(name: str) -> None:
    close(record.summed(record.numbers(name)), GOLDEN["numbers"][name], name)


@pytest.mark.parametrize("name", record.TEXTS)
def test_texts(name: str) -> None:
    now = {f"{name}: {of}": text for of, text in record.texts(name).items()}
    before = {key: text for key, text in GOLDEN["texts"].items() if key.startswith(f"{name}: ")}
    assert now.keys() == before.keys()
    for key, text in before.items():
        assert now[key] == text, key
