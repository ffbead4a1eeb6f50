"""Change what a plain module's calls do, without touching the module; and call modules of other libraries.

Torch-function modes see every ``linear``, ``conv2d`` and ``dropout`` that runs inside them.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.inputs import Inputs
from bpfed.nn.kernels.conv import conv2d, fast, in_pairs, output_size

#: Dropouts, and whether they drop whole channels.
_DROPOUTS: dict[Callable[..., Any], bool] = {F.dropout: False, F.dropout1d: True, F.dropout2d: True, F.dropout3d: True}
_UNKEYED = (F.alpha_dropout, F.feature_alpha_dropout)
#: Weights of a convolution up to which each example gets a draw of its own. A batch of 32 draws of a wider one takes as
#: long as the rest of a network, and many output positions average its noise already: it is drawn once for the batch.
MOST_PER_EXAMPLE = 1 << 15


def argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """The argument of a call that may have been given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name)


def example_keys(key: rng.SplitKey, examples: int) -> rng.SplitKey:
    """A key for each example of a batch, ``[2]`` to ``[B, 2]``: its noise is its own, however the batch is padded."""
    return rng.fold(key, torch.arange(examples, dtype=torch.int32, device=key.first.device))


def _open(function: Any) -> FunctionType:
    """A composite function of PyTorch whose own calls modes can see: one that does not hand itself over as a whole."""
    names = function.__globals__ | {"has_torch_function": lambda tensors: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_attention_layer = _open(F.multi_head_attention_forward)


class KeyedDropout(TorchFunctionMode):
    """Dropout whose mask is a function of a key, so that it is a client's own and repeats; that of attention too.

    Args:
        key: ``[2]`` int32; the n-th dropout of a forward pass uses the n-th fold of it.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = rng.fold(rng.SplitKey.of(key), 0x0D0)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(_DROPOUTS[func], *args, **kwargs)
        if func is F.scaled_dot_product_attention and (argument(args, kwargs, 4, "dropout_p") or 0.0) > 0.0:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and argument(args, kwargs, 10, "dropout_p") > 0.0:
            with self:  # it drops in calls of its own
                return _attention_layer(*args, **kwargs)
        if func in _UNKEYED and kwargs.get("training", False):
            raise UserError(f"The module uses {func.__name__}, whose masks cannot be keyed; use nn.Dropout.")
        return func(*args, **kwargs)

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return torch.zeros_like(input)
        self.calls += 1
        shape = input.shape[:2] if channels else input.shape  # a whole feature map has one number, [B, C]
        keys = example_keys(rng.fold(self.key, self.calls), shape[0])
        keep = rng.uniform(keys, math.prod(shape[1:])).reshape(*shape, *(1,) * (input.ndim - len(shape))) >= p
        return input * keep.to(input.dtype) * (1.0 / (1.0 - p))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` in single steps, with the weights dropped before they meet the values."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = torch.where(attn_mask, scores, float("-inf")) if hidden else scores + attn_mask
        return self._dropout(False, torch.softmax(scores, -1), dropout_p) @ value


class Recurrence(TorchFunctionMode):
    """Recurrent layers in single steps, which run for many clients at once; PyTorch's own operations do not.

    Dropout between layers is an ordinary one, and so a client's own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "lstm_cell":
            input, (hidden, cell), *weights = args
            hidden, cell = _lstm_cell(F.linear(input, *weights[::2]) + F.linear(hidden, *weights[1::2]), cell)
            return hidden, cell
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            if not isinstance(args[3], bool):  # lengths come second, and all else is one place further
                raise UserError(
                    "The module packs sequences (pack_padded_sequence), which decides by the numbers in a tensor; let the "
                    "layer run on padded ones and take the outputs that a mask leaves."
                )
            return _recurrent(name, *args)
        return func(*args, **(kwargs or {}))


def _lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    keep_in, forget, new, out = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(keep_in) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def _gru_cell(from_input: Tensor, from_hidden: Tensor, hidden: Tensor) -> Tensor:
    (reset, update, new), (reset_h, update_h, new_h) = from_input.chunk(3, -1), from_hidden.chunk(3, -1)
    update = torch.sigmoid(update + update_h)
    return (1.0 - update) * torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h) + update * hidden


def _recurrent(
    kind: str,
    input: Tensor,
    first: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` compute."""
    x = input if batch_first else input.transpose(0, 1)  # [B, T, ...]
    directions = 2 if both_ways else 1
    each = len(weights) // (layers * directions)
    hiddens, cells = (first[0], first[1]) if kind == "lstm" else (first, first)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = list(weights[place * each : (place + 1) * each])
            projection = own.pop() if len(own) % 2 else None
            into, back = (own[0], own[2] if biased else None), (own[1], own[3] if biased else None)
            gates, hidden, cell = F.linear(x, *into), hiddens[place], cells[place]
            steps: list[Tensor] = []
            times = range(x.shape[1])
            for t in reversed(times) if direction else times:
                from_hidden = F.linear(hidden, *back)
                if kind == "lstm":
                    hidden, cell = _lstm_cell(gates[:, t] + from_hidden, cell)
                    hidden = hidden if projection is None else F.linear(hidden, projection)
                elif kind == "gru":
                    hidden = _gru_cell(gates[:, t], from_hidden, hidden)
                else:
                    hidden = (torch.tanh if kind == "rnn_tanh" else torch.relu)(gates[:, t] + from_hidden)
                steps.append(hidden)
            ends.append((hidden, cell))
            outputs.append(torch.stack(steps[::-1] if direction else steps, 1))
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout, training=True)
    last = tuple(torch.stack(state) for state in zip(*ends, strict=True))
    return x if batch_first else x.transpose(0, 1), *(last if kind == "lstm" else last[:1])


class LocalNoise(TorchFunctionMode):
    """Move the noise of Gaussian weights from the weights to where it is cheaper and of lower variance.

    - ``linear``: the local reparameterisation trick. Outputs of a linear map of Gaussian weights are Gaussian, so draw
      those, independently for every example: mean x M^T + m, variance x² (S²)^T + s².
    - ``conv2d``: a weight draw for every example. Output positions share weights, so drawing outputs independently
      would be wrong; drawing the (few) weights once per example is exact. Not where there are more than
      `MOST_PER_EXAMPLE`.

    Args:
        sigma: Standard deviation of each parameter handled here, by ``id`` of the tensor that holds its mean.
        key: ``[2]`` int32.
    """

    def __init__(self, sigma: Mapping[int, Tensor], key: Tensor) -> None:
        super().__init__()
        self.sigma = sigma
        self.key = rng.fold(rng.SplitKey.of(key), 0x10C)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.conv2d) and id(argument(args, kwargs, 1, "weight")) in self.sigma:
            self.calls += 1
            return (self._linear if func is F.linear else self._conv2d)(*args, **kwargs)
        return func(*args, **kwargs)

    def _normal(self, word: int, shape: torch.Size) -> Tensor:
        keys = example_keys(rng.fold(self.key, 2 * self.calls + word), shape[0])
        return rng.normal(keys, math.prod(shape[1:])).reshape(shape)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mean = F.linear(input, weight, bias)
        variance = F.linear(input.square(), self.sigma[id(weight)].square())
        if bias is not None:
            variance = variance + self.sigma[id(bias)].square()
        # The floor keeps the square root's slope finite where the variance is zero; 1e-16 is far below any weight
        # noise.
        return mean + torch.sqrt(variance + 1e-16) * self._normal(0, mean.shape)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        examples = input.shape[0]
        drawn = weight + self.sigma[id(weight)] * self._normal(0, torch.Size([examples, *weight.shape]))
        drawn_bias = drawn.new_zeros(examples, len(weight))
        if bias is not None:
            drawn_bias = bias + self.sigma[id(bias)] * self._normal(1, drawn_bias.shape)
        form = in_pairs(weight.shape[2:], stride, padding, dilation)
        assert form is not None  # `LocalCalls` leaves those to PyTorch
        if fast(input):
            return conv2d(input[:, None], drawn, drawn_bias, *form).squeeze(1)
        return conv2d_as_matmul(input, drawn, *form) + drawn_bias[:, :, None, None]


def conv2d_as_matmul(
    input: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """A convolution with a weight ``[B, O, C, kh, kw]`` for each example, as its patches times a matrix."""
    kernel = weight.shape[-2:]
    patches = F.unfold(input, kernel, tuple(dilation), tuple(padding), tuple(stride))  # [B, C kh kw, L]
    size = output_size(input.shape[2:], kernel, stride, padding, dilation)
    return (weight.flatten(-3) @ patches).unflatten(-1, size)


class LocalCalls(TorchFunctionMode):
    """Finds the parameters that `LocalNoise` can handle: those of a linear map or convolution, used nowhere else.

    Args:
        parameters: By name, as the module will use them.
        examples: Batch size of the pass. A layer that runs on several rows of an example (the words of a text) shares
            its weights between them, so noise drawn for each row would be wrong; it is known by another number of rows.
    """

    def __init__(self, parameters: Mapping[str, Tensor], examples: int) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in parameters.items()}
        self.examples = examples
        self.uses = Counter[int]()
        self.calls: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.uses.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if func in (F.linear, F.conv2d) and self._plain(func, args, kwargs):
            used = (argument(args, kwargs, 1, "weight"), argument(args, kwargs, 2, "bias"))
            self.calls.append(tuple(id(p) for p in used if p is not None))
        return func(*args, **kwargs)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> bool:
        input, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
        if input.shape[0] != self.examples or input.ndim != (2 if func is F.linear else 4):
            return False
        if func is F.linear:
            return True
        if weight.numel() > MOST_PER_EXAMPLE:
            return False
        lopsided = argument(args, kwargs, 4, "padding") == "same" and any(k % 2 == 0 for k in weight.shape[-2:])
        return argument(args, kwargs, 6, "groups") in (None, 1) and not lopsided

    @property
    def local(self) -> frozenset[str]:
        """Names of the parameters found; a layer's weight and bias are found together or not at all."""
        found = [call for call in self.calls if all(i in self.names and self.uses[i] == 1 for i in call)]
        return frozenset(self.names[i] for call in found for i in call)


# --- Modules as their libraries make them: how they are called, and what transformers and peft need to run here -------


class ModuleInfo(NamedTuple):
    """What a walk through all layers of a module finds. The walk takes as long as a small step.

    Attributes:
        recurrent: Whether there are recurrent layers.
        tied: Whether a parameter or buffer has several names.
    """

    recurrent: bool
    tied: bool

    @classmethod
    def of(cls, module: nn.Module) -> ModuleInfo:
        """That of a module as it is now."""
        recurrent = any(isinstance(part, nn.RNNBase | nn.LSTMCell) for part in module.modules())
        named = [t for own in (module.named_parameters, module.named_buffers) for _, t in own(remove_duplicate=False)]
        return cls(recurrent, len({id(t) for t in named}) < len(named))


def run(module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs, info: ModuleInfo | None = None) -> Any:
    """What a module gives for these inputs, with these parameters instead of its own.

    A dict is taken by name, ``module(**x)``, a tuple by position. Of an object with ``logits``, as the models of
    transformers return, it is these.

    Args:
        module: It is as before afterwards.
        parameters: By name.
        x: ``[B, ...]``, one tensor or several.
        info: The module's, for whoever calls it often; None: it is looked at.
    """
    info = info or ModuleInfo.of(module)
    named = x if isinstance(x, dict) else {}
    args = () if named else x if isinstance(x, tuple) else (x,)
    with ExitStack() as changes:
        changes.enter_context(_whole_masks())
        changes.enter_context(_uncheckpointed())
        if info.recurrent:
            changes.enter_context(Recurrence())
        if maybe_current_level() is not None:  # fused attention has no rule for many clients and would run one by one
            changes.enter_context(sdpa_kernel(SDPBackend.MATH))
        outputs = functional_call(module, dict(parameters), args, named, tie_weights=info.tied)
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
