"""What running a graph through GraphRunner costs beside torch.fx's own Interpreter.

The network is deep and its tensors are small, so that the time of the runner itself is seen. Both
run the same graph on the same input in every round; their results are compared bit for bit first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.graph import GraphRunner

BLOCKS, CHANNELS, SIZE = 40, 4, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu() + x


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser(__doc__), argv)
    graph = fx.symbolic_trace(nn.Sequential(*(Block() for _ in range(BLOCKS))).eval())
    x = torch.randn(1, CHANNELS, SIZE, SIZE)
    interpreter = fx.Interpreter(graph)
    runner = GraphRunner(graph)
    with torch.no_grad(), Reporter("graph_runner", options.out) as report:
        if not torch.equal(interpreter.run(x), runner.run(x)):
            raise AssertionError("the two runners compute different results")
        candidates = {
            "fx.Interpreter": lambda: interpreter.run(x),
            "GraphRunner": lambda: runner.run(x),
        }
        for row in compare(candidates, baseline="fx.Interpreter", **timing(options)):
            report.timing(row, nodes=len(graph.graph.nodes))


if __name__ == "__main__":
    main()
