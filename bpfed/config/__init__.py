"""Configuration: settings, what a TOML file may say, and names of methods and datasets. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed.config.reader import Config, read

__all__ = ["Config", "read"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from bpfed.config import reader

        return getattr(reader, name)
    raise AttributeError(f"module 'bpfed.config' has no attribute '{name}'")
