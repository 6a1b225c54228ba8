"""What a model computes, seen as calls that feed calls. Knows nothing of quantization."""

from torchq.graph.flow import Call, Flow, flow_of_graph
from torchq.graph.recorder import record
from torchq.graph.tracing import (
    ForwardTracer,
    call_model,
    is_torch_leaf,
    observed,
    tensors_in,
    trace,
    trace_call,
)

__all__ = [
    "Call",
    "Flow",
    "ForwardTracer",
    "call_model",
    "flow_of_graph",
    "is_torch_leaf",
    "observed",
    "record",
    "tensors_in",
    "trace",
    "trace_call",
]
