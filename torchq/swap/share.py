"""The part of a model's work that is quantized: its products on an example, or its weights."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchq.graph import tensors_in
from torchq.nn.convert import float_name
from torchq.utils import counting_operations, is_torchs_own, unfused_attention

#: Below this share of what the user did not exclude, a warning says why.
SMALL = 1 / 3
_REASONS_SHOWN = 3
#: Why a quantized layer is computed in float.
RESULT_IN_FLOAT = "its result is not quantized"
BEFORE_NORM = "a BatchNorm that is not folded follows"


@dataclass(frozen=True)
class Share:
    """How much of the work is quantized.

    Attributes:
        quantized: of the whole, 0 to 1.
        wanted: the part of the whole that the user did not exclude.
        float_work: what stays float against the user's wish: (what and why) -> its part of the
            whole.
        unit: of the work, in words.
    """

    quantized: float
    wanted: float
    float_work: Mapping[str, float]
    unit: str

    def __str__(self) -> str:
        return f"{self.quantized:.1%} of the {self.unit} quantized"


@dataclass(frozen=True)
class Part:
    """A part of the work of one module.

    Attributes:
        name: the path of the module.
        amount: of its work.
        reason: why it stays float; empty where it is quantized.
    """

    name: str
    amount: float
    reason: str


@dataclass(frozen=True)
class Work:
    """What each module of a model computes in its own forward, without its children.

    Attributes:
        measured: the amounts are multiply-adds of a run; otherwise numbers of weights.
        amounts: path of each module that computes anything -> how much.
        classes: path of each of them -> the name of its class.
        calls: path of a module that calls functions with weights -> the place of each call in its
            code -> the part of its amount.
        rows: samples of the run, which some of the work, as on a table of positions, does not grow
            with.
    """

    measured: bool
    amounts: Mapping[str, float]
    classes: Mapping[str, str]
    calls: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rows: int = 1

    def share(self, parts: Iterable[Part], chosen: Set[str]) -> Share | None:
        """Return how much of some parts is quantized; None where there is none to quantize.

        Reasons that are ``chosen`` are the user's.
        """
        parts = list(parts)
        total = sum(part.amount for part in parts)
        if not total:
            return None
        done = sum(part.amount for part in parts if not part.reason)
        excluded = sum(part.amount for part in parts if part.reason in chosen)
        float_work: dict[tuple[str, str], float] = defaultdict(float)
        counts: Counter[tuple[str, str]] = Counter()
        for part in parts:
            if part.reason and part.reason not in chosen:
                kind = self.classes[part.name], part.reason
                float_work[kind] += part.amount / total
                counts[kind] += 1
        texts = {}
        for kind, amount in sorted(float_work.items(), key=lambda item: -item[1]):
            number = f"{counts[kind]} " if counts[kind] > 1 else ""
            texts[f"{number}{': '.join(kind)}"] = amount
        unit = "multiply-adds" if self.measured else "weights of layers"
        return Share(done / total, 1 - excluded / total, texts, unit)


def work_of(
    model: nn.Module,
    products: Mapping[str, float] | None,
    calls: Mapping[str, Mapping[str, float]],
    example: object,
) -> Work:
    """Return the multiply-adds that a run showed; the sizes of weights without one."""
    amounts = dict(_weights(model)) if products is None else dict(products)
    classes = {name: type(model.get_submodule(name)).__name__ for name in amounts}
    lengths = (tensor.shape[0] for tensor in tensors_in(example) if tensor.dim())
    rows = max(next(lengths, 1), 1)
    return Work(products is not None, amounts, classes, calls, rows)


def _weights(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the number of weights that each module multiplies by; tables are looked up."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            materialized = (
                p for p in module.parameters(recurse=False) if not is_lazy(p)
            )
            count = sum(p.numel() for p in materialized if p.dim() > 1)
            if count:
                yield name, count


@contextmanager
def counting_products(
    model: nn.Module,
) -> Iterator[tuple[dict[str, float], Callable[[], int]]]:
    """Yield what becomes path -> multiply-adds of each module's own forward in the block.

    Beside it the function that returns the operations so far, two for each multiply-add.
    """
    flops_by_name: Counter[str] = Counter()
    products: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(unfused_attention())  # torch counts nothing in others
        operations = stack.enter_context(counting_operations(model))
        calls = _Calls(operations, flops_by_name)
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # They take no hooks.
            before, after = calls.hooks(name)
            stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after))
        yield products, operations
    products.update({name: flops / 2 for name, flops in flops_by_name.items() if flops})


class _Calls:
    """The operations of each call, less those of the calls inside."""

    def __init__(self, total: Callable[[], int], found: Counter[str]) -> None:
        self._total, self._found = total, found
        self._open: list[tuple[int, int]] = []

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what runs before and after the forward of the module ``name``."""

        def before(module: nn.Module, args: object) -> None:
            self._open.append((self._total(), 0))

        def after(module: nn.Module, args: object, output: object) -> None:
            start, inside = self._open.pop()
            done = self._total() - start
            own_flops = done - inside
            # Torch counts nothing in some of its kernels.
            if isinstance(module, nn.RNNBase):
                own_flops = 2 * _recurrent(module, args)
            elif not own_flops:
                own_flops = 2 * _of_kernel(module, output)
            self._found[name] += own_flops
            if self._open:
                outer, others = self._open[-1]
                self._open[-1] = (outer, others + done)

        return before, after


def _of_kernel(module: nn.Module, output: object) -> int:
    """Return the multiply-adds of a convolution in an operator that torch knows nothing of.

    An example is torchvision's DeformConv2d. Every result reads each weight of its channel once.
    """
    weight: Any = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None and not is_torchs_own(module)
    is_kernel = isinstance(weight, nn.Parameter) and weight.dim() > 2
    if not (
        is_leaf
        and is_kernel
        and isinstance(output, Tensor)
        and output.dim() == weight.dim()
    ):
        return 0
    return (
        output.numel() * weight[0].numel() if output.shape[1] == weight.shape[0] else 0
    )


def _recurrent(module: nn.RNNBase, args: object) -> int:
    """Return the multiply-adds of a recurrent layer: each weight once for each step."""
    x = next(tensors_in(args), None)
    steps = 0 if x is None else x.numel() // max(module.input_size, 1)
    weights: Iterator[Tensor] = (p for p in module.parameters() if p.dim() > 1)
    return steps * sum(weight.numel() for weight in weights)


def warn_if_small(model: nn.Module, share: Share | None) -> None:
    """Warn where little of what the user wanted quantized is, with the largest reasons first."""
    if share is None or not share.wanted:
        return
    # A quantizer of a result is a small thing to add. The plan and the export say where.
    by_result = sum(
        part
        for reason, part in share.float_work.items()
        if reason.endswith(f": {RESULT_IN_FLOAT}")
    )
    if share.quantized + by_result >= SMALL * share.wanted:
        return
    reasons = [f"{reason} ({part:.1%})" for reason, part in share.float_work.items()]
    hidden = len(reasons) - _REASONS_SHOWN
    more = f"; {hidden} more" if hidden > 0 else ""
    warnings.warn(
        f"{float_name(model)}: only {share}. Float stay {'; '.join(reasons[:_REASONS_SHOWN])}"
        f"{more}",
        stacklevel=3,
    )
