"""The pages: their Python runs, their commands and flags exist, they are short enough, and the API is all there."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import bpfed
from bpfed.cli import app
from experiments.cli import app as paper

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
#: Pages whose Python is run. Sizes are made tiny: what is tested is that it runs.
RUN = (ROOT / "README.md", *sorted((DOCS / "tutorials").glob("*.md")))
TINY = {
    r"rounds=\d+": "rounds=1, epochs=1, eval_draws=2, baselines='off'",
    r"seeds=\d+": "seeds=1",
    r"range\(600\)": "range(60)",
}
#: Pages that describe earlier versions, or that are made.
PAST = ("lab", "generated")


def pages() -> list[Path]:
    written = [page for page in DOCS.rglob("*.md") if not set(PAST) & set(page.parts)]
    return [ROOT / "README.md", *sorted(written)]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"(<!-- not run: .+ -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL)
    code = "\n".join(block for skipped, block in blocks if not skipped)
    if not code:
        pytest.skip("has no Python")
    if "from peft" in code:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    for pattern, small in TINY.items():
        code = re.sub(pattern, small, code)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": page.stem}
    exec(compile(code, page.name, "exec", dont_inherit=True), found)


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child, below in command.commands.items():
            yield from _commands(below, f"{name} {child}")
    yield name, command


def test_commands_and_flags_of_the_pages_exist() -> None:
    known = dict(_commands(typer.main.get_command(app), "bpfed"))
    known |= dict(_commands(typer.main.get_command(paper), "bpfed paper"))
    wrong = []
    for page in pages():
        shown = re.findall(r"^(?:\$ |    )(bpfed [a-z].*)$", page.read_text(), re.MULTILINE)
        for line in shown:
            words = shlex.split(line.partition("  ")[0], comments=True)
            name = max((n for n in known if words[: len(n.split())] == n.split()), key=len)
            flags = {flag for option in known[name].params for flag in (*option.opts, *option.secondary_opts)}
            unknown = [w for w in words if w.startswith("--") and w.partition("=")[0] not in flags | {"--help"}]
            if name == "bpfed" or unknown:
                wrong.append(f"{page.relative_to(ROOT)}: {line} ({unknown})")
    assert not wrong, "\n".join(wrong)


def test_pages_are_short() -> None:
    assert {page.name: n for page in pages() if (n := len(page.read_text().splitlines())) > 300} == {}


def test_every_public_name_is_in_the_reference() -> None:
    from generate import API, _method_classes, public

    shown = {name.rpartition(".")[2] for _, _, names in API.values() for name in public(names)} | set(_method_classes())
    modules = {"callbacks", "config", "data", "methods", "__version__"}
    for module in (bpfed, bpfed.data, bpfed.methods, bpfed.callbacks):
        assert set(module.__all__) - shown - modules == set(), module.__name__


def test_prose_is_measured_without_code_and_tables() -> None:
    from readability import measure, sentences

    page = "# Title\n\nOne `a b c` two. Three four.\n\n| a | b |\n|---|---|\n\n```python\nx = 1\n```\n\n- A point\n- Another\n"
    assert sentences(page) == ["One code two.", "Three four.", "A point", "Another"]
    count, length, _ = measure(page)
    assert (count, length) == (4, 2.0)
    assert measure("A cat sat. It ran.")[2] < measure("Institutional considerations necessitate deliberation.")[2]
