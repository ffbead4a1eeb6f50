"""Clients that a column names are told apart by what is written there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bpfed.data import load


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_clients_are_told_apart_by_what_is_written(tmp_path: Path, kind: str) -> None:
    ids = [1234567890123456781, 1234567890123456782, 1234567890123456783]
    columns = {"id": np.repeat(ids, 6), "a": np.arange(18) % 5, "y": np.arange(18) % 2}
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        path.write_text("id,a,y\n" + "".join(f"{i},{a},{y}\n" for i, a, y in zip(*columns.values(), strict=True)))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        np.savez(path, **columns)
    assert load(f"folder:{path}", client_column="id").clients == tuple(map(str, ids))


def test_leading_zeros_tell_clients_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,a,y\n" + "".join(f"{i},{k % 5},{k % 2}\n" for i in ("007", "07", "7") for k in range(6)))
    assert load(f"folder:{path}", client_column="id").clients == ("007", "07", "7")
