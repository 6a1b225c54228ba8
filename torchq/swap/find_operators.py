"""Finding the operators in the forward of modules, and putting quantizable modules in their place."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.nn import (
    Add,
    Cat,
    MatMul,
    Mul,
    QuantModule,
    ScaledDotProductAttention,
    Tap,
    TensorQuantizer,
    replace_operators_,
    trace_forward,
)
from torchq.utils import modules_with_names

__all__ = ["MODULES", "Operator", "Untraceable", "find_operators", "insert_"]

_FUNCTIONS: dict[str, list[Any]] = {
    "add": [operator.add, operator.iadd, torch.add, "add", "add_"],
    "mul": [operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"],
    "matmul": [operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "pool": [
        F.max_pool1d,
        F.max_pool2d,
        F.max_pool3d,
        F.avg_pool1d,
        F.avg_pool2d,
        F.avg_pool3d,
        torch.max_pool2d,
        torch.avg_pool1d,
    ]
    + [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, torch.mean, "mean"],
    "attention": [F.scaled_dot_product_attention],
    "activation": [
        F.silu,
        F.hardswish,
        F.hardsigmoid,
        F.leaky_relu,
        F.elu,
        F.mish,
        F.sigmoid,
        torch.sigmoid,
        "sigmoid",
    ],
}
_KINDS = {target: kind for kind, targets in _FUNCTIONS.items() for target in targets}
#: The module that stands for each kind of operator.
MODULES: dict[str, type[nn.Module]] = {
    "add": Add,
    "mul": Mul,
    "matmul": MatMul,
    "cat": Cat,
    "pool": Tap,
    "activation": Tap,
    "attention": ScaledDotProductAttention,
}
_OPERANDS = {"add": 2, "mul": 2, "matmul": 2, "attention": 3}
#: Methods and attributes whose results are numbers.
_NUMBERS = frozenset(
    ["size", "shape", "dim", "ndim", "numel", "device", "dtype", "__len__", "stride"]
)
_LINEAR = (
    *(
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.Linear,
    ),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
#: What fusing leaves behind, and what evaluation mode removes.
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Operator:
    """One operator in the forward of one module.

    Attributes:
        owner, owner_names: the module and its dotted paths.
        node: the node in its traced forward.
        kind: "add", "mul", "matmul", "attention", "cat", "pool" or "activation".
        child: name of the child that will stand there.
        main: for "add", which operand (0 or 1) comes straight from a convolution, linear layer or BatchNorm; the later one of two.
    """

    owner: nn.Module
    owner_names: tuple[str, ...]
    node: str
    kind: str
    child: str
    main: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted paths of the child."""
        return tuple(f"{name}.{self.child}" if name else self.child for name in self.owner_names)

    def module(self) -> nn.Module:
        """A new float module that computes the operator."""
        return MODULES[self.kind]()

    def open_main(self) -> None:
        """Switch off the quantizer of the :attr:`main` operand, once the child is quantized."""
        if self.main is not None:
            quantizer = getattr(
                self.owner.get_submodule(self.child),
                ("input_quantizer", "other_quantizer")[self.main],
            )
            if isinstance(quantizer, TensorQuantizer):
                quantizer.mode = "off"


@dataclass(frozen=True)
class Untraceable:
    """A module whose forward torch.fx cannot follow, and why."""

    owner: nn.Module
    owner_names: tuple[str, ...]
    reason: str


def find_operators(
    model: nn.Module, kinds: frozenset[str]
) -> tuple[list[Operator], list[Untraceable]]:
    """The operators of some kinds between tensors in the forwards of all modules that are not torch's own.

    Operands that are numbers, parameters or buffers do not count. Each module is traced alone, so one that cannot be traced hides
    only its own operators.
    """
    found: list[Operator] = []
    failed: list[Untraceable] = []
    for names, module in modules_with_names(model):
        if isinstance(module, (QuantModule, TensorQuantizer)) or type(module).__module__.startswith(
            ("torch.nn.", "torchq.nn.")
        ):
            continue
        try:
            graphs = [trace_forward(module, training) for training in (False, True)]
        except Exception as error:  # whatever the model's code raises on a Proxy
            failed.append(
                Untraceable(
                    module,
                    names,
                    f"its forward cannot be traced ({type(error).__name__}: {_first_line(error)})",
                )
            )
            continue
        evaluated, trained = (_candidates(graph, kinds) for graph in graphs)
        if [(n.name, k) for n, k in evaluated] != [(n.name, k) for n, k in trained]:
            failed.append(
                Untraceable(module, names, "its operators differ between training and evaluation")
            )
            continue
        counts: dict[str, int] = {}
        for node, kind in evaluated:
            counts[kind] = number = counts.get(kind, -1) + 1
            child = f"quant_{kind}" + (f"_{number}" if number else "")
            found.append(
                Operator(
                    module,
                    names,
                    node.name,
                    kind,
                    child,
                    _main_operand(module, node) if kind == "add" else None,
                )
            )
    return found, failed


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _candidates(graph: fx.Graph, kinds: frozenset[str]) -> list[tuple[fx.Node, str]]:
    numbers: set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        if _is_number(node, numbers):
            numbers.add(node)
        kind = _KINDS.get(node.target) if node.op in ("call_function", "call_method") else None
        if kind in kinds and kind is not None and _is_between_tensors(node, kind, numbers):
            found.append((node, kind))
    return found


def _is_number(node: fx.Node, numbers: set[fx.Node]) -> bool:
    if node.op == "call_method" and node.target in _NUMBERS:
        return True
    if node.op == "call_function" and node.target is getattr and node.args[1] in _NUMBERS:
        return True
    sources = node.all_input_nodes
    return (
        bool(sources) and node.op != "call_module" and all(source in numbers for source in sources)
    )


def _is_between_tensors(node: fx.Node, kind: str, numbers: set[fx.Node]) -> bool:
    if kind == "pool" and node.target in (torch.mean, "mean") and not _is_spatial(node):
        return False
    rest: dict[str, Any] = {}
    if kind in ("pool", "activation"):
        operands = list(node.args[:1])
    elif kind == "attention":
        operands = list(node.args[:3])
    elif kind == "cat":
        operands = (
            list(node.args[0])
            if node.args and isinstance(node.args[0], (list, tuple))
            else list(node.args[:1])
        )
        rest = {name: value for name, value in node.kwargs.items() if name != "dim"}
    else:
        operands, rest = list(node.args), dict(node.kwargs)
    tensors = all(
        isinstance(o, fx.Node) and o.op != "get_attr" and o not in numbers for o in operands
    )
    return tensors and not rest and len(operands) == _OPERANDS.get(kind, len(operands))


def _is_spatial(node: fx.Node) -> bool:
    """Whether a mean goes over several dimensions: global pooling."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(dims, (tuple, list)) and len(dims) > 1


def _main_operand(module: nn.Module, node: fx.Node) -> int | None:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    ends = [
        (order[o], i)
        for i, o in enumerate(node.args)
        if isinstance(o, fx.Node) and _ends_linear(module, o)
    ]
    return max(ends)[1] if ends else None


def _ends_linear(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node is the call of a layer without activation, or of a Sequential that ends in one."""
    if node.op != "call_module":
        return False
    called = module.get_submodule(str(node.target))
    while isinstance(called, nn.Sequential) and (
        steps := [step for step in called if not isinstance(step, _NOTHING)]
    ):
        called = steps[-1]
    if isinstance(called, _NOTHING) and node.all_input_nodes:
        return _ends_linear(module, node.all_input_nodes[0])
    return isinstance(called, _LINEAR)


def insert_(operators: list[Operator]) -> None:
    """Put a float module in the place of each operator, in place."""
    by_owner: dict[int, list[Operator]] = {}
    for found in operators:
        by_owner.setdefault(id(found.owner), []).append(found)
    for group in by_owner.values():
        owner = group[0].owner
        for found in group:
            owner.add_module(found.child, found.module().train(owner.training))
        try:
            replace_operators_(owner, {found.node: found.child for found in group})
        except Exception:
            for found in group:
                delattr(owner, found.child)
            raise
