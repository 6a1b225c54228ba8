"""The runtime object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from torchq.errors import ConfigError
from torchq.formats import SCALE_TYPES
from torchq.onnx.ir import Model
from torchq.onnx.qdq import read_record
from torchq.runtime import Codes, FileRules, Placement, PlanPass
from torchq.runtimes.checks import (
    AVG_POOLS,
    LAYERS,
    check_one_range_per_tensor,
    check_unfolded_norms,
)
from torchq.runtimes.engine import Task
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.onnxruntime import SessionEngine
from torchq.runtimes.tensorrt.check import NOT_RUN, check_typing
from torchq.runtimes.tensorrt.rules import (
    check_activation_types,
    check_channels,
    check_concatenations,
    check_residual_adds,
    check_transposed_axis,
)
from torchq.runtimes.tensorrt.typed import store_typed
from torchq.swap.layers import one_weight_scale, open_branches


def check_own_scales(model: Model) -> Iterator[str]:
    """Yield quantizers whose scales the file has rounded, as the model was planned without."""
    record = read_record(model)
    rounded = record.get("rounded")
    if rounded:
        yield (
            f"{', '.join(rounded)}: has scales that are no {record['precision']} numbers, so the "
            "file has other ones than the model; quantize_ with target='tensorrt' rounds them "
            "before calibration"
        )


def notes(model: Model, path: Path) -> Iterator[str]:
    """Yield what stays in float32, how to build an engine, and what was not run."""
    record = read_record(model)
    if "precision" in record:
        reasons = record["kept"]
        yield (
            f"strongly typed, {record['precision']}: {len(reasons)} nodes kept in float32"
            f"{':' if reasons else ''}"
        )
        yield from (f"  {name}: {why}" for name, why in [*reasons.items()][:_SHOWN])
        if len(reasons) > _SHOWN:
            hidden = len(reasons) - _SHOWN
            yield f"  and {hidden} more: torchq.runtimes.tensorrt.check_file(path).kept"
        if record["unrecorded"]:
            yield record["unrecorded"]
    yield f"TensorRT 10: trtexec --onnx={path} --saveEngine={path.stem}.engine --stronglyTyped"
    yield "TensorRT 11: the same without --stronglyTyped"
    yield NOT_RUN


_SHOWN = 12
_PLACEMENT = Placement(
    # TensorRT adds in int32 to the result of a convolution, before that is rounded. It moves
    # quantizers through max pooling by itself. Its fused attention wants the scaled query, as
    # torchq.nn.QuantScaledDotProductAttention quantizes it (TensorRT documents, "Fused Attention").
    operators=frozenset(["add", "cat", "matmul", "attention"]),
    modules=(AVG_POOLS,),
)
_CODES = Codes(unsigned=False, zero_points=False, scales="float16")
_FILE = FileRules(
    float_types=(torch.float32, torch.float16, torch.bfloat16),
    passes=(store_typed,),
    checks=(
        # NVIDIA, Developer Guide, explicit quantization: such norms are fused in the engine.
        partial(
            check_unfolded_norms,
            "left for TensorRT to fuse, which was not run here",
            LAYERS,
        ),
        check_activation_types,
        check_transposed_axis,
        check_channels,
        check_residual_adds,
        check_concatenations,
        check_one_range_per_tensor,
        check_own_scales,
        check_typing,
    ),
    notes=notes,
)
_PRECISIONS = (*SCALE_TYPES, "float32")


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorRt(SessionEngine):
    """TensorRT 10 and 11, which build an engine from the file.

    ``deploy`` runs a float32 file through the provider of onnxruntime-gpu, whatever the precision:
    results are compared with those of the simulation.

    Attributes:
        quantized: see :class:`torchq.runtimes.Engine`.
        precision: the type of what is not quantized, and of scales: ``"float16"``,
            ``"bfloat16"`` or ``"float32"``. Give ``quantize_`` and ``export_onnx`` the same, since
            models are planned with scales of this type.
        typed_io: inputs and outputs have this type too. False: they are float32.

    Example:
        >>> TensorRt(precision="bfloat16").codes.scales
        'bfloat16'
    """

    measured: ClassVar[bool] = False  # it is for GPUs, and takes minutes to open a file
    name: str = "tensorrt"
    placement: Placement | None = _PLACEMENT
    adapting: tuple[PlanPass, ...] = (
        partial(one_weight_scale, ("torch.nn.modules.conv.ConvTranspose[123]d",)),
        open_branches,
    )
    # NVIDIA, Developer Guide, explicit quantization: such norms are fused in the engine.
    float_before_norms: frozenset[str] = frozenset()
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "FP8 convolutions were reported missing for some shapes (issues 3987 and 4560).",
        NOT_RUN,
    )
    versions: str = "documents of 10 and 11"
    proved: str = "structure alone"
    timer: str = (
        "trtexec --onnx={file}"  # of TensorRT 11; 10 also wants --stronglyTyped
    )
    precision: str = "float16"
    typed_io: bool = False

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise ConfigError(
                f"TensorRt: got precision {self.precision!r}; expected one of "
                f"{', '.join(map(repr, _PRECISIONS))}"
            )
        if self.codes is not None:
            scales = self.precision if self.precision in SCALE_TYPES else None
            object.__setattr__(self, "codes", replace(self.codes, scales=scales))

    @property
    def execution_provider(self) -> str:
        """See :attr:`SessionEngine.execution_provider`."""
        return "TensorrtExecutionProvider"

    def build(self, task: Task) -> EngineModule:
        """See :meth:`torchq.runtimes.Engine.build`."""
        runtime = (
            self if self.precision == "float32" else replace(self, precision="float32")
        )
        return super(TensorRt, runtime).build(task)
