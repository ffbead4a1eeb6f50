"""Settings that are chosen before a run: which, on what, and that a run repeats and resumes without choosing again."""

import dataclasses
import math

import numpy as np
import pytest
import scenarios
import torch

import bpfed
from bpfed._util.errors import Diverged, UserError
from bpfed.config.reader import read
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.methods import Adaptive, FedAvg, Recipe
from bpfed.methods.adaptive import DEVIATIONS, PRIORS
from bpfed.runs import pilot
from bpfed.runs.fit import method_of
from bpfed.runs.pilot import ScoredCandidate, Unscored, comparable, first_not_worse

#: A few steps have to do, so they are long.
QUICK = {
    "rounds": 12,
    "epochs": 4,
    "batch": 20,
    "eval_draws": 8,
    "network": "linear",
    "device": "cpu",
    "compile": "off",
}


def candidates(*sums, examples=10.0):
    sizes = np.full(len(sums[0]), examples)
    return [ScoredCandidate(FedAvg(), {}, np.array(s, dtype=float), sizes) for s in sums]


@pytest.mark.parametrize(
    ("sums", "chosen"),
    [
        (([10, 10, 10], [5, 5, 5]), 1),  # better at all clients alike: no doubt
        (([10, 10, 10], [10.3, 10, 4]), 0),  # better at one client alone: the first
        (([10, 10, 10], [8, 6, 4]), 0),  # three clients, t = 4.3: not beyond doubt
        (([10, 10, 10] * 5, [8, 6, 4] * 5), 1),  # fifteen of the same kind
        (([5, 5, 5], [10, 10, 10]), 0),
        (([10, 10, 10], [5, 5, math.nan]), 0),
        (([math.inf] * 3, [math.nan] * 3, [7, 8, 9]), 2),
    ],
)
def test_the_first_that_the_data_do_not_tell_from_the_best_is_chosen(sums, chosen):
    assert first_not_worse(candidates(*sums, examples=100.0)) == chosen


def test_a_candidate_that_is_much_worse_is_not_chosen_however_wide_the_interval():
    """Three clients do not tell the two apart, but the first is worse by 0.4 nats an example."""
    sums = ([10, 10, 10], [8, 6, 4])
    assert first_not_worse(candidates(*sums, examples=10.0)) == 1
    assert first_not_worse(candidates(*sums, examples=100.0)) == 0


def federation(differ, clients=6, size=60, seed=0):
    """Clients whose labels follow one slope each; slopes that are all the same, or of either sign."""
    g = scenarios.generator(seed)

    def part(i):
        x = torch.randn(size, 2, generator=g)
        slope = torch.tensor([2.0, -1.0]) * (-1.0 if differ and i % 2 else 1.0)
        return x, (x @ slope + 0.5 * torch.randn(size, generator=g) > 0).long()

    train, test = (Examples.of([part(i) for i in range(clients)]) for _ in range(2))
    return FederatedData("slopes", tuple(f"c{i}" for i in range(clients)), train, test, "classification", 2)


def test_candidates_are_compared_on_clients_that_scored_all_of_them():
    """The second is better at each client; without the first client's score it would seem far worse or far better."""
    one, other = candidates([50.0, 9.0, 9.0], [40.0, 8.0, 8.0])
    away = dataclasses.replace(other, sums=np.array([0.0, 8.0, 8.0]), examples=np.array([0.0, 10.0, 10.0]))
    diverged = dataclasses.replace(one, sums=np.full(3, math.inf), examples=np.ones(3))
    assert [c.nll for c in comparable([one, away, diverged])] == [0.9, 0.8, math.inf]
    assert [c.nll for c in comparable([one, other])] == [one.nll, other.nll]
    with pytest.raises(Unscored, match="No client has scored all candidates"):
        comparable([one, dataclasses.replace(other, sums=np.zeros(3), examples=np.zeros(3))])


def test_a_client_with_two_rows_holds_out_one_in_the_first_fold_alone(untraced):
    data = scenarios.classification(sizes=(20, 2, 20))
    settings = Settings(**{**QUICK, "rounds": 1, "epochs": 1})
    start = pilot.selection_settings(settings)
    found = pilot.score_methods([Adaptive()], data.folds(2, 0.2, start.seed), start, None, None)[0]
    assert found.examples.tolist() == [8.0, 1.0, 8.0]
    assert (found.sums > 0.0).all()


def test_settings_are_chosen_where_clients_have_no_example_for_the_last_fold(untraced):
    data = scenarios.classification(sizes=(3, 3, 2, 3))
    choice = pilot.choose(Adaptive(), data, Settings(**{**QUICK, "rounds": 1, "epochs": 1}))
    assert choice.scored.examples.tolist() == [2.0, 2.0, 1.0, 2.0]  # of two folds, the third is empty


def test_clients_that_are_alike_share_and_clients_that_differ_do_not():
    alike, apart = (
        pilot.choose(Adaptive(lr=0.03), federation(differ), Settings(**QUICK, weighting="size"))
        for differ in (False, True)
    )
    assert alike.method.head_deviation <= 0.3
    assert apart.method.head_deviation >= 0.3
    pooled = apart.stages[1][
        DEVIATIONS.index((0.0, 0.0))
    ]  # no deviation at all, which cannot tell slopes of either sign apart
    assert pooled.nll > apart.stages[1][apart.chosen[1]].nll + 0.2
    for choice in (alike, apart):
        assert [len(stage) for stage in choice.stages] == [len(PRIORS), len(DEVIATIONS)]
        best = min(c.nll for c in choice.stages[1])
        assert choice.stages[1][choice.chosen[1]].nll <= best + 0.1
        assert choice.method == choice.stages[1][choice.chosen[1]].method
        assert all((c.examples == 3 * 12).all() for stage in choice.stages for c in stage)


def test_no_test_example_takes_part():
    data = federation(True)
    spoilt = dataclasses.replace(data, test=dataclasses.replace(data.test, y=1 - data.test.y))
    settings = Settings(**QUICK)
    assert (
        pilot.choose(Adaptive(lr=0.03), data, settings).method
        == pilot.choose(Adaptive(lr=0.03), spoilt, settings).method
    )


def test_a_run_says_what_was_chosen_and_its_configuration_repeats_it(tmp_path):
    data, said = federation(True), []
    run = bpfed.fit(Adaptive(lr=0.03), data, out=tmp_path / "a", say=said.append, **QUICK)
    assert any("Choosing between 10 settings" in s for s in said)
    assert any(s.startswith("Chosen on held-out training examples: temperature ") for s in said)
    config = read(tmp_path / "a" / "config.toml")
    assert config.run.adapt == "off"
    assert config.method == run.federation.method
    assert config.method != Adaptive(lr=0.03)
    said.clear()
    again = bpfed.fit(config.method, data, settings=config.run, say=said.append)
    assert not said
    assert [r["nll"] for r in again.history] == [r["nll"] for r in run.history]


def test_a_run_is_resumed_with_what_was_chosen_for_it(tmp_path):
    data = federation(True)
    whole = bpfed.fit("bpfed-adaptive", data, out=tmp_path / "a", **QUICK)
    said = []
    resumed = bpfed.fit("bpfed-adaptive", data, out=tmp_path / "a", resume=True, say=said.append, **QUICK)
    assert resumed.federation.method == whole.federation.method
    assert not any("Choosing" in s for s in said)


def test_what_a_user_says_is_not_chosen_and_adapt_can_be_off():
    assert Adaptive(temperature=0.5).candidates() == ()
    assert Adaptive(head_deviation=1.0).candidates() == ()
    assert FedAvg().candidates() == ()
    said = []
    run = bpfed.fit(Adaptive(lr=0.03), federation(False), adapt="off", say=said.append, **QUICK)
    assert not said
    assert run.federation.method == Adaptive(lr=0.03)


def test_a_private_run_has_no_pilots_that_nobody_counts():
    with pytest.raises(UserError, match=r"not counted in ε; set adapt = 'off'"):
        bpfed.fit(Adaptive(), federation(False), noise=1.0, clip=1.0, **QUICK)


def test_a_pilot_that_diverges_is_not_chosen(monkeypatch):
    trained = pilot._trained

    def some(methods, *rest):
        if any(one.prior_scale == 1.0 and one.temperature == 1.0 for one in methods):
            raise Diverged("as if")
        return trained(methods, *rest)

    monkeypatch.setattr(pilot, "_trained", some)
    choice = pilot.choose(Adaptive(lr=0.03), federation(False), Settings(**QUICK))
    assert [math.isinf(c.nll) for c in choice.stages[0]] == [True, False, False, False, False]
    assert choice.chosen[0] > 0


def test_tables_are_trained_adaptively_and_other_data_by_the_recipe_where_nothing_is_chosen():
    data = federation(False)
    flat_file = dataclasses.replace(data, name="folder:x")
    image = dataclasses.replace(flat_file, train=dataclasses.replace(data.train, x=data.train.x[:, None]))
    found = [method_of(None, one).name for one in (data, flat_file, image)]
    assert found == ["bpfed-recipe", "bpfed-adaptive", "bpfed-recipe"]
    assert method_of("fedavg", flat_file).name == "fedavg"


# --- The method itself ------------------------------------------------------------------------------------------------

FEW_ROUNDS = {**QUICK, "rounds": 4, "epochs": 1}


def test_without_a_method_the_better_of_two_is_trained_and_its_configuration_repeats_it(tmp_path):
    data, said = federation(True), []
    run = bpfed.fit(None, data, out=tmp_path / "a", say=said.append, **FEW_ROUNDS)
    choice = pilot.choose_method(data, Settings(**FEW_ROUNDS))
    assert said == [said[0], choice.words]
    assert said[0].startswith(
        "Choosing between bpfed-recipe and bpfed-adaptive on held-out training examples first: 5 pilot"
    )
    assert "about 4.5 times the computation" in said[0]
    assert [one.method.name for one in choice.tried] == ["bpfed-recipe", "bpfed-adaptive"]
    assert choice.method.name in choice.words
    assert choice.tried[choice.chosen].nll == min(one.nll for one in choice.tried)
    assert run.federation.method == choice.method
    config = read(tmp_path / "a" / "config.toml")
    assert (config.method, config.run.adapt) == (choice.method, "off")
    said.clear()
    bpfed.fit(None, data, out=tmp_path / "a", resume=True, say=said.append, **FEW_ROUNDS)
    again = bpfed.fit(config.method, data, settings=config.run, say=said.append)
    assert not any("hoos" in sentence for sentence in said)
    assert again.history[-1]["nll"] == run.history[-1]["nll"]


def test_without_a_method_and_without_adapting_it_is_the_recipe():
    said = []
    run = bpfed.fit(None, federation(True), adapt="off", say=said.append, **FEW_ROUNDS)
    assert run.federation.method == Recipe()
    assert not said


def test_where_nothing_can_be_chosen_the_recipe_is_trained_and_a_sentence_says_why():
    said = []
    private = bpfed.fit(None, federation(False), noise=1.0, clip=1.0, say=said.append, **FEW_ROUNDS)
    assert private.federation.method == Recipe()
    assert "The method is bpfed-recipe, without a choice: pilot runs on the same clients' data would not be" in said[0]
    said.clear()
    bpfed.fit(None, federation(False), say=said.append, **{**FEW_ROUNDS, "rounds": 1})
    assert said[0] == "The method is bpfed-recipe, without a choice: one round is too short for pilot runs."


@pytest.mark.parametrize("examples", [100, pilot.MANY + 1])
def test_pilots_cost_at_most_five_runs_and_less_where_there_are_many_examples(examples):
    for rounds in (2, 3, 5, 30, 50, 301):
        short, long = pilot.method_rounds(examples, rounds)
        cost = (pilot.candidate_count(pilot.ForImages()) * short + 2 * long) / rounds
        assert 1 <= short <= long <= rounds
        assert cost <= 5.0
    assert examples == 100 or cost < 2.1


def test_a_calibrated_run_compares_calibrated_methods():
    data = federation(True)
    plain, calibrated = (
        pilot.choose_method(data, Settings(**FEW_ROUNDS, calibrate=how)).tried for how in ("none", "pilot:1")
    )
    assert [one.method.name for one in calibrated] == [one.method.name for one in plain]
    # Two rounds leave models unsure, so a fitted temperature helps each of them.
    assert all(new.nll < old.nll for new, old in zip(calibrated, plain, strict=True))


def test_seeds_may_choose_different_methods_and_each_is_what_it_would_be_alone(monkeypatch):
    def by_seed(data, settings, *_):
        method = Recipe() if settings.seed == 0 else Adaptive(prior_scale=2.0)
        return pilot.MethodChoice((ScoredCandidate(method, {}, np.ones(6), np.ones(6)),), 0, None)

    monkeypatch.setattr("bpfed.runs.fit.choose_method", by_seed)
    data, quiet = federation(True), {"say": lambda s: None, **FEW_ROUNDS}
    both = bpfed.fit_seeds(None, data, 2, **quiet)
    assert [run.federation.method.name for run in both] == ["bpfed-recipe", "bpfed-adaptive"]
    for seed, run in enumerate(both):
        alone = bpfed.fit(None, data, seed=seed, **quiet)
        assert run.history[-1]["nll"]["pooled"] == pytest.approx(alone.history[-1]["nll"]["pooled"], rel=1e-5)


def test_if_pilots_of_one_method_diverge_it_is_the_other(monkeypatch):
    trained = pilot._trained

    def recipe_alone(methods, *rest):
        if not isinstance(methods[0], Recipe):
            raise Diverged("as if")
        return trained(methods, *rest)

    monkeypatch.setattr(pilot, "_trained", recipe_alone)
    assert pilot.choose_method(federation(False), Settings(**FEW_ROUNDS)).method == Recipe()


def test_states_are_kept_in_a_file_where_the_method_is_chosen_too(tmp_path):
    kept = bpfed.fit(data=federation(False), out=tmp_path / "run", store="file", **FEW_ROUNDS)
    free = bpfed.fit(data=federation(False), **FEW_ROUNDS)
    assert kept.settings.store == "file"
    assert kept.evaluation[0].record() == free.evaluation[0].record()


def test_each_seed_has_a_choice_of_its_own():
    runs = bpfed.fit_seeds(Adaptive(lr=0.03), federation(True), 2, say=lambda s: None, **QUICK)
    assert all(run.federation.method.head_deviation >= 0.3 for run in runs)


def test_clients_with_a_row_or_two_are_in_some_folds_only():
    whole = federation(True)
    few = [whole.train.client(i) for i in range(6)]
    few[0] = tuple(part[:1] for part in few[0])
    few[1] = tuple(part[:2] for part in few[1])
    data = dataclasses.replace(whole, train=Examples.of(few))
    choice = pilot.choose(Adaptive(lr=0.03), data, Settings(**{**QUICK, "rounds": 2}, weighting="size"))
    for one in choice.stages[0]:
        assert one.examples.tolist() == [0, 1, 36, 36, 36, 36]
        assert one.sums[0] == 0.0
        assert one.sums[1] > 0.0
