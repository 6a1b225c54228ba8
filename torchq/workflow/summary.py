"""A table of what is quantized and how, or of what a deployed model runs on."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import listed, network_of, table, wrap

_SIMULATED = (
    "simulated: tensors are rounded to these formats but stored and computed in "
    "floating point"
)


#: A table of more rows is no screen; then those alike are counted.
_SCREEN = 24
_OF_EACH_CALL = "of each call"
_NOT_CALIBRATED = "of each call (not calibrated)"


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

    def table(self) -> str:
        """Return a row for every quantizer, or for every layer of a deployed model."""
        return self._deployed_text() if self.layers else self._simulated_text()

    def __str__(self) -> str:
        """Return one screen: a row for those alike, or a short :meth:`table` whole."""
        if max(len(self.rows), len(self.layers)) <= _SCREEN:
            return self.table()
        if self.layers:
            kinds = _counted((row.kernel, row.layer, row.note) for row in self.layers)
            head = ("layers", "kernel", "class", "note")
        else:
            kinds = _counted(
                (row.descriptor, row.mode, _range_kind(row)) for row in self.rows
            )
            head = ("quantizers", "format", "mode", "range")
        shown = kinds[:_SCREEN]
        lines = [table([head, *shown])]
        if len(kinds) > len(shown):
            lines.append(f"and {len(kinds) - len(shown)} kinds more")
        if self.float_modules:
            lines.append(
                f"{len(self.float_modules)} in float: {listed(self.float_modules)}"
            )
        elif not self.layers:
            lines.append("no layer with weights is left in float")
        total = sum(row.bytes for row in self.layers)
        lines.append(
            f"{total:,} bytes in {len(self.layers)} layers"
            if self.layers
            else _SIMULATED
        )
        lines += [line for line in (self.checked,) if line]
        return "\n".join(map(wrap, (*lines, "each of them: summary.table()")))

    def _simulated_text(self) -> str:
        head = ("quantizer", "in", "format", "amax", "mode")
        rows = [(r.name, r.owner, r.descriptor, r.amax, r.mode) for r in self.rows]
        in_float = "no layer with weights is left in float"
        if self.float_modules:
            in_float = f"float: {', '.join(self.float_modules)}"
        return table(
            [head, *rows], f"{wrap(in_float, indent='  ')}\n{wrap(_SIMULATED)}"
        )

    def _deployed_text(self) -> str:
        head = ("layer", "class", "kernel", "bytes", "note")
        rows = [
            (r.name, r.layer, r.kernel, f"{r.bytes:,}", r.note) for r in self.layers
        ]
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
    model = network_of(model)
    rows, float_modules, layers = [], [], []
    owners = {
        id(child): module for module in model.modules() for child in module.children()
    }
    for name, module in model.named_modules():
        describe = getattr(module, "summary_row", None)
        note = getattr(module, "deploy_note", "")
        if isinstance(module, TensorQuantizer):
            owner = owners.get(id(module))
            texts = (
                "" if owner is None else type(owner).__name__,
                str(module.descriptor),
            )
            rows.append(SummaryRow(name, *texts, _range_text(module), module.mode))
        elif callable(describe) or note:
            size = sum(
                p.numel() * p.element_size() for p in module.parameters(recurse=False)
            )
            runs_on = describe() if callable(describe) else ("simulated", size, note)
            layers.append(LayerRow(name or "(root)", type(module).__name__, *runs_on))
        elif not isinstance(module, QuantModule) and _has_weight(module):
            float_modules.append(name or "(root)")
    checked = str(getattr(model, "checked", "")) if layers else ""
    return Summary(tuple(rows), tuple(float_modules), tuple(layers), checked)


def _counted(kinds: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return each kind once with how many there are of it, the most first."""
    return [(str(count), *kind) for kind, count in Counter(kinds).most_common()]


def _range_kind(row: SummaryRow) -> str:
    return row.amax if row.amax in (_OF_EACH_CALL, _NOT_CALIBRATED) else "fixed"


def _has_weight(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _range_text(quantizer: TensorQuantizer) -> str:
    if quantizer.descriptor.dynamic:
        return _OF_EACH_CALL
    if not quantizer.calibrated:
        return _NOT_CALIBRATED
    return quantizer.range_text()
