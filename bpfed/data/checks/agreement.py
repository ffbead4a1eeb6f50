"""Agreement: columns whose units, codes or names differ between clients, with what would make them the same."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bpfed._util.errors import quoted
from bpfed._util.text import spelling
from bpfed.data.checks import Finding, file_of
from bpfed.data.checks.spelling import alike_words, letters
from bpfed.data.tabular.statistics import MOST_CODES, whole_numbers
from bpfed.data.tabular.table import UNKNOWN, Categorical, Column, Table

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor

#: Values of a column that a client must have for its unit to be compared, and values that are looked at.
ENOUGH, SAMPLED = 10, 20_000
#: Share of a client's values that must be above 0 for its unit to be compared by ratio.
POSITIVE = 0.9
#: By how many quartile ranges of the logarithms two clients must be apart: where the quantity is known by the column's
#: name, and where any factor may be meant; and the least such factor.
KNOWN_APART, ANY_APART, LEAST_FACTOR = 1.2, 2.0, 4.0
#: How far spreads may differ between clients that have the same unit, as a ratio.
SAME_SPREAD = 2.0
#: Categories up to which a column is taken for codes.
MOST_CATEGORIES = 20
#: Words up to which a column's spellings are compared.
MANY_CATEGORIES = 200


class Unit(NamedTuple):
    """Two units of a quantity: a value in ``low`` times ``factor``, plus ``offset``, is the value in ``high``.

    ``name`` is a pattern that the column's name has.
    """

    name: str
    low: str
    high: str
    factor: float
    offset: float = 0.0


# fmt: off
UNITS = (
    Unit(r"creat|krea", "mg/dL", "µmol/L", 88.4),
    Unit(r"gluc|glyc|zucker", "mmol/L", "mg/dL", 18.02),
    Unit(r"chol|ldl|hdl", "mmol/L", "mg/dL", 38.67),
    Unit(r"trigl", "mmol/L", "mg/dL", 88.57),
    Unit(r"bili", "mg/dL", "µmol/L", 17.1),
    Unit(r"urea|harnstoff", "mmol/L", "mg/dL", 6.006), Unit(r"bun", "mmol/L", "mg/dL", 2.801),
    Unit(r"uric|urate|harns", "mg/dL", "µmol/L", 59.48),
    Unit(r"calc|kalz", "mmol/L", "mg/dL", 4.008),
    Unit(r"h(a?e|ä)moglobin|\bhb\b|hgb", "g/dL", "g/L", 10.0), Unit(r"h(a?e|ä)moglobin|\bhb\b|hgb", "mmol/L", "g/dL", 1.611),
    Unit(r"a1c", "%", "mmol/mol", 10.93, -23.5),
    Unit(r"vit.*d|25.?oh", "ng/mL", "nmol/L", 2.496),
    Unit(r"temp|fever|fieber", "°C", "°F", 1.8, 32.0), Unit(r"temp", "°C", "K", 1.0, 273.15),
    Unit(r"weight|gewicht|mass|\bwt\b", "kg", "lb", 2.20462), Unit(r"weight|gewicht|mass|\bwt\b|dose", "kg", "g", 1000.0),
    Unit(r"height|length|size|gr(ö|oe)(ß|ss)e|waist|distance|width", "m", "cm", 100.0),
    Unit(r"height|length|size|gr(ö|oe)(ß|ss)e|waist|width", "in", "cm", 2.54),
    Unit(r"height|length|distance", "m", "ft", 3.28084),
    Unit(r"height|length|size|thick|diameter|width", "cm", "mm", 10.0),
    Unit(r"distance|speed", "miles", "km", 1.60934),
    Unit(r"pressure|druck|\b[sd]?bp\b", "kPa", "mmHg", 7.50062),
    Unit(r"energy|calor", "kcal", "kJ", 4.184),
    Unit(r"time|duration|dauer|hours|minutes", "h", "min", 60.0), Unit(r"time|duration|dauer|days|hours", "days", "h", 24.0),
    Unit(r"time|duration|stay|age|since|follow|days", "years", "days", 365.25), Unit(r"age|since|follow|month", "years", "months", 12.0),
    Unit(r"", "fractions", "percent", 100.0), Unit(r"", "thousands", "ones", 1000.0), Unit(r"", "tens", "ones", 10.0),
    Unit(r"", "millions", "ones", 1e6),
)
#: Words that mean the same, in groups of alternatives.
FAMILIES: tuple[tuple[frozenset[str], ...], ...] = tuple(tuple(frozenset(words.split()) for words in family) for family in (
    ("yes y ja j oui o si sí true t 1 wahr vrai positive positiv pos", "no n nein non false f 0 falsch faux negative negativ neg"),
    ("female f w weiblich frau woman femme féminin feminin mujer", "male m männlich maennlich mann man homme h masculin hombre"),
    ("left l links gauche", "right r rechts droite"),
    ("alive lebend living survived", "dead deceased died tot verstorben"),
))
# fmt: on


class _Spread(NamedTuple):
    """Median and quartile range of a client's numbers, and of their logarithms (NaN where some are not above 0)."""

    median: float
    range: float
    log_median: float
    log_range: float


def unit_findings(tables: Mapping[str, Table], columns: Iterable[str], gaps: Mapping[str, float]) -> list[Finding]:
    """Columns whose numbers at a client look like those of the others in another unit.

    Median and quartile range are compared with those of the clients that agree with most. ``gaps`` are numbers that seem
    to stand for missing values, by column.
    """
    found = []
    for name in columns:
        held = {client: table.columns[name] for client, table in tables.items() if name in table.columns}
        spreads = {
            client: spread
            for client, column in held.items()
            if not isinstance(column, Categorical) and (spread := _spread(column, gaps.get(name))) is not None
        }
        if len(spreads) < 2:
            continue
        usual = sorted(spreads, key=lambda client: spreads[client].median)[(len(spreads) - 1) // 2]
        alike = [s for s in spreads.values() if _conversion(name, s, spreads[usual]) is None]
        usual_spread = _Spread(*(float(np.median(values)) for values in zip(*alike, strict=True)))
        for client, spread in spreads.items():
            if (conversion := _conversion(name, spread, usual_spread)) is not None:
                found.append(_unit_finding(tables[client], client, name, conversion, spread, usual_spread))
    return found


class _Conversion(NamedTuple):
    """Which unit a client's values seem to be in (None: no known one), how to convert them, and the factor."""

    unit: tuple[str, str] | None
    steps: str
    factor: float


def _unit_finding(
    table: Table, client: str, name: str, conversion: _Conversion, here: _Spread, usual: _Spread
) -> Finding:
    medians = f"median {here.median:.3g}, elsewhere {usual.median:.3g}"
    entry = f"{name}@{client}:{conversion.steps}"
    if conversion.unit is None:
        times = f"{conversion.factor:.2g} times" if conversion.factor > 1 else f"1/{1 / conversion.factor:.2g} of"
        what = f"is {times} what it is elsewhere ({medians}), as if in another unit"
        return Finding(
            file_of(table, client), name, None, what, f"if so, use --convert '{entry}'", "convert", entry, False
        )
    mine, theirs = conversion.unit
    what = f"looks like {mine}, and elsewhere like {theirs} ({medians})"
    return Finding(file_of(table, client), name, None, what, f"use --convert '{entry}'", "convert", entry)


def _spread(column: np.ndarray, gap: float | None) -> _Spread | None:
    values = column[:: max(1, len(column) // SAMPLED)]
    values = values[~np.isnan(values) & (values != gap)]
    if len(values) < ENOUGH:
        return None
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    if high <= low:
        return None
    above = values[values > 0]
    logs = (math.nan,) * 3
    if len(above) >= POSITIVE * len(values):
        logs = tuple(np.quantile(np.log(above), (0.25, 0.5, 0.75)).tolist())
    return _Spread(float(median), float(high - low), logs[1], logs[2] - logs[0])


def _conversion(name: str, here: _Spread, usual: _Spread) -> _Conversion | None:
    """How the values of a client become those that are usual; None: they seem to be in the same unit."""
    text = re.sub(r"[_\W]+", " ", name).casefold()
    named = [unit for unit in UNITS if unit.name and re.search(unit.name, text)]
    for unit in (unit for unit in named if unit.offset):
        for upwards in (True, False):
            if _affine(unit, here, usual, upwards):
                return _steps(unit, upwards)
    if not (here.log_range > 0 and usual.log_range > 0):  # a spread that is no number, or none
        return None
    apart = here.log_median - usual.log_median
    widest = max(here.log_range, usual.log_range)
    if not 1 / SAME_SPREAD <= here.log_range / usual.log_range <= SAME_SPREAD:
        return None
    if abs(apart) > KNOWN_APART * widest:
        near = [(abs(apart - sign * math.log(u.factor)), u, sign) for u in named if not u.offset for sign in (1, -1)]
        if near and (best := min(near, key=lambda found: found[0]))[0] <= 0.5 * widest + 0.1:
            return _steps(best[1], upwards=best[2] < 0)
    if abs(apart) > ANY_APART * widest and abs(apart) >= math.log(LEAST_FACTOR):
        near = [(abs(apart - sign * math.log(u.factor)), u, sign) for u in UNITS if not u.name for sign in (1, -1)]
        best = min(near, key=lambda found: found[0])
        if best[0] <= 0.1 + 0.25 * widest:
            return _steps(best[1], upwards=best[2] < 0)
        factor = math.exp(apart)
        return _Conversion(None, f"/{factor:.2g}" if factor > 1 else f"*{1 / factor:.2g}", factor)
    return None


def _affine(unit: Unit, here: _Spread, usual: _Spread, upwards: bool) -> bool:
    """Whether a unit with an offset explains the difference; ``upwards``: the client has the low one."""
    if abs(here.median - usual.median) <= 3 * max(here.range, usual.range):
        return False
    median = here.median * unit.factor + unit.offset if upwards else (here.median - unit.offset) / unit.factor
    width = here.range * unit.factor if upwards else here.range / unit.factor
    return abs(median - usual.median) <= usual.range and 0.4 <= width / usual.range <= 2.5


def _steps(unit: Unit, upwards: bool) -> _Conversion:
    """From the low unit to the high one, or back."""
    if upwards:
        offset = f"{unit.offset:+g}" if unit.offset else ""
        times = f"*{unit.factor:g}" if unit.factor != 1.0 else ""
        return _Conversion((unit.low, unit.high), times + offset, 1 / unit.factor)
    offset = f"{-unit.offset:+g}" if unit.offset else ""
    times = f"/{unit.factor:g}" if unit.factor != 1.0 else ""
    return _Conversion((unit.high, unit.low), offset + times, unit.factor)


def disagreements(tables: Mapping[str, Table], preprocessor: Preprocessor) -> tuple[str, ...]:
    """What to say of columns whose units or codes differ between clients, in sentences."""
    if preprocessor.shape is not None:
        return ()
    numbers = [f.name for f in preprocessor.features if f.kind == "number" and preprocessor.standardise != "local"]
    words = [f.name for f in preprocessor.features if f.kind == "words"]
    return tuple(str(found) for found in (*unit_findings(tables, numbers, {}), *code_findings(tables, words)))


# --- Codes ------------------------------------------------------------------------------------------------------------


def code_findings(tables: Mapping[str, Table], columns: Iterable[str]) -> list[Finding]:
    """Columns whose words (or whole numbers) at some clients are others than at the rest, with a map where one is clear."""
    found = []
    for name in columns:
        held = {client: table.columns[name] for client, table in tables.items() if name in table.columns}
        categories = {client: categories for client, column in held.items() if (categories := _categories(column))}
        words = {client for client in categories if isinstance(held[client], Categorical)}
        if not words or max(map(len, categories.values())) > MOST_CATEGORIES:
            continue
        groups = _groups(categories)
        rank = {
            k: (len(group), len(words & set(group)), sum(tables[c].rows for c in group))
            for k, group in enumerate(groups)
        }
        usual = groups[max(rank, key=rank.__getitem__)]
        theirs = sorted({category for client in usual for category in categories[client]})
        for group in (group for group in groups if group is not usual):
            mine = sorted({category for client in group for category in categories[client]})
            mapping = matched(mine, theirs)
            both = bool(words & set(group)) and bool(words & set(usual)) and min(len(mine), len(theirs)) > 1
            if mapping is None and not both:
                continue  # a category of its own, or numbers beside words, of which no map is known
            for client in group:
                found.append(_code_finding(tables[client], client, name, categories[client], theirs, mapping))
    return found


def spelling_findings(tables: Mapping[str, Table], columns: Iterable[str]) -> list[Finding]:
    """Words of a column that differ only in case, spaces or the encoding of letters; that of most rows is kept."""
    found = []
    for name in columns:
        counts: Counter[str] = Counter()
        for table in tables.values():
            if isinstance(column := table.columns.get(name), Categorical):
                own = np.bincount(column.codes[column.codes != UNKNOWN], minlength=len(column.categories)).tolist()
                counts.update(dict(zip(column.categories, own, strict=True)))
        for same in alike_words(sorted(counts)) if len(counts) <= MANY_CATEGORIES else ():
            kept = max(same, key=counts.__getitem__)
            for word in (word for word in same if word != kept):
                client = next(c for c, t in tables.items() if name in t.columns and word in t.words(name))
                row, entry = tables[client].words(name).index(word) + 1, f"{name}:{word}={kept}"
                what = f"has '{word}' beside '{kept}', which differ only in case, spaces or encoding"
                file = file_of(tables[client], client)
                found.append(Finding(file, name, row, what, f"use --map '{entry}'", "map", entry))
    return found


def _code_finding(
    table: Table, client: str, name: str, mine: Sequence[str], theirs: Sequence[str], mapping: Mapping[str, str] | None
) -> Finding:
    what = f"has {quoted(mine, 4)}, and elsewhere {quoted(theirs, 4)}"
    if mapping is None:
        do = "if they mean the same, say how with --map, as in --map 'sex:F=female,M=male'"
        return Finding(file_of(table, client), name, None, what, do)
    entry = f"{name}:{','.join(f'{old}={new}' for old, new in mapping.items())}"
    return Finding(file_of(table, client), name, None, what, f"use --map '{entry}'", "map", entry)


def _categories(column: Column) -> tuple[str, ...]:
    """The words of a column that occur, or its numbers where they are whole and few."""
    if isinstance(column, Categorical):
        return tuple(column.categories[k] for k in np.unique(column.codes[column.codes != UNKNOWN]).tolist())
    return whole_numbers(column[~np.isnan(column)], MOST_CODES) or ()


def _groups(categories: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Clients that are linked by words that they have in common."""
    groups: list[tuple[set[str], list[str]]] = []
    for client, words in categories.items():
        linked = [group for group in groups if group[0] & set(words)]
        joined = (set(words).union(*(g[0] for g in linked)), [client, *(c for g in linked for c in g[1])])
        groups = [group for group in groups if group not in linked] + [joined]
    return [sorted(clients) for _, clients in groups]


def matched(mine: Sequence[str], theirs: Sequence[str]) -> dict[str, str] | None:
    """Which of their words each of mine means, one for one; None where that is not clear."""
    for how in (_same_spelling, _same_family, _same_beginning):
        found = {word: [other for other in theirs if how(word, other, mine, theirs)] for word in mine}
        chosen = {word: others[0] for word, others in found.items() if len(others) == 1}
        if len(chosen) == len(mine) and len(set(chosen.values())) == len(chosen):
            return chosen
    return None


def _same_spelling(word: str, other: str, mine: Sequence[str], theirs: Sequence[str]) -> bool:
    return spelling(word) == spelling(other)


def _same_family(word: str, other: str, mine: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether both stand for the same in a family that has all words of both sides."""
    for family in FAMILIES:
        every = frozenset().union(*family)
        if {spelling(w) for w in (*mine, *theirs)} <= every:
            return any(spelling(word) in same and spelling(other) in same for same in family)
    return False


def _same_beginning(word: str, other: str, mine: Sequence[str], theirs: Sequence[str]) -> bool:
    short, long = sorted((spelling(word), spelling(other)), key=len)
    return bool(short) and not short.isdecimal() and len(short) <= 3 and long.startswith(short)


# --- Columns ----------------------------------------------------------------------------------------------------------


def column_findings(tables: Mapping[str, Table], kept: set[str]) -> list[Finding]:
    """Columns that some clients lack, or have under another name; ``kept`` are columns that have a use of their own."""
    found = []
    names = dict.fromkeys(name for table in tables.values() for name in table.columns)
    having = {name: [client for client, table in tables.items() if name in table.columns] for name in names}
    renamed: set[tuple[str, str]] = set()
    for name, clients in having.items():
        for other, others in having.items():
            more = (len(others), other) > (len(clients), name)
            if other != name and more and letters(name) == letters(other) and not set(clients) & set(others):
                for client in clients:
                    entry, table = f"{name}={other}", tables[client]
                    what = f"is called '{other}' elsewhere"
                    found.append(
                        Finding(file_of(table, client), name, None, what, f"use --rename '{entry}'", "rename", entry)
                    )
                    renamed |= {(client, name), (client, other)}
                break
    for name, clients in having.items():
        lacking = [client for client in tables if client not in clients and (client, name) not in renamed]
        if not lacking or name in kept or any((client, name) in renamed for client in clients):
            continue
        if len(clients) == 1 and len(tables) > 2:
            what, do = "is a column of this file alone", f"use --ignore '{name}', or add it elsewhere"
            found.append(Finding(file_of(tables[clients[0]], clients[0]), name, None, what, do, "ignore", name))
        else:
            for client in lacking:
                what = f"is lacking, and {len(clients)} others have it"
                do = "it counts as missing there, so add it if it is known"
                found.append(Finding(file_of(tables[client], client), name, None, what, do))
    return found
