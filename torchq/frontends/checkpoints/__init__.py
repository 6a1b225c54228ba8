"""Models that other libraries have quantized, read as torchq's quantizers: a file for each maker.

No package of a maker is imported: its modules are known by the names of their classes.
"""

from torchq.frontends.checkpoints.adopt import MAKERS, Maker, adopt_

__all__ = ["MAKERS", "Maker", "adopt_"]
