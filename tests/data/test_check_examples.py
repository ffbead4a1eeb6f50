"""What is said of clients that have one class alone; what is said of sizes is with the arrays that have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Command

from bpfed.data import FederatedData, from_arrays, load

ENDS = (
    " only, so it will predict hardly anything else, and its scores make the overall scores look better than they are."
)
END = (
    " have training examples of one class only, so each will predict hardly anything else, and their scores make the "
    "overall scores look better than they are."
)


def clients(*classes: str, more: int = 0) -> FederatedData:
    """Four training examples and a test example of each client, of these classes; and as many more clients of both."""
    words = [*classes, *(["ny"] * more)]
    held = [(f"c{i}", word[j % len(word)], j == 4) for i, word in enumerate(words) for j in range(5)]
    who, y, test = zip(*held, strict=True)
    return from_arrays([[0.0]] * len(y), list(y), list(who), test=list(test))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (clients(more=3), ()),
        (clients("y", "n"), (f"2 of 2 clients{END}",)),
        (clients("y", more=1), (f"Client 'c0' has training examples of 'y'{ENDS}",)),
        (clients("y", "n", more=3), (f"Clients 'c0' and 'c1'{END}",)),
        (clients("y", "n", "y", more=4), (f"Clients 'c0', 'c1', 'c2'{END}",)),
        (clients("y", "n", "y", "y", more=5), (f"Clients 'c0', 'c1', 'c2' and 1 more{END}",)),
        (clients("y", "n", "y", more=3), (f"3 of 6 clients{END}",)),
        (clients("y", "y", "y"), ()),  # there is but one class
    ],
)
def test_clients_of_one_class_are_named(data: FederatedData, said: tuple[str, ...]) -> None:
    assert data.notes == said


def test_one_training_example_is_of_one_class_and_no_word_is_lost_on_it() -> None:
    assert from_arrays([[0.0]] * 5, [0, 1, 0, 1, 1], [0, 0, 1, 1, 2], test_fraction=0).notes == ()


def test_what_is_dealt_out_by_classes_is_told() -> None:
    assert load("digits", partition="shards:1").notes[0].endswith(END)
    assert load("digits").notes == ()


def test_a_user_with_tables_is_told(command: Command) -> None:
    Path("d").mkdir()
    for client, ill in (("north", "no"), ("south", "no"), ("west", "yes")):
        rows = [f"{k}.5,{ill if client == 'west' or k % 2 else 'yes'}" for k in range(10)]
        Path(f"d/{client}.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    sentence = f"Client 'west' has training examples of 'yes'{ENDS}"
    seen = command.ok("data", "inspect", "folder:d", "--target", "ill")
    assert sentence in " ".join((seen.out + seen.err).split())
    told = command.ok("run", "--data", "folder:d", "--target", "ill", "--rounds", "1", "--device", "cpu", "--quiet")
    assert sentence in " ".join(told.err.split())
