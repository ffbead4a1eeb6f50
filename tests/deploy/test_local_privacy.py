"""A site that trusts nobody: its update is clipped and noised before it is sent, and what that costs is counted."""

import json
import math

import pytest
import torch
from command import Command
from federations import Deployed
from scenarios import classification

from bpfed._util.errors import UserError
from bpfed.aggregation.privacy import gaussian_epsilon
from bpfed.deploy.ops import admin
from bpfed.deploy.protocol.messages import Request
from bpfed.deploy.protocol.state_schema import Upload
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.limits import FILE, LocalPrivacy
from bpfed.deploy.site.site import open_site
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import Weights

DATA = classification(sizes=(7, 12, 9))
#: A server that takes what such sites send: to others their noise looks like any other lie.
ANYTHING = {"max_update_ratio": 0.0, "max_sigma_ratio": 0.0}


def guard(folder, method=None, noise=4.0, epsilon=0.0, say=lambda sentence: None):
    return LocalPrivacy(folder, method or FedAvg(), 0.5, noise, 1e-5, epsilon, say)


def test_what_is_sent_is_the_clipped_update_with_noise_and_never_twice_the_same(tmp_path):
    shared, own = Weights(torch.zeros(20_000)), Upload(Weights(torch.full((20_000,), 3.0)))
    send = guard(tmp_path)
    first, second = (send(own, shared, 1).state.weights for _ in range(2))
    for sent in (first, second):
        assert sent.shape == (20_000,)
        assert float(sent.std()) == pytest.approx(4.0 * 0.5, rel=0.03)
        assert abs(float(sent.mean())) < 0.1  # 3.0 before
    assert float((first - second).std()) == pytest.approx(4.0 * 0.5 * math.sqrt(2), rel=0.03)


def test_answers_are_counted_over_rounds_repeats_restarts_and_other_noise(tmp_path):
    shared, own, said = Weights(torch.zeros(9)), Upload(Weights(torch.ones(9))), []
    for round_ in (1, 1, 2):  # asked for twice, paid for twice
        guard(tmp_path, say=said.append)(own, shared, round_)
    assert f"is {gaussian_epsilon(4.0, 3, 1e-5):.3f} now" in said[-1]
    guard(tmp_path, noise=2.0, say=said.append)(own, shared, 3)  # as much as four of noise 4
    assert f"is {gaussian_epsilon(4.0, 7, 1e-5):.3f} now" in said[-1]
    assert json.loads((tmp_path / FILE).read_text())["releases"] == 4
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        guard(tmp_path)(own, shared, 4)


@pytest.mark.parametrize("method", [FedAvg(), BPFed()])
def test_a_site_takes_part_until_its_epsilon_is_spent_and_says_so_at_home_only(tmp_path, method):
    deployed = Deployed(tmp_path, method, DATA, epochs=1, rounds=4, **ANYTHING)
    site = deployed.sites["site b"]
    site.transform = guard(site.folder, method, epsilon=gaussian_epsilon(4.0, 2, 1e-5), say=deployed.said.append)
    server = deployed.serve()
    assert server.journal.counted == {"site a": 4, "site b": 2, "site c": 4}
    assert server.sites["site b"].refused == 2
    assert any("raise epsilon in its deploy.toml" in sentence for sentence in deployed.said)
    assert b"epsilon" not in deployed.grid.bytes("up")


def test_a_server_that_asks_for_a_round_again_pays_again(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=2, **ANYTHING)
    site = deployed.sites["site b"]
    site.transform = guard(site.folder)
    answer, node = deployed.grid.clients[deployed.node("site b")], deployed.node("site b")

    def twice(message):
        if Request.read(message.content).train:
            site.answer(message.content)
        return answer(message)

    deployed.grid.clients[node] = twice
    deployed.serve()
    assert json.loads((site.folder / FILE).read_text())["releases"] == 4


def test_a_sites_own_file_sets_it(tmp_path, capsys):
    Command(capsys).ok("deploy", "init", tmp_path / "fed", "--clients", "2", "--method", "fedavg")
    folder = admin.site_folder(tmp_path / "fed", "client-00")
    text = (folder / "deploy.toml").read_text().replace('data = ""', 'data = "digits"')
    (folder / "deploy.toml").write_text(text)
    assert open_site(folder, print).transform is None
    text = text.replace("clip = 0.0", "clip = 0.2").replace("\nnoise = 0.0", "\nnoise = 6.0")
    (folder / "deploy.toml").write_text(text)
    made = open_site(folder, print).transform
    assert (made.clip, made.noise, made.delta, made.epsilon) == (0.2, 6.0, 1e-5, 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"noise": 1.0, "site": "a"}, "set clip too"),
        ({"noise": 1.0, "clip": 1.0}, "a site's own"),
        ({"epsilon": 1.0, "site": "a"}, "would do nothing"),
        ({"clip": -1.0, "site": "a"}, "clip = -1.0"),
        ({"noise": 1.0, "clip": 1.0, "delta": 1.0, "site": "a"}, "delta = 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(given, words):
    with pytest.raises(UserError, match=words):
        Plan(("a", "b"), **given).check()
