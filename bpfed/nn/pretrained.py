"""Modules as their libraries make them: how they are called, and what transformers and peft need to run here.

Neither library is imported unless the module is one of theirs.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import checkpoint

from bpfed._util.errors import UserError
from bpfed.inference.inputs import Inputs
from bpfed.nn.function_modes import Recurrence


def run(module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs) -> Any:
    """What a module gives for these inputs, with these parameters instead of its own.

    A dict is taken by name, ``module(**x)``, a tuple by position. Of an object with ``logits``, as the models of
    transformers return, it is these.
    """
    named = x if isinstance(x, dict) else {}
    args = () if named else x if isinstance(x, tuple) else (x,)
    with ExitStack() as changes:
        changes.enter_context(_whole_masks())
        changes.enter_context(_uncheckpointed())
        if any(isinstance(part, nn.RNNBase | nn.LSTMCell) for part in module.modules()):
            changes.enter_context(Recurrence())
        outputs = functional_call(module, dict(parameters), args, named)
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


class _Direct:
    """In place of the autograd.Function that checkpoints: it just calls."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what surrounds a checkpointed call: it does nothing before and after."""
    yield


@contextmanager
def _uncheckpointed() -> Iterator[None]:
    """Inside, gradient checkpointing is off: torch.func cannot follow it, and results are the same without it."""
    names = {"_checkpoint_without_reentrant_generator": _nothing, "CheckpointFunction": _Direct}
    before = {name: getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)}
    for name in before:
        setattr(checkpoint, name, names[name])
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(checkpoint, name, own)


@contextmanager
def _whole_masks() -> Iterator[None]:
    """Inside, transformers uses every attention mask as it is.

    Otherwise it looks whether a mask hides anything at all, which cannot be decided for many clients at once. It does
    not look while it is traced.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        yield
        return
    before = masks.is_tracing
    masks.is_tracing = lambda tensor=None: True
    try:
        yield
    finally:
        masks.is_tracing = before


def save_adapter(module: nn.Module, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write a peft model with these parameters to a new folder, as peft does: ``PeftModel.from_pretrained`` reads it.

    Raises:
        UserError: It is no peft model, or trains what peft would not write, or the folder is there already.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        raise UserError(
            f"The model is a {type(module).__name__}, but only a model of peft has an adapter to export; make one with "
            "peft.get_peft_model, or keep the whole run with out."
        )
    if folder.exists():
        raise UserError(f"'{folder}' is there already; give a new folder.")
    own = copy.deepcopy(module).cpu()
    named = dict(own.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            named[name].copy_(value)
    saved = {t.data_ptr() for t in peft.get_peft_model_state_dict(own, save_embedding_layers=False).values()}
    lost = [name for name in parameters if named[name].data_ptr() not in saved]
    if lost:
        raise UserError(
            f"Parameter '{lost[0]}' was trained, but is no part of the adapter that peft writes ({len(lost)} such in "
            "all); name its layer in modules_to_save when you make the peft model."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as part:
        own.save_pretrained(Path(part) / "adapter", save_embedding_layers=False)
        (Path(part) / "adapter").rename(folder)
