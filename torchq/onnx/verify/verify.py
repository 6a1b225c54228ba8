"""Proof that a file computes what the model simulates: end to end, and layer by layer in integer codes."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.functional import quantize
from torchq.graph import call_model, tensors_in
from torchq.nn import QuantModule, TensorQuantizer
from torchq.onnx.export import unwrap
from torchq.onnx.ir import Graph, load_graph
from torchq.onnx.passes.cleanup import TRANSPOSED
from torchq.onnx.verify.metrics import Codes, LayerAgreement, Outputs, VerifyReport
from torchq.onnx.verify.qdq import Grid, activation_grids, grid_of, pair_name, read_record
from torchq.onnx.verify.session import Session
from torchq.utils import evaluating
from torchq.utils.optional import need
from torchq.workflow import quantizers

__all__ = ["verify_onnx"]


def verify_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    layers: bool = True,
) -> VerifyReport:
    """Compare a file that :func:`torchq.export_onnx` wrote with its model, in ONNX Runtime on the CPU.

    *Layer by layer*: the graph runs unoptimised and every layer gets the model's own quantized values as input, so a difference is
    that layer's doing. Codes may differ where a value lies on the border of two codes (a tie): sums are added in another order.

    *End to end*: the file as it is, unoptimised, and with the optimisations that make it run on integers. Those round biases to
    int32 scales, so codes flip here and there.

    A file for another target can have finer grids for some tensors (uint8 after ReLU); the model is then simulated with these.

    Args:
        model: the quantized model; run in eval mode, left as it was.
        path: the file.
        batches: as for :func:`torchq.calibrate`; inputs of the file are fed in order, or by name from a dict.
        num_batches: stop after so many.
        layers: compare layer by layer as well.

    Returns:
        the agreement; ``print`` it, or ask ``report.ok``.

    Raises:
        ExportError: no batch, the file does not belong to this model, or ONNX Runtime cannot run it.
        MissingExtraError: onnx or onnxruntime is not installed.
    """
    model, graph = unwrap(model), load_graph(path)
    known = quantizers(model)
    grids = {
        name: grid
        for name, grid in activation_grids(graph).items()
        if name.partition("#")[0] in known
    }
    merged = read_record(graph).get("merged", {})
    plain, fast = Session(Path(path), optimize=False), _optimized(Path(path))
    forced = _forced(load_graph(path), list(grids)) if layers and grids else None
    exact, optimized = Outputs(plain.outputs), Outputs(plain.outputs)
    codes = {name: Codes(name, grid.format.qmax) for name, grid in grids.items()}
    count = 0
    calls: Counter[str] = Counter()
    with torch.no_grad(), evaluating(model), _simulating(known, grids, merged, calls) as seen:
        for batch in islice(batches, num_batches):
            seen.clear()
            calls.clear()
            expected = [t.cpu() for t in tensors_in(call_model(model, batch))]
            feeds = plain.feeds(batch)
            exact.add(expected, plain.run(feeds))
            if fast is not None:
                optimized.add(expected, fast.run(feeds))
            if forced is not None:
                _compare(forced, feeds, seen, grids, codes)
            count += 1
    if not count:
        raise ExportError("verify_onnx: got no batch; expected at least one")
    rows = [c.result() for c in codes.values()] + _weights(model, graph) if layers else []
    rows.sort(key=LayerAgreement.badness, reverse=True)
    return VerifyReport(
        os.fspath(path), exact.result(), () if fast is None else optimized.result(), tuple(rows)
    )


def _optimized(path: Path) -> Session | None:
    """The file as ONNX Runtime optimises it; None where that fails, as with FP8 activations: the proof needs only the plain graph."""
    try:
        return Session(path, optimize=True)
    except ExportError as error:
        warnings.warn(f"verify_onnx: {error}. Compared without optimisations", stacklevel=3)
        return None


Seen = dict[str, tuple[Tensor, Tensor, Tensor]]


@contextmanager
def _simulating(
    known: Mapping[str, TensorQuantizer],
    grids: Mapping[str, Grid],
    merged: Mapping[str, str],
    calls: Counter[str],
) -> Iterator[Seen]:
    """Inside, quantizers note what they do, as (scales, codes, values) under the name in the file, and take over a grid that differs."""
    seen: Seen = {}
    handles = []

    def hook(
        quantizer: TensorQuantizer, args: tuple[Tensor, ...], out: Tensor, path: str
    ) -> Tensor:
        calls[path] += 1
        own = path if calls[path] == 1 else f"{path}#{calls[path]}"
        grid = grids.get(merged.get(own, own))
        if grid is None:
            return out
        x = (
            args[0]
            if quantizer.pre_quant_scale is None
            else args[0] * quantizer.pre_quant_scale.to(args[0].dtype)
        )
        scales = grid.scaled(x)
        if _same(quantizer, grid):
            codes = grid.scaled(out)
            codes = (
                codes.round_() if grid.format.is_integer else grid.format.snap_(codes)
            )  # the division leaves a last bit
        else:
            codes = grid.codes(scales)
            out = grid.values(codes).to(out.dtype)
        seen[own] = (scales, codes, out.clone())  # the layer may work in place
        return out

    try:
        for path, quantizer in known.items():
            handles.append(
                quantizer.register_forward_hook(
                    lambda module, args, out, path=path: hook(module, args, out, path)
                )
            )
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _same(quantizer: TensorQuantizer, grid: Grid) -> bool:
    """Whether the file quantizes as the model does (a zero point shifts the codes, not the grid)."""
    scale = quantizer.calculate_qparams()[0].reshape(-1).cpu()
    return (
        torch.equal(scale, grid.scale.reshape(-1))
        and grid.format.quant_max - grid.zero >= quantizer.descriptor.format.quant_max
    )


def _forced(graph: Graph, names: list[str]) -> Session:
    """The graph with the value of every quantizer an input, and its codes, as floats, an output."""
    helper = need("onnx.helper", "verify_onnx")
    for name in names:
        pair = {
            node.op_type: node
            for node in graph.of("QuantizeLinear", "DequantizeLinear")
            if pair_name(node) == name
        }
        codes, value = pair["QuantizeLinear"].output[0], pair["DequantizeLinear"].output[0]
        given = f"{name}/given"
        graph.add("Cast", [codes], f"{name}/float codes", to=1)
        graph.replace_uses(value, given)
        graph.proto.input.append(helper.make_tensor_value_info(given, 1, None))
        graph.proto.output.append(helper.make_tensor_value_info(f"{name}/float codes", 1, None))
    with TemporaryDirectory() as folder:
        graph.save(Path(folder, "forced.onnx"), check=False)  # the new inputs have no shapes
        return Session(Path(folder, "forced.onnx"), optimize=False)


def _compare(
    forced: Session,
    feeds: Mapping[str, Tensor],
    seen: Seen,
    grids: Mapping[str, Grid],
    codes: Mapping[str, Codes],
) -> None:
    if missing := [name for name in grids if name not in seen]:
        raise ExportError(
            f"{missing[0]}: is in the file but was not called in the model; expected the model that was exported"
        )
    given = {f"{name}/given": seen[name][2].to(torch.float32) for name in grids}
    found = forced.run({**feeds, **given}, [f"{name}/float codes" for name in grids])
    for (name, grid), array in zip(grids.items(), found, strict=True):
        scales, expected, _ = (t.cpu() for t in seen[name])
        codes[name].add(scales, expected, array - grid.zero)


def _weights(model: nn.Module, graph: Graph) -> list[LayerAgreement]:
    """The stored weights against the model's codes."""
    nodes = {
        pair_name(node): node
        for node in graph.of("DequantizeLinear")
        if node.input[0] in graph.initializers
    }
    paths = {id(q): name for name, q in quantizers(model).items()}
    pairs = [
        pair
        for module in model.modules()
        if isinstance(module, QuantModule)
        for pair in module.quantized_weights()
    ]
    rows = []
    for quantizer, weight in pairs:
        name = paths[id(quantizer)]
        node = nodes.get(name)
        if node is None or not quantizer.quantizing:
            continue
        d = quantizer.descriptor
        expected = quantize(weight, quantizer.range_for(weight), d.format, d.granularity).float()
        grid = grid_of(graph, node)
        stored = graph.value(node.input[0]).float() - grid.zero
        if str(node.input[0]).endswith(TRANSPOSED):
            stored = stored.t()
        codes = Codes(name, 0.0)
        codes.add(stored, expected.cpu(), stored)
        rows.append(codes.result())
    return rows
