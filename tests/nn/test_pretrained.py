"""Models of transformers and peft as they are: trained, read back, and a client's adapter in peft's own format."""

import numpy as np
import pytest
import scenarios
import torch

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import from_arrays
from bpfed.inference.likelihoods import Categorical
from bpfed.methods import FedPer
from bpfed.nn.model import Model

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
peft = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")
pytestmark = pytest.mark.filterwarnings("ignore")

DRAWN = np.random.default_rng(0)
TEXTS = [DRAWN.integers(1, 30, int(DRAWN.integers(3, 7))).tolist() for _ in range(40)]
EXAMPLES = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in TEXTS]
DATA = from_arrays(EXAMPLES, [int(np.mean(ids) > 15) for ids in TEXTS], np.arange(40) % 2)
FEW = {name: part[:5] for name, part in DATA.test.x.items()}
QUICK = {"rounds": 1, "epochs": 1, "eval_draws": 2, "compile": "off", "device": "cpu", "say": lambda sentence: None}


def bert(dropout=0.1):
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    form = transformers.BertConfig(**sizes, **drops, intermediate_size=8, max_position_embeddings=8, num_labels=2)
    return scenarios.seeded(lambda: transformers.BertForSequenceClassification(form))


def adapted(config, **form):
    return scenarios.seeded(lambda: peft.get_peft_model(bert(**form), config))


def lora():
    return peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])


def ia3():
    return peft.IA3Config(task_type="SEQ_CLS", target_modules=["query"], feedforward_modules=[])


def outputs(module):
    with torch.no_grad():
        return module.eval()(**FEW).logits


@pytest.mark.parametrize("config", [lora, ia3])
def test_what_peft_freezes_is_constant_and_patterns_name_the_rest(config):
    module = adapted(config())
    names = {n for n, p in module.named_parameters() if p.requires_grad}
    kept = "classifier|lora_B" if config is lora else "classifier"
    model = Model.of(module, Categorical(2), FEW, kept)
    assert set(model.layout.names) == names
    wanted = {n for n in names if "classifier" in n or (config is lora and "lora_B" in n)}
    assert set(model.layout.personal_names) == wanted
    torch.testing.assert_close(model.outputs(model.initial, FEW), outputs(module))
    # As many clients at once, in training mode: the masks are the clients' own, and dropout is repeatable.
    two = {name: torch.stack([part, part]) for name, part in FEW.items()}
    weights, y = torch.stack([model.initial, model.initial]), torch.zeros(2, 5, dtype=torch.int64)
    value, gradient = model.gradient(weights, two, y, torch.ones(2, 5), scenarios.keys(1).expand(2, -1))
    assert value[0] == value[1]
    assert gradient.isfinite().all()
    assert model.layout.unflatten(gradient[0])[min(wanted)].any()


def test_a_frozen_encoder_without_dropout_is_computed_once():
    whole = Model.of(bert(0.0), Categorical(2), FEW, trainable="classifier")
    rest = whole.on_features(FEW)
    assert rest.features(FEW).shape == (5, 8)
    torch.testing.assert_close(rest.outputs(rest.initial, rest.features(FEW)), outputs(bert(0.0)))
    assert (
        "because it has dropout"
        in Model.of(bert(), Categorical(2), FEW, trainable="classifier").on_features(FEW).notes[-1]
    )


def test_a_clients_adapter_is_read_by_peft_and_predicts_as_the_client(tmp_path):
    run = bpfed.fit(FedPer(personal="classifier", lr=0.1), DATA, model=adapted(lora()), out=tmp_path / "run", **QUICK)
    loaded = bpfed.Run.load(tmp_path / "run", adapted(lora()))
    for client in run.data.clients:
        folder = loaded.export_adapter(client, tmp_path / f"adapter {client}")
        read = peft.PeftModel.from_pretrained(bert(), folder)
        torch.testing.assert_close(outputs(read).softmax(-1), run.client(client).predict(FEW).probs)
    assert not torch.equal(*(run.client(c).predict(FEW).probs for c in run.data.clients))
    with pytest.raises(UserError, match="is there already; give a new folder"):
        run.export_adapter("0", folder)


def test_an_adapter_that_would_lack_something_is_refused(tmp_path):
    module = adapted(lora())
    module.base_model.model.bert.embeddings.LayerNorm.requires_grad_(True)
    model = Model.of(module, Categorical(2), FEW)
    with pytest.raises(UserError, match=r"LayerNorm\.weight' was trained, but is no part .*2 such.*modules_to_save"):
        model.save_adapter(model.initial, tmp_path / "adapter")
    model = Model.of(bert(), Categorical(2), FEW)
    with pytest.raises(UserError, match="is a BertForSequenceClassification, but only a model of peft has an adapter"):
        model.save_adapter(model.initial, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())
