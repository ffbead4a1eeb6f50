"""What the commands print: words of strangers are shown, and never obeyed by the terminal."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from bpfed._util.console import Console
from bpfed._util.files import from_toml, to_toml

HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x7fd\u202ee\u2066f\u2028g\x00h"


@pytest.mark.parametrize("kind", [str, Text])
def test_signs_that_a_terminal_obeys_are_question_marks(kind: type[str] | type[Text]) -> None:
    table = Table("column")
    table.add_row(kind(HOSTILE))
    for what in (kind(HOSTILE), table):
        file = io.StringIO()
        Console(file=file, width=100).print(what, style="red", soft_wrap=True)
        shown = file.getvalue()
        assert "a?]0;title" in shown
        assert shown.replace("\n", "").isprintable()
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard", width=100).print("é 1\u202f2 😀", style="red")
    assert file.getvalue() == "\x1b[31mé 1\u202f2 😀\x1b[0m\n"


def test_toml_gives_any_words_back() -> None:
    words = "".join(map(chr, range(0x100))) + '"""\n[run]\n\u202e😀'
    assert from_toml(to_toml({"data": {"name": words, "list": [words]}})) == {"data": {"name": words, "list": [words]}}
