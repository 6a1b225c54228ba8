"""Post-training algorithms that win back accuracy without training.

Each function works in place on a quantized model and returns a report that names what it treated
and what it could not. May import workflow and below.
"""

from torchq.ptq.adaround import AdaRoundBlock, AdaRoundReport, adaround_
from torchq.ptq.bias_correction import correct_bias_
from torchq.ptq.gptq import GPTQLayer, GPTQReport, gptq_
from torchq.ptq.smoothing import SmoothedGroup, SmoothReport, smooth_
from torchq.ptq.tuning import TunedConfig, TuneResult, TuneTrial, tune
from torchq.workflow.equalization import (
    EqualizedPair,
    EqualizeReport,
    equalize_,
    equalize_depthwise_,
)

__all__ = [
    "AdaRoundBlock",
    "AdaRoundReport",
    "EqualizeReport",
    "EqualizedPair",
    "GPTQLayer",
    "GPTQReport",
    "SmoothReport",
    "SmoothedGroup",
    "TuneResult",
    "TuneTrial",
    "TunedConfig",
    "adaround_",
    "correct_bias_",
    "equalize_",
    "equalize_depthwise_",
    "gptq_",
    "smooth_",
    "tune",
]
