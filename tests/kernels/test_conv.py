"""Stacked convolution against PyTorch's own, and the rules that make it work under ``vmap`` and ``grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bpfed.kernels import conv

#: Clients, images, channels in, image size, channels out, kernel, stride, padding, dilation.
SHAPES = [
    (3, 4, 3, (12, 11), 6, (5, 5), (1, 1), (0, 0), (1, 1)),
    (2, 3, 6, (9, 9), 16, (5, 5), (1, 1), (0, 0), (1, 1)),
    (2, 3, 17, (8, 9), 35, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 2, 5, (9, 10), 7, (3, 2), (2, 3), (1, 2), (2, 1)),
    (2, 3, 16, (9, 8), 8, (3, 3), (2, 2), (1, 1), (1, 1)),
    (7, 1, 3, (12, 12), 6, (5, 5), (1, 1), (0, 0), (1, 1)),
    (1, 3, 4, (8, 8), 5, (1, 1), (1, 1), (2, 2), (1, 1)),
]
CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or not conv._TRITON, reason="the fast kernels need a CUDA GPU and Triton"
)


def drawn(shape: Any, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    s, b, c, size, o, kernel, *_ = shape
    sizes = [(s, b, c, *size), (s, o, c, *kernel), (s, o)]
    return tuple(torch.randn(z, dtype=torch.float64).to(device, dtype) for z in sizes)  # type: ignore[return-value]


def one_by_one(x: Tensor, w: Tensor, b: Tensor, *form: Any) -> Tensor:
    return torch.stack([F.conv2d(*client, *form) for client in zip(x, w, b, strict=True)])


def both_ways(function: Any, x: Tensor, w: Tensor, b: Tensor, *form: Any) -> list[Tensor]:
    """The result, and the gradients of its product with fixed random numbers."""
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = function(*leaves, *form)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y))
    return [y.detach(), *(t.grad for t in leaves)]  # type: ignore[misc]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_is_a_convolution_of_each_client(shape: Any) -> None:
    tensors, form = drawn(shape), shape[6:]
    for actual, expected in zip(
        both_ways(conv.conv2d, *tensors, *form), both_ways(one_by_one, *tensors, *form), strict=True
    ):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected)


def test_bias_may_be_left_out() -> None:
    x, w, _ = drawn(SHAPES[0])
    torch.testing.assert_close(conv.conv2d(x, w), one_by_one(x, w, torch.zeros(3, 6, dtype=x.dtype)))


def test_mapped_gradients_match_autograd() -> None:
    x, w, b = drawn(SHAPES[0])

    def loss(function: Any) -> Any:
        return lambda p, x: torch.sin(function(x, *p)).sum()

    def own(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv.conv2d(x[None], w[None], b[None]).squeeze(0)

    actual = vmap(grad_and_value(loss(own)))((w, b), x)
    expected = vmap(grad_and_value(loss(F.conv2d)))((w, b), x)
    torch.testing.assert_close(actual, expected)
    # Images in common, weights in common, and mapped twice.
    for dims in ((0, None), (None, 0)):
        p = tuple(t if dims[0] == 0 else t[0] for t in (w, b))
        images = x if dims[1] == 0 else x[0]
        pair = [vmap(grad(loss(f), argnums=(0, 1)), dims)(p, images) for f in (own, F.conv2d)]
        torch.testing.assert_close(*pair)
    twice = [vmap(vmap(f, (None, 0, 0)), (0, None, None))(x, w, b) for f in (own, F.conv2d)]
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_second_derivatives(shape: Any) -> None:
    tensors = [t.requires_grad_() for t in drawn((1, 2, 2, (5, 6), 3, *shape[5:]))]
    torch.autograd.gradgradcheck(lambda *t: conv.conv2d(*t, *shape[6:]), tensors)


def test_a_weight_for_every_example() -> None:
    x, _, _ = drawn(SHAPES[0])
    w = torch.randn(4, 6, 3, 5, 5, dtype=x.dtype)
    expected = torch.cat([F.conv2d(x[0, i : i + 1], w[i]) for i in range(4)])
    torch.testing.assert_close(conv.conv2d(x[0][:, None], w).squeeze(1), expected)


def test_no_input_gradient_in_a_first_layer() -> None:
    x, w, b = drawn(SHAPES[0])

    def step(x: Tensor, w: Tensor, b: Tensor) -> Any:
        own = lambda w, x, b: conv.conv2d(x[None], w[None], b[None]).square().sum()  # noqa: E731
        return vmap(grad(own, argnums=(0, 2)))(w, x, b)

    graph = make_fx(step)(x, w, b)
    called = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert "bpfed.convolve_weight_gradient.default" in called
    assert "bpfed.convolve_input_gradient.default" not in called
    torch.testing.assert_close(graph(x, w, b), step(x, w, b))


@pytest.mark.parametrize("shape", SHAPES)
def test_rules_of_the_operations(shape: Any) -> None:
    (x, w, b), form = drawn(shape), [list(f) for f in shape[6:]]
    g = conv.convolve(x, w, b, *form)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(conv.convolve, (x, w, b, *form), test_utils=checks)
    torch.library.opcheck(conv.input_gradient, (g, w, list(x.shape[3:]), *form), test_utils=checks)
    torch.library.opcheck(conv.weight_gradient, (x, g, list(w.shape[3:]), *form), test_utils=checks)


def test_the_mode_leaves_a_cpu_alone() -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    expected = layer(x)
    with conv.Convolutions():
        graph = make_fx(layer)(x)
        assert torch.equal(layer(x), expected)
    assert not any("bpfed" in str(n.target) for n in graph.graph.nodes)


@CUDA
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_float64_and_repeat(shape: Any, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    form = shape[6:]
    on_gpu = drawn(shape, "cuda", torch.float32)
    actual = both_ways(conv.conv2d, *on_gpu, *form)
    expected = both_ways(one_by_one, *(t.double().cpu() for t in on_gpu), *form)
    for a, e in zip(actual, expected, strict=True):
        assert error(a, e) < (1e-3 if tf32 else 1e-5)
    for a, again in zip(actual, both_ways(conv.conv2d, *on_gpu, *form), strict=True):
        assert torch.equal(a, again)


@CUDA
@pytest.mark.parametrize("shape", [(5, 50, 3, (32, 32), 6, (5, 5), (1, 1), (0, 0), (1, 1)), *SHAPES[:5]])
def test_a_client_does_not_depend_on_who_is_stacked_beside_it(shape: Any) -> None:
    together = drawn(shape, "cuda", torch.float32)
    alone = [t[1:2] for t in together]
    form = [list(f) for f in shape[6:]]
    y = conv.convolve(*together, *form)
    assert torch.equal(y[1:2], conv.convolve(*alone, *form))
    dx = [conv.input_gradient(g, t[1], list(shape[3]), *form) for t, g in ((together, y), (alone, y[1:2]))]
    dw = [conv.weight_gradient(t[0], g, list(shape[5]), *form) for t, g in ((together, y), (alone, y[1:2]))]
    assert torch.equal(dx[0][1:2], dx[1])
    assert torch.equal(dw[0][1:2], dw[1])


@CUDA
@pytest.mark.parametrize(("padding", "stride"), [(0, 1), ("same", 1), ("valid", 2), ((1, 0), 2)])
def test_the_mode_takes_a_gpu_over(padding: Any, stride: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 6, 3, stride, padding)
    weights = {n: p.detach()[None] + 0.1 * torch.randn(4, *p.shape) for n, p in layer.named_parameters()}
    x = torch.randn(4, 5, 3, 12, 12)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        with conv.Convolutions():
            return torch.func.functional_call(layer, weights, (x,)).square().sum()

    def step(weights: dict[str, Tensor], x: Tensor) -> Any:
        return vmap(grad_and_value(loss))(weights, x)

    expected = step({n: w.double() for n, w in weights.items()}, x.double())
    on_gpu = ({n: w.cuda() for n, w in weights.items()}, x.cuda())
    graph = make_fx(step)(*on_gpu)
    assert any("bpfed" in str(n.target) for n in graph.graph.nodes)
    for run in (graph, torch.compile(graph)):
        gradients, value = run(*on_gpu)
        assert error(value, expected[1]) < 1e-3
        for name, g in gradients.items():
            assert error(g, expected[0][name]) < 1e-3
