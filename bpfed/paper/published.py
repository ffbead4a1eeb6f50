"""The published numbers: Tables 1 and 2 of Chen et al. 2023, "Bayesian Personalized Federated Learning with Shared and
Personalized Uncertainty Representations", arXiv 2309.15499.

They are the best of 800 test rounds of one run for each cell, with the settings of the authors' code.
"""

from __future__ import annotations

#: The tables' columns.
CELLS = ("mnist-small", "mnist-large", "fmnist-small", "fmnist-large", "cifar10-small", "cifar10-large")

#: The tables' rows by our names, in the paper's order, and what the paper calls them.
METHODS = {
    "fedavg": "FedAvg",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "pfedbayes": "pFedBayes",
    "fedper": "FedPer",
    "lg-fedavg": "LG-FedAvg",
    "fedrep": "FedRep",
    "fedsoul": "FedSOUL",
    "bpfed": "BPFed",
}

#: Table 1, test accuracy in per cent as printed (means), a column for each cell.
ACCURACY = {
    "fedavg": (88.27, 89.32, 81.22, 82.13, 39.83, 55.23),
    "perfedavg": (92.13, 97.67, 87.38, 92.55, 52.15, 69.68),
    "pfedme": (93.70, 96.44, 89.24, 91.88, 52.58, 66.80),
    "pfedbayes": (93.31, 98.15, 87.91, 92.38, 50.39, 68.23),
    "fedper": (93.77, 98.49, 89.06, 93.43, 51.65, 73.99),
    "lg-fedavg": (91.59, 97.18, 86.79, 91.85, 41.87, 64.88),
    "fedrep": (94.61, 98.50, 88.76, 93.15, 46.80, 72.18),
    "fedsoul": (91.71, 97.69, 86.63, 91.87, 43.83, 62.70),
    "bpfed": (94.75, 98.51, 89.68, 93.54, 54.37, 70.14),
}

#: Table 2, expected calibration error in per cent as printed.
ECE = {
    "pfedbayes": (4.7, 1.4, 9.2, 7.1, 46.3, 35.2),
    "fedsoul": (6.2, 1.9, 9.7, 7.8, 52.0, 43.3),
    "bpfed": (4.4, 1.2, 8.9, 6.6, 42.8, 29.8),
}

TABLES = {"accuracy": ACCURACY, "ece": ECE}


def published(measure: str, method: str, cell: str) -> float | None:
    """The printed number as a fraction; None where the paper has none."""
    row = TABLES.get(measure, {}).get(method)
    return round(row[CELLS.index(cell)] / 100, 4) if row and cell in CELLS else None
