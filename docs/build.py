"""Build the documentation into site/: every page of docs/ and an API page made of the docstrings.

Fails if a public name has no docstring or a page links to a file that is not there.
"""

from __future__ import annotations

import html
import importlib
import inspect
import pkgutil
import re
import sys
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
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    names = {p: "index" if p.name == "README.md" else p.stem for p in pages}
    menu = "".join(f'<a href="{n}.html">{n}</a>' for n in [*names.values(), "api"])
    SITE.mkdir(exist_ok=True)
    markdown = MarkdownIt("commonmark").enable("table")
    for page, name in names.items():
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (page.parent / target).exists():
                problems.append(f"{page.relative_to(ROOT)} links to '{target}', which is not there")
        body = re.sub(
            r'href="(?:\.\./|docs/)?(\w[\w-]*)\.md', lambda m: f'href="{_page(m[1])}.html', markdown.render(text)
        )
        (SITE / f"{name}.html").write_text(_html(name, menu, body))
    (SITE / "api.html").write_text(_html("api", menu, _api(problems)))
    if problems:
        sys.exit("\n".join(problems))
    print(f"site/index.html and {len(names)} more pages")


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
