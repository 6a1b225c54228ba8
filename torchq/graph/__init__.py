"""What a model computes, as calls that feed calls, and how it is called.

The package knows nothing of quantization.
"""

from torchq.graph.calling import Forward, call_arguments, call_model, move_to, tensors_in
from torchq.graph.flow import Call, Flow, flow_of_graph
from torchq.graph.recorder import record
from torchq.graph.tracing import (
    ForwardTracer,
    forward_hook_kind,
    is_torch_leaf,
    trace,
    trace_call,
)

__all__ = [
    "Call",
    "Flow",
    "Forward",
    "ForwardTracer",
    "call_arguments",
    "call_model",
    "flow_of_graph",
    "forward_hook_kind",
    "is_torch_leaf",
    "move_to",
    "record",
    "tensors_in",
    "trace",
    "trace_call",
]
