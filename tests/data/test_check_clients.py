"""What may be meant otherwise is said, and what is usual is not."""

from __future__ import annotations

import numpy as np
import pytest

from bpfed.data import FederatedData, load
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.preprocessing import Standardise
from bpfed.data.tabular.table import Categorical, Table

RNG = np.random.default_rng(0)


def table(client: str, y: list[str] | np.ndarray, **columns: np.ndarray) -> Table:
    made = {"a": RNG.standard_normal(len(y)), **columns}
    return Table(client, len(y), {**made, "y": y if isinstance(y, np.ndarray) else Categorical.of(y)})


def notes(*tables: Table, **options: str) -> tuple[str, ...]:
    data: FederatedData = federate("t", {t.name: t for t in tables}, "y", **options)  # type: ignore[arg-type]
    return data.notes


def test_counts_taken_as_classes_are_said() -> None:
    visits = np.repeat(np.arange(8.0), [90, 110, 60, 40, 20, 10, 7, 6])
    tables = [table("a", visits), table("b", visits)]
    said = (
        "The target 'y' is treated as 8 classes without an order, but its whole numbers from 0 to 7 look like counts; "
        "if they are, use --task counts.",
    )
    assert notes(*tables) == said
    assert notes(*tables, task="classification") == ()
    assert notes(*tables, task="regression") == ()
    digits = np.repeat(np.arange(10.0), [40, 42, 41, 39, 40, 43, 40, 41, 38, 40])
    grades = np.repeat(np.arange(1.0, 6), [90, 50, 20, 10, 4])
    codes = np.repeat(np.arange(7.0), [9, 90, 10, 60, 8, 40, 7])
    for other in (digits, grades, codes):
        assert notes(table("a", other), table("b", other)) == ()


def test_clients_that_share_no_label_are_said() -> None:
    one, two = ["ill", "healthy"] * 9, ["sick", "well"] * 9
    assert notes(table("a", one), table("b", one), table("c", two)) == (
        "Client 'c' shares no label with any other; if 'sick', 'well' at 'c' mean the same as 'healthy', 'ill', spell "
        "them alike in all files.",
    )
    assert notes(table("a", one), table("c", two))[0].startswith("Clients 'a', 'c' share no label with any other; if")
    assert notes(table("a", one), table("c", ["ill", "well"] * 9)) == ()
    alone = notes(table("a", one), table("b", one), table("c", ["dead"] * 9))  # that is its only class
    assert not any("shares no label" in note for note in alone)


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_another_unit_is_said(factor: float) -> None:
    y = ["no", "yes"] * 20

    def site(client: str, unit: float = 1.0) -> Table:
        return table(client, y, weight=unit * (75 + 10 * RNG.standard_normal(40)))

    (said,) = notes(site("a"), site("b"), site("c", factor))
    assert said.startswith(f"Column 'weight' of 'c' looks like {'g' if factor > 1 else 'kg'}, and elsewhere like ")
    assert said.endswith(f"; use --convert 'weight@c:{'/' if factor > 1 else '*'}1000'.")
    assert len(notes(site("a"), site("b", factor))) == 1
    local: Standardise = "local"
    assert notes(site("a"), site("b"), site("c", factor), standardise=local) == ()
    assert len(notes(site("a"), site("b", factor), site("c", factor), site("d"))) == 2


def test_a_column_that_is_mostly_one_positive_number_has_no_unit_to_compare() -> None:
    rooms = np.repeat([0.0, 1.0, 5.0], [10, 16, 74])  # quartiles of all rows differ, those of the positive ones do not
    y = ["no", "yes"] * 50
    other = np.repeat(np.arange(1.0, 21.0), 5)
    assert notes(*(table(client, y, rooms=rooms) for client in "abc"), table("d", y, rooms=other)) == ()


def test_a_lone_client_is_said() -> None:
    (said,) = notes(table("a", ["no", "yes"] * 9))
    assert said.startswith("There is only one client, 'a', so nobody learns from others; give one file per client")


def test_datasets_here_need_no_hint(real_data: str) -> None:
    for name in ("heart-disease", "wisdm"):
        said = " ".join(load(name, data_dir=real_data).notes)
        assert not any(word in said for word in ("look like counts", "no label", "another one", "only one client"))


def test_targets_that_vary_far_more_at_one_client_are_said() -> None:
    kiosk, mall = (size * RNG.standard_normal(40) for size in (1.0, 30.0))
    (said,) = notes(table("kiosk", kiosk), table("mall", mall), task="regression")
    assert said.startswith("The standard deviation of 'y' is ")
    assert " at 'mall' but " in said
    assert "at 'kiosk', and one scale serves all" in said
    assert notes(table("a", mall), table("b", 3 * mall), task="regression") == ()


def test_classes_of_one_client_and_classes_of_hardly_any_example_are_said() -> None:
    usual = ["ok", "wear", "heat"] * 12
    tables = [table("a", usual), table("b", usual), table("c", usual + ["short"] * 12)]
    lone = "Training examples of 'short' are at 'c' alone, so the others will hardly ever predict it."
    assert notes(*tables) == (lone,)
    (few,) = notes(table("a", [*usual, "unknown", "unknown"]), table("b", usual))
    assert few == "There are fewer than 5 training examples of 'unknown', too few to learn from."
    assert notes(*tables[:2]) == ()
