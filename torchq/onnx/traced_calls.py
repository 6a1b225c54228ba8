"""Whether a model calls the same quantizers while torch traces it as in a run of it.

A forward may ask whether it is exported, and compute something else then. Names of calls, such as
``path#2``, count the calls of a quantizer, so that one call less also names the others wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.functional.onnx_ops import MARK
from torchq.graph import tensors_in, with_copies
from torchq.nn import QuantModule, TensorQuantizer
from torchq.onnx.interface import ExampleCall, named_calls
from torchq.onnx.ir import Model, attribute, onnx_ir
from torchq.onnx.qdq import path_of
from torchq.utils import untouched

#: More of them are counted in the error.
_SHOWN = 6


@contextmanager
def noted_holders(model: nn.Module, holders: set[str]) -> Iterator[None]:
    """Add the paths of the modules with quantizers that are called in the block to ``holders``."""
    handles = [
        module.register_forward_pre_hook(partial(_note, holders, path))
        for path, module in model.named_modules()
        if isinstance(module, QuantModule) and not module.is_container
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(holders: set[str], path: str, *_: object) -> None:
    holders.add(path)


def check_calls(
    graph: Model,
    call: ExampleCall,
    quantizers: Mapping[str, TensorQuantizer],
    traced: set[str],
) -> None:
    """Raise an error where the calls of quantizers are others in a graph than in a run.

    torch leaves out what nothing reads; so calls on which no result depends may be missing.

    Args:
        graph: with a mark for each call; see :func:`torchq.onnx.marks.marking`.
        call: the call that was traced.
        quantizers: of the model, by path.
        traced: the paths of the modules with quantizers that were called in the trace.

    Raises:
        ExportError: It names the modules, and what to do.
    """
    marked = {
        attribute(node, "name")
        for node in onnx_ir.traversal.RecursiveGraphIterator(graph.graph)
        if (node.domain, node.op_type) == MARK
    }
    run = _Run(call, quantizers)
    run.results()
    lost = run.called - marked
    parameters = dict(call.model.named_parameters(remove_duplicate=False))
    added = {
        name
        for name in marked - run.called
        if path_of(name).removesuffix("_quantizer") not in parameters
    }
    if lost and not run.is_read(lost):
        lost = set()
    if lost or added:
        raise _other_calls(lost, added, run.holders ^ traced)


def _other_calls(lost: set[str], added: set[str], holders: set[str]) -> ExportError:
    """Return the error for calls of quantizers that the trace lacks, and for those it has more."""
    paths = sorted({path_of(name) for name in (*lost, *added)})
    others = sorted(holders) or sorted(path.rpartition(".")[0] for path in paths)
    return ExportError(
        f"export_onnx: {_listed(paths)}: got {len(lost)} calls in a run of the model that torch's "
        f"trace lacks, and {len(added)} in the trace alone; expected equal calls, since the file "
        f"would compute something else. A forward around {_listed(others)} takes another way while "
        "it is exported, as by torch.onnx.is_in_onnx_export(), torch.jit.is_tracing() or "
        "torch.compiler.is_compiling(). Take that branch out, or leave these in float: "
        f"quantize_(..., exclude={others})"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


class _Run:
    """Runs a model as it simulates, and notes the calls of its quantizers by their names.

    Attributes:
        called: the names of the calls.
        holders: the paths of the modules with quantizers that were called.
    """

    def __init__(
        self, call: ExampleCall, quantizers: Mapping[str, TensorQuantizer]
    ) -> None:
        self._call = call
        self._quantizers = quantizers
        self.called: set[str] = set()
        self.holders: set[str] = set()

    def results(self, damaged: Iterable[str] = ()) -> list[Tensor]:
        """Return the tensors that the model returns, with other values from some calls."""
        model = self._call.model
        # A forward may work in place.
        args, kwargs = with_copies((self._call.args, self._call.kwargs))
        wrong = frozenset(damaged)

        def note(name: str, _: object, __: object, out: Tensor) -> Tensor:
            self.called.add(name)
            return other_values(out) if name in wrong else out

        with (
            untouched(model),
            noted_holders(model, self.holders),
            named_calls(model, self._quantizers, note),
        ):
            return list(tensors_in(model(*args, **kwargs)))

    def is_read(self, names: set[str]) -> bool:
        """Return True if a result depends on what some calls of quantizers return."""
        pairs = zip(self.results(), self.results(damaged=names), strict=True)
        return not all(torch.equal(*pair) for pair in pairs)


def other_values(out: Tensor) -> Tensor:
    """Return random values of the size of a tensor; no norm or softmax takes them for the same."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(out.shape, generator=generator).to(out)
    return noise * (1 + out.abs().amax()) if out.numel() else noise
