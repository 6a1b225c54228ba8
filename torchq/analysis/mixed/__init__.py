"""Formats layer by layer, under a budget."""

from torchq.analysis.mixed.api import mixed_precision
from torchq.analysis.mixed.plan import FrontPoint, LayerChoice, MixedPrecision

__all__ = ["FrontPoint", "LayerChoice", "MixedPrecision", "mixed_precision"]
