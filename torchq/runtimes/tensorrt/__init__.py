"""NVIDIA TensorRT 10 and 11: where pairs stand, strongly typed files, and a check of these.

``rules`` has the placement rules, ``typed`` gives a file one float type, with what ``recorded``
saw of the ranges of tensors, and ``check`` proves the properties of a written file.
"""

from torchq.runtimes.tensorrt.check import FileCheck, check_file
from torchq.runtimes.tensorrt.runtime import TensorRt

__all__ = ["FileCheck", "TensorRt", "check_file"]
