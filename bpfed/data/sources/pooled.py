"""Sources: pooled labelled datasets, before they are distributed over clients."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed._util.files import DataDir, DownloadError, Remote, destination, download, roots
from bpfed.config import registry
from bpfed.data.sources.images import CIFAR10, FMNIST, MNIST
from bpfed.data.tabular.federate import TEST_FRACTION
from bpfed.data.tabular.table import MISSING, SPLIT, Categorical, Table, by_column

# --- Datasets whose rows come from somebody ---------------------------------------------------------------------------
#
# The four hospitals of Heart Disease, and the 36 users of WISDM. Breast cancer comes with scikit-learn; its hospitals are
# made up, so that there is something to try without a network.


class TableFiles(Protocol):
    """How the files of such a dataset are found, read and fetched."""

    @property
    def home(self) -> str: ...
    @property
    def wanted(self) -> str: ...
    def find(self, root: Path) -> Path | None: ...
    def read(self, place: Path) -> dict[str, Table]: ...
    def fetch(self, root: Path) -> None: ...


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
HOSPITALS = {
    "cleveland": (18461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "hungarian": (10263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    "switzerland": (4109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "va": (6737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}
# fmt: off
#: The 13 attributes under the names of ``heart-disease.names``; where a number is a code, what it stands for.
ATTRIBUTES: dict[str, dict[float, str]] = {
    "age": {},
    "sex": {0: "female", 1: "male"},
    "cp": {1: "typical angina", 2: "atypical angina", 3: "non-anginal pain", 4: "asymptomatic"},
    "trestbps": {},
    "chol": {},
    "fbs": {0: "false", 1: "true"},
    "restecg": {0: "normal", 1: "ST-T abnormality", 2: "hypertrophy"},
    "thalach": {},
    "exang": {0: "no", 1: "yes"},
    "oldpeak": {},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "ca": {},
    "thal": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
}
# fmt: on
#: Nobody has a blood pressure or cholesterol of 0: it was not measured (in all of Switzerland, and often at the VA).
NEVER_ZERO = ("trestbps", "chol")


@dataclass(frozen=True)
class HeartFiles:
    """UCI Heart Disease: a file per hospital, 13 attributes and the diagnosis of each patient."""

    home: str = "heart-disease"
    base: str = _UCI

    @property
    def wanted(self) -> str:
        """The files that have to be there, in words."""
        return ", ".join(_file(hospital) for hospital in HOSPITALS)

    def find(self, root: Path) -> Path | None:
        """The folder below ``root`` that holds all four files, if one does."""
        folders = (root / f for f in (self.home, "heart_disease", ""))
        return next((f for f in folders if all((f / _file(h)).is_file() for h in HOSPITALS)), None)

    def read(self, place: Path) -> dict[str, Table]:
        """A table for each hospital; ``disease`` is whether any was found, ``num`` > 0."""
        return {hospital: _hospital(place / _file(hospital)) for hospital in HOSPITALS}

    def fetch(self, root: Path) -> None:
        """Download what is missing into its home below ``root``."""
        for hospital, (size, sha256) in HOSPITALS.items():
            path = root / self.home / _file(hospital)
            if not path.is_file():
                download(Remote(f"{self.base}/{_file(hospital)}", size, sha256), path)


ARFF = "WISDM_ar_v1.1_transformed.arff"


@dataclass(frozen=True)
class WisdmFiles:
    """WISDM activity prediction 1.1: what people do, from 43 features of the phone's accelerometer.

    A row is ten seconds, and rows are in the order in which they were recorded. Where test rows are drawn at random,
    most have neighbours of the same minute among the training rows.

    Attributes:
        later: Whether the test rows are the last three tenths of each user's rows of each activity instead.
    """

    home: str = "wisdm"
    later: bool = False

    @property
    def wanted(self) -> str:
        """The file that has to be there, in words."""
        return f"{ARFF} (in WISDM_ar_latest.tar.gz from https://www.cis.fordham.edu/wisdm/dataset.php)"

    def find(self, root: Path) -> Path | None:
        """The file below ``root``, if it is there."""
        folders = (root / f for f in (self.home, "WISDM", "WISDM_ar_v1.1", ""))
        return next((f / ARFF for f in folders if (f / ARFF).is_file()), None)

    def read(self, place: Path) -> dict[str, Table]:
        """A table for each user; the number of the row is left out."""
        table = read_arff(place)
        for name in ("user", "class", "UNIQUE_ID"):
            table.column(name)
        users = Categorical.of([f"user-{int(user):02d}" for user in table.words("user")])
        columns = {**table.without(["UNIQUE_ID", "class"]).columns, "user": users, "activity": table.column("class")}
        if self.later:
            owners = list(zip(users.words(), table.words("class"), strict=True))
            columns[SPLIT] = Categorical.of(["test" if late else "train" for late in _last(owners, TEST_FRACTION)])
        return by_column(Table(table.name, table.rows, columns), "user")

    def fetch(self, root: Path) -> None:
        """Not done: the archive's hash is not known here, and nothing is fetched that cannot be checked."""
        raise DownloadError("is not downloaded by bpfed")


def _last(groups: Sequence[Hashable], fraction: float) -> list[bool]:
    """Whether each row is among the last of its group, that fraction of them (rounded down), ``[n]``."""
    sizes, before = Counter(groups), Counter[Hashable]()
    late = []
    for group in groups:
        late.append(before[group] >= sizes[group] - int(fraction * sizes[group]))
        before[group] += 1
    return late


def read_arff(path: Path) -> Table:
    """Read an ARFF file: lines ``@attribute NAME TYPE``, then ``@data`` and rows as in CSV. Types are not looked at."""
    names: list[str] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in file:
                if line.strip().casefold() == "@data":
                    break
                if attribute := re.match(r"@attribute\s+(?:\"([^\"]+)\"|(\S+))", line.strip(), re.IGNORECASE):
                    names.append(attribute[1] or attribute[2])
            rows = [row for row in csv.reader(file) if row and not row[0].startswith("%")]
        cells = list(zip(*rows, strict=True))
        if not rows or len(cells) != len(names):
            raise ValueError(f"{len(names)} attributes but {len(cells)} columns")
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be read ({error.strerror}); fix its permissions or fetch it again."
        ) from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"'{path}' is damaged ({error}); delete it and fetch it again.") from error
    return Table(str(path), len(rows), {name: _column(c) for name, c in zip(names, cells, strict=True)})


def _column(cells: tuple[str, ...]) -> np.ndarray | Categorical:
    try:
        return np.array([np.nan if cell.strip().casefold() in MISSING else float(cell) for cell in cells])
    except ValueError:
        return Categorical.of(cells)


def _file(hospital: str) -> str:
    return f"processed.{hospital}.data"


def _hospital(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        found = [_column(cells) for cells in zip(*rows, strict=True)]
        if len(found) != len(ATTRIBUTES) + 1:
            raise ValueError(f"{len(found)} columns instead of {len(ATTRIBUTES) + 1}")
        columns: dict[str, np.ndarray | Categorical] = {}
        for (name, codes), values in zip(ATTRIBUTES.items(), found[:-1], strict=True):
            if isinstance(values, Categorical):
                raise ValueError(f"words in column '{name}'")
            if codes:
                columns[name] = Categorical.of(["" if v != v else codes[v] for v in values.tolist()])
            else:
                columns[name] = np.where(values == 0, np.nan, values) if name in NEVER_ZERO else values
        if isinstance(found[-1], Categorical) or np.isnan(found[-1]).any():
            raise ValueError("a patient without a diagnosis")
        columns["disease"] = Categorical.of(["yes" if v > 0 else "no" for v in found[-1].tolist()])
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be read ({error.strerror}); fix its permissions or fetch it again."
        ) from error
    except (ValueError, KeyError, csv.Error) as error:
        raise UserError(f"'{path}' is damaged ({error}); delete it and fetch it again.") from error
    return Table(path.stem.removeprefix("processed."), len(rows), columns)


#: Shares of the patients of the hospitals of `TumourFiles`.
SHARES = {"north": 0.4, "south": 0.3, "east": 0.2, "west": 0.1}


class TumourFiles:
    """Wisconsin breast cancer, which comes with scikit-learn, dealt to four hospitals that are made up.

    They differ in size, and east sends patients with large tumours to north.
    """

    home = ""
    wanted = ""

    def find(self, root: Path) -> Path | None:
        """Always there."""
        return root

    def read(self, place: Path) -> dict[str, Table]:
        """A table for each hospital: 30 measurements of each patient's tumour, and ``diagnosis``."""
        from sklearn.datasets import load_breast_cancer  # here, since importing scikit-learn takes a second

        found = load_breast_cancer()
        names = [name.replace(" ", "_") for name in found.feature_names]
        hospitals = np.random.default_rng(0).choice(list(SHARES), len(found.target), p=list(SHARES.values()))
        large = found.data[:, names.index("mean_radius")] > 17.0
        hospitals[large & (hospitals == "east")] = "north"
        diagnoses = np.array(["malignant", "benign"])[found.target]
        return {
            hospital: Table(
                hospital,
                int(here.sum()),
                dict(zip(names, found.data[here].T, strict=True))
                | {"diagnosis": Categorical.of(diagnoses[here].tolist())},
            )
            for hospital in sorted(SHARES)
            for here in [hospitals == hospital]
        }

    def fetch(self, root: Path) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Natural:
    """What is known of such a dataset without opening it."""

    examples: int
    clients: int
    target: str
    sentence: str
    files: TableFiles


NATURAL: dict[str, Natural] = {
    "breast-cancer": Natural(
        569,
        4,
        "diagnosis",
        "Whether a tumour is malignant, from 30 measurements, built in. The four hospitals are made up.",
        TumourFiles(),
    ),
    "heart-disease": Natural(
        920,
        4,
        "disease",
        "Whether heart disease was found in patients of four hospitals, from 13 attributes.",
        HeartFiles(),
    ),
    "wisdm": Natural(
        5418, 36, "activity", "What 36 people are doing, 43 features from the phone in their pocket.", WisdmFiles()
    ),
    "wisdm-later": Natural(
        5418, 36, "activity", "The same, tested on the last windows of each activity.", WisdmFiles(later=True)
    ),
}


@dataclass(frozen=True)
class Source:
    """A pooled labelled dataset.

    Inputs stay bytes until they are asked for, which needs a quarter of the memory.

    Attributes:
        name: What it is called.
        raw: Inputs as they were stored, ``[E, ...]`` uint8.
        y: Classes, ``[E]`` int64.
        half: Half of the largest raw value, so that inputs run from -1 to 1.
        labels: A word for each class.
    """

    name: str
    raw: np.ndarray
    y: np.ndarray
    half: float
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.y)

    def inputs(self, rows: np.ndarray) -> Tensor:
        """Inputs of these rows ``[R]``, scaled to -1 .. 1, ``[R, ...]`` float32."""
        return torch.from_numpy(self.raw[rows]).to(torch.float32).div_(self.half).sub_(1.0)

    @property
    def x(self) -> Tensor:
        """All inputs, ``[E, ...]`` float32."""
        return self.inputs(np.arange(len(self)))


class Files(Protocol):
    """How the files of a source are found, read and fetched."""

    @property
    def home(self) -> str: ...
    @property
    def wanted(self) -> str: ...
    def find(self, root: Path) -> Path | None: ...
    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]: ...
    def fetch(self, root: Path) -> None: ...


class Digits:
    """scikit-learn's digits, which come with it: nothing to find and nothing to fetch."""

    home = ""
    wanted = ""

    def find(self, root: Path) -> Path | None:
        """Always there."""
        return root

    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]:
        """Images ``[1797, 64]`` uint8 (0 to 16) and labels ``[1797]`` int64."""
        from sklearn.datasets import load_digits  # here, since importing scikit-learn takes a second

        x, y = load_digits(return_X_y=True)
        return x.astype(np.uint8), y.astype(np.int64)

    def fetch(self, root: Path) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Entry:
    """What is known of a source without opening it."""

    examples: int
    clients: int
    half: float
    labels: tuple[str, ...]
    sentence: str
    files: Files


_NUMERALS = tuple("0123456789")
_CLOTHES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

SOURCES: dict[str, Entry] = {
    "digits": Entry(1797, 10, 8.0, _NUMERALS, "Handwritten digits, 8 x 8 grey, built in.", Digits()),
    "mnist": Entry(70_000, 10, 127.5, _NUMERALS, "Handwritten digits, 28 x 28 grey.", MNIST),
    "fmnist": Entry(70_000, 10, 127.5, _CLOTHES, "Fashion-MNIST, pieces of clothing, 28 x 28 grey.", FMNIST),
    "cifar10": Entry(60_000, 20, 127.5, _THINGS, "Small photographs of ten kinds of things, 32 x 32 colour.", CIFAR10),
}


def entry(name: str) -> Entry | Natural:
    """What is known of this source, of bpfed itself or of another package, or a `UserError` with the nearest name."""
    if name in SOURCES or name in NATURAL:
        registry.DATASETS.refuse_clash(name)
        return SOURCES[name] if name in SOURCES else NATURAL[name]
    found = registry.DATASETS.load(name)
    if not isinstance(found, Entry | Natural):
        raise registry.DATASETS.unfit(name, "is neither an Entry nor a Natural of bpfed.data.sources.pooled")
    return found


def locate(name: str, data_dir: DataDir = None) -> Path | None:
    """The folder or archive that holds the files of this source, or None where they are not present."""
    files = entry(name).files
    return next((place for root in roots(data_dir) if (place := files.find(root)) is not None), None)


def obtain(name: str, data_dir: DataDir = None, download: bool = True) -> Path:
    """The folder or archive that holds the files of this source, downloaded if need be and allowed."""
    place, files, reason = locate(name, data_dir), entry(name).files, ""
    target = destination(data_dir)
    if place is None and download:
        try:
            files.fetch(target)
            place = files.find(target)
        except DownloadError as error:
            reason = f" and {error}"
    if place is None:
        searched = " or ".join(f"'{root}'" for root in roots(data_dir))
        raise UserError(
            f"Dataset '{name}' is not in {searched}{reason}; put {files.wanted} into '{target / files.home}', "
            "or set --data-dir or BPFED_DATA to the folder that has them."
        )
    return place


def read(name: str, data_dir: DataDir = None, download: bool = True) -> Source:
    """Read a source whole, downloading its files first if they are missing and that is allowed."""
    known = entry(name)
    if not isinstance(known, Entry):
        raise UserError(f"'{name}' is tables with clients of their own, not a pooled dataset; read it with tables().")
    raw, y = known.files.read(obtain(name, data_dir, download))
    return Source(name, raw, y, known.half, known.labels)
