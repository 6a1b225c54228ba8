"""Intel OpenVINO. Sources: measurements with version 2026.4."""

from __future__ import annotations

from torchq.onnx.targets.activations import ActivationTypes
from torchq.onnx.targets.base import AVG_POOLS, MAX_POOLS, OnnxTarget
from torchq.onnx.targets.checks import check_fused_norms, check_one_range_per_tensor

__all__ = ["OPENVINO"]

OPENVINO = OnnxTarget(
    name="openvino",
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention"]),
    modules=(MAX_POOLS, AVG_POOLS),
    # The kernels of CPUs without AMX multiply uint8 by int8.
    activation_types=ActivationTypes(nonnegative="unsigned", others="signed"),
    checks=(check_one_range_per_tensor, check_fused_norms),
    limits=(
        "OpenVINO computes the float parts in bfloat16 on CPUs that have it; "
        'set INFERENCE_PRECISION_HINT="f32" to compare with float32.',
    ),
)
