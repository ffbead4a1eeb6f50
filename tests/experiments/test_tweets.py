"""The study of tweets from end to end, with a tiny encoder and tweets of random words."""

import json

import numpy as np
import pytest
import torch

import bpfed
from bpfed._util.errors import UserError
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


def studied(assets, results, part, *names):
    given = ["--assets", str(assets), "few", "--select", *names, "--members", "1", "--seeds", "0", "--part", part]
    tweets.main([*given, "--precision", "bf16", "--device", "cpu", "--results", str(results)])
    return {json.loads(file.read_text())["candidate"]: file for file in (results / "few").glob(f"*-{part}-0.json")}


def test_the_study_runs_and_only_adapters_and_the_common_part_of_the_head_are_sent(assets, tmp_path):
    names = ["fedper:rounds=1,blocks=0", "fedper:rounds=1,lr=0.01,blocks=0", "adaptive:rounds=1,blocks=0"]
    files = studied(assets, tmp_path, "test", *names)
    found = {name: json.loads(file.read_text()) for name, file in files.items()}
    held = {
        one["candidate"]: one
        for one in (json.loads(file.read_text()) for file in (tmp_path / "few").glob("*-held-out-0.json"))
    }
    assert set(held) == set(names)
    best = min(names[:2], key=lambda name: held[name]["scores"]["as trained"]["nll"]["pooled"])
    assert set(found) == {best, names[2]}
    for name, one in found.items():
        assert one["bpfed"] == bpfed.__version__
        assert one["settings"]["rounds"] == 1
        assert one["device"] == "cpu"
        # Six matrices of 8 x 8 in the layer, two adapters of rank 16 each, four bytes a number.
        head = 0 if name.startswith("fedper") else 4 * 3 * (8 + 1)
        assert one["bytes"] == {"adapters": 4 * 6 * 2 * 16 * 8, "head": head, "encoder": 0}
        assert one["scores"]["as trained"]["temperature"] == 1.0
        assert one["scores"]["calibrated"]["temperature"] == held[name]["fitted_temperature"]
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("few/*.json")}
    studied(assets, tmp_path, "test", *names)  # what has a record is not run again
    assert kept == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("few/*.json")}
    page = tweets.render(tmp_path)
    nll = found[names[2]]["scores"]["calibrated"]["nll"]["pooled"]
    assert any("BPFed adaptive | calibrated" in line and f"{nll:.3f}" in line for line in page.splitlines())


def test_the_temperature_of_a_split_is_from_its_own_held_out_tweets(assets, tmp_path):
    name = "adaptive:rounds=1,blocks=0"
    one = json.loads(studied(assets, tmp_path, "split", name)[name].read_text())
    held = json.loads(studied(assets, tmp_path, "held-out", name)[name].read_text())
    assert one["held_out"] == held["scores"]["as trained"]
    assert one["scores"]["calibrated"]["temperature"] == one["fitted_temperature"] == held["fitted_temperature"]
    assert one["examples"] == {"train": 32, "scored": 40}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nobody", "There is no candidate 'nobody'"),
        ("fedper:colour=3", "'colour=3' is no setting"),
        ("fedper:lr=x", "'lr=x'"),
    ],
)
def test_candidates_that_there_are_not(name, sentence):
    with pytest.raises(UserError, match=sentence):
        tweets.candidate(name, "few")


def test_without_padding_the_encoder_gives_what_the_library_s_own_gives(assets):
    read = tweets.Tweets.read(assets)
    ids, mask = torch.from_numpy(read.ids), torch.from_numpy(read.mask)
    encoder = tweets.read_encoder(assets, 0.0).eval()
    whole = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    module = tweets.Classifier(encoder, (6.0, 0.0))
    row = tweets.Row.of(mask, module.lengths)
    found = row.padded(module.blocks(mask, row, ids, None)).unflatten(0, mask.shape)
    there = mask.bool()
    torch.testing.assert_close(found[there], whole[there], rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_row_without_padding_is_the_sum_that_pytorch_makes():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    row = tweets.Row.of(mask, (2.5, 0.4))  # room for 8 tokens, of which 5 are there
    x, y = (torch.randn(8, 3, requires_grad=True) for _ in range(2))
    there = row.there[:, None]
    for own, plain in ((row.packed, lambda t: t[row.tokens]), (row.padded, lambda t: t[row.place])):
        # Only what a token gives is used further on.
        kept = row.filled[:, None] if own == row.packed else there
        grads = [torch.autograd.grad((kept * made(z)).square().sum(), z)[0] for made, z in ((own, x), (plain, x))]
        torch.testing.assert_close(*grads)
    assert torch.equal(torch.where(there, row.padded(row.packed(y)), 0.0), torch.where(there, y, 0.0))


def test_the_last_blocks_on_kept_states_give_what_all_blocks_give(tmp_path, assets):
    form = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    tweets.save_encoder(transformers.BertModel(form, add_pooling_layer=False), assets)
    read = tweets.Tweets.read(assets)
    mask = torch.from_numpy(read.mask[:9])
    hidden = torch.from_numpy(tweets.hidden_states(assets, read, 1)[:9].astype(np.float32))
    whole, last = (tweets.network(assets, 0, "", 0.0, blocks=blocks).eval() for blocks in (0, 1))
    last.classifier.load_state_dict(whole.classifier.state_dict())
    found = last(mask, hidden=hidden)
    torch.testing.assert_close(found, whole(mask, torch.from_numpy(read.ids[:9])), rtol=0.05, atol=0.05)


def test_an_encoder_is_read_as_it_was_written_up_to_its_rounding(assets):
    read, again = (tweets.read_encoder(assets, 0.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), again.parameters(), strict=True))
    tweets.save_encoder(read, assets)
    for a, b in zip(read.parameters(), tweets.read_encoder(assets, 0.0).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_sixteen_bits_give_almost_the_same_outputs(assets):
    read = tweets.Tweets.read(assets)
    x = torch.from_numpy(read.mask[:9]), torch.from_numpy(read.ids[:9])
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
