"""Datasets of Hugging Face and partitions of Flower Datasets give what data frames give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import bpfed
from bpfed import UserError
from bpfed.data import from_frames, load


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age, dose = rng.normal(50.0, 10.0, 120), rng.random(120)
    return pd.DataFrame(
        {
            "age": age,
            "ward": rng.choice(["a", "b", "c"], 120),
            "dose": np.where(dose < 0.1, np.nan, dose),
            "outcome": np.where(age > 50.0, "yes", "no"),
            "site": rng.choice(["7", "8", "9"], 120),
        }
    )


class ClassLabel:
    names = ("no", "yes")


class Dataset:
    """As much of ``datasets.Dataset`` as is used, so that this is tested where the package is not installed."""

    def __init__(self, table: pa.Table, features: dict[str, Any] | None = None) -> None:
        self.table, self.features = table, dict.fromkeys(table.column_names) | (features or {})

    @property
    def column_names(self) -> list[str]:
        return list(self.table.column_names)

    def __len__(self) -> int:
        return len(self.table)

    def with_format(self, kind: str | None) -> Dataset:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self.table if isinstance(key, slice) else self.table.column(key)


def coded(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(outcome=(frame["outcome"] == "yes").astype(int))


def imitated(frame: pd.DataFrame) -> Dataset:
    return Dataset(pa.Table.from_pandas(coded(frame), preserve_index=False), {"outcome": ClassLabel()})


def genuine(frame: pd.DataFrame) -> Any:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_pandas(coded(frame), preserve_index=False)
    return made.cast_column("outcome", datasets.ClassLabel(names=["no", "yes"]))


@pytest.fixture(params=[imitated, genuine])
def dataset(request: pytest.FixtureRequest, frame: pd.DataFrame) -> Any:
    return request.param(frame)


def same(a: Any, b: Any) -> bool:
    tensors = [(getattr(a, part), getattr(b, part)) for part in ("train", "test")]
    return a.clients == b.clients and all(torch.equal(x.x, y.x) and torch.equal(x.y, y.y) for x, y in tensors)


def test_a_dataset_is_read_as_a_data_frame_is(dataset, frame):
    asked = {"target": "outcome", "client_column": "site"}
    made = load(dataset, **asked)
    assert same(made, load(frame, **asked))
    assert made.labels == ("no", "yes")
    run = bpfed.fit("bpfed-linear", dataset, **asked, rounds=2, progress=False)
    found = [run.client("7").predict(rows).probs for rows in (dataset, frame)]
    assert torch.equal(*found)
    assert same(
        from_frames({"here": dataset}, "outcome", ignore="site"), from_frames({"here": frame}, "outcome", ignore="site")
    )


def test_splits_say_which_rows_are_for_the_test(frame):
    parts = {"train": imitated(frame[:60]), "validation": imitated(frame[60:80]), "test": imitated(frame[80:])}
    data = load(parts, target="outcome", client_column="site")
    assert (len(data.train.y), len(data.test.y)) == (80, 40)
    alone = load({"train": parts["train"]}, target="outcome", client_column="site")
    assert len(alone.test.y) > 0
    with pytest.raises(UserError, match="a split 'extra'"):
        load({**parts, "extra": parts["test"]}, target="outcome", client_column="site")


class Partitions:
    """As ``FederatedDataset`` of Flower Datasets, with one dataset for each site."""

    def __init__(self, sites: dict[str, Any]) -> None:
        self.sites, self.num_partitions = list(sites.values()), len(sites)
        self.partition_id_to_natural_id = dict(enumerate(sites))
        self.partitioners = {"train": self}

    def load_partition(self, number: int, split: str | None = None) -> Any:
        return self.sites[number]


def test_each_partition_is_a_client(frame):
    given = Partitions({name: imitated(rows) for name, rows in frame.groupby("site")})
    made = load(given, target="outcome", ignore="site")
    assert made.clients == ("7", "8", "9")
    assert torch.equal(made.train.sizes, load(frame, target="outcome", client_column="site").train.sizes)
    with pytest.raises(UserError, match="omit client_column"):
        load(given, target="outcome", client_column="site")


def test_partitions_of_flower_datasets(frame, tmp_path):
    flower = pytest.importorskip("flwr_datasets")
    from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

    frame.to_csv(tmp_path / "rows.csv", index=False)

    def federated(partitioner: Any) -> Any:
        files = {"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")}
        return flower.FederatedDataset(dataset="csv", partitioners={"train": partitioner}, **files)

    made = load(federated(NaturalIdPartitioner("site")), target="outcome", ignore="site")
    assert sorted(made.clients) == ["7", "8", "9"]
    assert load(federated(IidPartitioner(4)), target="outcome").clients == tuple(f"client-0{i}" for i in range(4))


def test_images_of_a_dataset():
    picture = type("Image", (), {})()
    rng, labels = np.random.default_rng(0), ["u", "v"] * 20
    pictures = [Image.fromarray(rng.integers(0, 255, (6, 5), dtype=np.uint8)) for _ in labels]

    class Pictures(Dataset):
        def __getitem__(self, key: Any) -> Any:
            return pictures if key == "image" else super().__getitem__(key)

    table = pa.table({"image": [b""] * 40, "label": labels, "site": ["a", "b", "b", "a"] * 10})
    data = load(Pictures(table, {"image": picture}), client_column="site")
    assert data.train.x.shape[1:] == (1, 6, 5)
    run = bpfed.fit("fedavg", data, rounds=1, progress=False)
    assert run.client("a").predict(Pictures(table, {"image": picture})).probs.shape == (40, 2)
    with pytest.raises(UserError, match="no column of images"):
        run.client("a").predict(Dataset(table.drop_columns("image")))


def test_a_stream_is_refused(frame):
    stream = type("IterableDataset", (), {"column_names": [], "features": {}, "with_format": None})()
    with pytest.raises(UserError, match="stream"):
        load(stream, target="outcome", client_column="site")
