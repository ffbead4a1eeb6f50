"""The published numbers: Tables 1 and 2 of Chen et al. 2023, "Bayesian Personalized Federated Learning with Shared and
Personalized Uncertainty Representations", arXiv 2309.15499; and what this project aims at in the same cells.

The published numbers are the best of 800 test rounds of one run for each cell, with the settings of the authors' code.
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

#: What our methods aim at in the last round: accuracy and ECE in per cent, a pair for each cell.
AIMS = {
    "bpfed-recipe": ((95.2, 1.3), (98.5, 0.6), (89.8, 2.0), (93.7, 1.0), (62.5, 3.0), (76.5, 2.0)),
    "bpfed-population": ((95.6, 1.0), (98.7, 0.5), (90.3, 2.0), (94.1, 0.8), (63.5, 2.0), (78.0, 1.2)),
}
#: Decimals of the aims; a figure reaches its aim if it does when rounded to as many.
AIM_DECIMALS = 1


def published(measure: str, method: str, cell: str) -> float | None:
    """The printed number as a fraction; None where the paper has none."""
    row = TABLES.get(measure, {}).get(method)
    return round(row[CELLS.index(cell)] / 100, 4) if row and cell in CELLS else None


def reached(method: str, cell: str, accuracy: float, ece: float) -> bool:
    """Whether both figures, given as fractions, reach the aims of a method, rounded to the aims' decimals."""
    least, most = AIMS[method][CELLS.index(cell)]
    return round(100 * accuracy, AIM_DECIMALS) >= least and round(100 * ece, AIM_DECIMALS) <= most
