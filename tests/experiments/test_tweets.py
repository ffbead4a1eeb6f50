"""The study of tweets from end to end, with a tiny encoder and tweets of random words."""

import json

import numpy as np
import pytest
import torch

import bpfed
from experiments import tweets

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("peft", reason="peft is not installed (pip install peft)")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def assets(tmp_path):
    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    form = transformers.BertConfig(**sizes, max_position_embeddings=8)
    (tmp_path / "assets").mkdir()
    tweets.save_encoder(transformers.BertModel(form, add_pooling_layer=False), tmp_path / "assets")
    drawn = np.random.default_rng(0)
    ids = drawn.integers(1, 20, (80, 6))
    mask = np.arange(6) < drawn.integers(2, 7, 80)[:, None]
    label, airline = ids[:, 0] % 3, np.array(["A", "B"])[np.arange(80) % 2]
    np.savez(tmp_path / "assets" / "tweets.npz", ids=ids, mask=mask, label=label, airline=airline)
    return tmp_path / "assets"


def test_the_study_runs_and_only_adapters_and_the_common_part_of_the_head_are_sent(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(tweets, "SEEDS", (0,))
    quick = {name: tweets.replace(one, rounds=1) for name, one in tweets.CANDIDATES["few"].items()}
    monkeypatch.setattr(tweets, "CANDIDATES", {"few": quick})
    names = ["fedper", "fedper-fast", "adaptive"]
    given = ["--assets", str(assets), "few", "--select", *names, "--members", "1"]
    tweets.main([*given, "--precision", "bf16", "--device", "cpu", "--out", str(tmp_path / "found.json")])
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["bpfed"] == bpfed.__version__
    found = record["few"]
    assert list(found["candidates"]) == list(found["held out"]["0"]) == names
    points = found["FedPer"]
    assert points["calibrated"][0]["candidate"] == min(names[:2], key=found["held out"]["0"].get)
    for row in (*points["calibrated"], *points["as trained"]):
        # Six matrices of 8 x 8 in the layer, two adapters of rank 16 each, four bytes a number.
        assert row["bytes"] == {"adapters": 4 * 6 * 2 * 16 * 8, "head": 0, "encoder": 0}
    assert {row["temperature"] for row in points["as trained"]} == {1.0}
    assert all(row["temperature"] != 1.0 for row in points["calibrated"])


def test_an_encoder_is_read_as_it_was_written_up_to_its_rounding(assets):
    read, again = (tweets.read_encoder(assets, 0.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), again.parameters(), strict=True))
    tweets.save_encoder(read, assets)
    for a, b in zip(read.parameters(), tweets.read_encoder(assets, 0.0).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_sixteen_bits_give_almost_the_same_outputs(assets):
    read = tweets.Tweets.read(assets)
    x = torch.from_numpy(read.ids[:9]), torch.from_numpy(read.mask[:9])
    full, half = (tweets.network(assets, 0, "query,value", 0.0, half=half).eval()(*x) for half in (False, True))
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, rtol=0.05, atol=0.05)


def test_half_of_each_airline_is_for_testing_and_few_leaves_that_half_as_it_is(assets):
    read = tweets.Tweets.read(assets)
    data, few = read.federation(0), read.federation(0, few=5)
    assert data.train.sizes.tolist() == data.test.sizes.tolist() == [20, 20]
    assert few.train.sizes.tolist() == [5, 5]
    assert few.test.y.sort().values.tolist() == data.test.y.sort().values.tolist()
    assert read.federation(1).test.x["input_ids"].tolist() != data.test.x["input_ids"].tolist()
