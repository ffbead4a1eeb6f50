"""Heads on a frozen image network: a small run from end to end, with a backbone that is not trained."""

import json
import math

import numpy as np
import pytest
import scenarios
from torch import nn

from bpfed._util.errors import UserError
from experiments import cifar100_features as study
from experiments.jobs import run_jobs


class Body(nn.Module):
    """A convolution in place of EfficientNet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)

    def extract_features(self, x):
        return self.conv(x).relu()


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A file of 4 classes, whose images differ in colour, for 2 clients."""
    monkeypatch.setattr(study, "pretrained", lambda: study.Backbone(scenarios.seeded(Body), 16).eval())
    monkeypatch.setattr(study, "CLIENTS", 2)
    monkeypatch.setattr(study, "ALPHA", 5.0)
    monkeypatch.setattr(study, "STRENGTHS", (0.01, 1.0))
    drawn = np.random.default_rng(0)
    fine = np.repeat(np.arange(4, dtype=np.uint8), 20)
    pixels = drawn.integers(0, 200, (80, 3, 1024))
    pixels[:, 0] //= 1 + fine[:, None]
    rows = np.concatenate([fine[:, None], fine[:, None], pixels.reshape(80, -1)], axis=1).astype(np.uint8)
    (tmp_path / "train.bin").write_bytes(rows.tobytes())
    path = tmp_path / "part.npz"
    study.main(["--prepare", str(path), "--images", str(tmp_path), "--each", "15"])
    return path


def test_heads_and_the_cache_run_and_the_table_compares_them(part, tmp_path, capsys):
    found = study.Part.read(str(part))
    assert found.x.shape == (60, 3, 32, 32)
    assert np.bincount(found.y).tolist() == [15] * 4
    results = tmp_path / "results"
    asked = {"part": str(part), "seed": 0, "rounds": 2, "components": 3}
    jobs = [study.Job(f"heads/{h}-0.json", study.train, asked | {"head": h}) for h in ("adaptive", "site", "shifted")]
    jobs[0].asked["changes"] = {"temperature": 0.5}  # so nothing is chosen
    few = {"part": str(part), "images": 40, "clients": 2, "rounds": 2}
    run_jobs([*jobs, study.Job("cache.json", study.compare_cache, few)], results, 1, math.inf, lambda sentence: None)
    cache = json.loads((results / "cache.json").read_text())
    assert cache["largest_difference_of_probabilities"] < 1e-4
    study.main(["--render", "--results", str(results)])
    shown = capsys.readouterr().out
    assert "| BPFed adaptive, linear | 1 |" in shown
    assert "| in every step |" in shown


def test_components_come_from_training_rows_alone_and_have_variance_one():
    drawn = np.random.default_rng(0)
    features = drawn.normal(3.0, 2.0, (50, 8)).astype(np.float32)
    train = np.arange(50) < 40
    other = features.copy()
    other[~train] += 100.0
    one, two = (study.prepared(x, train, 3)[train] for x in (features, other))
    np.testing.assert_allclose(one, two, atol=1e-5)
    assert one.var(0).mean() == pytest.approx(1.0, rel=1e-4)


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no train\.bin"):
        study.read_images(tmp_path, 1)
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="it is damaged"):
        study.read_images(tmp_path, 1)
    with pytest.raises(UserError, match="--prepare"):
        study.Part.read(str(tmp_path / "nothing.npz"))
