"""The app that is handed to Flower: three lines that import the installed `bpfed`, so that no other code travels."""

from __future__ import annotations

from pathlib import Path

from bpfed import __version__
from bpfed.files import write_whole

PROJECT = """\
[project]
name = "bpfed-deployment"
version = "{version}"
description = "Runs the installed bpfed as server and sites of a federation."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41.0"]

[tool.flwr.app]
publisher = "bpfed"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "bpfed_deployment.server_app:app"
clientapp = "bpfed_deployment.client_app:app"

[tool.flwr.app.config]
"""


def write_app(folder: Path) -> Path:
    """Write the app's folder, and give it back."""
    write_whole(folder / "pyproject.toml", PROJECT.format(version=__version__))
    write_whole(folder / "LICENSE", "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0\n")
    package = folder / "bpfed_deployment"
    write_whole(package / "__init__.py", '"""See bpfed.flower."""\n')
    for side in ("server", "client"):
        write_whole(package / f"{side}_app.py", f'from bpfed.flower.{side}_app import app\n\n__all__ = ["app"]\n')
    return folder
