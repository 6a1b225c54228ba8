"""One way to quantize a model: a config, a calibration method and algorithms, as a value."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.calib import methods
from torchq.config import QuantConfig
from torchq.errors import ConfigError
from torchq.ptq.adaround import adaround_
from torchq.ptq.bias_correction import correct_bias_
from torchq.ptq.equalization import equalize_
from torchq.ptq.gptq import gptq_
from torchq.ptq.smoothing import smooth_
from torchq.swap import quantize_
from torchq.utils import check_fields, parse_json, short_repr
from torchq.workflow import calibrate

__all__ = ["ALGORITHMS", "PREPARATIONS", "TunedConfig"]


def _equalized(model: nn.Module, batches: Sequence[Any], **progress: bool) -> Any:
    return equalize_(model, batches[0])


#: Algorithms before calibration, by name, in the order in which they run.
PREPARATIONS: Mapping[str, Any] = {
    "equalization": _equalized,
    "smoothing": smooth_,
}

#: Algorithms after calibration, by name.
ALGORITHMS: Mapping[str, Any] = {
    "bias correction": correct_bias_,
    "gptq": gptq_,
    "adaround": adaround_,
}


@dataclass(frozen=True)
class TunedConfig:
    """How a model is quantized, from a float model to the result.

    Args:
        config: the rules of :func:`torchq.quantize_`.
        method: the calibration method of activations; None takes that of each descriptor.
        before: names in :data:`PREPARATIONS`: what runs before calibration.
        algorithm: a name in :data:`ALGORITHMS`, or None: what runs after calibration.

    Example:
        >>> settings = TunedConfig(torchq.recipes.int8(), algorithm="gptq")
        >>> TunedConfig.from_json(settings.to_json()) == settings
        True
    """

    config: QuantConfig
    _: dataclasses.KW_ONLY
    method: str | None = None
    before: tuple[str, ...] = ()
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"TunedConfig: got algorithm={short_repr(self.algorithm)}; expected None or one "
                f"of {', '.join(ALGORITHMS)}"
            )
        if self.method is not None and self.method not in methods():
            raise ConfigError(
                f"TunedConfig: got method={short_repr(self.method)}; expected None or one of "
                f"{', '.join(methods())}"
            )
        for name in self.before:
            if name not in PREPARATIONS:
                raise ConfigError(
                    f"TunedConfig: got before={short_repr(self.before)}; expected names among "
                    f"{', '.join(PREPARATIONS)}"
                )

    def apply_(self, model: nn.Module, batches: Sequence[Any], *, progress: bool = False) -> None:
        """Quantize ``model`` in place; inputs of layers that no batch reaches stay float, as said.

        Args:
            model: a float model, fused.
            batches: for calibration and the algorithm; see :func:`torchq.graph.call_arguments`.
            progress: show bars.

        Raises:
            TorchqError: what the functions raise.
        """
        quantize_(model, self.config, progress=progress)
        for name, function in PREPARATIONS.items():
            if name in self.before:
                function(model, batches, progress=progress)
        report = calibrate(
            model, batches, method=self.method, on_unseen="disable", progress=progress
        )
        if report.unseen:
            warnings.warn(
                f"no batch reached {', '.join(report.unseen)}: these inputs stay float",
                stacklevel=2,
            )
        if self.algorithm is not None:
            ALGORITHMS[self.algorithm](model, batches, progress=progress)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the settings as JSON text."""
        data = {
            "config": self.config.to_dict(),
            "method": self.method,
            "before": list(self.before),
            "algorithm": self.algorithm,
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> TunedConfig:
        """Return the settings that :meth:`to_json` was called on.

        Raises:
            ConfigError: not such a text.
        """
        known = ["config", "method", "before", "algorithm"]
        data = dict(
            check_fields(
                parse_json(text, "TunedConfig"), "TunedConfig", known=known, required=known
            )
        )
        before = data.pop("before")
        if not isinstance(before, list) or not all(isinstance(name, str) for name in before):
            got = short_repr(before)
            raise ConfigError(f"TunedConfig: got before={got}; expected a list of names")
        return cls(QuantConfig.from_dict(data.pop("config")), before=tuple(before), **data)

    def __str__(self) -> str:
        parts = [self.config.name]
        parts += [f"calibration {self.method}"] if self.method else []
        parts += self.before
        parts += [self.algorithm] if self.algorithm else []
        return ", ".join(parts)
