"""Cross-validation with scikit-learn: how well does a federation predict at sites that took no part in training?

    python examples/cross_validation.py

``GroupKFold`` leaves out whole sites. The estimator is told the site of each row too, by scikit-learn's metadata routing:
each training site gets a model of its own, and a site that was left out is predicted as a newcomer without data.
"""

from __future__ import annotations

import numpy as np
import sklearn
from sklearn.model_selection import GroupKFold, cross_val_score

from bpfed import BPFedClassifier


def sites(count: int = 6, rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of several sites with one rule and a threshold of each site's own: X ``[n, 3]``, y ``[n]``, site ``[n]``."""
    g = np.random.default_rng(seed)
    site = np.repeat(np.arange(count), rows)
    X = g.normal(size=(count * rows, 3))
    threshold = 0.3 * g.normal(size=count)
    return X, np.where(X[:, 0] - X[:, 1] > threshold[site], "ill", "well"), site


def main(method: str | None = "bpfed-linear", rounds: int = 10, folds: int = 3) -> np.ndarray:
    """The accuracy in each fold, ``[folds]``."""
    X, y, site = sites()
    with sklearn.config_context(enable_metadata_routing=True):
        model = BPFedClassifier(method, rounds=rounds).set_fit_request(groups=True).set_score_request(groups=True)
        return cross_val_score(model, X, y, params={"groups": site}, cv=GroupKFold(folds))


if __name__ == "__main__":
    print("accuracy at sites that were left out:", " ".join(f"{score:.2f}" for score in main()))
