"""Traced and recorded flows agree, and count what reads a result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchq.graph import flow_of_graph, record, tensors_in, trace_modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 2)

    def forward(self, x, scale=None):
        y = self.conv(x)
        n = y.shape[0] + y.size(1)  # looking at the shape is not reading the result
        z = self.act(y) + y
        if scale is not None:
            z = z * scale
        return {"out": self.head(z.mean((2, 3))), "again": (self.act(z), n)}


X = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def flows(model):
    return [flow_of_graph(trace_modules(model), model), record(model, X)]


def test_consumers_and_outputs():
    model = Net().eval()
    actual = flows(model)
    for flow in actual:
        (conv,) = flow.calls_of(model.conv)
        assert sorted(call.name for call in flow.consumers(conv)) == ["act", "add"]
        assert len(flow.calls_of(model.act)) == 2
        assert conv.index not in flow.outputs
        assert {flow.calls[i].name for i in flow.outputs} >= {"head", "act"}
    assert [flow.origin for flow in actual] == ["fx", "recorder"]


def test_recording_knows_ranks_and_leaves_no_trace():
    model = Net().train()
    hooks = len(model.conv._forward_hooks)
    flow = record(model, X)
    assert flow.calls_of(model.conv)[0].ndim == 4
    assert flow.calls_of(model.head)[0].ndim == 2
    assert model.training
    assert len(model.conv._forward_hooks) == hooks == 0


def test_recording_gives_hooks_back_after_an_error():
    model = Net().train()
    with pytest.raises(RuntimeError):
        record(model, torch.randn(2, 7, 5, 5))
    assert not model.conv._forward_hooks
    assert not model.conv._forward_pre_hooks
    assert model.conv.training


def test_functions_on_a_modules_weight_are_calls_of_the_module():
    class Functional(Net):
        def forward(self, x):
            return F.conv2d(x, self.conv.weight, bias=self.conv.bias)

    model = Functional()
    assert [len(flow.calls_of(model.conv)) for flow in flows(model)] == [1, 1]


def test_in_place_operations_read_and_replace():
    class InPlace(Net):
        def forward(self, x):
            y = self.conv(x)
            y += 1
            return self.act(y)

    model = InPlace()
    for flow in flows(model):
        (conv,) = flow.calls_of(model.conv)
        (act,) = flow.calls_of(model.act)
        assert act.inputs != (conv.index,)


def test_tracing_is_done_in_eval_mode_and_gives_the_mode_back():
    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x) if self.training else self.b(x)

    model = Modes().train()
    flow = flow_of_graph(trace_modules(model), model)
    assert not flow.calls_of(model.a)
    assert len(flow.calls_of(model.b)) == 1
    assert model.training


def test_reading_the_same_result_twice_counts_twice():
    class Twice(Net):
        def forward(self, x):
            y = self.conv(x)
            return y * y

    model = Twice()
    for flow in flows(model):
        assert len(flow.consumers(flow.calls_of(model.conv)[0])) == 2


def test_tensors_in_nested_values():
    from dataclasses import dataclass

    @dataclass
    class Output:
        a: torch.Tensor
        b: object = None

    a = torch.zeros(1)
    b = torch.ones(1)
    c = torch.ones(2)
    assert [id(t) for t in tensors_in([a, {"k": (b, 3)}, Output(c)])] == [
        id(a),
        id(b),
        id(c),
    ]
