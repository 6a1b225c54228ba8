"""The names that arguments take, for help that loads no torch.

The registries of torchq decide; tests/cli/test_without_torch.py compares them with these.
"""

from pathlib import Path

#: The order of recipes.RECIPES.
RECIPES = (
    "int8",
    "int8_dynamic",
    "int8_per_tensor",
    "w4a4",
    "w8a16",
    "fp8",
    "mxfp8",
    "nvfp4",
)
#: The order of calib.methods().
METHODS = ("max", "moving_average", "histogram", "percentile", "mse", "entropy")
#: The names of runtimes; only their package knows them, and importing it would load torch.
_RUNTIMES = Path(__file__).parents[1].joinpath("runtimes", "names.txt")
_NAMES = _RUNTIMES.read_text(encoding="utf-8").split()
#: The order of torchq.targets().
TARGETS = tuple(sorted(_NAMES))
#: The runtime that runs each file here, whatever it is for: runtime.reference_runtime().
READER = _NAMES[0]
