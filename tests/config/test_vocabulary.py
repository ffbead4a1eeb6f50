"""Words that were renamed are not used any more, but where old names are listed."""

from __future__ import annotations

import re
from pathlib import Path

from bpfed.config.migrations import FORMER, RENAMED

ROOT = Path(__file__).parents[2]
#: Where old names are listed, or were the names of what is described.
LISTED = ("bpfed/config/migrations.py", "CHANGELOG.md")
#: Words that have no other meaning, anywhere; then as names in code, and as code in prose.
WORDS = re.compile(
    r"softness|soften|rehears|\bhyper(_in)?\b(?!-)|rows_of_numbers|lookalike|\bentrants?\b|\bEntrants?\b|common_stretch"
    r"|\bfactors\.(names|shared|total|split|unflatten)",
    re.IGNORECASE,
)
CODE = re.compile(
    r"\bmodel\.(factors|levels)\b|\bnumbers: ClassVar|\bdef (structure|course|mistaken|suspects|hints|verbatim)\b"
    r"|\b(SUREST|SOFTEST|GridPost|OwnNetwork|_Sitting)\b|\b(Factors|Blanks|Separators|Keeper|Rehearsal|Meeting|Guard|Preparation|Ask|Answer|Refused|Course)\(|\bcourse\b|\bcrowd\b"
    r"|\bwarmer\b|\bholders\b|\bfacts=|\b(facts|preparation):|\.(facts|preparation|levels)\b",
)
IN_METHODS = ("numbers", "hyper", "hyper_in", "rows_of_numbers", "structure", "counting")
TICKED = re.compile(rf"`(method\.)?({'|'.join((*FORMER, *RENAMED, *IN_METHODS))})`")


def files() -> list[Path]:
    """The package, the documentation and what is read first."""
    found = [*ROOT.glob("bpfed/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    return [path for path in found if str(path.relative_to(ROOT)) not in LISTED]


def test_old_words_are_listed_and_used_nowhere_else() -> None:
    found = []
    for path in files():
        rules = (WORDS, CODE) if path.suffix == ".py" else (WORDS, TICKED)
        rules += (TICKED,) if path.parent.name == "methods" else ()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for rule in rules for m in rule.finditer(line)]
    assert not found, "\n".join(found)


def test_every_old_setting_has_a_new_name_that_exists() -> None:
    from bpfed.config.schema import fields_of
    from bpfed.config.settings import Settings

    known = fields_of(Settings).keys()
    assert set(RENAMED.values()) <= known
    assert not RENAMED.keys() & known
