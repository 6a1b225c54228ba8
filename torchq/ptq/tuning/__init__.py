"""The search for settings that keep a metric: :func:`torchq.tune`."""

from torchq.ptq.tuning.api import TuneResult, TuneTrial, tune
from torchq.ptq.tuning.settings import TunedConfig

__all__ = ["TuneResult", "TuneTrial", "TunedConfig", "tune"]
