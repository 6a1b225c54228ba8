"""torch's default dtype and device, which belong to the user, change no result."""

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.processes import run_code

#: Run by a process of its own, because modules keep what they make when they are imported.
SCRIPT = """
import copy, json, warnings
import torch
from torch import nn
torch.manual_seed(0)
warnings.simplefilter("ignore")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.inner, self.attention = nn.Conv2d(16, 16, 1), nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        y = nn.functional.hardswish(self.inner(y) + y)
        y = nn.functional.avg_pool2d(y, 4).flatten(2).permute(2, 0, 1)
        return self.head(y + self.attention(y, y, y)[0])

model, x = Net().eval(), torch.randn(2, 3, 8, 8)
ABOVE
import torchq

def quantized(target=None, method=None):
    # Products of weights of 8 bits overflow on CPUs without VNNI, but not in ONNX Runtime.
    config = torchq.recipes.int8(reduce_range=target != "onnxruntime")
    net = copy.deepcopy(model)
    torchq.fuse_(net, x)
    torchq.quantize_(net, config, target=target, example=x, progress=False)
    torchq.calibrate(net, [x], method=method, progress=False)
    return net

def total(net):
    with torch.no_grad():
        return float(net(x).double().sum())

found = {
    "calibrated": total(quantized()),
    "entropy": total(quantized(method="entropy")),
    "for a target": total(quantized("openvino")),
    "rounded": total(torchq.ptq.gptq_(net := quantized(), [x], progress=False) and net),
    "deployed": total(torchq.deploy(quantized(), x)),
}
if "FOLDER":
    torchq.export_onnx(net := quantized("onnxruntime"), x, "FOLDER/net.onnx")
    found["in a file"] = float(torchq.verify_onnx(net, "FOLDER/net.onnx", [x]).ok)
    found["on ONNX Runtime"] = total(torchq.deploy(net, x, target="onnxruntime"))
print(json.dumps(found))
"""


def results(setting: str, folder: Path, files: bool) -> dict[str, float]:
    """Return the results of the script behind a setting, those of files only if asked for."""
    exports = files and bool(find_spec("onnxruntime") and find_spec("onnxscript"))
    code = SCRIPT.replace("ABOVE", setting).replace(
        "FOLDER", str(folder) if exports else ""
    )
    actual: dict[str, float] = json.loads(run_code(code).splitlines()[-1])
    return actual


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[bool], dict[str, float]]:
    """What the script gives without a setting, with files or without."""

    @functools.cache
    def of_script(files: bool) -> dict[str, float]:
        return results("", tmp_path_factory.mktemp("plain"), files)

    return of_script


@pytest.mark.parametrize(
    ("setting", "files"),
    [
        ("torch.set_default_dtype(torch.float64)", False),
        ("torch.set_default_dtype(torch.bfloat16)", False),
        pytest.param(
            "torch.set_default_dtype(torch.float64)", True, marks=pytest.mark.slow
        ),
        # Whatever is made there cannot be computed with.
        pytest.param("torch.set_default_device('meta')", True, marks=pytest.mark.slow),
    ],
)
def test_defaults_change_no_result(
    setting: str,
    files: bool,
    expected: Callable[[bool], dict[str, float]],
    tmp_path: Path,
) -> None:
    assert results(setting, tmp_path, files) == expected(files)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.pools = nn.Sequential(
            nn.AvgPool2d(2),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.pools(self.conv(x) + x), self.pools(x)], 1)


#: Those that want quantizers beside the inputs of layers, which have a device of their own.
PLACING = [
    name for name in torchq.targets() if torchq.runtimes.RUNTIMES[name].placement
]


@pytest.mark.parametrize("target", PLACING)
def test_quantizers_are_on_the_device_of_the_model(target: str) -> None:
    model = nn.Sequential(Block()).eval().to("meta")
    torchq.quantize_(model, target=target)
    devices = {name: buffer.device.type for name, buffer in model.named_buffers()}
    added = [name for name in devices if "conv" not in name]
    assert added
    assert set(devices.values()) == {"meta"}


def test_ranges_keep_the_numbers_they_are_given() -> None:
    quantizer = torchq.TensorQuantizer(torchq.QuantDescriptor(amax=0.1))
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = torchq.TensorQuantizer(torchq.QuantDescriptor(amax=0.1))
        again.set_amax(0.2)
        per_channel = torchq.TensorQuantizer(torchq.QuantDescriptor(axis=0))
        per_channel.set_amax([0.1, 0.2])
    finally:
        torch.set_default_dtype(torch.float32)
    assert quantizer.amax.item() == torch.tensor(0.1).item()
    assert again.amax.item() == torch.tensor(0.2).item()
    assert per_channel.amax.flatten().tolist() == torch.tensor([0.1, 0.2]).tolist()
