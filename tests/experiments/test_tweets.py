"""The study of tweets from end to end, with a tiny encoder and tweets of random words."""

import json

import numpy as np
import pytest

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
    transformers.BertModel(form, add_pooling_layer=False).save_pretrained(tmp_path / "assets")
    drawn = np.random.default_rng(0)
    ids = drawn.integers(1, 20, (80, 6))
    mask = np.arange(6) < drawn.integers(2, 7, 80)[:, None]
    label, airline = ids[:, 0] % 3, np.array(["A", "B"])[np.arange(80) % 2]
    np.savez(tmp_path / "assets" / "tweets.npz", ids=ids, mask=mask, label=label, airline=airline)
    return tmp_path / "assets"


def test_the_study_runs_and_only_adapters_and_the_common_part_of_the_head_are_sent(assets, tmp_path, monkeypatch):
    from experiments import tweets

    monkeypatch.setattr(tweets, "SEEDS", (0,))
    quick = {name: tweets.replace(one, rounds=1) for name, one in tweets.CANDIDATES["few"].items()}
    monkeypatch.setattr(tweets, "CANDIDATES", {"few": quick})
    names = ["fedper", "fedper-fast", "adaptive"]
    given = ["--assets", str(assets), "few", "--select", *names, "--members", "1", "--calibrate", "pilot:1"]
    tweets.main([*given, "--device", "cpu", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["few"]
    assert list(found["held out"]) == names
    points = found[min(names[:2], key=found["held out"].get)]
    for row in (*points["calibrated"], *points["as trained"]):
        # Six matrices of 8 x 8 in the layer, two adapters of rank 16 each, four bytes a number.
        assert row["bytes"] == {"adapters": 4 * 6 * 2 * 16 * 8, "head": 0, "encoder": 0}
    assert {row["temperature"] for row in points["as trained"]} == {1.0}
    assert all(row["temperature"] != 1.0 for row in points["calibrated"])


def test_half_of_each_airline_is_for_testing_and_few_leaves_that_half_as_it_is(assets):
    from experiments.tweets import Tweets

    read = Tweets.read(assets)
    data, few = read.federation(0), read.federation(0, few=5)
    assert data.train.sizes.tolist() == data.test.sizes.tolist() == [20, 20]
    assert few.train.sizes.tolist() == [5, 5]
    assert few.test.y.sort().values.tolist() == data.test.y.sort().values.tolist()
    assert read.federation(1).test.x["input_ids"].tolist() != data.test.x["input_ids"].tolist()
