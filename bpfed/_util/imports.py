"""Imports: names that are imported when first asked for, and modules whose import is not interrupted."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package, which imports a name when it is first asked for.

    Args:
        package: The package.
        homes: The module that each name is in, or is. No name may be that of a module of the package that it is not.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        found = import_module(homes[name])
        return found if homes[name] == f"{package}.{name}" else getattr(found, name)

    return find


# --- Ctrl-C while torch is imported: its libraries would abort the process, so it waits until they are there -----------


@contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block; where it does something else than to interrupt, nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            raise KeyboardInterrupt


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside of the block, and leave what it has imported out of later collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class Whole(Loader):
    """Loads a module as another loader does, without an interruption by Ctrl-C or by the garbage collector."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with deferred(), uncollected():
            self.loader.exec_module(module)


class Finder(MetaPathFinder):
    """Finds one module, by name, to be loaded by `Whole`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.name else None
        if spec is not None and spec.loader is not None:
            spec.loader = Whole(spec.loader)
        return spec


@contextmanager
def imported_whole(name: str = "torch") -> Iterator[None]:
    """Inside of the block, a module that is imported is imported whole, whoever presses Ctrl-C."""
    finder = Finder(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
