"""How hard the pages are to read: words a sentence and the grade of Flesch and Kincaid, of prose alone.

    python docs/readability.py

It reports on the README, tutorials and how-to pages and fails nothing. The aim is a grade of 11 and 22 words a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GRADE, WORDS = 11.0, 22.0
PAGES = ("README.md", "docs/index.md", "docs/tutorials/*.md", "docs/how-to/*.md")


def sentences(page: str) -> list[str]:
    """The sentences of a page's paragraphs and lists, without code, tables, headings and directives."""
    page = re.sub(r"^(```|:::|~~~).*?^\1\s*$", "\n\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    found: list[str] = []
    for block in _blocks(page):
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", block)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"`[^`]*`", "code", text)
        text = re.sub(r"[*_]", "", text)
        parts = re.split(r"(?<=[.!?])\)?\s+(?=[\"'(]?[A-Z0-9])", text)
        found += [part for part in parts if re.search(r"[A-Za-z]{2}", part)]
    return found


def _blocks(page: str) -> Iterator[str]:
    """Paragraphs and list items, each as one line."""
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        starts = re.match(r"\s*([-*]|\d+\.) ", line)
        ends = not line.strip() or line.startswith(("#", "|", "    ", "<", "\t"))
        if (ends or starts) and block:
            yield " ".join(block)
            block = []
        if not ends or (starts and line.strip()):
            block.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def syllables(word: str) -> int:
    """The syllables of an English word, by its groups of vowels."""
    word = re.sub(r"[^a-z]", "", word.lower())
    groups = len(re.findall(r"[aeiouy]+", re.sub(r"(?<=[^aeiouyl])e$|(?<=[^aeiouytd])ed$", "", word)))
    return max(1, groups)


def measure(page: str) -> tuple[int, float, float]:
    """Sentences, words a sentence, and grade of a page's prose."""
    said = sentences(page)
    words = [word for sentence in said for word in re.findall(r"[A-Za-z][A-Za-z'’-]*|\d[\d.,]*", sentence)]
    if not said or not words:
        return 0, 0.0, 0.0
    length = len(words) / len(said)
    return len(said), length, 0.39 * length + 11.8 * sum(map(syllables, words)) / len(words) - 15.59


def main() -> None:
    print(f"{'page':<42}{'sentences':>10}{'words each':>12}{'grade':>7}")
    over = 0
    for path in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        count, length, grade = measure(path.read_text(encoding="utf-8"))
        hard = grade > GRADE or length > WORDS
        over += hard
        mark = "  hard to read" if hard else ""
        print(f"{path.relative_to(ROOT)!s:<42}{count:>10}{length:>12.1f}{grade:>7.1f}{mark}")
    print(f"{over} of these pages are above grade {GRADE:g} or {WORDS:g} words a sentence.")


if __name__ == "__main__":
    main()
