"""Learned rounding: AdaRound layer by layer, BRECQ block by block."""

from torchq.ptq.adaround.api import AdaRoundBlock, AdaRoundReport, adaround_

__all__ = ["AdaRoundBlock", "AdaRoundReport", "adaround_"]
