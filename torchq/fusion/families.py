"""The families of blocks that fuse_ knows by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.fusion.blocks import BLOCKS, BlockRule, Merge, main_layer, remove
from torchq.fusion.modules import is_layer


class GhostV3Rule(BlockRule):
    """Two linear parts, each with its own activation behind it, that become Sequentials."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``primary_rpr_*`` and ``cheap_rpr_*`` of ``block``, in place."""
        for part, result in (("primary", "primary_conv"), ("cheap", "cheap_operation")):
            names = [f"{part}_rpr_{kind}" for kind in ("conv", "scale", "skip")]
            branches: list[nn.Module] = []
            for name in names:
                branch = getattr(block, name, None)
                if isinstance(branch, nn.ModuleList):
                    branches.extend(branch)
                elif branch is not None:
                    branches.append(branch)
            layer = merge(
                lambda x, branches=branches: sum(branch(x) for branch in branches),
                main_layer(block, tuple(names)),
            )
            activation = getattr(block, f"{part}_activation", nn.Identity())
            setattr(block, result, nn.Sequential(layer.make(), activation))
            remove(block, names)
        block.infer_mode = True
        return None


class VanillaActivationRule(BlockRule):
    """A relu, a depthwise convolution by a parameter of the activation itself, a BatchNorm."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``bn`` into ``weight`` and ``bias`` of ``block``, in place."""
        channels, pad = block.weight.shape[0], (block.weight.shape[-1] - 1) // 2

        def linear(x: Tensor) -> Any:
            return block.bn(F.conv2d(x, block.weight, block.bias, padding=pad, groups=channels))

        layer = merge(linear, in_channels=channels).make()
        remove(block, ["bn", "bias"])
        block.weight, block.bias = layer.weight, layer.bias
        block.deploy = True
        return None


class VanillaNetRule(BlockRule):
    """A stem and a classifier of two convolutions each, which merge where the slope between is 1.

    The blocks in the middle have a rule of their own.
    """

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``stem1`` and ``stem2``, ``cls1`` and ``cls2`` of ``block``, in place."""
        conv, norm, activation = block.stem2
        pool, dropout, *classifier = block.cls1

        def stem(x: Tensor) -> Any:
            return norm(conv(F.leaky_relu(block.stem1(x), block.act_learn)))

        def classify(x: Tensor) -> Any:
            return block.cls2(F.leaky_relu(nn.Sequential(*classifier)(x), block.act_learn))

        first, last = merge(stem, block.stem1[0]), merge(classify, classifier[0])
        remove(block, ["stem1", "stem2", "cls1", "cls2"])
        block.stem = nn.Sequential(first.make(), activation)
        block.cls = nn.Sequential(pool, dropout, last.make())
        block.deploy = True
        return None


class ImplicitHeadRule(BlockRule):
    """YOLOv7 detection heads: ``im[i] * (m[i](x + ia[i]))`` with learned vectors."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``ia`` and ``im`` into ``m``, in place."""
        for index, layer in enumerate(block.m):
            before, after = block.ia[index], block.im[index]
            merged = merge(lambda x, b=before, a=after, m=layer: a(m(b(x))), layer)
            merged.put_into(layer)
            block.ia[index], block.im[index] = nn.Identity(), nn.Identity()
        return None


def _needs_more_than_one(block: Any) -> bool:
    """Return True if the forward of ``block`` has more than one required argument."""
    parameters = inspect.signature(block.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) > 1


def _add_rbr(block: Any, x: Tensor) -> Any:
    """Return the sum of a RepVGG block's branches on ``x``."""
    total = block.rbr_dense(x) + block.rbr_1x1(x)
    return total if block.rbr_identity is None else total + block.rbr_identity(x)


def _add_ghost(block: Any, x: Tensor) -> Any:
    """Return the cheap operation of a RepGhost block on ``x``, with its extra branches."""
    pairs = zip(block.fusion_conv, block.fusion_bn, strict=True)
    return sum((norm(conv(x)) for conv, norm in pairs), start=block.cheap_operation(x))


def _empty_ghost(block: Any) -> None:
    block.fusion_conv, block.fusion_bn = nn.ModuleList(), nn.ModuleList()


def _use_forward_fuse(block: Any) -> None:
    block.forward = block.forward_fuse  # as Ultralytics' own fuse does


def _is_module(block: Any, *names: str) -> bool:
    return all(isinstance(getattr(block, name, None), nn.Module) for name in names)


def _wraps_layer(block: Any, name: str) -> bool:
    return is_layer(getattr(getattr(block, name, None), "conv", None))


def _implicit(block: Any) -> bool:
    lists = [getattr(block, name, None) for name in ("m", "ia", "im")]
    return all(isinstance(each, nn.ModuleList) for each in lists) and any(
        hasattr(each, "implicit") for each in (*block.ia, *block.im)
    )


def _fully_fused(block: Any) -> bool:
    return bool(block.fully_fused or block.partially_fused)


def _two_heads(name: str, *heads: str) -> BlockRule:
    """Return the rule of classifiers for two teachers, whose results are averaged."""
    return BlockRule(
        name=name, has=heads, branches=heads, when=lambda b: _is_module(b, *heads), loose=True
    )


_RBR = ("rbr_dense", "rbr_1x1", "rbr_identity", "rbr_avg", "id_tensor")
_RBR_AFTER = ("nonlinearity", "se", "post_se", "act", "activation")

#: All built-in families, the general ones first: later entries are tried first.
FAMILIES: tuple[BlockRule, ...] = (
    # PaddleDetection PP-YOLOE, RT-DETR
    BlockRule(
        name="ppyoloe",
        has=("conv1", "conv2", "act"),
        branches=("conv1", "conv2"),
        writes="conv",
        bypass=("act",),
        lacks=("conv",),
        when=lambda b: _wraps_layer(b, "conv1") and _wraps_layer(b, "conv2"),
        loose=True,
    ),
    # Ultralytics RepConv, and Conv2, whose branches share one BatchNorm
    BlockRule(
        name="ultralytics-repconv",
        has=("conv1", "conv2", "forward_fuse"),
        branches=("conv1", "conv2", "bn"),
        writes="conv",
        bypass=("act",),
        lacks=("conv",),
        finish=_use_forward_fuse,
        loose=True,
    ),
    BlockRule(
        name="ultralytics-conv2",
        has=("conv", "cv2", "bn", "forward_fuse"),
        branches=("conv", "cv2"),
        writes="conv",
        bypass=("act", "bn"),
        finish=_use_forward_fuse,
        loose=True,
    ),
    # Ultralytics RepVGGDW: the large depthwise kernels of YOLOv10's CIB blocks
    BlockRule(
        name="ultralytics-repvggdw",
        has=("conv", "conv1", "act", "forward_fuse"),
        branches=("conv", "conv1"),
        writes="conv",
        bypass=("act",),
        finish=_use_forward_fuse,
    ),
    # RepVGG, RepVGGplus, YOLOv6, YOLOv7
    BlockRule(
        name="repvgg",
        has=("rbr_dense", "rbr_1x1"),
        branches=_RBR,
        writes="rbr_reparam",
        bypass=_RBR_AFTER,
        flags={"deploy": True},
        when=lambda b: _is_module(b, "rbr_dense"),
    ),
    BlockRule(
        name="repvgg-custom-l2",
        has=("rbr_dense", "rbr_1x1", "rbr_identity"),
        branches=_RBR,
        writes="rbr_reparam",
        flags={"deploy": True},
        when=lambda b: _is_module(b, "rbr_dense") and _needs_more_than_one(b),
        linear=_add_rbr,
    ),
    # YOLOv6 QARepVGG: the BatchNorm behind the addition is folded afterwards like any other
    BlockRule(
        name="qarepvgg",
        has=("rbr_dense", "rbr_1x1", "bn"),
        branches=_RBR,
        writes="rbr_reparam",
        bypass=(*_RBR_AFTER, "bn"),
        flags={"deploy": True},
        when=lambda b: _is_module(b, "rbr_dense", "bn"),
    ),
    # MobileOne, FastViT (Apple)
    BlockRule(
        name="mobileone",
        has=("rbr_conv", "rbr_scale"),
        branches=("rbr_conv", "rbr_scale", "rbr_skip"),
        writes="reparam_conv",
        bypass=("se", "activation"),
        lacks=("reparam_conv",),
        flags={"inference_mode": True},
    ),
    BlockRule(
        name="large-kernel",
        has=("lkb_origin", "small_conv"),
        branches=("lkb_origin", "small_conv"),
        writes="lkb_reparam",
        bypass=("activation",),
        lacks=("lkb_reparam",),
    ),
    BlockRule(
        name="repmixer",
        has=("mixer", "norm"),
        branches=("mixer", "norm", "layer_scale"),
        writes="reparam_conv",
        lacks=("reparam_conv",),
        when=lambda b: (
            _is_module(b, "mixer", "norm")
            and (hasattr(b, "reparam_conv") or hasattr(b, "use_layer_scale"))
        ),
        loose=True,
    ),
    BlockRule(
        name="repcpe",
        has=("pe",),
        branches=("pe",),
        writes="reparam_conv",
        lacks=("reparam_conv",),
        when=lambda b: is_layer(b.pe),
        loose=True,
    ),
    # timm
    BlockRule(
        name="timm",
        has=("conv_kxk", "reparam_conv"),
        branches=("conv_kxk", "conv_1x1", "conv_scale", "identity", "drop_path"),
        writes="reparam_conv",
        bypass=("attn", "se", "act"),
        lacks=("reparam_conv",),
    ),
    BlockRule(
        name="timm-large-kernel",
        has=("large_conv", "small_conv", "reparam_conv"),
        branches=("large_conv", "small_conv"),
        writes="reparam_conv",
        bypass=("se", "act"),
        lacks=("reparam_conv",),
        when=lambda b: _is_module(b, "large_conv"),
    ),
    BlockRule(
        name="timm-repcpe",
        has=("pos_enc", "reparam_conv"),
        branches=("pos_enc",),
        writes="reparam_conv",
        lacks=("reparam_conv",),
    ),
    GhostV3Rule(
        name="ghostnetv3",
        has=("primary_rpr_conv", "cheap_rpr_conv"),
        branches=("primary_rpr_*", "cheap_rpr_*"),
        writes="primary_conv",
    ),
    BlockRule(
        name="ghostnetv3-bottleneck",
        has=("dw_rpr_conv", "dw_rpr_scale", "conv_dw"),
        branches=("dw_rpr_*",),
        writes="conv_dw",
        flags={"infer_mode": True},
        when=lambda b: _is_module(b, "dw_rpr_conv") and len(b.dw_rpr_conv) > 0,
        linear=lambda b, x: sum((conv(x) for conv in b.dw_rpr_conv), start=b.dw_rpr_scale(x)),
    ),
    BlockRule(
        name="repghost",
        has=("fusion_conv", "fusion_bn", "cheap_operation"),
        branches=("fusion_conv", "fusion_bn"),
        writes="cheap_operation",
        when=lambda b: _is_module(b, "fusion_conv") and len(b.fusion_conv) > 0,
        linear=_add_ghost,
        finish=_empty_ghost,
    ),
    # YOLOv6 CSLA: factors instead of BatchNorms in the branches, and no deployed form
    BlockRule(
        name="yolov6-linear-add",
        has=("conv", "scale_conv", "conv_1x1", "scale_1x1"),
        branches=("conv", "scale_conv", "conv_1x1", "scale_1x1", "scale_identity", "bn"),
        bypass=("nonlinearity",),
    ),
    # RepViT
    BlockRule(
        name="repvit-depthwise",
        has=("conv", "conv1", "bn"),
        branches=("conv", "conv1", "bn"),
        when=lambda b: _is_module(b, "conv", "bn") and is_layer(b.conv1),
        loose=True,
    ),
    BlockRule(
        name="repvit-residual",
        has=("m", "drop"),
        branches=("m",),
        when=lambda b: _is_module(b, "m") and not isinstance(b.m, nn.ModuleList),
        loose=True,
    ),
    _two_heads("repvit-classifier", "classifier", "classifier_dist"),
    _two_heads("timm-distilled-classifier", "head", "head_dist"),
    # mmpretrain
    BlockRule(
        name="mmpretrain-repvgg",
        has=("branch_3x3", "branch_1x1"),
        branches=("branch_3x3", "branch_1x1", "branch_norm"),
        writes="branch_reparam",
        bypass=("se_layer", "act"),
        flags={"deploy": True},
    ),
    BlockRule(
        name="mmpretrain-mobileone",
        has=("branch_conv_list",),
        branches=("branch_conv_list", "branch_scale", "branch_norm"),
        writes="branch_reparam",
        bypass=("se_layer", "act"),
        flags={"deploy": True},
    ),
    # super-gradients: rbr_reparam is there from the start, unused
    BlockRule(
        name="super-gradients-qarepvgg",
        has=("branch_3x3", "branch_1x1", "fully_fused", "partially_fused"),
        branches=("branch_3x3", "branch_1x1", "identity", "alpha", "post_bn", "id_tensor"),
        writes="rbr_reparam",
        bypass=("se", "nonlinearity"),
        flags={"fully_fused": True, "partially_fused": False},
        when=lambda b: not _fully_fused(b),
    ),
    # Diverse Branch Block, ACNet, UniRepLKNet
    BlockRule(
        name="dbb",
        has=("dbb_origin",),
        branches=("dbb_origin", "dbb_1x1", "dbb_avg", "dbb_1x1_kxk"),
        writes="dbb_reparam",
        bypass=("nonlinear",),
        lacks=("dbb_reparam",),
    ),
    BlockRule(
        name="acnet",
        has=("square_conv", "ver_conv", "hor_conv"),
        branches=("square_*", "ver_*", "hor_*"),
        writes="fused_conv",
        flags={"deploy": True},
    ),
    BlockRule(
        name="unireplknet",
        has=("lk_origin", "origin_bn"),
        branches=("lk_origin", "origin_bn", "dil_conv_*", "dil_bn_*"),
        writes="lk_origin",
    ),
    # VanillaNet; conv1 and conv2 merge once the slope between them has reached 1
    BlockRule(
        name="vanillanet-block",
        has=("conv1", "conv2", "act_learn"),
        branches=("conv1", "conv2"),
        writes="conv",
        bypass=("pool", "act"),
        lacks=("conv",),
        flags={"deploy": True},
        loose=True,
    ),
    VanillaNetRule(
        name="vanillanet",
        has=("stem1", "stem2", "cls1", "cls2", "act_learn", "deploy"),
        branches=("stem1", "stem2", "cls1", "cls2"),
        writes="stem",
        loose=True,
    ),
    VanillaActivationRule(
        name="vanillanet-activation",
        has=("weight", "bn", "act_num", "dim"),
        branches=("bn",),
        writes="weight",
    ),
    ImplicitHeadRule(
        name="yolov7-implicit",
        has=("m", "ia", "im"),
        branches=("ia", "im"),
        writes="m",
        when=_implicit,
    ),
)

for _rule in FAMILIES:
    BLOCKS.add(_rule.name, _rule)
