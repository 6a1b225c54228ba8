"""GPTQ on models: errors shrink, codes survive, and failures leave layers whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq import gptq_


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        Block(8),
        Block(8),
        nn.Flatten(),
        nn.Linear(512, 5),
    ).eval()


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 3, 8, 8, generator=generator) for _ in range(count)]


def calibrated(model: nn.Module | None = None, bits: tuple[int, int] = (3, 4)) -> Any:
    model = model or net()
    torchq.quantize_(model, torchq.recipes.integer(*bits, weight_method="max"))
    torchq.calibrate(model, batches(), correct=False, progress=False)
    return model


def error(model: nn.Module) -> float:
    """Return the relative error of the output of ``model`` on data that it has not seen."""
    x = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = net()(x)
        return (
            (model(x) - expected).norm() / (expected - expected.mean(0)).norm()
        ).item()


def test_errors_shrink_and_shortcuts_are_repaired() -> None:
    model = calibrated()
    before = error(model)
    report = gptq_(model, batches(), progress=False)
    assert error(model) < 0.45 * before
    assert list(report.layers) == ["0", "2.conv1", "2.conv2", "3.conv1", "3.conv2", "5"]
    assert all(
        layer.error_after < layer.error_before for layer in report.layers.values()
    )
    assert report.skipped == {}
    assert report.batches == 3
    repairs = [name for name, layer in report.layers.items() if layer.repairs_shortcut]
    assert repairs == ["2.conv2", "3.conv2"]
    assert "3.conv2" in str(report)
    assert "repairs a shortcut" in str(report)


def test_the_bias_makes_the_mean_output_that_of_the_float_model() -> None:
    """E[Q x + b] = E[W x + b] on quantized and float inputs, and for a sum with a shortcut."""
    model = calibrated()
    floats = net()
    gptq_(model, batches(), progress=False)
    with torch.no_grad():
        x = torch.cat(batches())
        means = [(m[0](x).mean((0, 2, 3))) for m in (model, floats)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-6)
        sums: list[Tensor] = []
        for m in (model, floats):
            block = m[2]
            y = m[:2](x)  # type: ignore[index]
            sums.append((block.conv2(block.conv1(y).relu()) + y).mean((0, 2, 3)))
        torch.testing.assert_close(*sums, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [None, 4])
def test_weights_are_values_of_the_grid(dtype: torch.dtype, block: int | None) -> None:
    model = net()
    blocks = {"block_size": block, "block_axis": 1} if block else {"axis": 0}
    weight = torchq.QuantDescriptor(3, **blocks)
    rule = torchq.Rule("*", input=torchq.QuantDescriptor(4), weight=weight)
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    torchq.calibrate(model, batches(), progress=False)
    model, data = model.to(dtype), [batch.to(dtype) for batch in batches()]
    gptq_(model, data, progress=False)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            assert torch.equal(module.weight_quantizer(module.weight), module.weight), (
                name
            )
            assert (
                len(module.weight.unique()) <= 8 * module.weight_quantizer.amax.numel()
            )


@pytest.mark.eight_bit_products
def test_results_are_saved_restored_and_deployed(tmp_path: Path) -> None:
    model = calibrated(bits=(8, 8))
    gptq_(model, batches(), progress=False)
    x = batches()[0]
    expected = model(x)
    torchq.save(model, tmp_path / "model.pt")
    assert torch.equal(torchq.load(net(), tmp_path / "model.pt")(x), expected)
    # Deployed layers add their products in another order.
    torch.testing.assert_close(torchq.deploy(model, x)(x), expected, rtol=0, atol=0.02)
    torchq.restore_(model)
    assert not torch.equal(model[0].weight, net()[0].weight)


def test_layers_that_are_left_alone_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 3, 2)
            self.shared = nn.Conv2d(3, 3, 1)
            self.again = nn.Conv2d(3, 3, 1)
            self.again.weight = self.shared.weight
            self.last, self.unused, self.off = (
                nn.Conv2d(3, 3, 1, bias=False) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.off(self.last(self.again(self.shared(self.up(x)))))

    model = Net()
    torchq.quantize_(model, torchq.recipes.integer(3, 4))
    torchq.calibrate(model, batches(), on_unseen="disable", progress=False)
    model.off.weight_quantizer.mode = "off"  # type: ignore[union-attr]
    report = gptq_(model, batches(), progress=False)
    assert list(report.layers) == ["last"]
    assert report.skipped == {
        "up": "QuantConvTranspose2d is no convolution or linear layer",
        "shared": "it shares its weight with another module",
        "again": "it shares its weight with another module",
        "unused": "no batch reached it",
        "off": "its weight quantizer is off",
    }


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (4, 4)], ids=str)
def test_a_layer_with_few_samples_is_no_worse_on_others(bits: tuple[int, int]) -> None:
    """What cancels errors on fewer samples than inputs by chance must not be learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 24)).eval()
    few = torch.rand(64, 96)
    others = torch.rand(1000, 96)
    expected = model(others).detach()
    torchq.quantize_(model, torchq.recipes.integer(*bits))
    torchq.calibrate(model, few.split(16), progress=False)
    before = (model(others) - expected).square().mean().item()
    report = gptq_(model, few.split(16), progress=False)
    # By chance it may be a little worse; with a fixed pull it is 1.5 to 2.6 times as large.
    assert (model(others) - expected).square().mean().item() < 1.1 * before
    assert report.layers["0"].damping == pytest.approx(96 / 64 - 0.05)


def test_few_images_of_many_pixels_are_not_many_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What foretells half of the images is learned, not what cancels errors of them by chance."""

    def images(count: int, seed: int) -> Tensor:
        """Return images in which all pixels are nearly the same."""
        generator = torch.Generator().manual_seed(seed)
        flat = torch.rand(count, 64, 1, 1, generator=generator)
        return flat + 0.2 * torch.rand(count, 64, 8, 8, generator=generator)

    def error_on_others() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 16, 1)).eval()
        others = images(200, seed=2)
        expected = model(others).detach()
        torchq.quantize_(model, torchq.recipes.integer(4, 2))
        batches = images(32, seed=1).split(16)
        torchq.calibrate(model, batches, correct=False, progress=False)
        gptq_(model, batches, progress=False)
        return (model(others) - expected).detach().square().mean().item()

    chosen = error_on_others()
    monkeypatch.setattr("torchq.ptq.gptq._PULLS", (1.0,))
    # Without a choice it was 1.6 times as large.
    assert chosen < 0.75 * error_on_others()
