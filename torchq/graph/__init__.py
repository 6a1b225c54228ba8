"""What a model computes, as calls that feed calls, and how it is called.

The package knows nothing of quantization.
"""

from torchq.graph.calling import (
    Forward,
    call_arguments,
    call_model,
    floats_in,
    map_tensors,
    move_to,
    results_in,
    tensors_in,
    with_copies,
)
from torchq.graph.facade import PASSES, Graph, GraphPass, graph_pass
from torchq.graph.flow import Call, Flow, flow_of_graph, read_arguments, record
from torchq.graph.operators import (
    KINDS,
    OPERATORS,
    Operator,
    effects_of,
    never_negative,
    operator_kind,
    operator_name,
    operator_named,
    operator_of,
    reads_metadata,
    reads_shape,
    writes,
)
from torchq.graph.runner import GraphRunner, NodeMeta
from torchq.graph.source import Rewritten, SourceSite, rewrite_forward
from torchq.graph.tracing import (
    ForwardTracer,
    Trace,
    forward_hook_kind,
    is_torch_leaf,
    trace,
    trace_call,
    trace_modules,
    trace_or_none,
)

__all__ = [
    "KINDS",
    "OPERATORS",
    "Operator",
    "effects_of",
    "never_negative",
    "operator_named",
    "operator_of",
    "Rewritten",
    "SourceSite",
    "operator_kind",
    "rewrite_forward",
    "Call",
    "Flow",
    "Forward",
    "ForwardTracer",
    "PASSES",
    "Graph",
    "GraphPass",
    "graph_pass",
    "GraphRunner",
    "NodeMeta",
    "Trace",
    "call_arguments",
    "call_model",
    "floats_in",
    "flow_of_graph",
    "forward_hook_kind",
    "is_torch_leaf",
    "map_tensors",
    "move_to",
    "operator_name",
    "read_arguments",
    "reads_metadata",
    "reads_shape",
    "results_in",
    "writes",
    "record",
    "tensors_in",
    "trace",
    "trace_call",
    "trace_modules",
    "trace_or_none",
    "with_copies",
]
