"""``torchq convert``: a file of another framework as a program of torch.export."""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.cli.files import ENDINGS, is_network_file
from torchq.cli.loading import explained, load_model
from torchq.errors import ConfigError, ExportError
from torchq.utils import replacing


def run_convert(options: argparse.Namespace) -> int:
    """Read the file, export the model, and write it."""
    if not is_network_file(options.file):
        problem = f"got {options.file!r}; expected a name that ends in {', '.join(ENDINGS)}"
        raise ConfigError(problem)
    target = Path(options.to)
    shapes = [_sizes(text) for text in options.shape]
    model: Any = load_model(options.file, options.weights)
    example = example_of(model, shapes)
    program = _export(model, example)
    with replacing(target) as (temporary,):
        torch.export.save(program, temporary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"read {options.file}: {len(model.graph.nodes)} nodes, {parameters} parameters")
    print(f"wrote {target}; load it with torch.export.load({str(target)!r}).module()")
    return 0


def _sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII) or "0" in text.split(","):
        raise ConfigError(f"--shape {text}: expected sizes as 1,3,224,224")
    return [int(size) for size in text.split(",")]


def example_of(model: Any, shapes: list[list[int]]) -> tuple[Tensor, ...]:
    """Return random inputs, of ``shapes`` or of those that the file states, open sizes 1."""
    names: Any = model.input_names
    known: Any = model.input_shapes
    if shapes and len(shapes) != len(names):
        text = f"--shape: got {len(shapes)}; expected one for each of {', '.join(names)}"
        raise ConfigError(text)
    result = []
    for number, name in enumerate(names):
        sizes = [size or 1 for size in known[number] or ()]
        if shapes:
            sizes = shapes[number]
        if not sizes:
            raise ConfigError(f"the file does not state the shape of {name!r}; pass --shape")
        with explained(f"--shape {','.join(map(str, sizes))}"):
            result.append(torch.randn(sizes))
    return tuple(result)


def _export(model: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, example)
    except Exception as error:  # torch.export raises many kinds of errors
        line = str(error).strip().partition("\n")[0]
        text = f"convert: torch.export cannot follow the network ({type(error).__name__}: {line}). "
        text += "Layers that choose detections are such; cut them off, or use the model in Python"
        raise ExportError(text) from error
