"""Ranges of activations, and factors of channels, learned for the output of the float model."""

from torchq.ptq.learned_ranges.api import LearnedRangesReport, learn_ranges_

__all__ = ["LearnedRangesReport", "learn_ranges_"]
