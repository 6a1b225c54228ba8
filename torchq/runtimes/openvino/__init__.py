"""Intel OpenVINO: integer kernels on x86 and Arm CPUs.

``runtime`` says where quantizers stand and runs files, ``planning`` has the planning passes for
it, ``passes`` those of files. Sources: measurements with version 2026.4.
"""

from torchq.runtimes.openvino.runtime import OpenVino

__all__ = ["OpenVino"]
