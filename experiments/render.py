"""``bpfed paper render``: tables and figures from the files of results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bpfed._util.errors import UserError
from bpfed._util.files import write_whole
from experiments import markdown, typeset
from experiments.records import read
from experiments.results import Results

PAGES, README = "results", "README.md"
FIGURES = "figures"


def render(results: Path, docs: Path, say: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """Write the pages of ``DOCS/results/`` and ``DOCS/figures/`` from what is there; the same results give the same files.

    Of an existing page only what stands between markers is written again. Where there is no page, one is made.

    Args:
        results: Folder of results.
        docs: Folder of the pages.
        say: Called with each file as it is written.

    Returns:
        What was written.
    """
    found = Results.read(results)
    pages = read_pages(docs)
    markdown.fill(pages, found, {})  # a page without a place is better known before the figures are drawn
    others = tables(found, results, docs)
    written, pictures = _draw(found, docs / FIGURES, say)
    for path, filled in {**markdown.fill(pages, found, pictures), **others}.items():
        write_whole(path, filled)
        say(path)
        written.append(path)
    return written


def read_pages(docs: Path) -> dict[Path, str]:
    """The pages of results by their paths; one that has a place for every part where there is none."""
    there = sorted((docs / PAGES).glob("*.md"))
    return {page: _text(page) for page in there} if there else {docs / PAGES / "index.md": markdown.blank()}


def tables(found: Results, results: Path, docs: Path) -> dict[Path, str]:
    """README and pages beside those of the parts with their tables, where they have a place for them."""
    from experiments import (
        audit,
        cifar100_features,
        dirichlet,
        headline,
        honest_sets,
        many_classes,
        recipe,
        search,
        tweets,
    )
    from experiments import tables as own_tables

    readme, cells = docs.resolve().parent / README, results / "paper"
    parts: tuple[tuple[Path, str, Path, Callable[[], str]], ...] = (
        (readme, headline.README_PART, cells, lambda: headline.readme(found, results)),
        (readme, "tables", results / "tables", lambda: own_tables.readme(results / "tables")),
        (docs / PAGES / "headline.md", headline.README_PART, cells, lambda: headline.readme(found, results)),
        (docs / PAGES / "tables.md", "tables", results / "tables", lambda: own_tables.render(results / "tables")),
        (
            docs / PAGES / "dirichlet.md",
            "dirichlet",
            results / "dirichlet",
            lambda: dirichlet.render(results / "dirichlet", None),
        ),
        (
            docs / PAGES / "cifar100-features.md",
            "cifar100-features",
            results / "cifar100-features",
            lambda: cifar100_features.render(results / "cifar100-features"),
        ),
        (
            docs / PAGES / "many-classes.md",
            "many-classes",
            results / "many-classes",
            lambda: many_classes.render(results / "many-classes", "large"),
        ),
        (docs / PAGES / "tweets.md", "tweets", results / "tweets", lambda: tweets.render(results / "tweets")),
        (
            docs / PAGES / "honest-sets.md",
            "honest-sets",
            results / "honest-sets",
            lambda: honest_sets.render(results / "honest-sets"),
        ),
        *(
            (docs / PAGES / f"{page}.md", page, file, partial(headline.comparison, file))
            for page, name in headline.COMPARISONS.items()
            if (file := results / "other" / f"{name}.json")
        ),
        (docs / PAGES / "headline.md", headline.PART, cells, lambda: headline.markdown(found)),
        *(
            (docs / "lab" / "recipe-details.md", part, cells, partial(made, found))
            for part, made in recipe.PARTS.items()
        ),
        (docs / "lab" / "recipe-search.md", "search", results / "search", lambda: search.markdown(results)),
        (
            docs / "explanation" / "audit.md",
            "audit",
            results / audit.FILE,
            lambda: audit.markdown(read(results / audit.FILE)),
        ),
    )
    filled: dict[Path, str] = {}
    for page, part, source, table in parts:
        if page.exists() and source.exists() and typeset.opens(part) in (text := filled.get(page) or _text(page)):
            filled[page] = typeset.placed(text, part, table() or typeset.NOTHING)
    return filled


def _draw(found: Results, folder: Path, say: Callable[[Path], None]) -> tuple[list[Path], dict[str, list[str]]]:
    """Every figure there are results for; what was written, and for each part the Markdown of its figures."""
    from experiments import panel
    from experiments.figures import PICTURES

    written: list[Path] = []
    pictures: dict[str, list[str]] = {}
    with panel.style():
        for picture in PICTURES:
            figure = picture.draw(found)
            if figure is None:
                continue
            for path in panel.save(figure, folder, picture.name):
                written.append(path)
                say(path)
            pictures.setdefault(picture.part, []).append(
                typeset.picture(picture.name, picture.caption, f"../{FIGURES}")
            )
    return written, pictures


def _text(page: Path) -> str:
    try:
        return page.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{page}' cannot be read ({error}); move it away to have a new one written.") from None
