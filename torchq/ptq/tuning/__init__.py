"""The search for settings that keep a metric: :func:`torchq.tune`."""

from torchq.ptq.tuning.api import TuneResult, tune
from torchq.ptq.tuning.settings import TunedConfig
from torchq.ptq.tuning.trial import TuneTrial

__all__ = ["TuneResult", "TuneTrial", "TunedConfig", "tune"]
