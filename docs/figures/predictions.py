"""The README's picture: a sure prediction beside one that the model abstains on, from a real run on embedded digits.

    python docs/figures/predictions.py

It trains as ``make demo`` does, after pilot runs that choose the method, with a fifth of the training images kept back for prediction sets. Both images are test
images of one client: the one that its model is surest of, and, of those that it abstains on and whose set at 95 % has
several labels, the least sure. They are chosen by the prediction alone, not by the truth.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

import bpfed

LEVEL, SURE = 0.95, 0.9
OUT = Path(__file__).parent / "predictions.png"


def main() -> None:
    data = bpfed.data.load("digits")
    run = bpfed.fit(data=data, rounds=30, seed=0, calibrate="pilot:3", calibration=0.2)
    index, images, probs, sets, truth = _client(run)
    name, top = run.clients()[index].name, probs.max(1)
    sure = int(top.argmax())
    doubtful = [i for i in range(len(top)) if top[i] < SURE and sets[i].sum() > 1]
    unsure = min(doubtful, key=lambda i: float(top[i]))
    figure, axes = plt.subplots(1, 4, figsize=(10, 3.3), width_ratios=[1, 1.5, 1, 1.5], layout="constrained")
    for column, i in ((0, sure), (2, unsure)):
        abstains = top[i] < SURE
        image, bars = axes[column], axes[column + 1]
        image.imshow(images[i], cmap="gray_r")
        image.set_axis_off()
        image.set_title(f"truth: {truth[i]}", fontsize=12, color="#555555")
        inside = ["#1f5f8b" if sets[i][k] else "#c9d6df" for k in range(10)]
        bars.barh(range(10), probs[i], color=inside)
        bars.set(yticks=range(10), xlim=(0, 1.18), xticks=[0, 0.5, 1])
        bars.invert_yaxis()
        bars.spines[["top", "right"]].set_visible(False)
        bars.tick_params(labelsize=11)
        bars.set_xlabel("probability", fontsize=11)
        for k in np.flatnonzero(probs[i] > 0.01):
            bars.text(probs[i][k] + 0.02, k, f"{probs[i][k]:.2f}", va="center", fontsize=11)
        labels = ", ".join(str(k) for k in np.flatnonzero(sets[i]))
        words = "abstains: ask a person" if abstains else f"answers {int(probs[i].argmax())}"
        title = f"{words}\n{LEVEL:.0%} set: {{{labels}}}"
        bars.set_title(title, fontsize=13, fontweight="bold", color="#a33b20" if abstains else "#1f5f8b")
    figure.savefig(OUT, dpi=160, facecolor="white", metadata={"Software": ""})
    print(
        f"{OUT.name}: client {name}, test images {sure} and {unsure}; accuracy {run.history[-1]['accuracy']['pooled']:.3f}"
    )


def _client(run: bpfed.Run) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The first client with an image in doubt: its index, test images, probabilities, sets and truths."""
    for index, client in enumerate(run.clients()):
        x, y = run.data.test.client(index)
        found = client.predict(x, prepared=True)
        probs, sets = found.probs.numpy(), found.prediction_set(LEVEL).numpy()
        if ((probs.max(1) < SURE) & (sets.sum(1) > 1)).any():
            images = x.reshape(len(x), 8, 8).numpy()
            return index, images, probs, sets, y.numpy()
    raise SystemExit("No client has an image in doubt.")


if __name__ == "__main__":
    main()
