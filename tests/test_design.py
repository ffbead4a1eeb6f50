"""The map of the modules in ``docs/explanation/design.md``: nothing is missing, and nothing is named that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bpfed"


def mapped() -> set[str]:
    """Modules and packages that the page's tables name, as ``engine/plan.py`` and ``data/``.

    In a row a bare name is in the folder of the first one.
    """
    page = (
        (ROOT / "docs" / "explanation" / "design.md")
        .read_text()
        .partition("## Map of the modules")[2]
        .partition("\n## ")[0]
    )
    found = set()
    for row in page.splitlines():
        names = re.findall(r"`([\w/]+(?:\.py|/))`", row) if row.startswith("|") else []
        folder = names[0].rpartition("/")[0] if names and names[0].endswith(".py") else ""
        found |= {f"{folder}/{name}" if folder and "/" not in name else name for name in names}
    return found


def test_every_module_is_on_the_map() -> None:
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    named = mapped()
    assert {m for m in modules if m not in named and f"{m.rpartition('/')[0]}/" not in named} == set()


def test_everything_on_the_map_is_there() -> None:
    assert {name for name in mapped() if not (PACKAGE / name).exists()} == set()


def test_where_to_look_for_a_change_is_true_of_the_code() -> None:
    page = (
        (ROOT / "docs" / "explanation" / "design.md")
        .read_text()
        .partition("## Where to look for a change")[2]
        .partition("\n## ")[0]
    )
    rows = [row for row in page.splitlines() if row.startswith("| ") and "If you want" not in row]
    assert len(rows) == 10
    for row in rows:
        files = re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", row)
        assert 1 <= len(files) <= 4, row
        for path, names in files:
            code = (PACKAGE / path).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{name}\b", code), f"{path} has no {name}"
