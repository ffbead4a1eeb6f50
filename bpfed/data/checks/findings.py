"""All findings of a folder at once, and the configuration that would mend them; no file is changed.

tables, refused = survey("hospitals", Asked(target="died"))
found = examine(tables, Asked(target="died"))
configuration(found, settings)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed._util.files import toml_text
from bpfed._util.text import many, plain
from bpfed.config.schema import LISTS
from bpfed.data.checks import Finding, file_of
from bpfed.data.checks.agreement import code_findings, column_findings, spelling_findings, unit_findings
from bpfed.data.checks.column_types import (
    GAPS,
    MANY,
    OFTEN,
    as_text,
    is_identity,
    marks_split,
    named_identity,
    names_client,
)
from bpfed.data.checks.leakage import DISTINCT, FEWEST, row_hashes, tells
from bpfed.data.checks.spelling import alike_words, letters
from bpfed.data.holdout import Holdout
from bpfed.data.tabular.csvfile import WordsAmongNumbers, delimiter_of
from bpfed.data.tabular.federate import alike, client_files, not_inputs, read_clients
from bpfed.data.tabular.recode import NOTHING, Recoding
from bpfed.data.tabular.statistics import MOST_CATEGORIES
from bpfed.data.tabular.table import (
    AS_THEY_ARE,
    SPLIT,
    UNKNOWN,
    ArrayOptions,
    Categorical,
    Column,
    Table,
    column_names,
    read_table,
)

#: Quartile ranges from the median beyond which a number is a slip of the pen, and the same of logarithms plus a bit.
FAR, LOG_FAR, LOG_MORE = 12.0, 3.0, 0.5
#: Share of a client's rows up to which such numbers are slips.
FEW_SLIPS = 0.01
#: Share of a client's rows from which on a few in common with another are said.
COPIED = 0.01
#: Words of a text on average from which on a column is free text.
WORDY = 3.0
#: How separators are called.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Asked:
    """What is known of the columns, as a configuration says it; see `bpfed.config.schema.DataSettings`."""

    target: str | None = None
    client_column: str | None = None
    ignore: str | None = None
    missing: str | None = None
    holdout: str | None = None
    recoding: Recoding = NOTHING
    arrays: ArrayOptions = AS_THEY_ARE

    @property
    def unused(self) -> list[str]:
        """Columns that are no inputs."""
        return not_inputs(self.ignore, Holdout.of(self.holdout))


def survey(path: str | Path, asked: Asked) -> tuple[dict[str, Table], list[Finding], str]:
    """The tables of all clients that can be read, what is wrong with the others, and the first refusal in a sentence.

    A file with a few words among numbers is read as if these stood for no value. For a single file with a client column
    nothing is left to read where it is refused.
    """
    path, by = Path(path).expanduser(), Holdout.of(asked.holdout)
    missing, words = column_names(asked.missing), [*(by.words if by else ()), *asked.recoding.words]
    files = client_files(path)
    if files is None:
        read = read_clients(path, asked.client_column, asked.unused, missing, words, asked.recoding, asked.arrays)
        return read, [], ""
    if asked.client_column is not None:
        read_clients(path, asked.client_column)  # which refuses it
    tables: dict[str, Table] = {}
    found: list[Finding] = []
    why = ""
    for client, file in files.items():
        more: list[str] = []
        for _ in range(2):
            try:
                said = [*missing, *more]
                table = read_table(file, words, ignore=asked.unused, missing=said, arrays=asked.arrays)
                tables[client] = asked.recoding.apply(table, client, [*missing, *more])
                break
            except WordsAmongNumbers as error:
                why = why or str(error)
                for slip in error.slips:
                    more += [f"{slip.column}={word}" for word in slip.words if "," not in word]
                    entry = f"{slip.column}={slip.words[0]}"
                    do = f"correct it, or use --missing '{entry}' if it stands for no value"
                    found.append(Finding(file.name, slip.column, slip.row, f"is {slip.sentence}", do, "missing", entry))
                    rest = [f"{slip.column}={word}" for word in slip.words[1:] if "," not in word]
                    found += [found[-1]._replace(what=f"also has '{e.partition('=')[2]}'", entry=e) for e in rest]
            except UserError as error:
                why = why or str(error)
                what, _, do = str(error).rstrip(".").replace(f"'{file}'", "it").rpartition("; ")
                found.append(
                    Finding(file.name, "", None, f"cannot be read: {what or do}", do if what else "correct it")
                )
                break
    found += _separators({client: files[client] for client in tables})
    return alike(tables), found, why


def examine(tables: Mapping[str, Table], asked: Asked) -> list[Finding]:
    """Everything in these tables that is probably not meant as it would be taken, by file and column.

    Args:
        tables: Of all clients; ``recoding`` has been done to them.
        asked: What is known of them; findings that it has mended already are none.
    """
    if not tables or any(table.images is not None for table in tables.values()):
        return []
    aims = column_names(asked.target)  # several, where a time to event or a set of labels is predicted
    target = aims[0] if len(aims) == 1 else None
    kept = {SPLIT, *aims}
    unused = set(asked.unused)
    seen = {client: table.without(unused) for client, table in tables.items()}
    found = column_findings(seen, kept)
    names = list(dict.fromkeys(name for table in seen.values() for name in table.columns if name not in kept))
    gaps: dict[str, float] = {}
    for name in names:
        found += _gaps(seen, name, gaps)
    special = {finding.column: finding for name in names if (finding := _special(seen, name))}
    found += special.values()
    plain = [name for name in names if name not in special]
    found += code_findings(seen, [*plain, *([target] if target else ())])
    mapped = {finding.column for finding in found if finding.setting == "map"}
    targets = [target] if target else []
    found += spelling_findings(seen, [name for name in (*plain, *targets) if name not in mapped])
    found += _kinds(seen, [name for name in plain if name not in mapped])
    found += unit_findings(seen, plain, gaps)
    for name in plain:
        found += _slips(seen, name, gaps.get(name))
    if target:
        found += _targets(seen, target, plain)
    found += _copies(tables)
    for same in alike_words(tables):
        file = file_of(tables[same[1]], same[1])
        found.append(Finding(file, "", None, f"is called nearly as '{same[0]}'", "rename one if both are one client"))
    order = {client: k for k, client in enumerate(tables)}
    files = {file_of(table, client): order[client] for client, table in tables.items()}
    return sorted(found, key=lambda f: (files.get(f.file, -1), names.index(f.column) if f.column in names else -1))


def _separators(files: Mapping[str, Path]) -> list[Finding]:
    """Files whose columns are separated otherwise than in most."""
    used = {client: mark for client, file in files.items() if (mark := delimiter_of(file)) is not None}
    marks = list(used.values())
    if len(set(marks)) < 2:
        return []
    usual = max(set(marks), key=lambda mark: (marks.count(mark), mark == ","))
    return [
        Finding(
            files[client].name,
            "",
            None,
            f"has {SEPARATORS[mark]} between columns, most others {SEPARATORS[usual]}"
            f"{'' if mark == ',' else ', and may have decimal commas'}",
            "nothing needs to be done, it is read like that",
        )
        for client, mark in used.items()
        if mark != usual
    ]


def _gaps(tables: Mapping[str, Table], name: str, gaps: dict[str, float]) -> list[Finding]:
    """A number that seems to stand for a missing value: often, and further from all others than these are apart."""
    found = []
    for client, column in _numbers(tables, name).items():
        for gap in GAPS:
            where = np.flatnonzero(column == gap)
            if len(where) < OFTEN:
                continue
            rest = column[~np.isnan(column) & (column != gap)]
            if len(rest) and np.abs(rest - gap).min() > np.ptp(rest) > 0:
                gaps[name], entry = gap, f"{name}={gap:g}"
                what = f"has {gap:g} in {len(where)} rows, far from all others, as if for missing values"
                file = file_of(tables[client], client)
                found.append(Finding(file, name, int(where[0]) + 1, what, f"use --missing '{entry}'", "missing", entry))
    return found


def _special(tables: Mapping[str, Table], name: str) -> Finding | None:
    """What a column is that should be no input as it is: dates, identifiers, a client's name, text, a split."""
    held = {client: table.columns[name] for client, table in tables.items() if name in table.columns}
    columns = list(held.values())
    client = next(iter(held))
    file = file_of(tables[client], client) if len(held) == 1 else ""
    words = sorted(
        {category for column in columns if isinstance(column, Categorical) for category in column.categories}
    )

    def finding(what: str, do: str, setting: str = "ignore", sure: bool = True) -> Finding:
        return Finding(file or "(all)", name, None, what, do, setting, name if setting else "", sure)

    leave = f"use --ignore '{name}'"
    if words and marks_split(words):
        return finding("has the words of a split, but would be an input", f"call it '{SPLIT}', or {leave}")
    dated, identity = is_identity(columns, name)
    if dated:
        return finding("has dates", f"use --dates '{name}' to learn from them, else --ignore", "dates")
    if words and (such := as_text(words)):
        written = [who for who, column in held.items() if isinstance(column, Categorical)]
        said = finding(f"has numbers that are written as words, such as '{such}'", "write them as 1234.5", "")
        return said._replace(file=file_of(tables[written[0]], written[0])) if len(written) == 1 else said
    wordy = len(words) > MANY and np.mean([len(word.split()) for word in words]) >= WORDY
    if identity:
        read = f", or --text '{name}' to learn from its words" if wordy else ""
        return finding("looks like an identifier: nearly every value is different", leave + read)
    if wordy:
        return finding("is free text", f"use --text '{name}' to learn from its words, else --ignore", "text")
    if names_client(columns):
        return finding("is the same in all rows of a client, as if it named the client", leave)
    if named_identity(name) and (count := _repeated(columns)):
        what = f"looks like an identifier that several rows share ({count} different ones)"
        return finding(what, f"{leave}, or better --holdout 'group:{name}'")
    if len(words) > MANY:
        limit = f", more than {MOST_CATEGORIES} are refused" if len(words) > MOST_CATEGORIES else ""
        return finding(f"has {len(words)} different words{limit}", leave, sure=len(words) > MOST_CATEGORIES)
    return None


def _repeated(columns: Sequence[Column]) -> int:
    """How many different values there are, where they are many and most of them in several rows; else 0."""
    different = rows = 0
    for column in columns:
        known = column.codes[column.codes != UNKNOWN] if isinstance(column, Categorical) else column[~np.isnan(column)]
        different += len(np.unique(known))
        rows += len(known)
    return different if different >= 20 and rows >= 1.5 * different else 0


def _kinds(tables: Mapping[str, Table], names: Sequence[str]) -> list[Finding]:
    """Columns that are numbers at some clients and words at others, for which no map is known."""
    found = []
    for name in names:
        held = {client: table.columns[name] for client, table in tables.items() if not table.missing(name).all()}
        words = [client for client, column in held.items() if isinstance(column, Categorical)]
        if not words or len(words) == len(held):
            continue
        few = words if 2 * len(words) <= len(held) else [client for client in held if client not in words]
        for client in few:
            column = held[client]
            other = "numbers" if isinstance(column, Categorical) else "words"
            such = f", such as '{column.categories[0][:20]}'" if isinstance(column, Categorical) else ""
            what = f"is {'words' if other == 'numbers' else 'numbers'}{such}, and elsewhere {other}"
            do = "write it the same way everywhere, or use --map"
            found.append(Finding(file_of(tables[client], client), name, None, what, do))
    return found


def _slips(tables: Mapping[str, Table], name: str, gap: float | None) -> list[Finding]:
    """Single numbers that are far from all others of their client."""
    found = []
    for client, column in _numbers(tables, name).items():
        sample = column[:: max(1, len(column) // 20_000)]
        sample = sample[~np.isnan(sample) & (sample != gap)]
        if len(sample) < 20:
            continue
        low, median, high = np.quantile(sample, (0.25, 0.5, 0.75))
        if high <= low:
            continue
        far = np.flatnonzero((np.abs(column - median) > FAR * (high - low)) & (column != gap))
        if len(far) and low > 0:  # what is skew has a long tail that is none
            within = LOG_FAR * np.log(high / low) + LOG_MORE
            far = far[np.abs(np.log(np.maximum(column[far], 1e-300) / median)) > within]
        if 0 < len(far) <= max(1, FEW_SLIPS * len(column)):
            what = f"has {column[far[0]]:g}, far from all others (median {median:.3g})"
            do = "correct it, or leave the cell blank"
            found.append(Finding(file_of(tables[client], client), name, int(far[0]) + 1, what, do))
    return found


def _targets(tables: Mapping[str, Table], target: str, names: Sequence[str]) -> list[Finding]:
    """Rows without a target, and columns that alone tell it."""
    found = []
    having = {client: table for client, table in tables.items() if target in table.columns}
    for client, table in tables.items():
        file = file_of(table, client)
        if client not in having:
            near = [name for name in table.columns if letters(name) == letters(target)]
            if not near:
                found.append(Finding(file, target, None, "is lacking, and is to be predicted", "add it"))
            continue
        if len(gone := np.flatnonzero(table.missing(target))):
            what = f"is to be predicted, but {len(gone)} rows lack it"
            found.append(Finding(file, target, int(gone[0]) + 1, what, "fill it in, or remove these rows"))
    labels = {client: Categorical.of(table.words(target)) for client, table in having.items()}
    every = {
        category: k
        for k, category in enumerate(sorted({category for words in labels.values() for category in words.categories}))
    }
    if not 2 <= len(every) <= MOST_CATEGORIES:
        return found
    classes = [
        np.array([*(every[category] for category in words.categories), 0])[words.codes] for words in labels.values()
    ]
    rows = sum(table.rows for table in having.values())
    for name in (n for n in names if any(isinstance(t.columns.get(n), Categorical) for t in having.values())):
        if tells(name, list(having.values()), classes, rows):
            what = f"alone tells '{target}' in every row"
            do = f"use --ignore '{name}' if it is known only afterwards"
            found.append(Finding("(all)", name, None, what, do, "ignore", name, False))
    return found


def _copies(tables: Mapping[str, Table]) -> list[Finding]:
    """Rows that two clients have, that a client has twice, or that are both for training and for testing."""
    found = []
    clients = list(tables)
    hashes = [row_hashes(tables[client]) for client in clients]
    distinct = [np.unique(own) for own in hashes]
    owners = np.repeat(np.arange(len(clients)), [len(own) for own in distinct])
    every = np.concatenate(distinct) if distinct else np.zeros(0, dtype=np.uint64)
    order = np.lexsort((owners, every))
    every, owners = every[order], owners[order]
    same = np.flatnonzero(every[1:] == every[:-1])
    pairs, counts = np.unique(np.stack([owners[same], owners[same + 1]]), axis=1, return_counts=True)
    unlike = [len(distinct[k]) >= DISTINCT * max(1, len(hashes[k])) for k in range(len(clients))]
    for (one, other), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        fewer = min(len(hashes[one]), len(hashes[other]))
        if unlike[one] and unlike[other] and count >= max(FEWEST, COPIED * fewer):
            common = np.flatnonzero(np.isin(hashes[other], distinct[one]))
            what = f"has {count} rows that '{file_of(tables[clients[one]], clients[one])}' has too"
            do = "remove them from one of the two, or one trains on what the other is tested on"
            found.append(Finding(file_of(tables[clients[other]], clients[other]), "", int(common[0]) + 1, what, do))
    for k, client in enumerate(clients):
        table, own = tables[client], hashes[k]
        if not unlike[k]:
            continue
        _, first = np.unique(own, return_index=True)
        again = np.setdiff1d(np.arange(len(own)), first)
        part = None
        if SPLIT in table.columns:
            test = np.array([word.casefold().startswith("test") for word in table.words(SPLIT)])
            part = np.flatnonzero(test & np.isin(own, own[~test]))
        if part is not None and len(part):
            what = f"has {many(len(part), 'test row')} also among the training rows"
            found.append(Finding(file_of(table, client), "", int(part[0]) + 1, what, "remove one of each two"))
        elif part is None and len(again) >= FEWEST:
            what = f"has {len(again)} rows that occur more than once"
            do = "remove them if they are copies, or some are both for training and for testing"
            found.append(Finding(file_of(table, client), "", int(again[0]) + 1, what, do))
    return found


def _numbers(tables: Mapping[str, Table], name: str) -> dict[str, np.ndarray]:
    held = {client: table.columns[name] for client, table in tables.items() if name in table.columns}
    return {client: column for client, column in held.items() if not isinstance(column, Categorical)}


# --- A configuration --------------------------------------------------------------------------------------------------


def configuration(found: Sequence[Finding], settings: Mapping[str, object]) -> str:
    """A TOML file with what the findings propose, each with a comment that says why; what is unsure is a comment.

    Args:
        found: Findings.
        settings: What ``[data]`` says already, by key; None is left out.
    """
    head = [
        "# Proposals of 'bpfed data inspect': look at each before you use them. No file is changed; a run with this",
        "# configuration reads the files as they are and does what is said here.",
        "",
        "[data]",
    ]
    lists = {key.partition(".")[2]: separator for key, separator in LISTS.items()}
    head += [
        f"{k} = {toml_text(v) if isinstance(v, str) else json.dumps(v)}"
        for k, v in settings.items()
        if v is not None and k not in lists
    ]
    for key, separator in lists.items():
        said = [entry for entry in str(settings.get(key) or "").split(separator) if entry.strip()]
        lines = [f"    {toml_text(entry)}," for entry in said]
        proposals: dict[str, list[Finding]] = {}
        for finding in found:
            if finding.setting == key and finding.entry not in said and separator not in finding.entry:
                proposals.setdefault(finding.entry, []).append(finding)
        for entry, why in proposals.items():
            mark = "" if why[0].sure else "# "
            files = quoted(list(dict.fromkeys(f.file for f in why)), 3).replace("'", "")
            # What was found quotes the files: a line break in a cell must not end the comment.
            lines.append(f"    {mark}{toml_text(entry)},  # {plain(f'{files}: {why[0].what}')}")
        if lines:
            head += [f"{key} = [", *lines, "]"]
    return "\n".join(head) + "\n"
