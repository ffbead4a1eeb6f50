"""Reference posteriors of hierarchical linear models by NUTS, with which `bpfed-linear` is compared.

    python -m benchmarks.nuts [NAME ...]        needs: pip install 'bpfed[reference]', and the tables in BPFED_DATA

The model of client i with rows x (a 1 for the intercept, then the inputs) is

    w_i = θ + τ ⊙ z_i,    z_i ~ N(0, I),    θ ~ N(0, 3² I),    τ ~ HalfNormal(1)

with one τ for each column; y ~ N(x · w_i, σ²) with σ ~ HalfNormal(10) for numbers, and y ~ softmax(B W_i x) for K
classes, with a vector w_i for each of K − 1 orthonormal contrasts B. All of it is sampled: nothing is integrated by hand.
The record is ``benchmarks/results/nuts.json``. `problem` needs NumPy alone, so that a test can read the record and
compare it with a run on the same rows.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORD = Path(__file__).parent / "results" / "nuts.json"
#: Prior standard deviations of θ, of τ and of σ.
THETA, TAU, SIGMA = 3.0, 1.0, 10.0
SETTINGS = {"chains": 4, "warmup": 1000, "samples": 2000, "target_accept": 0.9, "max_tree_depth": 10, "seed": 0}
#: Digits that are recorded.
DIGITS = 5


class Problem(NamedTuple):
    """Rows of all clients.

    Attributes:
        x: Inputs without the intercept, ``[n, D]``.
        y: Targets, ``[n]``: numbers with mean 0 and standard deviation 1, or classes.
        who: The client of each row, ``[n]``, from 0.
        classes: How many there are; 0: the targets are numbers.
        columns: Names of the inputs.
    """

    x: NDArray[np.float64]
    y: NDArray[Any]
    who: NDArray[np.int64]
    classes: int
    columns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """By which the same rows are known again."""
        found = hashlib.sha256()
        for array in (self.x.astype("<f4"), self.y.astype("<f4"), self.who.astype("<i8")):
            found.update(array.tobytes())
        return found.hexdigest()[:16]


def _table(name: str, client: str) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """The columns of a table as words, and the place of each row's client among them in order."""
    path = Path(os.environ.get("BPFED_DATA", ".")) / "tables" / f"{name}.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    return columns, np.unique(columns[client], return_inverse=True)[1].astype(np.int64)


def _standardised(values: NDArray[Any]) -> NDArray[np.float64]:
    numbers = values.astype(np.float64)
    return (numbers - numbers.mean()) / numbers.std()


def radon() -> Problem:
    """Logarithm of radon in houses, 85 counties."""
    columns, who = _table("radon", "county")
    x = np.column_stack([columns["basement"].astype(np.float64), columns["uranium"].astype(np.float64)])
    return Problem(x, _standardised(columns["log.radon"]), who, 0, ("basement", "uranium"))


def hsb82() -> Problem:
    """Achievement in mathematics, 160 schools."""
    columns, who = _table("Hsb82", "school")
    x = [columns["cses"].astype(np.float64), columns["minrty"] == "Yes", columns["sx"] == "Male"]
    return Problem(
        np.column_stack(x).astype(np.float64), _standardised(columns["mAch"]), who, 0, ("cses", "minority", "male")
    )


def contraception() -> Problem:
    """Use of contraception, 60 districts."""
    columns, who = _table("Contraception", "district")
    children = [columns["livch"] == level for level in ("1", "2", "3+")]
    x = np.column_stack([columns["age"].astype(np.float64) / 10.0, columns["urban"] == "Y", *children])
    names = ("age / 10", "urban", "1 child", "2 children", "3 or more")
    return Problem(x.astype(np.float64), (columns["use"] == "Y").astype(np.int64), who, 2, names)


def _made(sizes: list[int], classes: int, seed: int) -> Problem:
    """Rows drawn from the model, with two inputs."""
    rng = np.random.default_rng(seed)
    outputs = max(1, classes - 1)
    theta, tau = rng.normal(0.0, 0.7, (outputs, 3)), np.array([0.6, 0.4, 0.2])
    who = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(who), 2))
    w = theta + tau * rng.normal(size=(len(sizes), outputs, 3))
    means = np.einsum("nkc,nc->nk", w[who], np.column_stack([np.ones(len(x)), x]))
    if not classes:
        return Problem(x, means[:, 0] + rng.normal(0.0, 0.8, len(x)), who, 0, ("a", "b"))
    logits = means @ contrasts(classes).T
    y = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    return Problem(x, y, who, classes, ("a", "b"))


def few() -> Problem:
    """Numbers of five clients."""
    return _made([30, 20, 15, 25, 10], 0, 1)


def three() -> Problem:
    """Three classes, 30 clients with 5 to 40 rows."""
    return _made(np.random.default_rng(2).integers(5, 41, 30).tolist(), 3, 2)


PROBLEMS = {"radon": radon, "hsb82": hsb82, "contraception": contraception, "few": few, "three": three}


def contrasts(classes: int) -> NDArray[np.float64]:
    """Orthonormal contrasts of classes, ``[K, K - 1]``: each class against the mean of those before it."""
    made = np.zeros((classes, classes - 1))
    for k in range(1, classes):
        made[:k, k - 1], made[k, k - 1] = -1.0, k
        made[:, k - 1] /= np.sqrt(k * (k + 1.0))
    return made


def sampled(problem: Problem) -> dict[str, Any]:
    """Means and standard deviations of the posterior, and how well the chains agree."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.diagnostics import summary
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    x = jnp.column_stack([jnp.ones(len(problem.x)), problem.x])
    clients, outputs, width = int(problem.who.max()) + 1, max(1, problem.classes - 1), x.shape[1]

    def model() -> None:
        theta = numpyro.sample("theta", dist.Normal(0.0, THETA).expand([outputs, width]).to_event(2))
        tau = numpyro.sample("tau", dist.HalfNormal(TAU).expand([width]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([clients, outputs, width]).to_event(3))
        w = numpyro.deterministic("coefficients", theta + tau * z)
        means = (w[problem.who] * x[:, None]).sum(-1)
        if problem.classes:
            numpyro.sample("y", dist.Categorical(logits=means @ contrasts(problem.classes).T), obs=problem.y)
        else:
            sigma = numpyro.sample("sigma", dist.HalfNormal(SIGMA))
            numpyro.sample("y", dist.Normal(means[:, 0], sigma), obs=problem.y)

    kernel = NUTS(model, target_accept_prob=SETTINGS["target_accept"], max_tree_depth=SETTINGS["max_tree_depth"])
    chains = MCMC(
        kernel,
        num_warmup=SETTINGS["warmup"],
        num_samples=SETTINGS["samples"],
        num_chains=SETTINGS["chains"],
        chain_method="sequential",
        progress_bar=False,
    )
    chains.run(jax.random.PRNGKey(SETTINGS["seed"]), extra_fields=("diverging",))
    drawn = {name: values for name, values in chains.get_samples(group_by_chain=True).items() if name != "z"}
    found = summary(drawn)
    return {
        name: {"mean": _listed(found[name]["mean"]), "sd": _listed(found[name]["std"])} for name in sorted(found)
    } | {
        "divergences": int(chains.get_extra_fields()["diverging"].sum()),
        "least effective samples": int(min(np.min(s["n_eff"]) for s in found.values())),
        "greatest r_hat": round(float(max(np.max(s["r_hat"]) for s in found.values())), 4),
    }


def _listed(values: Any) -> Any:
    return np.round(np.asarray(values, dtype=np.float64), DIGITS).tolist()


def main(names: list[str]) -> None:
    import jax
    import numpyro

    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record |= {
        "numpyro": numpyro.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "settings": SETTINGS,
        "priors": {"theta": THETA, "tau": TAU, "sigma": SIGMA},
    }
    for name in names or list(PROBLEMS):
        problem, start = PROBLEMS[name](), time.perf_counter()
        found = sampled(problem)
        shape = {"rows": len(problem.y), "clients": int(problem.who.max()) + 1, "classes": problem.classes}
        record[name] = {"digest": problem.digest, **shape, "columns": problem.columns, **found}
        checks = {key: value for key, value in found.items() if not isinstance(value, dict)}
        print(f"{name}: {time.perf_counter() - start:.0f} s, {checks}", flush=True)
        RECORD.write_text(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
