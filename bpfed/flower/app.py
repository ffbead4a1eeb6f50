"""The app that is handed to Flower: two lines that import the installed `bpfed`, so that no other code travels.

Flower sends the app of a run, as a bundle, to whoever takes part in it. Ours is the same to the last byte wherever it is
made, so it can be told from any other. Even of ours nothing is executed: see `bpfed.flower.launch`.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import cache

PACKAGE = "bpfed_deployment"
PROJECT = f"""\
[project]
name = "bpfed-deployment"
version = "1.0.0"
description = "Runs the installed bpfed as server and sites of a federation."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41.0"]

[tool.flwr.app]
publisher = "bpfed"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
"""
#: The app's files.
FILES = {
    "pyproject.toml": PROJECT,
    "LICENSE": "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0\n",
    f"{PACKAGE}/__init__.py": '"""See bpfed.flower."""\n',
    f"{PACKAGE}/client_app.py": 'from bpfed.flower.client_app import app\n\n__all__ = ["app"]\n',
    f"{PACKAGE}/server_app.py": 'from bpfed.flower.server_app import app\n\n__all__ = ["app"]\n',
}
#: Flower's list of a bundle's files.
CONTENT = ".info/CONTENT"


@cache
def bundle() -> bytes:
    """The app as Flower's bundle (FAB); it depends on nothing but the files above."""
    listed = "\n".join(
        f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text.encode())}" for name, text in FILES.items()
    )
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in {**FILES, CONTENT: listed}.items():
            entry = zipfile.ZipInfo(name)  # stored, and dated 1980
            entry.create_system = 3  # else the system's own
            archive.writestr(entry, text)
    return made.getvalue()


def fingerprint(content: bytes) -> str:
    """What Flower knows a bundle by."""
    return hashlib.sha256(content).hexdigest()


def is_ours(content: bytes) -> bool:
    """Whether a bundle is the one of this version of bpfed."""
    return content == bundle()
