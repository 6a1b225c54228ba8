import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import Residual, calibrated, recipe, sqnr
from tests.models import simulated
from torchq.lowering import Int8Conv
from torchq.lowering.codes import Dequantize
from torchq.runtimes import Torch


def kinds(model: nn.Module, kind: type) -> int:
    return sum(isinstance(m, kind) for m in model.modules())


def deployed(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    return torchq.deploy(calibrated(model, x), x, **options)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.SiLU, nn.GELU, nn.Sigmoid],
)
@pytest.mark.parametrize("fuse", [False, True])
def test_a_network_agrees_with_its_simulation(
    images: Tensor, activation: type[nn.Module], fuse: bool
) -> None:
    model = calibrated(Residual(activation), images)
    before = copy.deepcopy(model)
    int8 = torchq.deploy(model, images, target=Torch(fuse=fuse))
    # Where float32 rounds differently next to a tie, a code moves by one: 1/127 of a range.
    assert sqnr(int8(images), model(images)) > 40
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            model.state_dict().values(), before.state_dict().values(), strict=True
        )
    )
    assert type(model.stem) is torchq.nn.QuantConv2d


class Aliased(nn.Module):
    """What a pass could get wrong.

    A layer is called twice, a tensor that is read again is changed in place, and the result of a
    convolution is viewed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.conv
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(3 * 256, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.relu(y)
        u = self.again(z) + y  # y was changed in place
        u += z
        return self.head(u.view(x.size(0), -1)) + u.mean()


def test_shared_layers_and_work_in_place(images: Tensor) -> None:
    model = calibrated(Aliased(), images)
    int8 = torchq.deploy(model, images)
    assert sqnr(int8(images.clone()), model(images.clone())) > 40


class Changed(nn.Module):
    """A layer reads a tensor after it was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        z = y.add_(1.0)
        return self.conv(y) + z


def test_tensors_are_quantized_after_work_in_place(images: Tensor) -> None:
    model = calibrated(Changed(), images)
    assert sqnr(torchq.deploy(model)(images), model(images)) > 40


def test_hooks_keep_layers_apart(images: Tensor) -> None:
    model = calibrated(Residual(), images)
    seen: list[int] = []
    model.act.register_forward_hook(lambda *args: seen.append(1))  # type: ignore[union-attr]
    torchq.deploy(model)(images)
    assert len(seen) == 5


# --- living with the result ----------------------------------------------------------------------


def test_threads(images: Tensor) -> None:
    int8 = copy.deepcopy(deployed(Residual(), images))  # nothing packed yet
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(int8(images))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = int8(images)
    assert len(results) == 8
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_any_batch(images: Tensor, count: int) -> None:
    int8 = deployed(Residual(), images)
    x = torch.randn(count, 3, 16, 16)
    assert int8(x).shape == (count, 5)
    for one, together in zip(x.split(1), int8(x).split(1), strict=False):
        torch.testing.assert_close(int8(one), together, rtol=1e-5, atol=1e-5)


def compiled(model: nn.Module, x: Tensor) -> object:
    return torch.compile(model, backend="eager")(x)


def exported(model: nn.Module, x: Tensor) -> object:
    return torch.export.export(model, (x,))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("record", [compiled, exported, torch.jit.trace])
def test_what_records_calls_is_refused(
    images: Tensor, record: Callable[..., object]
) -> None:
    int8 = deployed(Residual(), images)
    message = (
        "got a deployed model inside torch.compile, torch.export or torch.jit.trace; "
        "expected a"
    )
    with pytest.raises(torchq.errors.ExportError, match=message):
        record(int8, images)


# --- errors and warnings --------------------------------------------------------------------------


def test_nothing_to_deploy() -> None:
    message = "deploy: Sequential has no quantized layer; expected a calibrated model"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(nn.Sequential(nn.ReLU()))


def test_uncalibrated_quantizers_are_named() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.Linear(2, 2),
    )
    torchq.quantize_(model, recipe())
    torchq.calibrate(model, progress=False)
    model[1].input_quantizer.set_amax(1.0)  # type: ignore[union-attr, operator]
    message = r"no range is known for 0.input_quantizer; expected calibrated quantizers"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_quantizers_placed_for_a_runtime(images: Tensor, target: str) -> None:
    model = simulated(
        nn.Sequential(Residual()).eval(), [images], recipe(), target=target
    )
    int8 = torchq.deploy(model, images, target="torch")
    assert sqnr(int8(images), model(images)) > 40
    if target == "tensorrt":  # the shortcut alone is quantized, as the kernels want it
        assert (
            sum(
                m.residual_qparams is not None
                for m in int8.modules()
                if isinstance(m, Int8Conv)
            )
            == 1
        )
        assert kinds(int8, Dequantize) <= 1
