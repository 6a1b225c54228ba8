"""A YOLO-NAS of super-gradients, quantized by its own quantizer, in a file for OpenVINO.

tests/roads/test_super_gradients.py runs it by ``python -m torchq.compat``. It prints one JSON line.
"""

import json
import sys

import torch
from super_gradients.training import models
from super_gradients.training.utils.quantization import (
    QuantizationCalibrator,
    SelectiveQuantizer,
)
from torch import Tensor, nn

import torchq


class Boxes(nn.Module):
    """The first tensor of what a detector returns, since a traced one returns less."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        result = self.net(images)
        while not isinstance(result, Tensor):
            result = result[0]
        return result


def main(path: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = models.get("yolo_nas_s", num_classes=3)
    images = torch.rand(2, 3, 64, 64)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        net.train()(images)  # Its norms get statistics, in place of trained weights.
    net.prep_model_for_conversion(input_size=list(images.shape))
    torchq.fuse_(net.eval(), images, progress=False)
    quantizer = SelectiveQuantizer(
        default_quant_modules_calibrator_inputs="max", verbose=False
    )
    quantizer.register_skip_quantization(layer_names={"heads"})
    quantizer.quantize_module(net)
    QuantizationCalibrator(verbose=False).calibrate_model(
        net, calib_data_loader=[images], method="max", num_calib_batches=1
    )
    model = Boxes(net.eval())
    written = torchq.export_onnx(
        model, images, path, target="openvino", dynamo=False, progress=False
    )
    coverage = written.coverage
    assert coverage is not None
    report = {
        "share": coverage.share,
        "layers": coverage.layers,
        "float": [*coverage.float_weights, *coverage.float_inputs],
        "norms": coverage.before_norms,
        "verified": torchq.verify_onnx(model, path, [images], progress=False).ok,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
