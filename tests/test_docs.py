"""The pages: their Python runs, their commands and flags exist, they are short enough, and the API is all there."""

from __future__ import annotations

import json
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
from experiments.__main__ import ALONE, overview
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


def test_the_readme_of_experiments_has_every_study_with_its_records_and_page() -> None:
    told = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in told.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    command = typer.main.get_command(paper)
    assert isinstance(command, click.Group)
    assert named == {*ALONE, *command.commands}
    assert all(name in overview() for name in ALONE)
    for row in rows:
        records = re.findall(r"`([^`]+)`", row.split("|")[4])
        assert [one for one in records if not (ROOT / "results" / one).exists()] == ["small-cells/"] * (
            "no records" in row
        )
    for link in re.findall(r"\]\(([^)#]+)", told):
        assert (ROOT / "experiments" / link).is_file(), link


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


def test_figures_of_the_results_have_a_record_and_a_version() -> None:
    """Tables stand between the marks of `bpfed paper render`, or their page names the file that they are from."""
    wrong = []
    for page in (ROOT / "README.md", *sorted((DOCS / "results").glob("*.md"))):
        text = page.read_text()
        own = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
        figures = [line for line in own.splitlines() if line.startswith("|") and re.search(r"\d\.\d\d|\d %", line)]
        named = re.findall(r"`(benchmarks/results/[\w-]+\.json)`", own)
        wrong += [f"{page.name}: {line[:60]}" for line in figures if not named]
        wrong += [f"{page.name}: there is no {name}" for name in named if not (ROOT / name).is_file()]
        if own != text and not re.search(r"version|0\.\d+\.\d", text, re.IGNORECASE):
            wrong.append(f"{page.name} names no version")
    assert not wrong, "\n".join(wrong)


def test_tables_of_speeds_are_those_of_their_records() -> None:
    def read(name: str) -> Any:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    cpu, gpu, league, large = (read(name) for name in ("cpu", "gpu", "league", "large-gpu"))
    steps = cpu["client-steps per second"]
    shown = [
        f"| {steps[name]:.0f} | {ratio:.1f} x |"
        for name, ratio in (
            ("plain Bayesian loop", steps["bpfed, BPFed, compiled"] / steps["plain Bayesian loop"]),
            ("plain deterministic loop", steps["bpfed, BPFed, compiled"] / steps["plain deterministic loop"]),
            ("bpfed, BPFed, traced only", steps["bpfed, BPFed, compiled"] / steps["bpfed, BPFed, traced only"]),
        )
    ]
    mlp, lenet = gpu["MLP 784-100-10, 10 clients"], gpu["LeNet, CIFAR-10, 10 clients"]
    shown.append(
        f"| {mlp['µs per step']} | {gpu['MLP 784-100-10, 100 clients']['µs per step']:.0f} | {mlp['µs at copy bandwidth']} |"
    )
    shown.append(f"| {lenet['µs per step']:.0f} | 1 410 | {lenet['µs at copy bandwidth']} |")
    for name in ("fedavg", "bpfed", "bpfed-recipe"):
        on, off = league[f"{name}, kernels on"], league[f"{name}, kernels off"]
        shown.append(f"| {on['seconds per round']:.3f} | {off['seconds per round']:.3f} | {on['first round']:.0f} s |")
    shown.append(f"| {large['rows']['plain deterministic loop']['ms per step']:.1f} | – |")
    page = (DOCS / "results" / "benchmarks.md").read_text()
    assert [row for row in shown if row not in page] == []
    for one in ("cpu", "gpu", "league", "large-gpu", "scale"):
        assert re.search(rf"{one}\.json`, version {re.escape(read(one)['bpfed'])}\.", page), one
    moments = read("moments")["bpfed-recipe"]["MLP, 10 clients"]["agreement"]
    assert (
        f"{moments['mean |p - p of 400 draws|']:.4f} ({moments['the same for 50 other draws']:.4f})"
        in (DOCS / "results" / "prediction.md").read_text()
    )
    adapted = [f"{100 * one['accuracy']:.1f}" for one in read("novel")["adapted"][1:]]
    assert f"| accuracy %, adapted | {' | '.join(adapted)} |" in (DOCS / "results" / "newcomers.md").read_text()
