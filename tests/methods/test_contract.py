"""The contract of a method, for every method there is."""

import dataclasses

import pytest
import scenarios
import torch
from torch.utils._pytree import tree_flatten, tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.inference.estimators import Batch
from bpfed.methods import METHODS, method
from bpfed.methods.base import rows, untrained
from bpfed.runs.fit import prepare
from bpfed.runs.run import train_together

CLIENTS, STEPS = 3, 3


def leaves(state):
    return tree_flatten(state)[0]


def structure(state):
    return tree_flatten(state)[1]


def copied(state):
    return tree_map(torch.clone, state)


def picked(state, index):
    return tree_map(lambda t: t[index], state)


def same(first, second, atol=1e-6):
    assert structure(first) == structure(second)
    for a, b in zip(leaves(first), leaves(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)


def shaken(state, seed=0):
    """Like ``state``, with other numbers."""
    g = scenarios.generator(seed)
    return tree_map(lambda t: t * (1 + 0.2 * torch.rand(t.shape, generator=g)), state)


class Client:
    """Some clients of a method, ready for a round."""

    def __init__(self, name, count=CLIENTS):
        self.method = method(name)()
        self.method.check()
        self.model = scenarios.model_of(scenarios.module_for(self.method), personal=self.method.personal)
        self.initial = self.method.init(self.model)
        self.shared = rows(self.initial.shared, count)
        self.personal = rows(self.initial.personal, count)
        spread = torch.linspace(0.5, 1.0, count)  # every client has numbers of its own
        self.hparams = {n: value * spread for n, value in self.method.hparams().items()}
        used = [5, 2, 4]
        self.batches = [scenarios.random_batch(count, 5, seed=t, used=used[:count]) for t in range(STEPS)]

    def round(self, shared, personal, hparams, batches):
        local = self.method.begin(self.model, shared, personal, hparams)
        losses = []
        for phase in self.method.phases(2):
            for batch in batches:
                local, loss = self.method.step(self.model, local, batch, hparams, phase.name)
                losses.append(loss)
        return self.method.finish(self.model, local, hparams), losses


@pytest.fixture(params=list(METHODS))
def client(request):
    return Client(request.param)


def test_every_method_is_known_by_its_name_and_describes_itself(client):
    kind = type(client.method)
    assert method(kind.name) is kind
    for words in (kind.title, kind.paper, kind.shared_words, kind.personal_words, kind.random_words):
        assert words
    assert not kind.paper.endswith(".")


def test_an_unknown_method_is_one_sentence_that_names_the_nearest():
    with pytest.raises(UserError, match="'bpfed'"):
        method("bpfd")


def test_states_have_a_row_for_each_client_and_keep_their_structure(client):
    model = client.model
    local = client.method.begin(model, client.shared, client.personal, client.hparams)
    for phase in client.method.phases(3):
        assert phase.epochs >= 1
        new, loss = client.method.step(model, local, client.batches[0], client.hparams, phase.name)
        assert loss.shape == (CLIENTS,)
        assert (loss > 0).all()
        assert structure(new) == structure(local)
        assert [t.shape for t in leaves(new)] == [t.shape for t in leaves(local)]
        assert [t.dtype for t in leaves(new)] == [t.dtype for t in leaves(local)]
        assert all(len(t) == CLIENTS for t in leaves(new))
    finished = client.method.finish(model, local, client.hparams)
    assert structure(finished.personal) == structure(client.initial.personal)
    assert [t.shape for t in leaves(finished.personal)] == [
        (CLIENTS, *t.shape) for t in leaves(client.initial.personal)
    ]
    for value in finished.info.values():
        assert value.shape == (CLIENTS,)
    shared = client.method.aggregate(client.initial.shared, finished.upload, torch.ones(CLIENTS), clients=CLIENTS)
    assert structure(shared) == structure(client.initial.shared)
    assert [t.shape for t in leaves(shared)] == [t.shape for t in leaves(client.initial.shared)]


def test_states_are_plain_numbers_so_that_they_can_be_stored(client):
    finished, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    for state in (client.initial.shared, client.initial.personal, finished.upload, finished.personal):
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in leaves(state))


def test_training_changes_the_upload(client):
    finished, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    idle, _ = client.round(client.shared, client.personal, client.hparams, [])
    if client.model.layout.shared:
        assert any((a != b).any() for a, b in zip(leaves(finished.upload), leaves(idle.upload), strict=True))


def test_an_upload_is_made_of_shared_tensors_only(client):
    finished, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    layout = client.model.layout
    widths = {layout.shared} | ({layout.total - layout.shared} if client.method.population else set())
    shapes = {(width,) for width in widths}
    if client.method.adds:  # changes of what the server holds: sums over all clients
        shapes = {t.shape for t in leaves(client.initial.shared)}
    assert all(t.shape[0] == CLIENTS and t.shape[1:] in shapes for t in leaves(finished.upload))


def test_an_upload_before_any_step_says_nothing_of_the_personal_state(client):
    # With nothing trained, whatever the upload holds comes from the server alone; unless heads are meant to be summed up.
    if client.method.population:
        pytest.skip(f"{client.method.title} uploads a summary of personal factors by design")
    first, _ = client.round(client.shared, client.personal, client.hparams, [])
    second, _ = client.round(client.shared, shaken(client.personal), client.hparams, [])
    same(first.upload, second.upload, atol=0)


def test_clients_stacked_are_clients_alone_whatever_their_numbers(client):
    shared = shaken(client.shared)
    together, losses = client.round(shared, client.personal, client.hparams, client.batches)
    for s in range(CLIENTS):
        one = slice(s, s + 1)
        alone, loss = client.round(
            picked(shared, one),
            picked(client.personal, one),
            picked(client.hparams, one),
            [Batch(*(t[one] for t in batch)) for batch in client.batches],
        )
        same(alone, picked(together, one))
        same(loss, [t[one] for t in losses])


def test_a_method_changes_nothing_that_it_is_given(client):
    model, hparams = client.model, client.hparams

    def unchanged(function, *states):
        before = copied(states)
        result = function(*states)
        for now, then in zip(leaves(states), leaves(before), strict=True):
            assert torch.equal(now, then)
        return result

    local = unchanged(
        lambda s, p: client.method.begin(model, s, p, hparams), copied(client.shared), copied(client.personal)
    )
    for phase in client.method.phases(2):
        batch = client.batches[0]
        local, _ = unchanged(
            lambda state, b=batch, n=phase.name: client.method.step(model, state, b, hparams, n), local
        )
    finished = unchanged(lambda state: client.method.finish(model, state, hparams), local)
    old = client.initial.shared
    unchanged(lambda s, u: client.method.aggregate(s, u, torch.ones(CLIENTS), clients=CLIENTS), old, finished.upload)
    unchanged(lambda s, p: client.method.predictive(model, s, p), client.shared, finished.personal)


def test_the_same_round_twice_is_the_same(client):
    first, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    second, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    same(first, second, atol=0)


def test_the_server_does_not_care_for_the_order_of_uploads_nor_for_the_sum_of_weights(client):
    finished, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    weights, order = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([2, 0, 1])
    first = client.method.aggregate(client.initial.shared, finished.upload, weights, clients=CLIENTS)
    mixed = picked(finished.upload, order)
    second = client.method.aggregate(client.initial.shared, mixed, 10 * weights[order], clients=CLIENTS)
    same(first, second)


def test_a_predictive_draws_whole_weight_vectors_that_repeat(client):
    finished, _ = client.round(client.shared, client.personal, client.hparams, client.batches)
    predictive = client.method.predictive(client.model, client.shared, finished.personal)
    assert 1 <= predictive.draws(4) <= 4
    assert client.method.sampled == (predictive.draws(4) > 1)
    key = scenarios.keys(CLIENTS)
    for index in range(predictive.draws(4)):
        weights = predictive.draw(key, index)
        assert weights.shape == (CLIENTS, client.model.layout.total)
        assert weights.isfinite().all()
        assert torch.equal(weights, predictive.draw(key, index))


def adapted(client, batches):
    method = client.method.adapting()
    personal = rows(method.newcomer(client.model, client.initial.shared), CLIENTS)
    local = method.begin(client.model, client.shared, personal, client.hparams)
    for phase in method.adaptation(2):
        for batch in batches:
            local, loss = method.step(client.model, local, batch, client.hparams, phase.name)
            assert loss.isfinite().all()
    return method.finish(client.model, local, client.hparams).personal


def test_a_newcomer_has_the_state_of_a_client_and_learns_it(client):
    before, after = adapted(client, []), adapted(client, client.batches)
    assert structure(after) == structure(before)
    assert all(t.isfinite().all() for t in leaves(after))
    keeps = any(t.numel() for t in leaves(before))
    assert not keeps or any((a != b).any() for a, b in zip(leaves(before), leaves(after), strict=True))


def test_a_newcomer_leaves_the_shared_factors_as_they_are(client):
    # A method that keeps a whole network of the client's own (a fine-tuned one, say) has nothing to freeze.
    if client.method.personal in ("none", "all"):
        pytest.skip(f"{client.method.title} does not split the network")
    key, cut = scenarios.keys(CLIENTS), client.model.layout.shared
    first, second = (
        client.method.adapting().predictive(client.model, client.shared, adapted(client, batches)).draw(key, 0)
        for batches in ([], client.batches)
    )
    assert torch.equal(first[:, :cut], second[:, :cut])
    assert (first[:, cut:] != second[:, cut:]).any()


def test_settings_that_are_numbers_do_not_change_the_structure_and_others_do(client):
    kind = client.method
    assert set(kind.stackable) <= set(kind.hparams()) & set(kind.settings())
    assert dataclasses.replace(kind, lr=0.5 * kind.lr).trace_key() == kind.trace_key()
    assert dataclasses.replace(kind, personal="*.bias").trace_key() != kind.trace_key()
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind.lr = 1.0


@pytest.mark.parametrize("name", METHODS)
def test_seeds_side_by_side_are_what_each_is_alone(name, monkeypatch):
    """Stacked seeds share the first one's model; what is a seed's own, as its first head, must come from its states."""
    made = METHODS[name]()
    if "estimator" in made.settings():
        made = dataclasses.replace(made, estimator="weights")  # one draw for a batch: equal but for rounding
    elif hasattr(made, "estimator"):
        monkeypatch.setattr(type(made), "estimator", "weights")
    data = scenarios.classification(sizes=(12,) * 3)
    settings = Settings(rounds=2, epochs=2, batch=6, eval_draws=2, device="cpu", compile="off")

    def ready(seed):
        return prepare(made, data, dataclasses.replace(settings, seed=seed))

    together = train_together([ready(0), ready(1)], [[], []])[1]
    alone = ready(1).train()
    assert together.history[-1]["nll"]["pooled"] == pytest.approx(alone.history[-1]["nll"]["pooled"], rel=1e-3)
    for kind in ("shared", "personal"):
        found, wanted = (
            leaves(run.federation.shared if kind == "shared" else run.federation.personal(torch.arange(3)))
            for run in (together, alone)
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_all_that_a_method_makes_is_where_its_model_is(name):
    """On a device that computes nothing: what meets a tensor that was left on another one is an error, as on a GPU."""
    client = Client(name)
    away = client.model.to("meta")
    made = [client.method.init(away), untrained(client.method, away)]
    made.append(client.method.newcomer(away, made[0].shared))
    made.append(client.method.predictive(away, rows(made[0].shared, 2), rows(made[0].personal, 2)))
    assert {t.device.type for state in made for t in leaves(state) if isinstance(t, torch.Tensor)} == {"meta"}
