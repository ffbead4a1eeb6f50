"""Names of methods, datasets, tasks and whatever else is chosen by name: those of bpfed, and those of other packages.

A name is known before what it stands for is imported, so that a misspelt one is refused before torch is imported, which
takes seconds. Other packages add names by entry points, one group for each registry:

    [project.entry-points."bpfed.methods"]
    scaffold = "bpfed_scaffold:Scaffold"

Their metadata is read when a name is looked up, and their code is imported when it is used. The names of datasets are
those of `bpfed.data.names`, which a test compares. Tasks are made when
first asked for (`bpfed.inference.tasks.get_task`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bpfed._util.errors import UserError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The packages whose plug-ins may be used here, ``NAME==VERSION`` each; None: all that are installed.
_ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)


@contextmanager
def allowing(packages: Iterable[str]) -> Iterator[None]:
    """Inside, plug-ins of these packages alone are used, ``NAME==VERSION`` each; any other is refused."""
    before = _ALLOWED.set(frozenset(packages))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


class Registry(Collection[str]):
    """Names of one kind of thing: those of bpfed itself first, then those of plug-ins.

    Args:
        kind: What they name, in words.
        group: The group of entry points by which other packages add some.
        own: The names of bpfed itself; in a mapping, with what they stand for as ``module:Class``.
    """

    def __init__(self, kind: str, group: str, own: Collection[str] = ()) -> None:
        self.kind, self.group, self.own = kind, group, own

    def __contains__(self, name: object) -> bool:
        return name in self.own or any(point.name == name for point in self._points())

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.plugins()))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def plugins(self) -> tuple[str, ...]:
        """The names that other packages add, in order; nothing is imported."""
        return tuple(sorted({point.name for point in self._points()} - set(self.own)))

    def package(self, name: str) -> str | None:
        """The package that a name comes from, as ``NAME==VERSION``; None: it is of bpfed itself, or unknown."""
        found = [point for point in self._points() if point.name == name]
        return _package(found[0]) if found and name not in self.own else None

    def target(self, name: str) -> str:
        """What the name of a plug-in stands for, as ``module:Class``."""
        return next(point.value for point in self._points() if point.name == name)

    def check(self, name: str) -> None:
        """Raise a `UserError` unless the name means one thing, which may be used here; nothing is imported."""
        if name not in self:
            raise unknown(self.kind, name, self)
        self.refuse_clash(name)
        package = self.package(name)
        allowed = _ALLOWED.get()
        if package is not None and allowed is not None and package not in allowed:
            raise UserError(
                f"The {self.kind} '{name}' is of the package {package}, which this site does not allow; if its owner "
                f"trusts the package, add \"{package}\" to 'plugins' of the site's deploy.toml."
            )

    def refuse_clash(self, name: str) -> None:
        """Raise a `UserError` if several packages have this name."""
        packages = [_package(point) for point in self._points() if point.name == name]
        if name in self.own:
            packages.insert(0, "bpfed")
        if len(packages) > 1:
            raise UserError(
                f"The {self.kind} '{name}' is in several packages ({', '.join(packages)}); uninstall all but one of "
                "them, or rename it there."
            )

    def load(self, name: str) -> Any:
        """What the name stands for, imported.

        Raises:
            UserError: There is no such name, several packages have it, or it cannot be imported.
        """
        self.check(name)
        if name in self.own:
            return self.load_own(name)
        point = next(point for point in self._points() if point.name == name)
        if _ALLOWED.get() is not None and not _of_its_package(point):
            raise self.unfit(
                name, f"stands for '{point.value}', which is no file of that package, so a site does not run it"
            )
        try:
            return point.load()
        except (Exception, SystemExit) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.unfit(name, f"cannot be imported ({words})") from error

    def load_own(self, name: str) -> Any:
        """What a name of bpfed itself stands for, imported."""
        if not isinstance(self.own, Mapping):
            raise LookupError(f"what '{name}' stands for is not in this registry")
        module, _, attribute = self.own[name].partition(":")
        return getattr(import_module(module), attribute)

    def homes(self) -> dict[str, str]:
        """The module of each class of bpfed itself, by the class's name."""
        assert isinstance(self.own, Mapping)
        return {name: module for module, _, name in (place.partition(":") for place in self.own.values())}

    def unfit(self, name: str, why: str) -> UserError:
        """A `UserError` for a plug-in that cannot be used, with the package that it is of."""
        return UserError(
            f"The {self.kind} '{name}' of the package {self.package(name)} {why}; update the package or uninstall it."
        )

    def _points(self) -> list[EntryPoint]:
        from importlib import metadata  # here, since most commands need no plug-in's name

        try:
            return list(metadata.entry_points(group=self.group))
        except Exception:  # the metadata of any one package is damaged: that of the others is read all the same
            found: dict[tuple[str, str], EntryPoint] = {}
            for distribution in metadata.distributions():
                try:
                    points = distribution.entry_points.select(group=self.group)
                except Exception:  # whatever it has cannot be named, and is unknown to whoever asks for it
                    continue
                for point in points:
                    found.setdefault((distribution.name, point.name), point)
            return list(found.values())


def _package(point: EntryPoint) -> str:
    """``NAME==VERSION`` of the package that an entry point is of."""
    return f"{point.dist.name}=={point.dist.version}" if point.dist is not None else "unknown"


def _of_its_package(point: EntryPoint) -> bool:
    """Whether the module of an entry point, and the packages that it is in, would be read from the package that declares it.

    Nothing of it is imported. Whoever trusts a package does not trust what another one, or a file in the working folder,
    has under the same name, nor what another one has put into its folder.
    """
    from importlib.machinery import all_suffixes
    from importlib.util import find_spec

    if point.dist is None:
        return False
    first, *inside = point.module.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return True  # it cannot be imported, which is said when that is tried
    if spec is None:
        return True
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    found = [Path(spec.origin).resolve()] if spec.origin is not None else places  # without a file: a namespace
    for name in inside:
        files = [f"{stem}{ending}" for stem in (name, f"{name}/__init__") for ending in all_suffixes()]
        found = [*found, *(path.resolve() for place in places for file in files if (path := place / file).is_file())]
        places = [place / name for place in places]
    own = [Path(str(point.dist.locate_file(file))).resolve() for file in point.dist.files or ()]
    checkout = _checkout(point)
    return all(
        any(place == file or place in file.parents for file in own)
        or (checkout is not None and checkout in place.parents)
        for place in found
    )


def _checkout(point: EntryPoint) -> Path | None:
    """The folder of a package that is installed as editable, whose files its metadata do not list; None: it is not."""
    import json
    from urllib.parse import unquote, urlsplit

    try:
        said = json.loads((point.dist.read_text("direct_url.json") if point.dist else None) or "{}")
        editable = said.get("dir_info", {}).get("editable") is True
        return Path(unquote(urlsplit(said["url"]).path)).resolve() if editable else None
    except (ValueError, KeyError, AttributeError):
        return None


# fmt: off
METHODS = Registry("method", "bpfed.methods", {
    "bpfed": "bpfed.methods.bpfed:BPFed",
    "bpfed-recipe": "bpfed.methods.recipe:Recipe",
    "bpfed-population": "bpfed.methods.population:Population",
    "bpfed-adaptive": "bpfed.methods.adaptive:Adaptive",
    "bpfed-linear": "bpfed.methods.linear:Linear",
    "fedavg": "bpfed.methods.fedavg:FedAvg",
    "fedavg-ft": "bpfed.methods.fedavg:FedAvgFT",
    "local": "bpfed.methods.fedavg:LocalOnly",
    "perfedavg": "bpfed.methods.perfedavg:PerFedAvg",
    "pfedme": "bpfed.methods.pfedme:PFedMe",
    "pfedbayes": "bpfed.methods.pfedbayes:PFedBayes",
    "fedper": "bpfed.methods.fedper:FedPer",
    "lg-fedavg": "bpfed.methods.fedper:LGFedAvg",
    "fedrep": "bpfed.methods.fedper:FedRep",
    "fedsoul": "bpfed.methods.fedsoul:FedSOUL",
    "pfedvem": "bpfed.methods.pfedvem:PFedVEM",
    "ditto": "bpfed.methods.ditto:Ditto",
    "fedbabu": "bpfed.methods.fedper:FedBABU",
})
DATASETS = Registry("dataset", "bpfed.datasets", (
    "digits", "mnist", "fmnist", "cifar10", "breast-cancer", "heart-disease", "wisdm", "wisdm-later",
    "mnist-small", "mnist-large", "fmnist-small", "fmnist-large", "cifar10-small", "cifar10-large",
))
# fmt: on
#: Networks that are made where none is given. One of a package is a function of the shape of an example and the number of
#: outputs that gives a module.
NETWORKS = Registry("network", "bpfed.networks", ("auto", "mlp", "skip", "linear", "conv1d"))
PARTITIONS = Registry("partition", "bpfed.partitions", ("groups", "random", "dirichlet", "shards", "iid"))
RULES = Registry("server rule", "bpfed.rules", ("mean", "moments", "precision", "product"))
LIKELIHOODS = Registry(
    "likelihood",
    "bpfed.likelihoods",
    {
        "categorical": "bpfed.inference.likelihoods:Categorical",
        "normal": "bpfed.inference.likelihoods:Normal",
    },
)
#: Formats of tables, by the ending of their files without the dot.
FORMATS = Registry(
    "table format",
    "bpfed.tables",
    {
        "csv": "bpfed.data.tabular.csvfile:FORMAT",
        "tsv": "bpfed.data.tabular.csvfile:FORMAT",
        "csv.gz": "bpfed.data.tabular.csvfile:FORMAT",
        "tsv.gz": "bpfed.data.tabular.csvfile:FORMAT",
        "csv.zst": "bpfed.data.tabular.csvfile:FORMAT",
        "tsv.zst": "bpfed.data.tabular.csvfile:FORMAT",
        "xlsx": "bpfed.data.tabular.excel:FORMAT",
        "arff": "bpfed.data.tabular.arff:FORMAT",
        "parquet": "bpfed.data.tabular.parquet:PARQUET",
        "feather": "bpfed.data.tabular.parquet:FEATHER",
        "arrow": "bpfed.data.tabular.parquet:FEATHER",
        "npz": "bpfed.data.tabular.npz:FORMAT",
        "npy": "bpfed.data.tabular.npz:NPY",
    },
)
#: Metrics: the group is reserved, and nothing reads it yet.
METRICS = Registry("metric", "bpfed.metrics")
#: Where each task is, by its name: ``module:class``.
TASKS = {
    "classification": "bpfed.inference.tasks:Classification",
    "regression": "bpfed.inference.tasks:Regression",
    "counts": "bpfed.inference.counts:Counts",
    "heteroscedastic": "bpfed.inference.tasks:HeteroscedasticRegression",
    "negative-binomial": "bpfed.inference.counts:NegativeBinomialCounts",
    "ordinal": "bpfed.inference.labels:OrderedClasses",
    "multilabel": "bpfed.inference.labels:MultiLabel",
    "tokens": "bpfed.inference.labels:TokenClassification",
    "survival": "bpfed.inference.survival:Survival",
}
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]
#: Models that a method stands for, by name.
MODELS = {"linear": "bpfed-linear"}
#: How a path is told from a dataset's name.
PREFIX = "folder:"


def located(name: str) -> str:
    """The name of a dataset; ``folder:PATH`` as it is called from everywhere."""
    return f"{PREFIX}{Path(name.removeprefix(PREFIX)).expanduser().resolve()}" if name.startswith(PREFIX) else name


def shown(name: str) -> str:
    """The name of a dataset where there is little room: of a whole path its end."""
    path = Path(name.removeprefix(PREFIX))
    return f"{PREFIX}{path.name}" if name.startswith(PREFIX) and path.is_absolute() else name


def check_method(name: str | None) -> None:
    """Raise a `UserError` unless there is a method of that name; None is left to the default."""
    if name is not None:
        METHODS.check(name)


def method_named(method: str | None, model: str | None) -> str | None:
    """The name of the method that is asked for, by itself or as a model; None: by neither.

    Raises:
        UserError: There is no such method or model, or both are named.
    """
    check_method(method)
    if model is None:
        return method
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    if method is not None and method != MODELS[model]:
        raise UserError(f"--model {model} stands for --method {MODELS[model]}, but the method is {method}; give one.")
    return MODELS[model]


def check_data(name: str | None) -> None:
    """Raise a `UserError` unless there is such a dataset or it is ``folder:PATH``; None is left to the default."""
    if name is None or name.startswith(PREFIX):
        return
    if name not in DATASETS and Path(name).exists():
        raise UserError(f"Unknown dataset '{name}'; to use the files there, write '{PREFIX}{name}'.")
    DATASETS.check(name)
