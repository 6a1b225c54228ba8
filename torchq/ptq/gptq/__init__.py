"""GPTQ for convolutions and linear layers, in the published form and as least squares."""

from torchq.ptq.gptq.api import GPTQReport, gptq_
from torchq.ptq.gptq.layer import GPTQLayer

__all__ = ["GPTQLayer", "GPTQReport", "gptq_"]
