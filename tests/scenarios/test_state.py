"""Scenarios of checkpoints, copies and averages."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches, simulated
from tests.processes import run_code
from torchq import QuantConfig
from torchq.workflow import quantizers


def calibrated(config: QuantConfig | None = None) -> ConvNet:
    return simulated(ConvNet().eval(), image_batches(), config)


def fresh() -> ConvNet:
    model = ConvNet().eval()
    torchq.quantize_(model)
    return model


@pytest.mark.parametrize("stage", ["uncalibrated", "calibrated", "trained"])
def test_s18_deepcopy_pickle_and_another_process(stage: str, tmp_path: Path) -> None:
    model = fresh() if stage == "uncalibrated" else calibrated()
    x = image_batches()[0]
    if stage == "trained":
        model(x).sum().backward()
    expected = model(x).detach()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    torch.save(
        {"model": model, "x": x, "y": expected},
        tmp_path / "m.pt",
    )
    code = f"import torch; d = torch.load({str(tmp_path / 'm.pt')!r}, weights_only=False); "
    code += "print(torch.equal(d['model'](d['x']), d['y']))"
    assert run_code(code) == "True\n"


def test_s19_exponential_moving_average() -> None:
    """Average weights as ultralytics does, over 20 steps of QAT.

    Fixed ranges stay; the average is quantized and near the model.
    """
    model = calibrated().train()
    x = image_batches()[0]
    average = copy.deepcopy(model).eval()
    for p in average.parameters():
        p.requires_grad_(False)
    before = {n: q.amax.clone() for n, q in quantizers(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        state = model.state_dict()
        for key, value in average.state_dict().items():
            if value.dtype.is_floating_point:
                value *= 0.9
                value += 0.1 * state[key].detach()
    assert list(average.state_dict()) == list(model.state_dict())
    for name, q in quantizers(average).items():
        torch.testing.assert_close(
            q.amax, before[name]
        )  # 0.9 a + 0.1 a is a up to float32 rounding
        assert torch.equal(
            quantizers(model)[name].amax,
            before[name],
        )
    y = average(x)
    reference = model.eval()(x)
    assert (y - reference).norm() < 0.2 * reference.norm()  # behind by about ten steps
    with torchq.disabled(average):
        assert not torch.equal(average(x), y)


def test_s21_checkpoint_of_the_ancestor() -> None:
    model = calibrated()
    x = image_batches()[0]
    names = {
        "input_quantizer.amax": "_input_quantizer._amax",
        "weight_quantizer.amax": "_weight_quantizer._amax",
    }
    state = {}
    for key, value in model.state_dict().items():
        old = next(
            (
                key.removesuffix(new) + old
                for new, old in names.items()
                if key.endswith(new)
            ),
            key,
        )
        state[old] = value
    assert "stem.0._input_quantizer._amax" in state
    twin = fresh()
    twin.load_state_dict(state, strict=True)
    assert torch.equal(twin(x), model(x))
    # The caller's dictionary is not touched.
    assert "stem.0._input_quantizer._amax" in state


def test_s22_gpu(device: torch.device) -> None:
    """Built, calibrated and loaded wherever the model is: never a tensor on another device."""
    model = fresh().to(device)
    torchq.calibrate(model, image_batches(), progress=False)
    twin = fresh().to(device)
    twin.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    x = image_batches()[0].to(device)
    assert twin(x).device.type == device.type
    assert all(q.amax.device.type == device.type for q in quantizers(twin).values())
    assert isinstance(nn.Sequential(twin).to(device)(x), Tensor)


def test_no_class_has_the_name_of_a_quantizer_of_modelopt() -> None:
    """Ultralytics' trainer asks every class called TensorQuantizer for its state."""
    model = calibrated()
    assert not [m for m in model.modules() if type(m).__name__ == "TensorQuantizer"]
    assert "TensorQuantizer(int8" in repr(model)
    assert (
        type(quantizers(pickle.loads(pickle.dumps(model))).popitem()[1])
        is torchq.TensorQuantizer
    )
    assert torchq.workflow.select_quantizers(model, "type:TensorQuantizer")
