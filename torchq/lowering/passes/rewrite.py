"""Joining integer layers in a traced model: each rule replaces a pattern by an equal one that is closer to the kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx, nn

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import base_name
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.lookup_table import LookupTable
from torchq.lowering.modules.pooling import CodesAvgPool2d, CodesMaxPool2d
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.ops.epilogues import ACTIVATIONS
from torchq.lowering.passes.fold_batchnorm import NORMS, fold_norm
from torchq.lowering.passes.propagate_qparams import Settler
from torchq.lowering.qparams import QParams

__all__ = ["Rewriter"]


class Rewriter(Settler):
    """Rewrites one traced model, in place."""

    def run(self) -> None:
        """Apply all rules until nothing changes, then settle what depends on the result."""
        self.separate()
        self.tables = {}
        rules: list[Callable[[fx.Node], bool]] = [  # the order matters: clamps join qparams before kernels take them
            self._share, self._cancel, self._never_negative, self._quantize_earlier, self._dequantize_later,
            self._fold_norm, self._fuse_activation, self._fuse_add, self._look_up, self._average_codes, self._fuse_output,
        ]  # fmt: skip
        while any(self._everywhere(rule) for rule in rules):
            pass  # a rule may make room for earlier ones
        self.settle()

    def _everywhere(self, rule: Callable[[fx.Node], bool]) -> bool:
        """Apply one rule wherever it fits; whether it did."""
        changed, present = False, set(self.graph.nodes)
        for node in list(self.graph.nodes):
            if node in present and (node.users or node.op == "output") and rule(node):
                self.prune()
                changed, present = True, set(self.graph.nodes)
        return changed

    def _share(self, node: fx.Node) -> bool:
        """One tensor, one qparams: one Quantize."""
        changed = False
        kept: dict[QParams, fx.Node] = {}
        for user in sorted(node.users):
            module = self.module(user)
            if isinstance(module, Quantize):
                if module.qparams in kept:
                    user.replace_all_uses_with(kept[module.qparams])
                    self.graph.erase_node(user)
                    changed = True
                else:
                    kept[module.qparams] = user
        return changed

    def _cancel(self, node: fx.Node) -> bool:
        """Codes -> values -> the same codes."""
        module, source = self.module(node), match.source_of(node)
        before, codes = self.module(source), source and match.source_of(source)
        if codes is None or not (
            isinstance(module, Quantize)
            and isinstance(before, Dequantize)
            and module.qparams == before.qparams
        ):
            return False
        node.replace_all_uses_with(codes)
        self.graph.erase_node(node)
        return True

    def _never_negative(self, node: fx.Node) -> bool:
        """Codes of values that are never negative start at 0: faster, and exact where a shifted zero costs bits of the bias."""
        quantize = self.module(node)
        if (
            not isinstance(quantize, Quantize)
            or quantize.qparams.quant_min == quantize.qparams.zero_point
            or not self._positive(node.args[0])
        ):
            return False
        quantize.qparams = quantize.qparams.clamped(
            0.0, float("inf"), keep_zero=self._meets_others(node)
        )
        return True

    def _positive(self, node: object) -> bool:
        if not isinstance(node, fx.Node):
            return False
        layer, module = self.layer(node), self.module(node)
        if layer is not None:
            return layer.activation == "relu" or (
                layer.activation == "clamp" and layer.arguments[0] >= 0
            )
        if isinstance(module, Dequantize):
            return module.qparams.quant_min >= module.qparams.zero_point
        bounds = match.clamp_bounds(match.activation_of(node, self.modules))
        if bounds is not None:
            return bounds[0] >= 0
        return match.keeps_sign(node, self.modules) and all(
            map(self._positive, node.all_input_nodes)
        )

    def _quantize_earlier(self, node: fx.Node) -> bool:
        """Quantize before what commutes with it: clamps, max pooling, concatenation, rearranging."""
        quantize = self.module(node)
        if not isinstance(quantize, Quantize):
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        bounds = match.clamp_bounds(match.activation_of(source, self.modules))
        if bounds is not None and all(
            isinstance(self.module(user), Quantize) for user in source.users
        ):
            qparams = quantize.qparams.clamped(*bounds, keep_zero=self._meets_others(node))
            self.replace(node, Quantize(qparams), "clamped", source.args[0])  # type: ignore[arg-type]
            return True
        if len(source.users) > 1:
            return False
        pool = match.max_pool_of(source, self.modules)
        inputs: list[fx.Node | None] = [*(match.concatenated(source) or ())] or [
            match.moved(source, self.modules) or (match.source_of(source) if pool else None)
        ]
        if inputs == [None]:
            return False
        for tensor in dict.fromkeys(inputs):
            assert isinstance(tensor, fx.Node)
            with self.graph.inserting_before(source):
                source.replace_input_with(
                    tensor,
                    self.call(f"{base_name(node)}_earlier", Quantize(quantize.qparams), tensor),
                )
        node.replace_all_uses_with(source)
        self.graph.erase_node(node)
        if pool:
            self._pool_codes(source, pool)
        return True

    def _meets_others(self, node: fx.Node) -> bool:
        """Whether these codes are concatenated with others, which must then have the same zero; perhaps as values, until rules move."""
        return any(
            match.concatenated(user) or (self._will_pass(user) and self._meets_others(user))
            for user in node.users
        )

    def _will_pass(self, node: fx.Node) -> bool:
        pooled = match.max_pool_of(node, self.modules) is not None
        return pooled or self.codes_pass(node) or isinstance(self.module(node), Dequantize)

    def _pool_codes(self, node: fx.Node, pool: nn.MaxPool2d) -> fx.Node:
        settings = (
            pool.kernel_size,
            pool.stride,
            pool.padding,
            pool.dilation,
            False,
            pool.ceil_mode,
        )
        return self.replace(node, CodesMaxPool2d(*settings), "codes", node.args[0])  # type: ignore[arg-type]

    def _dequantize_later(self, node: fx.Node) -> bool:
        """Rearrange codes instead of the values made from them."""
        pool = match.max_pool_of(node, self.modules)
        tensors: list[fx.Node | None] = [*(match.concatenated(node) or ())] or [
            match.moved(node, self.modules) or (match.source_of(node) if pool else None)
        ]
        found = [self.module(tensor) for tensor in tensors]
        qparams = {module.qparams for module in found if isinstance(module, Dequantize)}
        if len(qparams) != 1 or not all(isinstance(module, Dequantize) for module in found):
            return False
        for tensor in dict.fromkeys(tensors):
            assert isinstance(tensor, fx.Node)
            node.replace_input_with(tensor, tensor.args[0])  # type: ignore[arg-type]
        if pool:
            node = self._pool_codes(node, pool)
        with self.graph.inserting_after(node):
            values = self.call(
                f"{base_name(node)}_values", Dequantize(qparams.pop(), self.dtype), node
            )
        node.replace_all_uses_with(values, delete_user_cb=lambda user: user is not values)
        return True

    def _look_up(self, node: fx.Node) -> bool:
        """A function between two qparams is a table; so is going from one qparams to another."""
        values, function, end = (
            match.source_of(node),
            match.pointwise_of(node, self.modules),
            next(iter(node.users), node),
        )
        if isinstance(self.module(node), Quantize):
            function, end = _same, node
        before, after = self.module(values), self.module(end)
        if (
            function is None
            or not isinstance(before, Dequantize)
            or not isinstance(after, Quantize)
            or (end is not node and len(node.users) > 1)
        ):
            return False
        assert values is not None
        table = self.replace(
            end,
            LookupTable(function, before.qparams, after.qparams, self.dtype),
            "table",
            values.args[0],
        )  # type: ignore[arg-type]
        self.tables[table] = function, before.qparams, after.qparams
        return True

    def _average_codes(self, node: fx.Node) -> bool:
        """Average codes between two qparams."""
        pool, values = match.average_pool_of(node, self.modules), match.source_of(node)
        before, end = self.module(values), next(iter(node.users), None)
        after = self.module(end)
        if (
            pool is None
            or len(node.users) != 1
            or not isinstance(before, Dequantize)
            or not isinstance(after, Quantize)
        ):
            return False
        self.replace(
            end, CodesAvgPool2d(pool, before.qparams, after.qparams), "codes", values.args[0]
        )  # type: ignore[arg-type, union-attr]
        return True

    def _plain(self, node: object) -> Int8Layer | None:
        """The integer layer of a node with one reader and nothing fused behind it yet."""
        layer = self.layer(node)
        plain = layer is not None and layer.output_qparams is None and layer.activation == "none"
        return layer if plain and isinstance(node, fx.Node) and len(node.users) == 1 else None

    def _fold_norm(self, node: fx.Node) -> bool:
        """BatchNorm in eval mode is a scale and a shift per channel: it goes into the scales and the bias, without new rounding."""
        norm, source = self.module(node), node.args[0] if node.args else None
        layer = self._plain(source)
        if (
            not isinstance(norm, NORMS)
            or not isinstance(layer, Int8Conv)
            or len(source.args) > 1
            or norm.running_var is None
        ):  # type: ignore[union-attr]
            return False
        fold_norm(self.own(source), norm)  # type: ignore[arg-type]
        node.replace_all_uses_with(source)  # type: ignore[arg-type]
        self.graph.erase_node(node)
        return True

    def _fuse_activation(self, node: fx.Node) -> bool:
        """The kernel applies the activation."""
        found = match.activation_of(node, self.modules)
        source = node.args[0] if node.args else None
        layer = self._plain(source)
        if (
            found is None
            or layer is None
            or (isinstance(layer, Int8Conv) and not ACTIVATIONS[found[0]].on_conv)
        ):
            return False
        if all(
            isinstance(self.module(user), Quantize) for user in node.users
        ) and match.clamp_bounds(found):
            return False  # becomes part of the qparams
        layer = self.own(source)  # type: ignore[arg-type]
        layer.activation, layer.arguments = found[0], list(found[1])
        node.replace_all_uses_with(source)  # type: ignore[arg-type]
        self.graph.erase_node(node)
        return True

    def _fuse_add(self, node: fx.Node) -> bool:
        """The kernel of a convolution adds the other operand."""
        pair = match.added(node)
        if pair is None:
            return False
        for conv, other in sorted(
            (pair, pair[::-1]), key=lambda p: p[0], reverse=True
        ):  # the later one: its input may be freed
            layer = self._plain(conv)
            if isinstance(layer, Int8Conv) and layer.adds and len(conv.args) == 1:
                self.own(conv)
                with self.graph.inserting_before(node):
                    new = self.graph.call_module(str(conv.target), (conv.args[0], other))
                node.replace_all_uses_with(new)
                self.graph.erase_node(node)
                self.graph.erase_node(conv)
                return True
        return False

    def _fuse_output(self, node: fx.Node) -> bool:
        """The kernel rounds its result onto the qparams of the only reader."""
        layer = self.layer(node)
        if layer is None or layer.output_qparams is not None or len(node.users) != 1:
            return False
        (user,) = node.users
        quantize = self.module(user)
        if not isinstance(quantize, Quantize):
            return False
        residual = node.args[1] if len(node.args) > 1 else None
        kept = self.module(residual)
        if residual is not None and not isinstance(kept, Dequantize):
            return False  # adding floats, the kernel returns floats
        layer = self.own(node)
        bounds = match.clamp_bounds((layer.activation, tuple(layer.arguments)))
        qparams = (
            quantize.qparams
            if bounds is None
            else quantize.qparams.clamped(*bounds, keep_zero=self._meets_others(user))
        )
        layer.output_qparams = qparams
        if isinstance(kept, Dequantize):
            layer.residual_qparams = kept.qparams
            node.args = (node.args[0], residual.args[0])  # type: ignore[union-attr]
        elif bounds is not None:
            layer.activation, layer.arguments = (
                ("none", []) if qparams.saturates_by_itself else ("clamp", list(qparams.bounds))
            )
        user.replace_all_uses_with(node)
        self.graph.erase_node(user)
        return True


def _same(x: Tensor) -> Tensor:
    return x
