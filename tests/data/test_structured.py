"""Inputs that are several arrays, by name or by position: through training, prediction, adaptation and loading."""

import numpy as np
import pytest
import torch
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import from_arrays
from bpfed.methods import BPFed, FedPer

DRAWN = np.random.default_rng(0)
TEXTS = [DRAWN.integers(1, 20, int(DRAWN.integers(2, 7))).tolist() for _ in range(60)]
EXAMPLES = [{"ids": ids, "attention_mask": [1] * len(ids)} for ids in TEXTS]
Y = [int(np.mean(ids) > 10) for ids in TEXTS]
OWNERS = np.arange(60) % 2
QUICK = {"rounds": 1, "epochs": 1, "batch": 7, "eval_draws": 2, "compile": "off", "device": "cpu"}


class Texts(nn.Module):
    """The mean of the embeddings of those words that the mask leaves, and two layers on it."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, ids, attention_mask):
        there = attention_mask[..., None].float()
        return self.head(torch.tanh(self.body((self.embed(ids) * there).sum(1) / there.sum(1))))


class Positional(Texts):
    def forward(self, first, second):
        return super().forward(first, second)


def made(kind):
    torch.manual_seed(0)
    return kind()


def fit(method, data, kind=Texts, **changes):
    return bpfed.fit(method, data, model=made(kind), say=lambda note: None, **QUICK | changes)


def test_examples_of_different_lengths_are_filled_up_and_ids_stay_whole():
    data = from_arrays(EXAMPLES, Y, OWNERS)
    assert {n: (t.dtype, t.shape[1:]) for n, t in data.train.x.items()} == {
        "ids": (torch.int64, (6,)),
        "attention_mask": (torch.int64, (6,)),
    }
    x, y = data.train.client(1)
    lengths = x["attention_mask"].sum(1)
    assert ((x["ids"] > 0).sum(1) == lengths).all()
    texts = sorted((*ids, label) for ids, label in zip(TEXTS[1::2], Y[1::2], strict=True))
    found = [(*ids[:n].tolist(), int(label)) for ids, n, label in zip(x["ids"], lengths, y, strict=True)]
    assert set(found) <= set(texts)


def test_a_dict_a_tuple_and_an_archive_are_the_same_to_a_run(tmp_path):
    data = from_arrays(EXAMPLES, Y, OWNERS)
    whole = {n: np.array([row[n] + [0] * (6 - len(row[n])) for row in EXAMPLES]) for n in EXAMPLES[0]}
    np.savez(tmp_path / "x.npz", **whole)
    runs = [
        fit(FedPer(), data),
        fit(FedPer(), from_arrays(np.load(tmp_path / "x.npz"), Y, OWNERS)),
        fit(FedPer(), from_arrays(tuple(whole.values()), Y, OWNERS), Positional),
    ]
    assert len({run.history[-1]["nll"]["pooled"] for run in runs}) == 1
    by_position = runs[2].clients()[0].predict(tuple(part[:2] for part in whole.values())).probs
    assert torch.equal(by_position, runs[0].clients()[0].predict(EXAMPLES[:2]).probs)


def test_a_run_on_several_arrays_predicts_calibrates_loads_and_takes_newcomers(tmp_path):
    """Two members, and batches of an odd number, of which the antithetic estimator makes halves."""
    data = from_arrays(EXAMPLES, Y, OWNERS)
    method = BPFed(estimator="antithetic", draws=1)
    run = fit(method, data, members=2, calibration=0.4, out=tmp_path / "run")
    loaded = bpfed.Run.load(tmp_path / "run", made(Texts))
    one, other = (r.clients()[1].predict(EXAMPLES[:3]) for r in (run, loaded))
    assert torch.equal(one.probs, other.probs)
    assert torch.equal(one.prediction_set(0.5), other.prediction_set(0.5))
    np.savez(tmp_path / "new.npz", y=np.array(Y[:6]), **{n: t[:6].numpy() for n, t in data.test.x.items()})
    newcomer = loaded.adapt(tmp_path / "new.npz", steps=1)
    kept = loaded.newcomer(newcomer.save(tmp_path / "newcomer"))
    assert torch.equal(kept.predict(EXAMPLES[:3]).probs, newcomer.predict(EXAMPLES[:3]).probs)


def test_a_run_does_not_depend_on_the_length_that_sequences_are_filled_up_to():
    longer = [{n: [*values, *[0] * (9 - len(values))] for n, values in row.items()} for row in EXAMPLES]
    short, long = (fit(FedPer(), from_arrays(x, Y, OWNERS)) for x in (EXAMPLES, longer))
    assert short.history[-1]["nll"]["pooled"] == pytest.approx(long.history[-1]["nll"]["pooled"], rel=1e-5)
    assert long.clients()[0].predict(EXAMPLES[:4]).probs.shape == (4, 2)  # which are shorter


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        ([{"ids": ids} for ids in TEXTS], r"'ids' of 'own' differ in length and no mask .*attention_mask"),
        ([*EXAMPLES[:59], {"ids": [1]}], r"Example 59 of 'own' has the inputs ids, but the first has ids, attention"),
        ({"ids": np.ones((59, 2), int)}, r"inputs of shape \(59, 2\) in 'ids', targets of \(60,\)"),
        ({"a": np.full((60, 2), np.nan)}, r"NaN or infinite values in its training data, in x\['a'\]\[:, 0\]"),
        ({"words": np.array([["a"]] * 60)}, r"'words' of 'own' are not all numbers"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_one_sentence(x, reason):
    with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*\.$"):
        from_arrays(x, Y, OWNERS)


def test_new_inputs_of_another_structure_are_refused_in_one_sentence():
    client = fit(FedPer(), from_arrays(EXAMPLES, Y, OWNERS)).clients()[0]
    for x, reason in (
        (np.ones((3, 6)), r"which are \{ids: \[6\], attention_mask: \[6\]\}; give a dict"),
        ({"ids": np.ones((3, 6), int)}, "give a dict of these arrays"),
        ({n: np.ones((3, 7), int) for n in EXAMPLES[0]}, r"'ids' have shape \[7\] each, .*have \[6\]; cut longer"),
        ({n: np.ones((3, 6)) for n in EXAMPLES[0]}, "'ids' are float32, but those of 'own' are int64"),
    ):
        with pytest.raises(UserError, match=reason):
            client.predict(x)
    with pytest.raises(UserError, match=r"which no network that is made here takes; give one as model"):
        bpfed.fit(FedPer(), from_arrays(EXAMPLES, Y, OWNERS), **QUICK)
