"""Running a traced model: any value of it, parts of it, with hooks at its nodes."""

from torchq.graph.runner.api import GraphRunner
from torchq.graph.runner.meta import NodeMeta

__all__ = ["GraphRunner", "NodeMeta"]
