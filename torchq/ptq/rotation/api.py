"""QuaRot: rotate the residual stream of a transformer, so that no channel has outliers.

Reference: Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (NeurIPS 2024),
sections 3 and 4; the invariance of RMSNorm: Ashkboos et al., SliceGPT (ICLR 2024), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, QuantizationError
from torchq.graph import call_model, is_torch_leaf, record, tensors_in
from torchq.nn import QuantModule
from torchq.ptq.channels import largest_change, tensors_restored_on_error
from torchq.ptq.modes import quantizers_off
from torchq.ptq.rotation.heads import HeadSizes, find_heads
from torchq.ptq.rotation.online import rotate_online
from torchq.ptq.rotation.orthogonal import random_rotation
from torchq.ptq.rotation.stream import Stream, find_stream
from torchq.ptq.smoothing.sources import is_norm
from torchq.utils import NotebookText, device_of, evaluating
from torchq.workflow import is_quantized, quantizers

__all__ = ["RotationReport", "hadamard_"]


@dataclass(frozen=True)
class RotationReport(NotebookText):
    """The result of :func:`hadamard_`.

    Attributes:
        size: channels of the residual stream.
        is_hadamard: True for a Hadamard matrix with random signs, False for a random rotation.
        embeddings: paths of the tables that were rotated.
        writers: paths of the layers whose outputs were rotated.
        readers: paths of the layers whose inputs were rotated; they also took the norms' weights.
        heads: paths of the layers that make and read values that were rotated inside each head.
        online: paths of the layers whose inputs are rotated when the model runs.
        untied: paths of the layers that shared the table of an embedding and have their own weight
            now.
        error: the relative change of the float output.
    """

    size: int
    is_hadamard: bool
    embeddings: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    heads: tuple[tuple[str, str], ...]
    online: tuple[str, ...]
    untied: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        kind = "a Hadamard matrix" if self.is_hadamard else "a random rotation"
        text = (
            f"residual stream of {self.size} channels, rotated by {kind}: "
            f"{len(self.embeddings)} embeddings, {len(self.writers)} writers, "
            f"{len(self.readers)} readers; {len(self.heads)} attentions rotated inside their heads"
        )
        if self.online:
            text += f", {len(self.online)} layers with a rotation before them"
        if self.untied:
            text += f"; {', '.join(self.untied)} no longer shares the embedding"
        return f"{text}\noutput changed by {self.error:.1e}"


def hadamard_(
    model: nn.Module,
    example: Any = None,
    *,
    heads: bool = True,
    online: bool = False,
    seed: int = 0,
    tolerance: float | None = None,
) -> RotationReport:
    """Rotate the residual stream of a transformer with RMSNorm, in place.

    Call it before :func:`torchq.calibrate`, on a float or a quantized model. The weights of the
    norms move into the layers behind them; then the tables of embeddings and the outputs of the
    layers that write to the stream are multiplied by an orthogonal matrix, and the inputs of the
    layers that read it by its transpose. The float output stays the same, which is verified. In the
    rotated basis no channel has outliers, so that activations of few bits work. A call that fails
    changes nothing.

    It works by the flow of the model, so module names do not matter: Llama, Mistral, Qwen2 and
    their like, also without Hugging Face.

    Args:
        model: a language model with its head: an embedding, RMSNorm before each part, no bias in
            norms.
        example: arguments of one call; see :func:`torchq.graph.call_arguments`. None calls the
            model with eight numbers of tokens.
        heads: also rotate the values inside each attention head, where the layers are found.
        online: also rotate the inputs of the other layers that write to the stream, such as the
            last one of a SwiGLU, whose activations are the hardest. No layer before can take this
            rotation, so it is computed: each of these layers becomes a Sequential of the rotation
            and itself. Only for float models. A file that :func:`torchq.save` writes is loaded into
            a model that went through the same call.
        seed: of the random signs.
        tolerance: the largest relative change of the float output that is accepted; None means
            1e-5 for float32, and 8 units in the last place for other dtypes.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already.
        QuantizationError: the model is built in another way, such as with LayerNorm; or the float
            output changed by more than ``tolerance``.
    """
    _check_ready(model, online)
    if example is None:
        example = torch.arange(8, device=device_of(model)).unsqueeze(0)
    with torch.no_grad(), evaluating(model), quantizers_off(model), HeadSizes() as attention:
        flow = record(model, example, _is_leaf)
        stream = find_stream(flow)
        _check_modules(model, stream)
        pairs = find_heads(flow, stream, attention.sizes) if heads else []
        most = _most_error(stream) if tolerance is None else tolerance
        return _rotate_all(model, example, stream, pairs, _Plan(seed, online, most))


def _check_ready(model: nn.Module, online: bool) -> None:
    """Raise an error for a calibrated model, or for layers that cannot be wrapped any more."""
    if online and is_quantized(model):
        raise ConfigError(
            "hadamard_: got online=True and a quantized model; expected a float one. Call it "
            "before torchq.quantize_"
        )
    known = [name for name, q in quantizers(model).items() if q.calibrated]
    if known:
        raise ConfigError(
            f"hadamard_: got a calibrated model ({known[0]} has a range), whose ranges would be "
            "wrong afterwards; expected a call before torchq.calibrate"
        )


@dataclass(frozen=True)
class _Plan:
    """What to rotate by: the seed, whether also online, and the largest change of the output."""

    seed: int
    online: bool
    most: float


def _rotate_all(
    model: nn.Module,
    example: Any,
    stream: Stream,
    pairs: list[tuple[str, str, int]],
    plan: _Plan,
) -> RotationReport:
    """Rotate the heads and the stream, or change nothing if the output does not stay."""
    expected = _outputs(model, example)

    def change_of_output() -> float:
        return _relative_error(_outputs(model, example), expected)

    with tensors_restored_on_error(stream.modules()), ExitStack() as undo:
        untied = _untie(model, stream, undo)
        layers = dict(model.named_modules())
        if not _rotate_heads(layers, pairs, lambda: change_of_output() <= plan.most):
            pairs = []
        is_hadamard = _rotate(stream, plan.seed)
        others = stream.writers.keys() - {out for _, out, _ in pairs}
        names = [name for name in stream.writers if name in others and plan.online]
        rotated_online = rotate_online(model, names, undo)
        error = change_of_output()
        if not error <= plan.most:
            raise QuantizationError(
                f"hadamard_: the float output changed by {error:.1e}, relative; expected at "
                f"most {plan.most:.1e}. The model is as before. A norm may use its weight in "
                "another way than as a factor"
            )
        undo.pop_all()
    return _report(stream, pairs, is_hadamard, rotated_online, untied, error)


def _report(
    stream: Stream,
    pairs: list[tuple[str, str, int]],
    is_hadamard: bool,
    online: tuple[str, ...],
    untied: tuple[str, ...],
    error: float,
) -> RotationReport:
    return RotationReport(
        size=stream.size,
        is_hadamard=is_hadamard,
        embeddings=tuple(stream.embeddings),
        writers=tuple(stream.writers),
        readers=tuple(name for group in stream.readers.values() for name in group),
        heads=tuple((value, out) for value, out, _ in pairs),
        online=online,
        untied=untied,
        error=error,
    )


def _is_leaf(module: nn.Module) -> bool:
    """Return True for layers; modules that only look at the shape or dtype are looked into."""
    is_library = type(module).__module__.startswith("torch.nn.") and is_torch_leaf(module)
    is_layer = isinstance(module, (nn.Linear, nn.Embedding, QuantModule))
    return is_library or is_layer or is_norm(module)


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    found = tensors_in(call_model(model, example, device=device_of(model)))
    return [t.double() for t in found if t.is_floating_point()]


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(((f - e).norm() / e.norm().clamp(min=1e-30)).item() for f, e in pairs)


def _most_error(stream: Stream) -> float:
    dtype = next(iter(stream.embeddings.values())).weight.dtype
    return largest_change(1e-5, dtype)


def _check_modules(model: nn.Module, stream: Stream) -> None:
    """Raise an error for parameters that a rotation cannot reach."""
    if not stream.norms or not stream.writers:
        raise QuantizationError(
            "hadamard_: got a model without RMSNorm or Linear layers on its residual stream; "
            "expected a pre-norm transformer"
        )
    tables = {id(table.weight) for table in stream.embeddings.values()}
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(False))
    for layer in (*stream.writers.values(), *stream.layers()):
        if owners[id(layer.weight)] > 1 and id(layer.weight) not in tables:
            raise QuantizationError(
                "hadamard_: got layers that share a weight, and not with an embedding; expected a "
                "weight of each layer's own"
            )
    for name, norm in stream.norms.items():
        if getattr(norm, "bias", None) is not None:
            raise QuantizationError(f"hadamard_: {name}: got a norm with a bias; expected none")


def _untie(model: nn.Module, stream: Stream, undo: ExitStack) -> tuple[str, ...]:
    """Give layers that share the table of an embedding a weight of their own."""
    tables = {id(table.weight) for table in stream.embeddings.values()}
    found = []
    for group in stream.readers.values():
        for name, layer in group.items():
            if id(layer.weight) in tables:
                undo.callback(setattr, layer, "weight", layer.weight)
                layer.weight = nn.Parameter(
                    layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad
                )
                found.append(name)
    config = getattr(model, "config", None)
    if found and getattr(config, "tie_word_embeddings", False):
        undo.callback(setattr, config, "tie_word_embeddings", True)
        config.tie_word_embeddings = False  # type: ignore[union-attr]
    return tuple(found)


def _gain(name: str, norm: Any) -> tuple[Tensor, float]:
    """Return the factors of a norm, and the weight that means a factor of 1.

    Most norms multiply by their weight, and some by one more than it.
    """
    found = norm(torch.full_like(norm.weight, 1000.0).unsqueeze(0))[0].double()
    weight = norm.weight.double()
    # Ones of 1000 make the epsilon of the norm vanish; what remains is rounding.
    close = 4 * torch.finfo(norm.weight.dtype).eps
    for offset in (0.0, 1.0):
        if torch.allclose(found, weight + offset, rtol=close, atol=close):
            return weight + offset, 1.0 - offset
    raise QuantizationError(
        f"hadamard_: {name}: got a norm that does not multiply by its weight, or by one more; "
        "expected RMSNorm. The model is as before"
    )


def _rotate(stream: Stream, seed: int) -> bool:
    """Fold the norms and rotate the stream; return True for a Hadamard matrix."""
    matrix, is_hadamard = random_rotation(stream.size, seed)
    for name, norm in stream.norms.items():
        gain, neutral = _gain(name, norm)
        for layer in stream.readers[name].values():
            folded = (layer.weight.double() * gain) @ matrix.to(gain.device)
            layer.weight.copy_(folded.to(layer.weight.dtype))
        norm.weight.fill_(neutral)
    for table in stream.embeddings.values():
        _change_(table.weight, lambda w: w @ matrix.to(w.device))
    for layer in stream.writers.values():
        _change_(layer.weight, lambda w: matrix.T.to(w.device) @ w)
        if layer.bias is not None:
            _change_(layer.bias, lambda b: b @ matrix.to(b.device))
    return is_hadamard


def _rotate_heads(
    layers: dict[str, Any], pairs: list[tuple[str, str, int]], is_good: Callable[[], bool]
) -> bool:
    """Rotate the values of all attentions; undo it and return False if the output changes.

    One layer may make queries, keys and values, and positions do not commute with a rotation.
    """
    try:
        with tensors_restored_on_error(layers[name] for pair in pairs for name in pair[:2]):
            for value, out, size in pairs:
                _rotate_values(layers[value], layers[out], size)
            if not is_good():
                raise QuantizationError("hadamard_: the heads cannot be rotated")
    except QuantizationError:
        return False
    return True


def _rotate_values(value: Any, out: Any, size: int) -> None:
    """Rotate the values inside each head, by one matrix."""
    matrix, _ = random_rotation(size, 0)
    _change_(
        value.weight, lambda w: (matrix.T.to(w.device) @ w.unflatten(0, (-1, size))).flatten(0, 1)
    )
    if value.bias is not None:
        _change_(value.bias, lambda b: (b.unflatten(0, (-1, size)) @ matrix.to(b.device)).flatten())
    _change_(out.weight, lambda w: (w.unflatten(1, (-1, size)) @ matrix.to(w.device)).flatten(1, 2))


def _change_(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Compute a parameter anew, in float64."""
    parameter.copy_(change(parameter.double()).to(parameter.dtype))
