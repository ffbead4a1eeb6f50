"""Stacked convolution against PyTorch's own, and the rules that make it work under ``vmap`` and ``grad``."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.nn.kernels import conv

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
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # as in every run
    form = shape[6:]
    on_gpu = drawn(shape, "cuda", torch.float32)
    actual = both_ways(conv.conv2d, *on_gpu, *form)
    expected = both_ways(one_by_one, *(t.double().cpu() for t in on_gpu), *form)
    for a, e in zip(actual, expected, strict=True):
        assert error(a, e) < (1e-3 if tf32 else 1e-4)
    for a, again in zip(actual, both_ways(conv.conv2d, *on_gpu, *form), strict=True):
        assert torch.equal(a, again)


#: As `SHAPES`, and whether with TF32: a run of 50 clients that read before its images, and another whose weights' gradient
#: looked wrong because of TF32.
KNOWN = [
    ((50, 10, 32, (30, 30), 64, (3, 3), (1, 1), (0, 0), (1, 1)), True),
    ((50, 10, 3, (32, 32), 32, (3, 3), (1, 1), (0, 0), (1, 1)), True),
    ((50, 10, 3, (32, 32), 6, (5, 5), (1, 1), (0, 0), (1, 1)), False),
]


def at_random(number: int) -> tuple[Any, bool]:
    """A shape of those that clients may have, and whether with TF32; the same for a number each time."""
    chance = random.Random(number)
    s, b = chance.choice([(1, 8), (2, 5), (10, 3), (50, 2)])
    c, o = (chance.choice([1, 3, 6, 16, 32, 64, 128]) for _ in range(2))
    kernel = (chance.choice([1, 2, 3, 5, 7]),) * 2 if chance.random() < 0.7 else (chance.choice([1, 3]), 2)
    form = [(chance.choice(values),) * 2 for values in ([1, 1, 2, 3], [0, 0, 1, 2, 3], [1, 1, 1, 2])]
    least = [form[2][i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = tuple(max(n, chance.randrange(4, 33)) for n in least)
    return (s, b, c, size, o, kernel, *form), chance.random() < 0.5


def among_nan(t: Tensor, how: str) -> Tensor:
    """The same on the GPU in single precision, with NaN around it in memory.

    Args:
        t: ``[S, ...]``.
        how: ``row``: one client after the other; ``slices``: each within a larger row, where rows of weights begin;
            ``shared``: the first client's for all; ``turned``: with its last two axes swapped in memory.
    """
    margin = 4096
    if how == "shared":
        return among_nan(t[:1], "row").expand_as(t)
    if how == "turned":
        return among_nan(t.transpose(-1, -2).contiguous(), "row").transpose(-1, -2)
    each, gap = t[0].numel(), 37 if how == "slices" else 0
    memory = torch.full((2 * margin + len(t) * (each + gap),), torch.nan, device="cuda")
    rows = memory.as_strided((len(t), each), (each + gap, 1), margin + gap // 2)
    rows.copy_(t.flatten(1))
    return rows.unflatten(1, t.shape[1:])


@CUDA
@pytest.mark.parametrize(("shape", "tf32"), [*KNOWN, *(at_random(number) for number in range(150))])
def test_kernels_read_nothing_but_their_inputs(shape: Any, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves, whether or not they are the faster ones, and then whatever is taken for this shape."""
    from bpfed.nn.kernels import conv_triton

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    chance, form, size, kernel = random.Random(str(shape)), [list(f) for f in shape[6:]], list(shape[3]), shape[5]
    x, w, b = drawn(shape)
    x, w, b = (
        among_nan(t, chance.choice(ways))
        for t, ways in ((x, ["row", "shared", "turned"]), (w, ["row", "slices", "slices", "shared"]), (b, ["slices"]))
    )
    leaves = [t.double().contiguous().requires_grad_() for t in (x, w, b)]
    y = one_by_one(*leaves, *form)
    g = torch.randn_like(y)
    y.backward(g)
    dx, dw, db = (t.grad for t in leaves)
    g = among_nan(g, chance.choice(["row", "turned"]))
    expected = [y.detach(), dx, torch.cat([dw.flatten(2), db[..., None]], -1)]
    for kernels, bound in ((conv_triton, 1e-3 if tf32 else 1e-5), (conv, 2e-3)):
        actual = [
            kernels.convolve(x, w, b, *form),
            kernels.input_gradient(g, w, size, *form),
            kernels.weight_gradient(x, g, list(kernel), *form),
        ]
        for a, e in zip(actual, expected, strict=True):
            assert a.is_contiguous()
            assert a.dtype == torch.float32
            assert error(a, e.cpu()) < bound


@CUDA
@pytest.mark.parametrize(
    ("channels", "stride", "taken"),
    [
        ((3, 6), 1, ["convolve", "weight_gradient"]),
        ((6, 16), 1, ["convolve", "input_gradient", "weight_gradient"]),
        ((6, 16), 2, ["convolve", "weight_gradient"]),
        ((64, 64), 1, ["convolve", "weight_gradient"]),
        ((128, 128), 1, []),
    ],
)
def test_kernels_are_taken_where_they_are_faster(
    channels: tuple[int, int], stride: int, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpfed.nn.kernels import conv_triton

    called: list[str] = []
    for name in ("convolve", "input_gradient", "weight_gradient"):
        real = getattr(conv_triton, name)

        def watched(*given: Any, name: str = name, real: Any = real) -> Tensor:
            called.append(name)
            return real(*given)

        monkeypatch.setattr(conv_triton, name, watched)
    form = ((stride, stride), (0, 0), (1, 1))
    tensors = drawn((2, 3, channels[0], (9, 9), channels[1], (3, 3), *form), "cuda", torch.float32)
    both_ways(conv.conv2d, *tensors, *form)
    # A gradient in the images is a convolution, too.
    assert [name for i, name in enumerate(called) if called[i - 1 : i] != ["input_gradient"]] == taken


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conv.kernels_wanted()
    monkeypatch.setenv("BPFED_KERNELS", "off")
    assert not conv.kernels_wanted()
    monkeypatch.setenv("BPFED_KERNELS", "no")
    with pytest.raises(UserError, match="BPFED_KERNELS is 'no' in the environment, but must be 'on' or 'off'"):
        conv.kernels_wanted()


@CUDA
def test_kernels_that_are_turned_off_are_not_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BPFED_KERNELS", "off")
    layer, x = nn.Conv2d(3, 4, 3).cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    with conv.Convolutions():
        graph = make_fx(layer)(x)
    assert not any("bpfed" in str(n.target) for n in graph.graph.nodes)


@pytest.mark.skipif(not conv._TRITON or "TRITON_INTERPRET" in os.environ, reason="needs Triton's compiler")
@pytest.mark.parametrize("shape", [*(shape for shape, _ in KNOWN), *SHAPES])
def test_no_addition_is_of_two_parts(shape: Any) -> None:
    """Of these ptxas loses a part (`bpfed.nn.kernels.conv_triton`). The compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bpfed.nn.kernels import conv_triton

    _, n, c, (h, w), o, (kh, kw), stride, padding, dilation = shape
    size = conv.output_size((h, w), (kh, kw), stride, padding, dilation)
    around = [d * (k - 1) - p for d, k, p in zip(dilation, (kh, kw), padding, strict=True)]
    forward = (c, h, w, o, *size, kh, kw, *stride, *padding, *dilation)
    backward = (o, *size, c, h, w, kh, kw, 1, 1, *around, *dilation)
    taps = kh * kw
    convolving = {"EDGES": True, "PRECISION": "tf32"}
    kinds = [
        (conv_triton._convolve, forward, convolving | {"W_ROW": c * taps, "W_CHANNEL": taps, "FLIP": False, "BIAS": True}
         | conv_triton._convolve_config(c, o, n * size[0] * size[1])),
        (conv_triton._convolve, backward, convolving | {"W_ROW": taps, "W_CHANNEL": c * taps, "FLIP": True, "BIAS": False}
         | conv_triton._convolve_config(o, c, n * h * w)),
        (conv_triton._weight_gradient, forward, convolving | conv_triton._weight_config(taps, c, o)),
    ]  # fmt: skip
    for kernel, numbers, more in kinds:
        names = kernel.arg_names
        first = names.index("C")
        known = dict(zip(names[first : first + len(numbers)], numbers, strict=True)) | more
        how = {name: known.pop(name) for name in ("num_warps", "num_stages")}
        pointers = {name: "*fp32" for name in names[:first] if name in ("x", "w", "b", "y", "g", "out")}
        types = {name: pointers.get(name, "i32") for name in names[:first]} | dict.fromkeys(known, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names[:first]) if name in pointers}
        made = triton.compile(ASTSource(kernel, types, known, aligned), target=GPUTarget("cuda", 90, 32), options=how)
        assert "16x2" not in made.asm["ptx"]


@CUDA
@pytest.mark.parametrize("shape", [(5, 50, 3, (32, 32), 6, (5, 5), (1, 1), (0, 0), (1, 1)), *SHAPES[:5]])
def test_a_client_does_not_depend_on_who_is_stacked_beside_it(shape: Any) -> None:
    """With our kernels; PyTorch's may."""
    from bpfed.nn.kernels import conv_triton

    together = drawn(shape, "cuda", torch.float32)
    alone = [t[1:2] for t in together]
    form = [list(f) for f in shape[6:]]
    y = conv_triton.convolve(*together, *form)
    assert torch.equal(y[1:2], conv_triton.convolve(*alone, *form))
    dx = [conv_triton.input_gradient(g, t[1], list(shape[3]), *form) for t, g in ((together, y), (alone, y[1:2]))]
    dw = [conv_triton.weight_gradient(t[0], g, list(shape[5]), *form) for t, g in ((together, y), (alone, y[1:2]))]
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


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_matrices_are_the_same_convolution(shape: Any) -> None:
    (x, w, b), form = drawn(shape), shape[6:]
    y, dx, dw, db = both_ways(one_by_one, x, w, b, *form)
    torch.manual_seed(1)
    gradient = torch.randn(y.shape, dtype=torch.float64)
    assert error(conv.by_matrices(x, w, b, *form), y) < 1e-12
    assert error(conv.input_gradient_by_matrices(gradient, w, x.shape[3:], *form), dx) < 1e-12
    both = conv.weight_gradient_by_matrices(x, gradient, w.shape[3:], *form)
    assert error(both[..., :-1].reshape(w.shape), dw) < 1e-12
    assert error(both[..., -1], db) < 1e-12


def test_convolutions_that_are_mostly_weights() -> None:
    assert conv._mostly_weights(512, 512, 32)
    assert conv._mostly_weights(128, 128, 512)
    assert not conv._mostly_weights(128, 128, 8192)  # large images: patches would be many times the weights
    assert not conv._mostly_weights(64, 64, 64)  # the kernels of our own are faster
