"""The names that arguments take, for help that loads no torch.

The registries of torchq decide; tests/cli/test_without_torch.py compares them with these.
"""

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
#: The order of torchq.targets().
TARGETS = (
    "ascend",
    "executorch",
    "fpga",
    "mnn",
    "ncnn",
    "nxp",
    "onnxruntime",
    "openvino",
    "qnn",
    "rknn",
    "snpe",
    "tensorrt",
    "torch",
)
#: The runtime that runs each file here, whatever it is for: runtime.reference_runtime().
READER = "onnxruntime"
