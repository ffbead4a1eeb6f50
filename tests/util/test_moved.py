"""Old names of modules that the documentation mentioned can still be imported, and say the new one."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from bpfed._util.moved import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_is_the_new_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(FutureWarning, match=f"{name} is now {MOVED[name]}"):
        old = import_module(name)
    new = import_module(MOVED[name])
    public = [n for n in vars(new) if not n.startswith("_")]
    assert all(getattr(old, n) is getattr(new, n) for n in public)


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("bpfed.nowhere")
