"""Build the documentation into site/: every page of docs/ and an API page made of the docstrings.

Fails if a public name has no docstring, or a page links to a file or a heading that is not there.
"""

from __future__ import annotations

import html
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt

import bpfed

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
STYLE = (
    "body{font:16px/1.55 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "pre,code{font:14px ui-monospace,monospace}pre{overflow:auto;padding:.7rem;border:1px solid #8884}"
    "table{border-collapse:collapse}td,th{border:1px solid #8884;padding:.25rem .6rem;text-align:left}img{max-width:100%}"
    "nav a{margin-right:1rem}"
)


def main() -> None:
    problems: list[str] = []
    pages = {p: p.read_text() for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))}
    menu = "".join(f'<a href="{n}.html">{n}</a>' for n in [*(_page(p.stem) for p in pages), "api"])
    SITE.mkdir(exist_ok=True)
    markdown = MarkdownIt("commonmark").enable("table")
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if ":" not in target and (problem := _broken(page, target, pages)):
                problems.append(f"{page.relative_to(ROOT)} links to '{target}', {problem}")
        body = re.sub(r"<h([23])>(.*?)</h\1>", _with_id, markdown.render(text))
        body = re.sub(r'(href|src)="(?:\.\./|docs/|lab/)+', r'\1="', body)
        body = re.sub(r'href="(\w[\w-]*)\.md', lambda m: f'href="{_page(m[1])}.html', body)
        (SITE / f"{_page(page.stem)}.html").write_text(_html(_page(page.stem), menu, body))
    for picture in (*(ROOT / "docs").glob("*.png"), *(ROOT / "docs" / "figures").iterdir()):
        copy = SITE / picture.relative_to(ROOT / "docs")
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, copy)
    (SITE / "api.html").write_text(_html("api", menu, _api(problems)))
    if problems:
        sys.exit("\n".join(problems))
    print(f"site/index.html and {len(pages)} more pages")


def _broken(page: Path, target: str, pages: Mapping[Path, str]) -> str | None:
    """What is wrong with a link of a page to a file, a heading, or a heading of another page; None: nothing."""
    name, _, anchor = target.partition("#")
    there = (page.parent / name).resolve() if name else page
    if not there.exists():
        return "which is not there"
    if anchor and anchor not in {_slug(h) for h in re.findall(r"^##+ (.+)$", pages.get(there, ""), re.MULTILINE)}:
        return "which has no such heading"
    return None


def _slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]+>", "", heading).lower()).strip().replace(" ", "-")


def _with_id(heading: re.Match[str]) -> str:
    return f'<h{heading[1]} id="{_slug(html.unescape(heading[2]))}">{heading[2]}</h{heading[1]}>'


def _page(stem: str) -> str:
    return "index" if stem == "README" else stem


def _html(title: str, menu: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>bpfed: {title}</title><style>{STYLE}</style><nav>{menu}</nav>{body}</html>\n"
    )


def _api(problems: list[str]) -> str:
    parts = ["<h1>API</h1>"]
    for info in pkgutil.walk_packages(bpfed.__path__, "bpfed."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # GPU kernels; not installed with a CPU build of torch
                raise
            continue
        if not module.__doc__:
            problems.append(f"{info.name} has no docstring")
        parts.append(f"<h2>{info.name}</h2><p>{html.escape(inspect.getdoc(module) or '')}</p>")
        for name, value in _public(module):
            if not inspect.getdoc(value):
                problems.append(f"{info.name}.{name} has no docstring")
            signature = html.escape(f"{name}{_signature(value)}")
            parts.append(f"<h3><code>{signature}</code></h3><pre>{html.escape(inspect.getdoc(value) or '')}</pre>")
    return "\n".join(parts)


def _public(module: ModuleType) -> list[tuple[str, object]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


if __name__ == "__main__":
    main()
