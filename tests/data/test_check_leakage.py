"""What is suspect in rows: slips of the pen, copied clients, and columns that give the answer away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bpfed.data import load
from bpfed.data.checks.leakage import row_hashes
from bpfed.data.tabular.table import Categorical, Table

ROWS = 60


def write(folder: Path, client: str, seed: int, **changed: list[str]) -> None:
    """A client's file with a number, a word and a class; given columns come instead, or beside them."""
    rng = np.random.default_rng(seed)
    columns = {
        "area": [f"{v:.3f}" for v in rng.normal(50, 5, ROWS)],
        "heating": rng.choice(["gas", "oil"], ROWS).tolist(),
        "y": rng.choice(["no", "yes"], ROWS).tolist(),
    } | changed
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    (folder / f"{client}.csv").write_text("\n".join(lines) + "\n")


def said(folder: Path, word: str, **asked: str) -> list[str]:
    return [note for note in load(f"folder:{folder}", target="y", **asked).notes if word in note]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k, client in enumerate(("a", "b", "c")):
        write(tmp_path, client, k)
    return tmp_path


def test_rows_as_they_should_be_are_not_suspect(folder: Path) -> None:
    assert load(f"folder:{folder}", target="y").notes == ()


def test_a_slip_of_the_pen_is_told_with_its_place(folder: Path) -> None:
    write(
        folder,
        "b",
        7,
        area=["51", "2400", *(f"{50 + 0.1 * i}" for i in range(ROWS - 2))],
        split=["train"] * 40 + ["test"] * 20,
    )
    for k, client in ((0, "a"), (2, "c")):
        write(folder, client, k, split=["train"] * 40 + ["test"] * 20)
    (note,) = said(folder, "standard deviations")
    assert "training mean: 'area' of 'b' (1 of 40 rows, such as 2400)." in note


def test_a_target_far_from_all_others_is_told_too(folder: Path) -> None:
    for k, client in enumerate(("a", "b", "c")):
        prices = [f"{v:.2f}" for v in np.random.default_rng(k).normal(100, 9, ROWS)]
        write(
            folder,
            client,
            k,
            y=["10000.5", *prices[1:]] if client == "c" else prices,
            split=["train"] * 50 + ["test"] * 10,
        )
    assert "'y' of 'c' (1 of 50 rows, such as 10000.5)" in said(folder, "standard deviations")[0]


def test_a_copied_client_is_told(folder: Path) -> None:
    (folder / "a - Copy.csv").write_text((folder / "a.csv").read_text())
    assert "Clients 'a - Copy' and 'a' have 60 rows in common" in said(folder, "in common")[0]


def test_rows_that_are_alike_because_few_are_possible_are_no_copy(tmp_path: Path) -> None:
    for k, client in enumerate(("a", "b")):
        write(tmp_path, client, k, area=[str(i % 3) for i in range(ROWS)])
    assert said(tmp_path, "in common") == []


def test_a_column_that_gives_the_answer_away_is_told(folder: Path) -> None:
    for k, client in enumerate(("a", "b", "c")):
        y = np.random.default_rng(k).choice(["no", "yes"], ROWS).tolist()
        write(folder, client, k, y=y, reason=["late" if word == "yes" else "" for word in y])
    assert "'reason' alone tells 'y' in all" in said(folder, "alone tells")[0]
    assert said(folder, "alone tells", ignore="reason") == []


def test_a_row_is_the_same_whatever_the_codes_of_its_words() -> None:
    one = Table("one", 2, {"x": np.array([1.0, np.nan]), "w": Categorical(np.array([0, 1]), ("a", "b"))})
    other = Table("other", 2, {"w": Categorical(np.array([0, -1]), ("b",)), "x": np.array([np.nan, 1.0])})
    first, second = row_hashes(one), row_hashes(other)
    assert first[1] == second[0]
    assert len({*first.tolist(), *second.tolist()}) == 3


def test_a_column_of_names_tells_nothing(folder: Path) -> None:
    for k, client in enumerate(("a", "b", "c")):
        write(
            folder,
            client,
            k,
            who=[f"{client} {i // 2}" for i in range(ROWS)],
            y=["no", "no", "yes", "yes"] * (ROWS // 4),
        )
    assert said(folder, "alone tells") == []
