"""ExecuTorch: programs in the form of PT2E, ``.pte`` files, and the runtime.

``form.py`` has the rules of what XNNPACK delegates, ``program.py`` traces a model into that form,
``lower.py`` makes a file of it, and ``runtime.py`` says where quantizers stand and runs files.
"""

from torchq.runtimes.executorch.lower import PteReport, export_pte
from torchq.runtimes.executorch.program import to_exported_program

__all__ = ["PteReport", "export_pte", "to_exported_program"]
