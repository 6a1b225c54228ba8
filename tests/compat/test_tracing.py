"""Legacy quantizers under torch.compile and torch.fx."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchq.compat.pytorch_quantization.nn import TensorQuantizer
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# torch 2.9's tracer warns about what it does itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("num_bits", [8, (4, 3)], ids=str)
def test_compiles_as_one_graph(num_bits: Any) -> None:
    torch._dynamo.reset()
    quantizer = TensorQuantizer(QuantDescriptor(num_bits, amax=1.0))
    x = draw(20).requires_grad_()
    found = torch.compile(quantizer, fullgraph=True, backend="aot_eager")(x)
    assert found.equal(quantizer(x))
    found.sum().backward()
    assert x.grad.equal((x.abs() <= 1).float())


def test_traces_with_fx() -> None:
    model = torch.nn.Sequential(
        TensorQuantizer(QuantDescriptor(amax=1.0)), TensorQuantizer(QuantDescriptor(axis=0))
    )

    class Inside(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return False

    x = draw(3, 4)
    traced = torch.fx.GraphModule(model, Inside().trace(model))
    assert traced(x).equal(model(x))
