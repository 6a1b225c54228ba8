"""Quantizers of others for benchmarks/accuracy.py: each by its default, and by its best setting.

The best setting is the one that the documents of a toolkit advise for convolutional networks whose
default loses accuracy. Each function takes a fused float model and batches to calibrate on, and
returns what computes the quantized outputs; ImportError says that a toolkit is not installed.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.deploy import nncf, onnxruntime_static

Run = Callable[[Tensor], Tensor]
PACKAGES = ("nvidia-modelopt", "brevitas", "nncf", "openvino", "onnxruntime")


def modelopt(model: nn.Module, batches: Sequence[Tensor], best: bool) -> Run:
    """Quantize with ModelOpt: INT8, by max; the best also searches weight ranges by error."""
    tool = import_module("modelopt.torch.quantization")
    config = copy.deepcopy(tool.INT8_DEFAULT_CFG)
    if best:
        config["algorithm"] = {"method": "mse"}
    run: Run = tool.quantize(model, config, lambda m: [m(x) for x in batches])
    return run


def brevitas(model: nn.Module, batches: Sequence[Tensor], best: bool) -> Run:
    """Quantize layers with Brevitas; the best equalizes them first, and corrects their biases."""
    graph = import_module("brevitas.graph.quantize")
    modes = import_module("brevitas.graph.calibrate")
    if best:
        traced = torch.fx.symbolic_trace(model)
        model = graph.preprocess_for_quantize(
            traced, equalize_iters=20, equalize_merge_bias=True
        )
    quantized: nn.Module = graph.layerwise_quantize(model)
    passes = (modes.calibration_mode, modes.bias_correction_mode)[: 1 + best]
    with torch.no_grad():
        for mode in passes:
            with mode(quantized):
                for x in batches:
                    quantized(x)
    return quantized.eval()


def _file(write: Callable[..., str], suffix: str, **options: Any) -> Callable[..., Run]:
    """Return the quantizer of a runtime's maker, which goes through files."""

    def quantize(model: nn.Module, batches: Sequence[Tensor]) -> Run:
        images = torch.cat(list(batches)).split(1)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "float.onnx")
            path = Path(folder, f"peer{suffix}")
            torch.onnx.export(
                model,
                (images[0],),
                str(source),
                dynamo=False,
                opset_version=20,
                input_names=["x"],
                dynamic_axes={"x": {0: "n"}},
            )
            # Both makers advise to say what is a transformer.
            has_norms = any(isinstance(m, nn.LayerNorm) for m in model.modules())
            write(source, path, images, has_norms, **options)
            return _onnxruntime(path) if suffix == ".onnx" else _openvino(path)

    return quantize


def _onnxruntime(path: Path) -> Run:
    """Run a file as it says: integer kernels of CPUs without VNNI saturate where it does not."""
    tool = import_module("onnxruntime")
    options = tool.SessionOptions()
    options.graph_optimization_level = tool.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = tool.InferenceSession(path.read_bytes(), options)
    return lambda x: torch.as_tensor(session.run(None, {"x": x.numpy()})[0])


def _openvino(path: Path) -> Run:
    # By itself it computes in bfloat16 on CPUs that can.
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    model = import_module("openvino").Core().compile_model(str(path), "CPU", settings)
    return lambda x: torch.as_tensor(model([x.numpy()])[0]).clone()


_NNCF: dict[str, Any] = {"preset": "mixed", "fast_bias_correction": False}
PEERS: dict[str, Callable[[nn.Module, Sequence[Tensor]], Run]] = {
    "ModelOpt": partial(modelopt, best=False),
    "ModelOpt, mse": partial(modelopt, best=True),
    "Brevitas": partial(brevitas, best=False),
    "Brevitas, equalized, biases corrected": partial(brevitas, best=True),
    "NNCF": _file(nncf, ".xml"),
    "NNCF, mixed, exact bias correction": _file(nncf, ".xml", **_NNCF),
    "quantize_static": _file(onnxruntime_static, ".onnx", default=True),
    "quantize_static, uint8, per channel": _file(onnxruntime_static, ".onnx"),
}
