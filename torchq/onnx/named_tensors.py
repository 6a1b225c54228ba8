"""Which tensors of an ONNX file the quantizers of its model read, for ranges that have names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from torchq.errors import CalibrationError, ConfigError
from torchq.graph import call_arguments
from torchq.nn import switched_off
from torchq.utils import untouched
from torchq.workflow import quantizers, weight_quantizers


def named_tensors(
    where: str,
    model: nn.Module,
    example: object,
    known: Mapping[str, bool],
    *,
    weights: bool = False,
) -> dict[str, list[str]]:
    """Return the names of the tensors that each quantizer of an activation reads, one for a call.

    ``known`` has the names in a file of ranges, and whether the numbers are usable; ``weights``
    adds quantizers of weights. A quantizer without any such tensor is an error.
    """
    if not isinstance(model, fx.GraphModule):
        raise ConfigError(
            f"{where}: got a {type(model).__name__}; expected what torchq.from_onnx made of the "
            "ONNX file, since the ranges have names of its tensors"
        )
    tensors = _read(model, example) | (_stored(model) if weights else {})
    names_by_path: dict[str, list[str]] = {path: [] for path in tensors}
    for path, calls in tensors.items():
        for names in calls:
            usable = [name for name in names if known.get(name)]
            names_by_path[path] += usable[-1:]
    _check_found(where, known, tensors, names_by_path)
    return names_by_path


def _check_found(
    where: str,
    known: Mapping[str, bool],
    tensors: Mapping[str, list[list[str]]],
    found: Mapping[str, list[str]],
) -> None:
    """Raise one error for all quantizers that the file has no scale for."""
    missing = [path for path, names in found.items() if not names]
    if not missing:
        return
    counted = f"{where}: matches {len(found) - len(missing)} of {len(found)} quantizers"
    if len(missing) == len(found):
        read = [names[-1] for calls in tensors.values() for names in calls if names]
        raise CalibrationError(
            f"{counted}; expected the ranges of this network. It has {_few([*known])}, and the "
            f"model reads {_few(read)}"
        )
    rows = [
        f"{path} reads {_few([*names], known)}"
        for path in missing[:5]
        for names in tensors[path][:1]
    ]
    more = f", ... ({len(missing)} in all)" if len(missing) > len(rows) else ""
    raise CalibrationError(
        f"{counted}; expected a finite scale for each. {'; '.join(rows)}{more}. Leave these layers "
        "in float with exclude=, or calibrate on data"
    )


def _few(names: list[str], known: Mapping[str, bool] | None = None) -> str:
    """Return the first names, and whether a file has infinite scales for them."""
    infinite = known is not None and not set(names).isdisjoint(known)
    more = ", ..." if len(names) > 3 else ""
    listed = f"{', '.join(names[:3])}{more}" if names else "no tensor of the file"
    return f"{listed}, whose scale is infinite" if infinite else listed


def _stored(model: fx.GraphModule) -> dict[str, list[list[str]]]:
    """Return the name of the stored tensor that each quantizer of a weight reads."""
    names = {
        f"{n.target}.weight_quantizer": n.meta.get("onnx_weight")
        for n in model.graph.nodes
    }
    weights = weight_quantizers(model)
    return {
        path: [[names.get(path) or path.removesuffix("_quantizer")]]
        for path, quantizer in quantizers(model).items()
        if quantizer.quantizing and id(quantizer) in weights
    }


def _read(model: fx.GraphModule, example: object) -> dict[str, list[list[str]]]:
    """Return the names of the tensor that each call of a quantizer of an activation reads.

    One tensor has several where layers in between became nothing, as folded norms do. What the
    quantizer of a layer's result reads is the result of its node.
    """
    weights = weight_quantizers(model)
    watched = {
        path: q
        for path, q in quantizers(model).items()
        if q.quantizing and id(q) not in weights
    }
    names_by_path: dict[str, list[list[str]]] = {path: [] for path in watched}
    run = _Named(model)
    with untouched(model), switched_off(quantizers(model).values()), torch.no_grad():
        handles = [
            quantizer.register_forward_pre_hook(
                lambda _, args, path=path: names_by_path[path].append(
                    run.names(args[0])
                )
            )
            for path, quantizer in watched.items()
        ]
        try:
            args, kwargs = call_arguments(model, example)
            run.run(*args, *kwargs.values())
        finally:
            for handle in handles:
                handle.remove()
    for node in model.graph.nodes:
        path = f"{node.target}.output_quantizer"
        if node.op == "call_module" and path in names_by_path:
            names_by_path[path] = [list(node.meta.get("onnx_tensors", ()))]
    return names_by_path


class _Named(fx.Interpreter):
    """Runs a graph and knows which tensors of the file its values are."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self._seen: dict[int, tuple[Tensor, list[str]]] = {}

    def run_node(self, n: fx.Node) -> object:
        """Run a node, and note the names of its result."""
        result = super().run_node(n)
        # Kept alive, so that no other tensor gets its id.
        if isinstance(result, Tensor):
            _, names = self._seen.setdefault(id(result), (result, []))
            names.extend(n.meta.get("onnx_tensors", ()))
        return result

    def names(self, tensor: Tensor) -> list[str]:
        """Return the names of a tensor in the file, that of the last node behind the others."""
        return list(dict.fromkeys(self._seen.get(id(tensor), (tensor, []))[1]))
