"""Configuration: settings, what a TOML file may say, and names of methods and datasets. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily

if TYPE_CHECKING:
    from bpfed.config.reader import Config, read

__all__ = ["Config", "read"]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "bpfed.config.reader"))
