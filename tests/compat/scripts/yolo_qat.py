"""Quantize a detector-like net in the manner of the published YOLO scripts.

The model is not rebuilt; each layer is swapped by hand. The script has a regex skip list, patched
forwards with a shared quantizer, per-layer sensitivity, feature distillation and an export. It
prints one JSON line.
"""

import argparse
import json
import re
from copy import deepcopy

import torch
import torch.nn.functional as F
from absl import logging as quant_logging
from pytorch_quantization import calib, quant_modules
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.nn.modules import _utils as quant_nn_utils
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import nn


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1) -> None:
        super().__init__()
        self.conv, self.bn, self.act = (
            nn.Conv2d(c1, c2, k, s, k // 2, bias=False),
            nn.BatchNorm2d(c2),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 1), Conv(c, c, 3), True

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C3(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.cv3, self.m = (
            Conv(c, c // 2),
            Conv(c, c // 2),
            Conv(c, c),
            Bottleneck(c // 2),
        )

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPP(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv, self.m = Conv(c, c), nn.MaxPool2d(kernel_size=3, stride=1, padding=1)

    def forward(self, x):
        return self.cv(x) + self.m(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Conv(3, 8, 3, 2), C3(8), SPP(8), Conv(8, 8, 3, 2), nn.Upsample(scale_factor=2)
        )
        self.head = nn.Conv2d(8, 6, 1)

    def forward(self, x):
        return self.head(self.model(x))


class QuantAdd(nn.Module):
    """Both inputs through one quantizer, so that the sum needs no requantization."""

    def __init__(self, quantization: bool = True) -> None:
        super().__init__()
        if quantization:
            self._input_quantizer = quant_nn.TensorQuantizer(
                QuantDescriptor(num_bits=8, calib_method="histogram")
            )
            self._input_quantizer._calibrator._torch_hist = True
            self._fake_quant = True
        self.quantization = quantization

    def forward(self, x, y):
        return self._input_quantizer(x) + self._input_quantizer(y) if self.quantization else x + y


class disable_quantization:
    def __init__(self, model) -> None:
        self.model = model

    def apply(self, disabled: bool = True) -> None:
        for _, module in self.model.named_modules():
            if isinstance(module, quant_nn.TensorQuantizer):
                module._disabled = disabled

    def __enter__(self) -> None:
        self.apply(True)

    def __exit__(self, *args) -> None:
        self.apply(False)


def initialize() -> None:
    desc = QuantDescriptor(calib_method="histogram")
    for cls in (quant_nn.QuantConv2d, quant_nn.QuantMaxPool2d, quant_nn.QuantLinear):
        cls.set_default_quant_desc_input(desc)
    quant_logging.set_verbosity(quant_logging.ERROR)


def transfer_torch_to_quantization(instance: nn.Module, quant_class):
    quant_instance = quant_class.__new__(quant_class)
    for k, val in vars(instance).items():
        setattr(quant_instance, k, val)

    def __init__(self) -> None:
        if isinstance(self, quant_nn_utils.QuantInputMixin):
            self.init_quantizer(
                quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__, input_only=True)
            )
        else:
            self.init_quantizer(*quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__))
            if isinstance(self._weight_quantizer._calibrator, calib.HistogramCalibrator):
                self._weight_quantizer._calibrator._torch_hist = True
        if isinstance(self._input_quantizer._calibrator, calib.HistogramCalibrator):
            self._input_quantizer._calibrator._torch_hist = True

    __init__(quant_instance)
    return quant_instance


def replace_to_quantization_module(model: nn.Module, ignore) -> list:
    module_dict = {
        id(getattr(e.orig_mod, e.mod_name)): e.replace_mod for e in quant_modules._DEFAULT_QUANT_MAP
    }
    module_dict[id(nn.MaxPool2d)] = quant_nn.QuantMaxPool2d
    ignored = []

    def recurse(module, prefix: str = "") -> None:
        for name in list(module._modules):
            child = module._modules[name]
            path = name if prefix == "" else prefix + "." + name
            recurse(child, path)
            if id(type(child)) in module_dict:
                if any(re.match(pattern, path) for pattern in ignore):
                    ignored.append(path)
                    continue
                module._modules[name] = transfer_torch_to_quantization(
                    child, module_dict[id(type(child))]
                )

    recurse(model)
    return ignored


def bottleneck_quant_forward(self, x):
    return (
        self.addop(x, self.cv2(self.cv1(x)))
        if hasattr(self, "addop")
        else x + self.cv2(self.cv1(x))
    )


def replace_custom_module_forward(model) -> None:
    Bottleneck.forward = bottleneck_quant_forward
    for _, bottleneck in model.named_modules():
        if isinstance(bottleneck, Bottleneck) and bottleneck.add:
            bottleneck.addop = QuantAdd(bottleneck.add)
    for _, c3 in model.named_modules():  # the two inputs of a concatenation share a range, too
        if isinstance(c3, C3):
            c3.cv2.conv._input_quantizer = c3.cv1.conv._input_quantizer


def batches(n: int):
    generator = torch.Generator().manual_seed(2)
    for _ in range(n):
        yield torch.rand(4, 3, 16, 16, generator=generator)


def collect_stats(model) -> None:
    model.eval()
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.disable_quant()
                module.enable_calib()
            else:
                module.disable()
    with torch.no_grad():
        for image in batches(3):
            model(image)
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.enable_quant()
                module.disable_calib()
            else:
                module.enable()


def compute_amax(model, device: str = "cpu", **kwargs) -> None:
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer) and module._calibrator is not None:
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax(strict=False)
            else:
                module.load_calib_amax(strict=False, **kwargs)
            module._amax = module._amax.to(device)


def have_quantizer(module) -> bool:
    return any(isinstance(child, quant_nn.TensorQuantizer) for _, child in module.named_modules())


def distance(model, origin) -> float:
    with torch.no_grad():
        return sum(F.mse_loss(model(x), origin(x)).item() for x in batches(2))


def finetune(model, origin) -> list:
    """Train the quantized model to reproduce the features of the float one, layer by layer."""
    pairs, losses = [], []
    handles = []
    # As published, the shorter list ends the loop.
    for (_, ml), (_, ori) in zip(model.named_modules(), origin.named_modules()):  # noqa: B905
        if isinstance(ml, C3) and isinstance(ori, C3):
            for module in (ml, ori):
                pairs.append([])
                handles.append(
                    module.register_forward_hook(lambda m, i, o, store=pairs[-1]: store.append(o))
                )
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    for image in batches(6):
        for store in pairs:
            store.clear()
        out, wanted = model(image), origin(image)
        loss = F.mse_loss(out, wanted.detach())
        for ml, ori in zip(pairs[0::2], pairs[1::2]):  # noqa: B905
            loss = loss + F.mse_loss(ml[0], ori[0].detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    return losses


def sensitivity_analysis(model, origin) -> dict:
    """The distance with one block quantized at a time."""
    found = {}
    disable_quantization(model).apply(True)
    for i in range(len(model.model)):
        if have_quantizer(model.model[i]):
            disable_quantization(model.model[i]).apply(False)
            found[str(i)] = distance(model, origin)
            disable_quantization(model.model[i]).apply(True)
    disable_quantization(model).apply(False)
    return found


def export(model, path: str) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    names = {
        "input_names": ["images"],
        "output_names": ["out"],
        "dynamic_axes": {"images": {0: "batch"}, "out": {0: "batch"}},
    }
    with torch.no_grad():
        torch.onnx.export(
            model, torch.zeros(1, 3, 16, 16), path, opset_version=13, dynamo=False, **names
        )
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--onnx", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch.set_num_threads(1)
    initialize()
    model = Model()
    for image in batches(30):  # stands for the pretrained weights: gives BatchNorm its statistics
        model(image)
    model.eval()
    origin = deepcopy(model)
    ignored = replace_to_quantization_module(model, [r"head", r"model\.0\..*"])
    replace_custom_module_forward(model)
    collect_stats(model)
    compute_amax(model, method="mse")
    report = {"ignored": ignored, "distance": distance(model, origin)}
    with disable_quantization(model):
        report["off"] = distance(model, origin)
    report["sensitivity"] = sensitivity_analysis(model, origin)
    report["losses"] = finetune(model, origin)
    model.eval()
    torch.save({"model": model}, args.out + "/qat.pt")
    report["half"] = str(deepcopy(model).half().model[1].cv1.conv._input_quantizer._amax.dtype)
    if args.onnx:
        export(model, args.out + "/qat.onnx")
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
