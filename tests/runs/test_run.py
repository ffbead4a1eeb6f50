"""The Python way: fit, ask, and what a user of it may get wrong."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import files, metrics
from scenarios import classification, regression
from torch import nn

import bpfed
from bpfed.callbacks import Callback
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.methods import BPFed, FedAvg
from bpfed.report import RunRecord

QUICK = {"rounds": 2, "epochs": 1, "eval_draws": 2}


@pytest.fixture(scope="module")
def run() -> bpfed.Run:
    return bpfed.fit(BPFed(), classification(), rounds=3, epochs=2, seed=1)


def test_what_can_be_asked_of_a_run(run: bpfed.Run) -> None:
    assert [r["round"] for r in run.history] == [1, 2, 3]
    text = run.summary()
    assert text.startswith("BPFed on small: 5 clients, round 3, seed 1")
    assert text.splitlines()[1] == "  personal: layer 3 (303 weights); shared: layer 1 (500 weights)"
    assert run.summary_record()["factors"] == text.splitlines()[1].strip()
    assert re.search(r"^  accuracy +0\.\d{4} +\(worst client 0\.\d{4}\)$", text, re.M)
    assert run.client("site c").name == "site c"
    assert [c.name for c in run.clients()] == list(run.data.clients)
    with pytest.raises(bpfed.UserError, match="Unknown client 'site z'"):
        run.client("site z")
    with pytest.raises(
        bpfed.UserError, match=r"The client is 0, but clients are named by text; use run.client\('site a'"
    ):
        run.client(0)


def test_a_client_predicts_with_its_uncertainty(run: bpfed.Run) -> None:
    x = run.data.test.client(0)[0]
    told = run.clients()[0].predict(x, draws=50)
    assert told.probs.shape == (len(x), 3)
    assert torch.allclose(told.probs.sum(-1), torch.ones(len(x)))
    assert torch.allclose(told.entropy, told.epistemic + told.aleatoric, atol=1e-6)
    assert torch.equal(told.probs, run.clients()[0].predict(x, draws=50).probs)
    with pytest.raises(bpfed.UserError, match=r"Inputs have shape \[2\] each, but those of 'small' have \[4\]"):
        run.clients()[0].predict(x[:, :2])
    with pytest.raises(bpfed.UserError, match="NaN or infinite"):
        run.clients()[0].predict(torch.full((1, 4), float("nan")))


def test_of_two_classes_each_is_named() -> None:
    two = replace(classification(classes=2), labels=("healthy", "ill"))
    found = bpfed.fit(FedAvg(), two, rounds=1, epochs=1, progress=False).record()
    titles = {measure.name: measure.full for measure in found.measures}
    assert (titles["sensitivity"], titles["specificity"]) == ("Recall of 'ill'", "Recall of 'healthy'")
    unnamed = bpfed.fit(FedAvg(), classification(classes=2), rounds=1, epochs=1, progress=False).record()
    assert {measure.full for measure in unnamed.measures} >= {"Sensitivity", "Specificity"}


def test_a_report_without_a_folder(run: bpfed.Run, tmp_path: Path) -> None:
    assert "BPFed" in run.summary()
    page = run.report(tmp_path / "r.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "personal: layer 3 (303 weights); shared: layer 1 (500 weights)" in page


def test_the_folder_holds_what_the_run_says(tmp_path: Path) -> None:
    data = regression()
    run = bpfed.fit(FedAvg(), data, out=tmp_path / "a", **QUICK)
    for i, row in enumerate(run.detail()["clients"]):
        (_, own), (_, tested) = data.train.client(i), data.test.client(i)
        assert row["baseline"] == pytest.approx(float((tested - own.mean()).square().mean().sqrt()), rel=1e-5)
    read = RunRecord.read(tmp_path / "a")
    assert read == run.record()
    assert read.summary["rmse"]["last"] == run.history[-1]["rmse"]["pooled"]
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert config["data"]["name"] == "lines"
    assert config["run"]["rounds"] == 2
    assert config["model"]["personal"] == list(run.federation.model.layout.personal_names)


def test_a_resume_in_python_is_the_same_run(tmp_path: Path) -> None:
    class Breaks(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            if run.federation.round == 2:
                raise ZeroDivisionError

    def fit(out: str, **more: object) -> bpfed.Run:
        return bpfed.fit(FedAvg(), classification(), out=tmp_path / out, rounds=3, epochs=1, **more)  # type: ignore[arg-type]

    whole = fit("whole")
    with pytest.raises(ZeroDivisionError):
        fit("broken", callbacks=[Breaks()])
    said: list[str] = []
    again = fit("broken", resume=True, say=said.append)
    assert said == ["Resuming after round 2 of 3."]
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert again.seconds > again.history[1]["seconds"]
    x = whole.data.test.x
    assert torch.equal(again.clients()[0].predict(x).probs, whole.clients()[0].predict(x).probs)


def test_callbacks_hear_of_everything_in_order() -> None:
    heard: list[str] = []

    class Listens(Callback):
        def start(self, run: bpfed.Run) -> None:
            heard.append("start")

        def round(self, run: bpfed.Run, info: object, record: dict | None) -> None:
            heard.append(f"round {run.federation.round}{'' if record is None else ' evaluated'}")

        def end(self, run: bpfed.Run) -> None:
            heard.append("end")

        def stop(self, run: bpfed.Run) -> None:
            heard.append("stop")

    bpfed.fit(FedAvg(), classification(), rounds=3, epochs=1, eval_every=3, callbacks=[Listens()])
    assert heard == ["start", "round 1 evaluated", "round 2", "round 3 evaluated", "end", "stop"]


def test_nothing_is_printed_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    bpfed.fit(FedAvg(), classification(), **QUICK)
    assert capfd.readouterr() == ("", "")
    bpfed.fit(FedAvg(), classification(), progress=True, **QUICK)
    out, err = capfd.readouterr()
    assert out == ""
    first, *rounds = err.splitlines()
    assert first == "personal: nothing; shared: layer 1, layer 3 (803 weights)"
    assert [line.split()[:2] for line in rounds] == [["round", "1/2"], ["round", "2/2"]]


def test_a_changed_module_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    bpfed.fit(FedAvg(), classification(), model=module, rounds=1, epochs=1)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "Batch normalisation replaced by group normalisation in: 1.\n"


def spoilt(value: float) -> FederatedData:
    data = classification()
    data.train.x[data.train.offsets[2] + 1, 0] = value
    return data


def without_examples() -> FederatedData:
    whole = classification()
    parts = [whole.train.client(i) for i in range(len(whole))]
    parts[3] = (parts[3][0][:0], parts[3][1][:0])
    return FederatedData("small", whole.clients, Examples.of(parts), whole.test, "classification", 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": "digitz"}, "Unknown dataset 'digitz'; did you mean 'digits'?"),
        ({"rouns": 3}, "Unknown setting 'rouns'; did you mean 'rounds'?"),
        (
            {"method": "fedper", "lr": 0.1},
            "'lr' is a setting of the method; give it to the method itself, such as method=bpfed.methods.",
        ),
        (
            {"partition": "iid"},
            "'partition' is a data setting; pass it to bpfed.data.load() and use the result as data=",
        ),
        ({"data": spoilt(float("nan"))}, "Client 'site c' of 'small' has NaN or infinite values in its training data"),
        ({"data": spoilt(float("inf"))}, "Client 'site c' of 'small' has NaN or infinite values in its training data"),
        ({"data": without_examples()}, "Client 'site d' of 'small' has no training example"),
        ({"model": nn.Linear(4, 7)}, "output has shape [2, 7] for a batch of 2, but the data has 3 classes"),
        ({"model": nn.Linear(9, 3)}, "The module cannot take inputs of shape [4] (a batch of 2)"),
        ({"model": nn.ReLU()}, "The module has no parameters"),
        ({"data": regression(), "model": nn.Linear(3, 2)}, "regression needs one number per example"),
        ({"method": BPFed(rule="meen")}, "did you mean 'mean'?"),
        ({"participants": 6}, "participants is 6, but there are 5 clients; choose 1 to 5."),
        ({"seed": -1}, "seed is -1, but must be 0 or more."),
        ({"eval_clients": 0}, "eval_clients is 0, but must be at least 1, or left unset."),
        ({"resume": True, "overwrite": True}, "choose one of --resume and --overwrite"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(tmp_path: Path, arguments: dict, said: str) -> None:
    with pytest.raises(bpfed.UserError) as error:
        bpfed.fit(**{"data": classification(), "out": tmp_path / "a", **QUICK, **arguments})
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_best_round_of_a_run_that_was_not_always_finite() -> None:
    run = bpfed.fit(FedAvg(), classification(), rounds=3, epochs=1)
    run.history[1]["nll"]["pooled"] = None
    kept = [run.history[i]["nll"]["pooled"] for i in (0, 2)]
    assert run.summary_record()["nll"]["best"] == min(kept)
    for record in run.history:
        record["nll"] = {"pooled": None, "mean": None, "worst": None}
    assert run.summary_record()["nll"] == {"last": None, "best": None, "worst_client": None}
    assert "n/a" in run.summary()
    assert json.dumps(run.summary_record(), allow_nan=False)


def test_overwriting_waits_until_the_new_run_is_known_to_be_possible(tmp_path: Path) -> None:
    bpfed.fit(FedAvg(), classification(), out=tmp_path / "a", **QUICK)
    before = files(tmp_path)
    with pytest.raises(bpfed.UserError):
        bpfed.fit(FedAvg(), classification(), model=nn.Linear(4, 7), out=tmp_path / "a", overwrite=True, **QUICK)
    assert files(tmp_path) == before


def test_the_names_of_the_package() -> None:
    for name in bpfed.__all__:
        assert getattr(bpfed, name) is not None
    assert dir(bpfed) == sorted(bpfed.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        bpfed.fitt  # noqa: B018


@pytest.mark.parametrize(
    ("ask", "word"),
    [
        (lambda: bpfed.fit(weighting="sise"), "weighting is 'sise'"),
        (lambda: bpfed.fit(rounds=1.5), "whole number"),
        (lambda: bpfed.fit(bpfed.methods.BPFed(draws=0)), "draws is 0"),
        (lambda: bpfed.fit(bpfed.methods.BPFed(discount=1.5)), "discount is 1.5"),
        (
            lambda: bpfed.fit(bpfed.methods.BPFed(predict="ownn")),
            "predict is 'ownn', but must be 'own' or 'aggregated'.",
        ),
        (lambda: bpfed.fit(bpfed.methods.BPFed(draws=1.5)), "draws is 1.5, but must be a whole number."),
        (lambda: bpfed.fit(bpfed.methods.BPFed(lr="0.1")), "lr is '0.1', but must be a number."),
        (lambda: bpfed.fit(bpfed.methods.FedPer(personal=3)), "personal is 3, but must be text or a list of text."),
        (lambda: bpfed.fit(bpfed.methods.FedAvg(keep_adam="no")), "keep_adam is 'no', but must be true or false."),
        (lambda: bpfed.fit(bpfed.methods.FedAvg(optimiser=3)), "optimiser is 3, but must be 'adam' or 'sgd'."),
        (lambda: bpfed.fit(drop_rate="0.1"), "drop_rate is '0.1', but must be a number."),
        (lambda: bpfed.fit(robust=None), "robust is None, but must be text."),
        (lambda: bpfed.fit(seed="a"), "seed is 'a', but must be a whole number."),
        (lambda: bpfed.fit(settings=Settings(rounds=1, tf32="yes")), "tf32 is 'yes', but must be true or false."),
        (lambda: bpfed.fit("fedavg", torch.zeros(3, 4)), "The data is a Tensor, but must be the name of a dataset"),
        (lambda: bpfed.tune("fedavg", [1, 2], {"lr": [0.1]}), "make such data of arrays with bpfed.data.from_arrays()"),
        (lambda: bpfed.compare(["fedavg"], 7), "The data is a int, but must be"),
        (lambda: bpfed.fit_seeds(seeds=1.5), "seeds is 1.5, but must be at least one whole number"),
        (lambda: bpfed.fit_seeds(seeds="ab"), "seeds is 'ab', but must be at least one whole number"),
        (lambda: bpfed.fit_seeds(seeds=0), "seeds is 0, but must be at least one whole number"),
        (lambda: bpfed.data.load(seed="a"), "seed is 'a', but must be a whole number."),
        (lambda: bpfed.fit(bpfed.methods.BPFed), "bpfed.methods.BPFed()"),
        (lambda: bpfed.fit("fedavgg"), "Unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (lambda: bpfed.fit_seeds("fedavgg"), "Unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (lambda: bpfed.fit(bpfed.methods.FedAvg(personal="head")), "FedAvg shares all weights"),
        (lambda: bpfed.fit(store="file"), "no run folder"),
        (lambda: bpfed.fit_seeds(seeds=[]), "at least one"),
        (lambda: bpfed.fit_seeds(roundz=3), "did you mean 'rounds'"),
        (lambda: bpfed.fit(bpfed.methods.BPFed(lr=1e30), rounds=2), "diverged in round 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(ask, word):
    with pytest.raises(bpfed.UserError, match=re.escape(word)):
        ask()


def test_runs_of_several_seeds_are_the_runs_of_each_seed(tmp_path):
    runs = bpfed.fit_seeds(None, "digits", (0, 1), rounds=2, out=tmp_path, tf32=False)
    alone = bpfed.fit(None, "digits", seed=1, rounds=2, tf32=False)
    # A GPU multiplies more clients at once in another order.
    near = 1e-4 if torch.cuda.is_available() else 1e-6
    assert runs[1].history[-1]["nll"]["pooled"] == pytest.approx(alone.history[-1]["nll"]["pooled"], abs=near)
    assert runs[0].history[-1]["nll"] != runs[1].history[-1]["nll"]
    assert (tmp_path / "seed-0" / "report.html").exists()


def test_a_run_says_who_was_never_drawn():
    data = classification(sizes=(6,) * 9)
    run = bpfed.fit(FedAvg(), data, rounds=2, participants=2, device="cpu", compile="off")
    drawn = {i for round_ in (1, 2) for i in run.federation.participants(round_).tolist()}
    record = run.record()
    assert (record.summary["participants"], record.summary["never_drawn"]) == (2, 9 - len(drawn))
    assert record.participation_note.startswith(
        f"2 of the 9 clients are drawn in a round; {9 - len(drawn)} were never drawn"
    )
    whole = bpfed.fit(FedAvg(), data, rounds=1, device="cpu", compile="off").record()
    assert whole.participation_note == ""


def test_what_is_true_of_all_seeds_is_said_once():
    said: list[str] = []
    data = replace(classification(), notes=("There seem to be dates.",))
    bpfed.fit_seeds(FedAvg(), data, (0, 1, 2), rounds=1, epochs=1, compile="off", say=said.append)
    assert said == ["There seem to be dates."]


def test_a_method_may_be_named():
    said, data = {"progress": False}, classification()
    named, given = (bpfed.fit(method, data, **QUICK, **said).history[-1] for method in ("fedavg", FedAvg()))
    assert named | {"seconds": 0} == given | {"seconds": 0}
    assert bpfed.fit_seeds("fedavg", data, (0,), **QUICK)[0].federation.method == FedAvg()
    assert [run.settings.seed for run in bpfed.fit_seeds("fedavg", data, 2, **QUICK)] == [0, 1]
    assert bpfed.tune("fedavg", data, {"lr": [0.1]}, cuts=1, **QUICK, **said).trials["lr=0.1"].method == FedAvg(lr=0.1)
    assert list(bpfed.compare({"mine": "fedavg"}, data, 1, **QUICK, **said).names) == ["mine"]


def test_a_client_without_test_examples_is_named() -> None:
    whole = classification()
    parts = [whole.test.client(i) for i in range(len(whole))]
    parts[1] = (parts[1][0][:0], parts[1][1][:0])
    run = bpfed.fit(FedAvg(), replace(whole, test=Examples.of(parts)), rounds=1, epochs=1, progress=False)
    assert run.record().untested == (
        f"1 client has no test examples and is not counted in any figure: {whole.clients[1]}."
    )


def test_a_last_step_that_goes_to_infinity_is_no_result():
    """The loss of one batch is that of the weights before its only step."""
    with pytest.raises(bpfed.UserError, match=r"diverged in round 1 \(it predicts what is not a number\)"):
        bpfed.fit(FedAvg(lr=1e30), classification(), rounds=1, epochs=1, batch=100)


def test_who_will_never_be_drawn_is_said_before_training():
    said: list[str] = []
    settings = {"rounds": 3, "participants": 2, "epochs": 1, "eval_draws": 1, "compile": "off", "baselines": "off"}
    run = bpfed.fit(FedAvg(), classification(sizes=(6,) * 9), say=said.append, **settings)
    never = [name for k, name in enumerate(run.data.clients) if not run.federation.times_drawn()[k]]
    assert never
    (note,) = (sentence for sentence in said if "never drawn" in sentence)
    assert note.startswith(f"With 2 of 9 clients in each of 3 rounds, {len(never)} client")
    assert all(f"'{name}'" in note for name in never[:3])
    assert run.federation.never_drawn().tolist() == [run.data.clients.index(name) for name in never]
