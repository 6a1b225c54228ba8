"""``adopt_``: from the quantized model of another maker to torchq's quantizers on a float model."""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError
from torchq.frontends.checkpoints import makers, pt2e
from torchq.frontends.checkpoints.makers import (
    Grid,
    Layer,
    Layers,
    are_equal,
    modules_of,
)
from torchq.nn import QuantModule, TensorQuantizer, quantized_class
from torchq.nn.convert import unchanged_on_error
from torchq.runtime import Runtime, runtime_of
from torchq.swap import Plan
from torchq.swap.held import Held
from torchq.swap.planning import quantize_around_
from torchq.utils import bullets, network_of, short_repr, undone_on_error


class Maker(NamedTuple):
    """A library that quantizes models.

    Attributes:
        name: for error texts.
        package: what the names of its modules begin with, or of its operators in a graph.
        read: returns what is quantized in a model, given the float one too.
    """

    name: str
    package: str
    read: Callable[[Any, nn.Module], Layers]


MAKERS = (
    Maker("ModelOpt", makers.MODELOPT, makers.read_modelopt),
    Maker("Brevitas", makers.BREVITAS, makers.read_brevitas),
    Maker("quanto", makers.QUANTO, makers.read_quanto),
    Maker("PT2E", pt2e.PACKAGE, pt2e.read_pt2e),
)


def adopt_(
    model: nn.Module,
    other: nn.Module | torch.export.ExportedProgram,
    *,
    target: str | Runtime | None = None,
    example: object = None,
) -> Plan:
    """Quantize a float model as another library has quantized the same network, in place.

    Weights become those of ``other``: the values of its codes where it has codes. Ranges, scales
    and zero points are held as they are, so both compute the same codes. All is adopted, or nothing
    is: what torchq has no quantizer for is named by layer.

    With a target, what its kernels want beside is added: quantizers of results and of operators
    between layers, in the form of the adopted ones. One that reads what an adopted one reads is the
    same; of the others :func:`torchq.calibrate` finds the ranges, and leaves what is adopted.

    Args:
        model: The float network, not quantized: the one that ``other`` was made of.
        other: A calibrated model of NVIDIA ModelOpt, Brevitas or quanto (weights alone), or a
            graph of PT2E after ``convert_pt2e``, as a GraphModule or an ExportedProgram. It stays
            as it is. No file is read: load the model by its maker's own functions first.
        target: the runtime that the model is for, as for :func:`torchq.quantize_`. None adds
            nothing.
        example: the arguments for one call of the model, in a batch; needed with a target, as a
            run shows which results and operators are read.

    Returns:
        What is quantized now, and which quantizers have no range yet.

    Raises:
        ConfigError: ``other`` is of no known maker or not calibrated, is quantized in a way that
            torchq does not have (blocks, tables, ranges of each call), or is another network; or a
            target is given without an example, or rounds scales in its files. The model stays as it
            was.

    Example:
        >>> plan = torchq.adopt_(model, quantized_by_modelopt)  # doctest: +SKIP
    """
    graph = other.module() if isinstance(other, torch.export.ExportedProgram) else other
    for name, value in (("model", model), ("other", graph)):
        if not isinstance(value, nn.Module):
            raise ConfigError(
                f"adopt_: {name}: got a {type(value).__name__}; expected a torch.nn.Module. Pass "
                "the float model, then the one that another library quantized"
            )
    runtime = runtime_of(target)
    if (runtime is None) != (example is None):
        got, expected = (
            ("a target", "an example of") if runtime else ("an example", "a target for")
        )
        raise ConfigError(
            f"adopt_: got {got} alone; expected both, or none: a run shows what a runtime needs "
            f"beside the layers. Pass {expected} the model too"
        )
    if runtime is not None and runtime.codes and runtime.codes.scales is not None:
        raise ConfigError(
            f"adopt_: target: got {runtime.name}, whose files have scales in "
            f"{runtime.codes.scales}; expected one that keeps adopted scales as they are. Use its "
            'setting precision="float32", or adopt without a target'
        )
    model = network_of(model)
    graph = network_of(graph)
    if any(isinstance(module, TensorQuantizer) for module in model.modules()):
        raise ConfigError(
            "adopt_: got a quantized model; expected a float one. Call restore_ on it"
        )
    maker = _maker_of(graph)
    layers = _by_first_path(model, maker.read(graph, model))
    refused = [
        f"{path}: {found}" for path, found in layers.items() if isinstance(found, str)
    ]
    if refused:
        raise ConfigError(
            f"adopt_: {maker.name} quantizes in ways that torchq has no quantizer for, or other "
            f"modules; expected scales per tensor or channel. Quantize these otherwise there:\n"
            f"{bullets(refused)}"
        )
    held_tensors = [*model.parameters(), *model.buffers()]
    with unchanged_on_error(model), undone_on_error(model, written=held_tensors):
        found = {p: f for p, f in layers.items() if isinstance(f, Layer)}
        return _carry_out(model, graph, found, runtime, example)


def _maker_of(other: nn.Module) -> Maker:
    for maker in MAKERS:
        if isinstance(other, fx.GraphModule) and maker.package == pt2e.PACKAGE:
            if any(
                str(node.target).startswith(maker.package) for node in other.graph.nodes
            ):
                return maker
        elif isinstance(other, nn.Module) and next(
            modules_of(other, maker.package), None
        ):
            return maker
    maker_names = ", ".join(maker.name for maker in MAKERS)
    raise ConfigError(
        f"adopt_: got a {type(other).__name__} in which nothing is quantized by a known library; "
        f"expected a model of {maker_names}, as the library's own functions return it"
    )


def _by_first_path(model: nn.Module, layers: Layers) -> Layers:
    """Return the layers by the first path of their module, which may stand in several places."""
    first_paths: dict[nn.Module, str] = {}
    first_path_of = {
        path: first_paths.setdefault(module, path)
        for path, module in model.named_modules(remove_duplicate=False)
    }
    merged: Layers = {}
    for path, layer in layers.items():
        first_path = first_path_of.get(path, path)
        earlier = merged.get(first_path)
        if earlier is None or isinstance(layer, str):
            merged[first_path] = layer
        elif isinstance(earlier, Layer) and not _is_equal(earlier, layer):
            merged[first_path] = f"is {path} too, and quantized in another way there"
    return merged


def _is_equal(one: Layer, other: Layer) -> bool:
    if (
        one.grids.keys() != other.grids.keys()
        or one.values.keys() != other.values.keys()
    ):
        return False
    grids = ((grid, other.grids[slot]) for slot, grid in one.grids.items())
    values = ((one.values[name], value) for name, value in other.values.items())
    return all(a == b for a, b in grids) and all(are_equal(a, b) for a, b in values)


def _carry_out(
    model: nn.Module,
    other: nn.Module,
    layers: Mapping[str, Layer],
    runtime: Runtime | None,
    example: object,
) -> Plan:
    """Swap exactly the found layers, take the maker's numbers, and compare them."""
    config = QuantConfig(_rules(model, layers), name="adopted")
    _copy_values(model, other, layers)
    held = Held(frozenset(layers), _ranges(layers))
    plan = quantize_around_(model, config, held, runtime, example)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, layer in layers.items():
        module = modules[path]
        assert isinstance(module, QuantModule)
        for slot in module.slots():
            quantizer = getattr(module, f"{slot}_quantizer")
            if slot in layer.grids:
                shape = (
                    module.get_parameter(slot).shape
                    if slot in module.weight_slots
                    else None
                )
                _set(quantizer, layer.grids[slot], shape)
            elif isinstance(quantizer, TensorQuantizer):
                is_added = runtime is not None and slot in module.optional_slots
                quantizer.mode = quantizer.mode if is_added else "off"
    return plan if runtime is None else replace(plan, todo=_without_ranges(model))


def _ranges(layers: Mapping[str, Layer]) -> dict[str, Hashable]:
    """Return path of the quantizer of each adopted input -> its numbers, None with factors."""
    return {
        f"{path}.{slot}_quantizer": grid.numbers if grid.factor is None else None
        for path, layer in layers.items()
        for slot, grid in layer.grids.items()
        if slot != "weight"
    }


def _without_ranges(model: nn.Module) -> str:
    """Return how many quantizers of a model wait for calibration, in a sentence."""
    missing = {
        id(module)
        for module in model.modules()
        if isinstance(module, TensorQuantizer)
        and module.quantizing
        and not module.calibrated
    }
    if not missing:
        return "every quantizer has its range"
    return (
        f"{len(missing)} quantizers beside those adopted have no range yet: "
        "torchq.calibrate(model, batches)"
    )


def _rules(model: nn.Module, layers: Mapping[str, Layer]) -> tuple[Rule, ...]:
    """Return a rule for each layer, which must be one that torchq quantizes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    rules: list[Rule] = []
    wrong: list[str] = []
    for path, layer in layers.items():
        module = modules.get(path)
        cls = None if module is None else quantized_class(type(module))
        if cls is None or set(layer.grids) - set(cls.slots()):
            got = "no module" if module is None else f"a {type(module).__name__}"
            wrong.append(
                f"{path}: got {got}; expected a layer with {', '.join(layer.grids)}"
            )
            continue
        inputs = [
            layer.grids[slot].descriptor
            for slot in cls.input_slots
            if slot in layer.grids
        ]
        if any(found != inputs[0] for found in inputs):
            wrong.append(f"{path}: its inputs have different formats; expected one")
        weight = layer.grids.get("weight")
        rules.append(
            Rule(
                f"re:^{re.escape(path)}$",
                input=inputs[0] if inputs else None,
                weight=None if weight is None else weight.descriptor,
            )
        )
    if wrong:
        raise ConfigError(
            f"adopt_: the networks differ, or torchq lacks a slot:\n{bullets(wrong)}"
        )
    return tuple(rules)


def _copy_values(
    model: nn.Module, other: nn.Module, layers: Mapping[str, Layer]
) -> None:
    """Give the model the parameters and buffers that the maker computes with."""
    maker_tensors = {
        f"{p}.{n}".lstrip("."): v
        for p, layer in layers.items()
        for n, v in layer.values.items()
    }
    state = {**other.state_dict(), **maker_tensors}
    model_state = model.state_dict()
    # The maker may know a tensor that stands in several places by another of its names.
    alias_of = {
        tensor.data_ptr(): name for name, tensor in model_state.items() if name in state
    }
    for name, tensor in model_state.items():
        alias = alias_of.get(tensor.data_ptr()) if tensor.numel() else None
        if (
            name not in state
            and alias is not None
            and model_state[alias].shape == tensor.shape
        ):
            state[name] = state[alias]
    missing = sorted(n for n in model_state if n not in state) + sorted(
        n for n in maker_tensors if n not in model_state
    )
    poisoned = [
        n for n, tensor in maker_tensors.items() if not bool(tensor.isfinite().all())
    ]
    if poisoned:
        raise ConfigError(
            f"adopt_: {', '.join(poisoned[:6])}: got values that are NaN or infinite; expected "
            "numbers. Makers divide by the scale, which is 0 for a channel of zeros: give it "
            "another one there, or leave the layer out"
        )
    wrong = [
        n for n in model_state if n in state and state[n].shape != model_state[n].shape
    ]
    if missing or wrong:
        raise ConfigError(
            f"adopt_: the networks differ: {', '.join((missing + wrong)[:6])} stand in one alone "
            "or have other shapes; expected the float model that the other one was made of, with "
            "BatchNorm folded by torchq.fuse_ where its maker folds it"
        )
    with torch.no_grad():
        for name, tensor in model_state.items():
            tensor.copy_(state[name])


def _set(quantizer: TensorQuantizer, grid: Grid, shape: torch.Size | None) -> None:
    """Give a quantizer a grid, and check that it has it; ``shape`` is that of a weight."""
    d = quantizer.descriptor

    def shaped(value: Tensor | None) -> Tensor | None:
        if value is None or (shape is None and d.axis is not None):
            return value
        return value.reshape(() if shape is None else d.granularity.amax_shape(shape))

    if grid.factor is not None:
        quantizer.pre_quant_scale = grid.factor.detach().clone()
    if grid.scale is None:
        quantizer.set_amax(shaped(grid.amax))
        return
    quantizer.set_qparams(shaped(grid.scale), shaped(grid.zero_point))
    pairs = zip(
        quantizer.calculate_qparams(), (grid.scale, grid.zero_point), strict=True
    )
    for held, given in pairs:
        if given is not None and not torch.equal(
            held.flatten(), given.flatten().to(held)
        ):
            raise ConfigError(
                f"{quantizer.name}: got {short_repr(given)}, and holds {short_repr(held)}; "
                "expected equal numbers. Please report this as a fault of torchq"
            )
