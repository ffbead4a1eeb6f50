"""Numbers, tables and figures as Markdown, and their place on a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from bpfed._util.errors import UserError
from bpfed.metrics.registry import BEST_IS_HIGH

#: What stands where there is no number.
NOTHING = "–"
#: Of a measure: whether it is shown in per cent, and its decimals.
MEASURES = {
    "accuracy": (True, 2),
    "nll": (False, 3),
    "brier": (False, 3),
    "ece": (True, 2),
    "mce": (True, 1),
    "auroc": (True, 1),
    "hellinger": (False, 4),
}


def opens(name: str) -> str:
    """The marker before a part of a page."""
    return f"<!-- {name} -->"


def placed(page: str, name: str, text: str) -> str:
    """A page with the text of one part in its place.

    Raises:
        UserError: The part has no place on the page, or more than one.
    """
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise UserError(
            f"A page has no place for '{name}', or more than one; write <!-- {name} --> and <!-- /{name} --> on two "
            "lines where it belongs."
        )
    return place.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "|".join(line) + "|" for line in lines
    )


def figures(value: float, measure: str, sd: float = math.nan) -> str:
    """A number as the tables show it: ``94.60 ± 0.36`` of a fraction in per cent; a dash if there is none."""
    if not math.isfinite(value):
        return NOTHING
    per_cent, digits = MEASURES[measure]
    factor = 100 if per_cent else 1
    return f"{factor * value:.{digits}f}" + (f" ± {factor * sd:.{digits}f}" if math.isfinite(sd) else "")


def strong(values: Sequence[float], texts: Sequence[str], measure: str) -> list[str]:
    """The texts, with the best number bold; so are all that look the same."""
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return list(texts)
    first = (max if measure in BEST_IS_HIGH else min)(finite, key=values.__getitem__)
    best = texts[first].split(" ")[0]
    return [f"**{best}**" + t.removeprefix(best) if t.split(" ")[0] == best else t for t in texts]


def picture(name: str, caption: str, folder: str = "figures") -> str:
    """A figure in Markdown: the PNG, and under it its caption with a link to the SVG."""
    return f"![{caption}]({folder}/{name}.png)\n\n{caption} ([SVG]({folder}/{name}.svg))"


def signed(value: float, digits: int) -> str:
    """A number with its sign; a dash if there is none."""
    return f"{value:+.{digits}f}".replace("-", "−") if math.isfinite(value) else NOTHING


def interval(value: float, half: float, digits: int) -> str:
    """A difference with half the width of its interval, where there is one."""
    return signed(value, digits) + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def unit(measure: str) -> str:
    """A measure's name as a column's head."""
    word = {"accuracy": "accuracy", "brier": "Brier", "hellinger": "error"}.get(measure, measure.upper())
    return f"{word} %" if MEASURES[measure][0] else word
