"""A GRU on signals and a transformer on characters: training, report, predictions, and a client that joins later.

    python examples/sequences/walk.py [FOLDER] [--rounds 3] [--roles 3] [--characters 400]

The signals are made here; they are like those of a telephone that is carried by people who walk, run or sit. The characters
are of speaking roles in Shakespeare's plays, from the file ``tinyshakespeare/input.txt`` in the folder that ``BPFED_DATA``
names, or else of three verses below. Test rows are the last three tenths of what each client has: windows of a text
overlap, so that rows drawn at random would be known from training.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bpfed_sequences import ALPHABET, characters, gru
from torch import nn

import bpfed
from bpfed.data import from_arrays

#: Makes a network for inputs of a shape, with so many outputs.
Make = Callable[[tuple[int, ...], int], nn.Module]

STEPS, LENGTH = 24, 12
VERSES = {
    "JULIET": "what's in a name? that which we call a rose by any other name would smell as sweet; ",
    "HAMLET": "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer ",
    "MACBETH": "tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day, ",
}


def signals(people: int = 3, rows: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of three axes ``[n, STEPS, 3]``, activities ``[n]`` and people ``[n]``; each moves in a way of their own."""
    g = np.random.default_rng(seed)
    who, what = np.repeat(np.arange(people), rows), np.tile(np.arange(3), people * rows // 3)
    pace = np.array([0.0, 0.6, 1.2])[what] * (1.0 + 0.15 * g.normal(size=people))[who]
    phase = g.uniform(0, 2 * np.pi, (len(what), 1, 3))
    x = np.sin(pace[:, None, None] * np.arange(STEPS)[:, None] + phase) + 0.3 * g.normal(size=(len(what), STEPS, 3))
    return x.astype(np.float32), np.array(["sits", "walks", "runs"])[what], np.array([f"person {i}" for i in who])


def roles(most: int = 400, count: int = 3) -> dict[str, str]:
    """What the roles with most to say say, at most so many characters each."""
    path = Path(os.environ.get("BPFED_DATA", "")) / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        print(f"'{path}' is missing, so the plays are three verses; name the folder of the data in BPFED_DATA.")
        return {role: 4 * text for role, text in VERSES.items()}
    said: dict[str, str] = {}
    for speech in path.read_text(encoding="utf-8").split("\n\n"):
        role, _, words = speech.partition(":\n")
        said[role] = said.get(role, "") + words.lower() + "\n"
    longest = sorted(said, key=lambda role: -len(said[role]))[:count]
    return {role: said[role][:most] for role in longest}


def letters(said: dict[str, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of characters as places in the alphabet ``[n, LENGTH, 1]``, the next one ``[n]``, and roles ``[n]``."""
    x, y, who = [], [], []
    for role, text in said.items():
        ids = [ALPHABET.find(c) % len(ALPHABET) for c in text]
        for at in range(len(ids) - LENGTH):
            x.append(ids[at : at + LENGTH])
            y.append(ALPHABET[ids[at + LENGTH]])
            who.append(role)
    return np.array(x, np.float32)[..., None], np.array(y), np.array(who)


def last(who: np.ndarray, share: float = 0.3) -> np.ndarray:
    """Which rows are among the last of their client's, ``[n]`` bool."""
    test = np.zeros(len(who), bool)
    for one in np.unique(who):
        own = np.flatnonzero(who == one)
        test[own[len(own) - int(share * len(own)) :]] = True
    return test


def walk(
    name: str, rows: tuple[np.ndarray, np.ndarray, np.ndarray], make: Make, folder: Path, rounds: int
) -> bpfed.Run:
    """Train all clients but the last, write the report, predict, and let the last one join."""
    x, y, who = rows
    labels, y = np.unique(y, return_inverse=True)
    late = who == who[-1]
    data = from_arrays(
        x[~late],
        y[~late],
        who[~late],
        name=name,
        labels=labels.tolist(),
        task="classification",
        test=last(who[~late]),
    )
    model = make(x.shape[1:], len(labels))
    run = bpfed.fit("bpfed", data, model=model, rounds=rounds, epochs=2, batch=32, seed=0, eval_draws=4, progress=False)
    run.report(folder / f"{name}.html")
    print(f"{name}: {run.summary()}")
    first = run.client(data.clients[0]).predict(data.test.client(0)[0][:3])
    print(
        f"{name}: three test rows of {data.clients[0]} have their class with probability {first.probs.amax(-1).tolist()}"
    )
    half = int(late.sum()) // 2
    joined = run.adapt(x[late][:half], y[late][:half], name=who[-1], steps=100)
    right = joined.predict(x[late][half:]).probs.argmax(-1).numpy() == y[late][half:]
    print(f"{name}: {who[-1]} joins later, and {100 * right.mean():.0f} % of its other rows are predicted right")
    return run


def main(folder: Path, rounds: int = 3, count: int = 3, most: int = 400) -> list[bpfed.Run]:
    """Both networks; of the plays so many roles, and so many characters of each."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        walk("activities", signals(), gru, folder, rounds),
        walk("plays", letters(roles(most, count)), characters, folder, rounds),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roles", type=int, default=3)
    parser.add_argument("--characters", type=int, default=400)
    given = parser.parse_args()
    main(given.folder, given.rounds, given.roles, given.characters)
