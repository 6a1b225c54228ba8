"""A table of what is quantized and how, or of what a deployed model runs on."""

from dataclasses import dataclass

from torch import nn

from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import table, wrap

_SIMULATED = (
    "simulated: tensors are rounded to these formats but stored and computed in floating point"
)


@dataclass(frozen=True)
class SummaryRow:
    """One quantizer.

    Attributes:
        name: its dotted path.
        owner: the class of the module that it belongs to.
        descriptor: format, granularity and calibration method.
        amax: its range, as text.
        mode: what it does; see :attr:`torchq.TensorQuantizer.mode`.
    """

    name: str
    owner: str
    descriptor: str
    amax: str
    mode: str


@dataclass(frozen=True)
class LayerRow:
    """One layer of a deployed model.

    Attributes:
        name: its dotted path.
        layer: its class.
        kernel: the kernel that runs it.
        bytes: the size of its parameters.
        note: what is fused into it, or why it has no integer kernel.
    """

    name: str
    layer: str
    kernel: str
    bytes: int
    note: str


@dataclass(frozen=True)
class Summary:
    """Rows to read, and to print.

    Attributes:
        rows: one for each quantizer.
        float_modules: paths of the modules with weights that stay float.
        layers: one for each layer that :func:`torchq.deploy` has treated.
        checked: how far a deployed model agrees with its simulation.
    """

    rows: tuple[SummaryRow, ...]
    float_modules: tuple[str, ...]
    layers: tuple[LayerRow, ...] = ()
    checked: str = ""

    def __str__(self) -> str:
        return self._deployed_text() if self.layers else self._simulated_text()

    def _simulated_text(self) -> str:
        head = ("quantizer", "in", "format", "amax", "mode")
        rows = [(r.name, r.owner, r.descriptor, r.amax, r.mode) for r in self.rows]
        in_float = "no layer with weights is left in float"
        if self.float_modules:
            in_float = f"float: {', '.join(self.float_modules)}"
        return table([head, *rows], f"{wrap(in_float, indent='  ')}\n{wrap(_SIMULATED)}")

    def _deployed_text(self) -> str:
        head = ("layer", "class", "kernel", "bytes", "note")
        rows = [(r.name, r.layer, r.kernel, f"{r.bytes:,}", r.note) for r in self.layers]
        lines = [table([head, *rows])]
        if self.float_modules:
            lines.append(wrap(f"float: {', '.join(self.float_modules)}", indent="  "))
        total = sum(r.bytes for r in self.layers)
        lines.append(f"{total:,} bytes in {len(self.layers)} layers")
        return "\n".join([*lines, wrap(self.checked)] if self.checked else lines)


def summary(model: nn.Module) -> Summary:
    """Return what every quantizer of ``model`` does; of a deployed model, what every layer runs on.

    A module may describe itself with a method ``summary_row() -> (kernel, bytes, note)``. A
    quantized module that :func:`torchq.deploy` leaves as a simulation says why in the attribute
    ``deploy_note``.

    Args:
        model: any module.

    Returns:
        The rows; ``print`` it.
    """
    rows, float_modules, layers = [], [], []
    owners = {id(child): module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        describe = getattr(module, "summary_row", None)
        note = getattr(module, "deploy_note", "")
        if isinstance(module, TensorQuantizer):
            owner = owners.get(id(module))
            texts = ("" if owner is None else type(owner).__name__, str(module.descriptor))
            rows.append(SummaryRow(name, *texts, _range_text(module), module.mode))
        elif callable(describe) or note:
            size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
            runs_on = describe() if callable(describe) else ("simulated", size, note)
            layers.append(LayerRow(name or "(root)", type(module).__name__, *runs_on))
        elif not isinstance(module, QuantModule) and _has_weight(module):
            float_modules.append(name or "(root)")
    checked = str(getattr(model, "checked", "")) if layers else ""
    return Summary(tuple(rows), tuple(float_modules), tuple(layers), checked)


def _has_weight(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _range_text(quantizer: TensorQuantizer) -> str:
    if quantizer.descriptor.dynamic:
        return "of each call"
    if not quantizer.calibrated:
        return "of each call (not calibrated)"
    return quantizer.range_text()
