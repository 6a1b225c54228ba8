"""Why do images leave a file of 4-bit codes with other outputs than the simulation?

ONNX Runtime computes convolutions of 4-bit codes in float, and adds in another order than torch.
Of each of ``--images`` whose outputs differ, this finds the first quantizer whose codes differ, and
how far the exact sum behind these codes, in float64, is from the tie between two of them: in units
in the last place of float32. A few are what two orders of adding differ by; more would be a fault.

The file is cut at its codes for that: each part runs in a default session on the codes in front of
it. Where the parts do not give what the whole file gives, to the last bit, nothing is found: they
have other kernels.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

import torchq
from benchmarks.cifar import logits, read_split, resnet20
from benchmarks.deploy_images import quantized_for
from benchmarks.harness import Reporter, parse, parser
from torchq.nn import TensorQuantizer
from torchq.runtime import open_session
from torchq.utils import watching

_BATCH = 50
_CODES = "/codes"
_CLIPS = ("Relu", "Min", "Max")

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Difference:
    """Where an image's codes differ first, with the exact sums there.

    Attributes:
        quantizer: its path.
        steps: an exact sum, in steps of the codes.
        from_tie: the largest distance of one from the tie between its two codes, in ulps.
        of_products: the same in ulps of the sum of the magnitudes of the products.
        simulation: how far the sum of torch is from the exact one, in ulps.
        file: how far that of ONNX Runtime is.
    """

    quantizer: str
    steps: float
    from_tie: float
    of_products: float
    simulation: float
    file: float


class CutFile:
    """A file with pairs of Q and DQ operators, run part by part between its codes."""

    def __init__(self, path: Path, folder: Path) -> None:
        model = onnx.shape_inference.infer_shapes(onnx.load(path))
        nodes = model.graph.node
        self.producer = {name: node for node in nodes for name in node.output}
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.output = model.graph.output[0].name
        self.quantized = [n for n in nodes if n.op_type == "QuantizeLinear"]
        extractor = onnx.utils.Extractor(model)
        self._parts: dict[str, tuple[list[str], Any]] = {}
        for number, name in enumerate((*self._floats(), self.output)):
            if name != "x":
                inputs = sorted(self._codes_behind(name))
                part = folder / f"{number}.onnx"
                onnx.save(extractor.extract_model(inputs, [name]), part)
                self._parts[name] = inputs, open_session(part, optimize=True)

    def _floats(self) -> list[str]:
        return [node.input[0] for node in self.quantized]

    def _codes_behind(self, name: str) -> set[str]:
        """Return the codes that a tensor is computed of, without others in between."""
        codes: set[str] = set()
        for source in self.producer[name].input:
            node = self.producer.get(source)
            if node is None:
                continue
            is_code = node.op_type == "QuantizeLinear"
            codes |= {source} if is_code else self._codes_behind(source)
        return codes

    def constant(self, name: str) -> Array:
        """Return a stored tensor."""
        return numpy_helper.to_array(self._stored[name])

    def grid(self, node: onnx.NodeProto) -> tuple[Array, Array]:
        """Return scale and zero point of a Q or DQ operator."""
        has_zero_point = len(node.input) > 2 and bool(node.input[2])
        zero_point = self.constant(node.input[2]) if has_zero_point else np.uint8(0)
        return self.constant(node.input[1]), np.asarray(zero_point)

    def run(self, x: Tensor) -> dict[str, Tensor]:
        """Return the codes, and the floats in front of them, of a batch, and the output."""
        tensors = {"x": x}
        for node in self.quantized:
            source, codes = node.input[0], node.output[0]
            self._compute(source, tensors)
            scale, zero_point = self.grid(node)
            limits = np.iinfo(zero_point.dtype)
            rounded = np.rint(tensors[source].numpy() / scale) + np.float32(zero_point)
            stored = np.clip(rounded, limits.min, limits.max).astype(zero_point.dtype)
            tensors[codes] = torch.from_numpy(stored)
        self._compute(self.output, tensors)
        return tensors

    def _compute(self, name: str, tensors: dict[str, Tensor]) -> None:
        if name not in tensors:
            inputs, session = self._parts[name]
            feeds = session.feeds({source: tensors[source] for source in inputs})
            tensors[name] = session.run(feeds)[0]

    def values(self, codes: Tensor, node: onnx.NodeProto) -> Array:
        """Return the exact values of codes of a Q or DQ operator, (C, H, W) or the like."""
        scale, zero_point = self.grid(node)
        whole = codes.numpy().astype(np.float64) - zero_point.astype(np.float64)
        return whole * scale.astype(np.float64)

    def exact_sums(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        image: int,
        *,
        magnitudes: bool = False,
    ) -> Tensor:
        """Return what a convolution in front of a tensor adds up to, in float64.

        ``magnitudes`` adds those of the products, which bound what rounding may be off by.

        Raises:
            RuntimeError: Something else than a convolution is in front of the tensor.
        """
        node = self.producer[name]
        while node.op_type in _CLIPS:
            node = self.producer[node.input[0]]
        if node.op_type != "Conv":
            raise RuntimeError(f"{name}: got {node.op_type}; expected a convolution")
        source = self.producer[node.input[0]]
        x = self.values(tensors[source.input[0]][image], source)
        weight, bias = (torch.from_numpy(self._parameter(n)) for n in node.input[1:])
        attributes = {
            a.name: onnx.helper.get_attribute_value(a) for a in node.attribute
        }
        padding = attributes.get("pads", [0, 0])[:2]
        stride = attributes.get("strides", 1)
        operands = torch.from_numpy(x)[None], weight, bias
        if magnitudes:
            operands = tuple(operand.abs() for operand in operands)
        return F.conv2d(*operands, stride, padding)[0]

    def _parameter(self, name: str) -> Array:
        """Return a weight or bias, in float64."""
        if name in self._stored:
            return self.constant(name).astype(np.float64)
        node = self.producer[name]
        scale, _ = self.grid(node)
        codes = self.constant(node.input[0]).astype(np.float64)
        return codes * scale.astype(np.float64).reshape(-1, *[1] * (codes.ndim - 1))


def _simulated(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the outputs of a simulation, and what each quantizer reads and gives."""
    seen: dict[str, list[Tensor]] = {}

    def seeing(name: str) -> tuple[nn.Module, object]:
        def see(args: tuple[Tensor, ...], kwargs: object, result: Tensor) -> None:
            seen[name] = [args[0].clone(), result.clone()]

        return model.get_submodule(name), see

    names = [n for n, m in model.named_modules() if isinstance(m, TensorQuantizer)]
    with torch.no_grad(), watching([seeing(name) for name in names]):
        return model(x), seen


def first_difference(
    file: CutFile,
    tensors: Mapping[str, Tensor],
    seen: Mapping[str, Sequence[Tensor]],
    image: int,
) -> Difference | None:
    """Return where the codes of an image differ first; None where they are all equal."""
    for node in file.quantized:
        name = node.output[0].removesuffix(_CODES)
        if name not in seen:
            continue
        of_torch, values = (tensor[image] for tensor in seen[name])
        of_file = torch.from_numpy(file.values(tensors[node.output[0]][image], node))
        places = (values != of_file.float()).nonzero(as_tuple=True)
        if not len(places[0]):
            continue
        scale = float(file.grid(node)[0])
        source = node.input[0]
        exact = file.exact_sums(source, tensors, image)[places]
        largest = file.exact_sums(source, tensors, image, magnitudes=True)[places]
        ulps = _unit_in_last_place(exact)
        ties = ((exact / scale).floor() + 0.5) * scale
        distances = (exact - ties).abs() / ulps
        worst = int(distances.argmax())
        errors = [
            float(((sums[places].double() - exact) / ulps)[worst])
            for sums in (of_torch, tensors[source][image])
        ]
        of_products = float(((exact - ties).abs() / _unit_in_last_place(largest)).max())
        steps = float(exact[worst] / scale)
        return Difference(name, steps, float(distances[worst]), of_products, *errors)
    return None


def _unit_in_last_place(numbers: Tensor) -> Tensor:
    """Return those of float32 for numbers in float64."""
    return torch.from_numpy(np.spacing(numbers.abs().float().numpy())).double()


def report_differences(options: argparse.Namespace) -> None:
    """Report one line for each image of another class, and one for all other outputs."""
    test = read_split(options.data, "test", options.images)
    batches = read_split(options.data, "train", options.calibration).batches(_BATCH)
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    quantized = quantized_for(model, "onnxruntime", batches, torchq.recipes.w4a4())
    with (
        Reporter("first_differences", options.out, ["onnxruntime"]) as report,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder, "model.onnx")
        example = test.images[:2]
        torchq.export_onnx(quantized, example, path, dynamo=False, progress=False)
        session = open_session(path, optimize=True)
        runs = [session.run(session.feeds({"x": x})) for x in test.batches(_BATCH)]
        of_file = torch.cat([results[0] for results in runs])
        of_torch = logits(quantized, test, _BATCH)
        chosen = (of_file != of_torch).any(1).nonzero().flatten()
        file = CutFile(path, Path(folder))
        found_differences: list[Difference] = []
        for part in chosen.split(_BATCH):
            tensors = file.run(test.images[part])
            outputs, seen = _simulated(quantized, test.images[part])
            if not torch.equal(outputs, of_torch[part]):
                raise RuntimeError("first_differences: hooks change the simulation")
            is_file = (tensors[file.output] == of_file[part]).all(1).tolist()
            for place, image in enumerate(part.tolist()):
                if not is_file[place]:
                    continue
                found = first_difference(file, tensors, seen, place)
                if found is None:
                    raise RuntimeError(
                        f"first_differences: image {image} has equal codes"
                    )
                found_differences.append(found)
                if of_file[image].argmax() != of_torch[image].argmax():
                    report.value(image=image, **vars(found))
        report.value(
            image=None,
            images=options.images,
            other_outputs=len(chosen),
            found=len(found_differences),
            median_from_tie=median(d.from_tie for d in found_differences),
            largest_from_tie=max(d.from_tie for d in found_differences),
            largest_of_products=max(d.of_products for d in found_differences),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the lines."""
    arguments = parser(__doc__)
    folder = "folder with the trained weights and the tars of images"
    arguments.add_argument("--data", type=Path, required=True, help=folder)
    arguments.add_argument("--images", type=int, default=10_000, help="of the test")
    arguments.add_argument("--calibration", type=int, default=500, help="images")
    report_differences(parse(arguments, argv))


if __name__ == "__main__":
    main()
