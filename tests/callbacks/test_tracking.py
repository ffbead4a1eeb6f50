"""TensorBoard and MLflow, each by a stand-in for its package: what is sent to it, and what is said without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scenarios import classification

import bpfed
from bpfed.callbacks import Callback, MLflow, TensorBoard
from bpfed.callbacks.trackers import scalars
from bpfed.methods import FedAvg


class Breaks(Callback):
    """Breaks a run off after its second round."""

    def round(self, run: bpfed.Run, info: object, record: object) -> None:
        if run.federation.round == 2:
            raise ZeroDivisionError


def fit(*callbacks: Callback, **more: Any) -> bpfed.Run:
    return bpfed.fit(FedAvg(), classification(), rounds=4, epochs=1, eval_every=2, callbacks=callbacks, **more)


class Writer:
    """Stands for torch.utils.tensorboard.SummaryWriter."""

    made: list[Writer]

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self.log_dir, self.purge_step, self.closed = log_dir, purge_step, False
        self.written: list[tuple[str, float, int]] = []
        Writer.made.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.made = []
    return Writer.made


def test_tensorboard_gets_every_evaluated_round(writers: list[Writer], tmp_path: Path) -> None:
    run = fit(TensorBoard(tmp_path / "tb"))
    (writer,) = writers
    assert (writer.log_dir, writer.purge_step, writer.closed) == (str(tmp_path / "tb"), None, True)
    assert {step for _, _, step in writer.written} == {1, 2, 4}
    assert ("accuracy/pooled", run.history[-1]["accuracy"]["pooled"], 4) in writer.written
    assert ("train_nll", run.history[0]["train_nll"], 1) in writer.written


def test_tensorboard_forgets_the_rounds_that_are_run_again(writers: list[Writer], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(TensorBoard(tmp_path / "tb"), Breaks(), out=tmp_path / "run")
    assert writers[0].closed
    fit(TensorBoard(tmp_path / "tb"), out=tmp_path / "run", resume=True)
    assert writers[1].purge_step == 3


class Client:
    """Stands for mlflow.MlflowClient."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.experiments: dict[str, str] = {}

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = "e7"
        return "e7"

    def create_run(self, experiment_id: str, run_name: str | None = None) -> SimpleNamespace:
        self.calls.append(("create", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r9"))

    def log_param(self, run_id: str, key: str, value: Any) -> None:
        self.calls.append(("param", run_id, key, value))

    def log_metric(self, run_id: str, key: str, value: float, step: int | None = None) -> None:
        self.calls.append(("metric", run_id, key, value, step))

    def update_run(self, run_id: str, status: str | None = None) -> None:
        self.calls.append(("update", run_id, status))

    def set_terminated(self, run_id: str, status: str | None = None) -> None:
        self.calls.append(("ended", run_id, status))


@pytest.fixture
def _mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)


@pytest.mark.usefixtures("_mlflow")
def test_mlflow_gets_settings_and_every_evaluated_round() -> None:
    tracker = MLflow(experiment="mine")
    run = fit(tracker)
    calls = tracker.client.calls
    assert calls[0] == ("create", "e7", "fedavg on small, seed 0")
    assert ("param", "r9", "method.lr", 0.001) in calls
    assert ("param", "r9", "run.rounds", 4) in calls
    assert ("metric", "r9", "nll/worst", run.history[1]["nll"]["worst"], 2) in calls
    assert calls[-1] == ("ended", "r9", "FINISHED")


@pytest.mark.usefixtures("_mlflow")
def test_mlflow_goes_on_with_the_run_it_had(tmp_path: Path) -> None:
    broken, again = (MLflow(remember=tmp_path / "run" / "mlflow.txt") for _ in range(2))
    with pytest.raises(ZeroDivisionError):
        fit(broken, Breaks(), out=tmp_path / "run")
    assert broken.client.calls[-1] == ("ended", "r9", "KILLED")
    fit(again, out=tmp_path / "run", resume=True)
    assert again.client.calls[0] == ("update", "r9", "RUNNING")
    assert {call[-1] for call in again.client.calls if call[0] == "metric"} == {4}
    assert again.client.calls[-1] == ("ended", "r9", "FINISHED")


@pytest.mark.parametrize(
    ("module", "make", "name"),
    [("torch.utils.tensorboard", lambda: TensorBoard("x"), "TensorBoard"), ("mlflow", MLflow, "MLflow")],
)
def test_without_the_package_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Any, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        bpfed.UserError, match=rf"{name} is not installed; install it with: pip install 'bpfed\[track\]'"
    ):
        make()


def test_only_finite_numbers_are_sent() -> None:
    record = {"round": 3, "nll": {"pooled": 1.0, "worst": None}, "train_kl": float("nan"), "seconds": 2}
    assert scalars(record) == {"nll/pooled": 1.0, "seconds": 2.0}
