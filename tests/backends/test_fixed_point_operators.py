"""Transposed convolutions, products and additions on integers, against Python integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.backends.test_backends import AFFINE, codes, runner
from tests.backends.test_fixed_point import tflite_multiply
from tests.reference import rounded
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.backends import fixed_point
from torchq.nn import TensorQuantizer


class Between(nn.Module):
    """An operator between quantizers of both operands and of the result."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], ends: bool = True) -> None:
        super().__init__()
        self.first, self.second = TensorQuantizer(AFFINE), TensorQuantizer(QuantDescriptor())
        self.last = TensorQuantizer(AFFINE) if ends else nn.Identity()
        self.function = function

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(self.function(self.first(a), self.second(b)))


def calibrated(
    function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, ends: bool = True
) -> Between:
    model = Between(function, ends).eval()
    torchq.calibrate(model, [(a, b)], progress=False)
    return model


def grid(quantizer: TensorQuantizer, x: Tensor) -> tuple[Tensor, float, int]:
    """Return centred codes, the scale and the zero point."""
    scale, zero_point = quantizer.calculate_qparams()
    whole = torch.tensor(codes(quantizer(x), quantizer)).view(x.shape)
    return whole - int(zero_point), float(scale), int(zero_point)


def clamped(code: int) -> int:
    return max(-128, min(127, code))


def test_additions_are_those_of_tensorflow_lite(generator: torch.Generator) -> None:
    a, b = torch.randn(5, 40, generator=generator), 3 * torch.randn(40, generator=generator)
    model = calibrated(torch.add, a, b)
    (first, s1, _), (second, s2, _) = grid(model.first, a), grid(model.second, b)
    s_out, z_out = (float(part) for part in model.last.calculate_qparams())
    widest = 2 * max(s1, s2)
    wanted = []
    others = second.expand(5, 40).flatten().tolist()
    for one, other in zip(first.flatten().tolist(), others, strict=True):
        parts = tflite_multiply(one << 20, s1 / widest), tflite_multiply(other << 20, s2 / widest)
        wanted.append(clamped(tflite_multiply(sum(parts), widest / 2**20 / s_out) + int(z_out)))
    result = runner(model, (a, b)).run((a, b), backend=fixed_point())
    assert codes(result, model.last) == wanted
    assert torch.allclose(result, model(a, b), atol=1.01 * s_out)


@pytest.mark.parametrize("ends", [True, False])
def test_products_of_two_tensors(ends: bool, generator: torch.Generator) -> None:
    a, b = torch.randn(2, 3, 7, generator=generator), torch.randn(2, 7, 4, generator=generator)
    model = calibrated(torch.matmul, a, b, ends)
    (first, s1, _), (second, s2, _) = grid(model.first, a), grid(model.second, b)
    sums = [
        int(sum(int(first[n, i, k]) * int(second[n, k, j]) for k in range(7)))
        for n, i, j in itertools.product(range(2), range(3), range(4))
    ]
    result = runner(model, (a, b)).run((a, b), backend=fixed_point())
    if not ends:
        exact = (torch.tensor(sums).double() * (s1 * s2)).float()
        assert torch.equal(result.flatten(), exact)
        return
    s_out, z_out = (float(part) for part in model.last.calculate_qparams())
    wanted = [clamped(tflite_multiply(total, s1 * s2 / s_out) + int(z_out)) for total in sums]
    assert codes(result, model.last) == wanted


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups: int, generator: torch.Generator) -> None:
    x = torch.randn(1, 4, 3, 3, generator=generator)
    layer = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=groups)
    model = nn.Sequential(layer, nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    weights = Rule("type:ConvTranspose2d", input=AFFINE, weight=QuantDescriptor(axis=1))
    others = Rule("type:Conv2d", input=AFFINE, weight=QuantDescriptor(axis=0))
    torchq.quantize_(model, QuantConfig((weights, others)))
    torchq.calibrate(model, [x], progress=False)
    conv, reader = model[0], model[2].input_quantizer
    image, s_in, _ = grid(conv.input_quantizer, x)
    s_w = conv.weight_quantizer.scale.flatten().tolist()
    weight = (conv.weight / conv.weight_quantizer.scale).round().long()
    s_out, z_out = (float(part) for part in reader.calculate_qparams())
    per_group = 6 // groups
    wanted = []
    for o, i, j in itertools.product(range(6), range(6), range(6)):
        sources = range(o // per_group * (4 // groups), (o // per_group + 1) * (4 // groups))
        total = sum(
            int(image[0, c, i // 2, j // 2]) * int(weight[c, o % per_group, i % 2, j % 2])
            for c in sources
        )
        real = s_in * s_w[o % per_group]
        total += rounded(float(conv.bias[o].detach().double() / real), "half_away")
        code = clamped(tflite_multiply(total, real / s_out) + int(z_out))
        wanted.append(max(code, int(z_out)))  # ReLU ends at zero
    run = runner(model, x)
    name = [name for name in run.node_names if name.endswith("input_quantizer")][-1]
    assert codes(run.run(x, outputs=name, backend=fixed_point()), reader) == wanted


def test_models_that_are_read_from_files(tmp_path: object, generator: torch.Generator) -> None:
    pytest.importorskip("onnx", reason="writes the file")
    x = torch.randn(2, 3, 6, 6, generator=generator)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    path = f"{tmp_path}/net.onnx"
    torchq.export_onnx(model, x, path, dynamo=False)
    read = torchq.from_onnx(path)
    results = [runner(m, x).run(x, backend=fixed_point()) for m in (model, read)]
    assert torch.equal(*results)
    assert not torch.equal(results[0], model(x))
