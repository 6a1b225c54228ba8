"""Where the error of a quantized model is born, and which layers only pass it on."""

from torchq.analysis.layer_errors.api import layer_errors
from torchq.analysis.layer_errors.quantizer_statistics import QuantizerRow
from torchq.analysis.layer_errors.report import LayerError, LayerErrors

__all__ = ["LayerError", "LayerErrors", "QuantizerRow", "layer_errors"]
