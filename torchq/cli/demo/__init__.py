"""``torchq demo``: the way from a trained network to INT8 on real images, in about a minute."""

from torchq.cli.demo.data import NETWORKS
from torchq.cli.demo.steps import run_demo

__all__ = ["NETWORKS", "run_demo"]
