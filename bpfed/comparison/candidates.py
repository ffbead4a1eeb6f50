"""Who takes part in a comparison: a method by its name, or a variant of one such as ``fedper+laplace``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bpfed._util.errors import UserError, unknown
from bpfed.config.schema import TABLES, fields_of
from bpfed.config.settings import Settings
from bpfed.methods import METHODS, Method, as_method, method, names

#: What may follow a method's name after a ``+``, and the settings that it stands for.
VARIANTS: dict[str, dict[str, Any]] = {
    "laplace": {"method.laplace": True},
    "temperature": {"run.scaling": "client", "run.calibration": 0.2},
    "calibrated": {"run.calibrate": "pilot:3"},
    "members": {"run.members": 2},
    "ivon": {"method.optimiser": "ivon"},
    "sgd": {"method.optimiser": "sgd", "method.lr": 0.03, "method.decay": 3.0, "run.batch": 10},
}

#: The name that stands for every method of bpfed that takes any network: what is for tables alone, and what other
#: packages have, has to be named.
ALL = "all"
#: The name of what `bpfed.fit` trains where no method is given: for images and arrays pilots choose it.
DEFAULT = "default"


#: Files of a comparison's folder, beside those of its methods; the first marks it as one.
TAKEN = REQUEST, RESULT, MARKDOWN, CSV, REPORT = (
    "comparison.toml",
    "comparison.json",
    "comparison.md",
    "comparison.csv",
    "report.html",
)


@dataclass(frozen=True)
class Candidate:
    """One of those that are compared.

    Attributes:
        name: What it is called, also the name of its folder.
        title: Its heading.
        method: The method with its settings; None: the default for the data.
        settings: How it is run; the seed is the cell's.
    """

    name: str
    title: str
    method: Method | None
    settings: Settings


def listed(names: str | Iterable[str]) -> list[str]:
    """The names in a list or in a text such as ``all,fedper+laplace``, each once; for ``all`` see `ALL`."""
    words = [w.strip() for w in (names.split(",") if isinstance(names, str) else names)]
    every = [name for name, kind in METHODS.items() if kind.network == "auto"]
    found = [name for word in words if word for name in (every if word == ALL else (word,))]
    if not found:
        raise UserError("No method is named; give some as in --methods bpfed,fedavg, or all of them by --methods all.")
    for name in found:
        changes(name)
    return list(dict.fromkeys(found))


def changes(name: str) -> dict[str, Any]:
    """The settings that the variants in a name stand for, by their full names; none for a method's own name.

    Raises:
        UserError: There is no such method or variant, or the variant does not apply to the method.
    """
    base, *variants = name.split("+")
    if base == DEFAULT:
        if variants:
            raise UserError(
                f"'{name}': the default has no variants; name the method, such as bpfed-recipe+{variants[0]}."
            )
        return {}
    chosen = method(base)
    found: dict[str, Any] = {}
    for variant in variants:
        if variant not in VARIANTS:
            raise unknown("variant", variant, VARIANTS)
        if variants.count(variant) > 1:
            raise UserError(f"'{name}' has the variant '{variant}' twice; name it once.")
        if not _applies(variant, chosen):
            fitting = [n for n, m in METHODS.items() if _applies(variant, m)]
            says = f"it applies to: {', '.join(fitting)}" if fitting else "no method here has it"
            raise UserError(f"The variant '{variant}' does not apply to {base}; {says}.")
        found |= VARIANTS[variant]
    return found


def check_common(name: str, common: Mapping[str, Any]) -> None:
    """Raise a `UserError` if a variant in the name stands for another value of a run's setting than everybody is given.

    (Of a method's own settings the variant's come before those for all.)

    Args:
        name: See `changes`.
        common: What is set for all, by full names, as values or as texts.
    """
    for key, value in changes(name).items():
        if key.startswith("run.") and key in common and str(common[key]).lower() != str(value).lower():
            raise UserError(
                f"'{name}' stands for {key} = {value}, but {key} is {common[key]} for all here; leave one of them out."
            )


def title(name: str) -> str:
    """The heading of a name: ``fedper+laplace`` is FedPer + laplace; a method that is not known keeps its name."""
    base, *variants = name.split("+")
    known = "Default" if base == DEFAULT else method(base).title if base in names() else base
    return " + ".join([known, *variants])


def candidates(
    methods: str | Sequence[str | Method] | Mapping[str, Method | str], settings: Settings
) -> list[Candidate]:
    """Those named, or those given, under names of one's own or each under its own."""
    if not isinstance(methods, str | Mapping) and any(isinstance(m, Method) for m in methods):
        given = [as_method(m) for m in methods]
        methods = {method.name: method for method in given}
        if len(methods) < len(given):
            raise UserError("Two of the methods have the same name; give them in a dict, under names of your own.")
    if isinstance(methods, Mapping):
        if not methods:
            raise UserError("No method is given; name some, such as 'bpfed-recipe,fedavg'.")
        for name in methods:
            if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or name in TAKEN:
                raise UserError(
                    f"'{name}' cannot name a method, since it would name its folder; choose a word that does not begin "
                    "with '.', has no '/' and is no file of the comparison."
                )
        return [
            Candidate(name, name, None if value == DEFAULT else as_method(value), settings)
            for name, value in methods.items()
        ]
    found = []
    usual, common = asdict(Settings()), asdict(settings)
    for name in listed(methods if isinstance(methods, str) else [str(m) for m in methods]):
        check_common(name, {f"run.{key}": value for key, value in common.items() if value != usual[key]})
        values = _tables(changes(name))
        made = None if name == DEFAULT else method(name.split("+")[0])(**values.get("method", {}))
        found.append(Candidate(name, title(name), made, replace(settings, **values.get("run", {}))))
    return found


def _applies(variant: str, chosen: type[Method]) -> bool:
    """Whether all settings of a variant exist, in the method and in the run."""
    known = {**TABLES, "method": chosen}
    return all(key in fields_of(known[table]) for table, values in _tables(VARIANTS[variant]).items() for key in values)


def _tables(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``{"run.rounds": 3}`` as ``{"run": {"rounds": 3}}``."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    return tables
