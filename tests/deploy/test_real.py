"""A real federation: a SuperLink and three SuperNodes on loopback, over TLS and with keys, as a person starts it."""

import json
import os
import time

import pytest
import safetensors.torch
import torch
from federations import simulated
from torch.utils._pytree import tree_leaves

from benchmarks.faults import children
from bpfed._util.files import RUN, SERVER
from bpfed.config.reader import Override, read
from bpfed.deploy.ops import admin, certificates, flower, supervise
from bpfed.deploy.settings import Plan

pytestmark = pytest.mark.skipif(os.environ.get("BPFED_TEST_DEPLOY") != "1", reason="run by 'make test-deploy'")

WANTED = {"data.name": "digits", "data.clients": 3, "run.rounds": 2, "run.epochs": 1, "run.eval_every": 1}


def strangers_words(folder, server, plan):
    """What a SuperNode prints until it ends that has the server's certificate, a site's name and its own key."""
    own, nowhere = folder / "stranger", folder / "nowhere"
    nowhere.mkdir()
    own.mkdir()
    (nowhere / certificates.AUTHORITY).write_bytes((server / certificates.AUTHORITY).read_bytes())
    certificates.make_site(own, nowhere, plan.sites[0])
    env = {**supervise.environment(own / "flwr", plan), supervise.SITE_FOLDER: str(own)}
    process = supervise.start(flower.supernode_command(own, plan), env, folder / "stranger.log")
    try:
        assert process.wait(240.0)
        return (folder / "stranger.log").read_bytes()
    finally:
        supervise.stop(process)


def test_a_real_federation_gives_the_simulators_numbers_and_leaves_nothing_running(tmp_path):
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    data = config.load_data()
    plan = Plan(data.clients, f"127.0.0.1:{supervise.free_port()}", timeout=240.0, wait=300.0)
    folder = tmp_path / "fed"
    admin.make(folder, plan, config)
    said = []
    with admin.started(folder, plan, "digits", said.append) as running:
        admin.run(folder / SERVER, plan, said.append, lambda found: None)
        assert supervise.NOT_LET_IN in strangers_words(tmp_path, folder / SERVER, plan)
        pids = [p for process in running.values() for p in (process.pid, *children(process.pid))]
    assert len(pids) > 2 * len(running)  # Flower's own are among them
    until = time.monotonic() + 60.0
    while any(admin.alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(admin.alive(pid) for pid in pids)

    federation, history = simulated(config.method, data, **{**vars(config.run), "compile": "off"})
    kept = safetensors.torch.load_file(folder / SERVER / RUN / "checkpoint" / "round-000002.safetensors")
    for i, theirs in enumerate(tree_leaves(federation.shared)):
        torch.testing.assert_close(kept[f"shared.{i}"], theirs, rtol=0, atol=1e-6)
    detail = json.loads((folder / SERVER / RUN / "evaluation.json").read_text())
    for name, score in history[-1][1].scores.items():
        assert [row[name] for row in detail["clients"]] == pytest.approx(score.clients.tolist(), abs=1e-6), name
    assert (folder / SERVER / RUN / "report.html").exists()
    status = admin.status(folder / SERVER)
    assert (status["state"], status["round"]) == ("finished", 2)
    assert all(site["refused"] == site["lost"] == 0 for site in status["sites"].values())
