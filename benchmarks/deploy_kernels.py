"""Which kernels ONNX Runtime and OpenVINO execute for a file of torchq and for the maker's own.

The files are those of benchmarks/deploy_onnx.py. Where both run the same kernels equally often,
what remains between their times is noise. Each line has the number of every kernel that one file
executes, and ``only`` lists what the other file does not execute as often.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.deploy_onnx import (
    MODELS,
    TARGETS,
    TRANSFORMERS,
    build,
    export_float,
    export_quantized,
    quantized_for,
)
from benchmarks.harness import Reporter, parse, parser
from benchmarks.vendors import VENDORS

__all__ = ["main"]


def onnxruntime_kernels(path: Path, x: Tensor) -> Counter[str]:
    """Count the operators of the graph that ONNX Runtime executes, by its profiler."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(".profile"))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {session.get_inputs()[0].name: x.numpy()})
    events = json.loads(Path(session.end_profiling()).read_text())
    return Counter(
        event["args"]["op_name"] for event in events if event["name"].endswith("_kernel_time")
    )


def openvino_kernels(path: Path, x: Tensor) -> Counter[str]:
    """Count the kernels that OpenVINO executes, by its counters."""
    import openvino

    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": "YES"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    request.infer([x.numpy()])
    return Counter(
        f"{entry.node_type} {entry.exec_type}"
        for entry in request.get_profiling_info()
        if entry.status.name == "EXECUTED"
    )


KERNELS = {"onnxruntime": onnxruntime_kernels, "openvino": openvino_kernels}


def kernels(report: Reporter, name: str, target: str) -> None:
    """Report the kernels of both files of one model in one runtime."""
    try:
        model, x = build(name)
        with tempfile.TemporaryDirectory() as folder:
            plain, own = Path(folder, "float.onnx"), Path(folder, "own.onnx")
            export_float(model, x, plain)
            export_quantized(quantized_for(target, model, x), x, own, target)
            quantize, suffix = VENDORS[target]
            peer = Path(folder, "peer").with_suffix(suffix)
            maker = quantize(plain, peer, [x, torch.randn_like(x)], name in TRANSFORMERS)
            found = {"int8": KERNELS[target](own, x), maker: KERNELS[target](peer, x)}
    except ImportError as error:
        report.value(model=name, runtime=target, skipped=str(error))
        return
    for (candidate, counts), other in zip(
        found.items(), reversed(list(found.values())), strict=True
    ):
        case = {"model": name, "runtime": target, "candidate": candidate}
        report.value(**case, kernels=dict(counts), only=dict(counts - other))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _options(argv)
    with Reporter(
        "deploy_kernels", options.out, ["onnx", "onnxruntime", "openvino", "nncf"]
    ) as report:
        for name in options.models:
            for target in options.runtimes:
                kernels(report, name, target)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    arguments.add_argument("--runtimes", nargs="*", default=list(TARGETS), choices=TARGETS)
    return parse(arguments, argv)


if __name__ == "__main__":
    main()
