"""The families of blocks that fuse_ knows by name."""

import inspect
import re
from collections.abc import Callable, Iterator
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
        channels = block.weight.shape[0]
        pad = (block.weight.shape[-1] - 1) // 2

        def linear(x: Tensor) -> object:
            return block.bn(
                F.conv2d(x, block.weight, block.bias, padding=pad, groups=channels)
            )

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

        def stem(x: Tensor) -> object:
            return norm(conv(F.leaky_relu(block.stem1(x), block.act_learn)))

        def classify(x: Tensor) -> object:
            return block.cls2(
                F.leaky_relu(nn.Sequential(*classifier)(x), block.act_learn)
            )

        first = merge(stem, block.stem1[0])
        last = merge(classify, classifier[0])
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
            before = block.ia[index]
            after = block.im[index]
            merged = merge(lambda x, b=before, a=after, m=layer: a(m(b(x))), layer)
            merged.put_into(layer)
            block.ia[index], block.im[index] = nn.Identity(), nn.Identity()
        return None


def _needs_more_than_one(block: nn.Module) -> bool:
    """Return True if the forward of ``block`` has more than one required argument."""
    parameters = inspect.signature(block.forward).parameters.values()
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return sum(p.default is p.empty for p in positional) > 1


def _add_rbr(block: Any, x: Tensor) -> object:
    """Return the sum of a RepVGG block's branches on ``x``."""
    total = block.rbr_dense(x) + block.rbr_1x1(x)
    return total if block.rbr_identity is None else total + block.rbr_identity(x)


def _add_ghost(block: Any, x: Tensor) -> object:
    """Return the cheap operation of a RepGhost block on ``x``, with its extra branches."""
    pairs = zip(block.fusion_conv, block.fusion_bn, strict=True)
    return sum((norm(conv(x)) for conv, norm in pairs), start=block.cheap_operation(x))


def _empty_ghost(block: nn.Module) -> None:
    block.fusion_conv, block.fusion_bn = nn.ModuleList(), nn.ModuleList()


def _use_forward_fuse(block: Any) -> None:
    block.forward = block.forward_fuse  # as Ultralytics' own fuse does


def _is_module(block: object, *names: str) -> bool:
    return all(isinstance(getattr(block, name, None), nn.Module) for name in names)


def _wraps_layer(block: object, name: str) -> bool:
    return is_layer(getattr(getattr(block, name, None), "conv", None))


def _implicit(block: Any) -> bool:
    lists = [getattr(block, name, None) for name in ("m", "ia", "im")]
    return all(isinstance(each, nn.ModuleList) for each in lists) and any(
        hasattr(each, "implicit") for each in (*block.ia, *block.im)
    )


#: The families by name, the general ones first: later ones are tried first. What stands behind a
#: name are fields of :class:`BlockRule`, of which ``sets`` are the flags.
_TABLE = """
# PaddleDetection PP-YOLOE, RT-DETR
ppyoloe: loose; has conv1 conv2 act; lacks conv; branches conv1 conv2; writes conv; bypass act
# Ultralytics RepConv, and Conv2, whose branches share one BatchNorm
ultralytics-repconv: loose; has conv1 conv2 forward_fuse; lacks conv; branches conv1 conv2 bn;
    writes conv; bypass act
ultralytics-conv2: loose; has conv cv2 bn forward_fuse; branches conv cv2; writes conv;
    bypass act bn
# Ultralytics RepVGGDW: the large depthwise kernels of YOLOv10's CIB blocks
ultralytics-repvggdw: has conv conv1 act forward_fuse; branches conv conv1; writes conv; bypass act
# RepVGG, RepVGGplus, YOLOv6, YOLOv7
repvgg: has rbr_dense rbr_1x1; branches rbr_dense rbr_1x1 rbr_identity rbr_avg id_tensor;
    writes rbr_reparam; bypass nonlinearity se post_se act activation; sets deploy
repvgg-custom-l2: has rbr_dense rbr_1x1 rbr_identity;
    branches rbr_dense rbr_1x1 rbr_identity rbr_avg id_tensor; writes rbr_reparam; sets deploy
# YOLOv6 QARepVGG: the BatchNorm behind the addition is folded afterwards like any other
qarepvgg: has rbr_dense rbr_1x1 bn; branches rbr_dense rbr_1x1 rbr_identity rbr_avg id_tensor;
    writes rbr_reparam; bypass nonlinearity se post_se act activation bn; sets deploy
# MobileOne, FastViT (Apple)
mobileone: has rbr_conv rbr_scale; lacks reparam_conv; branches rbr_conv rbr_scale rbr_skip;
    writes reparam_conv; bypass se activation; sets inference_mode
large-kernel: has lkb_origin small_conv; lacks lkb_reparam; branches lkb_origin small_conv;
    writes lkb_reparam; bypass activation
repmixer: loose; has mixer norm; lacks reparam_conv; branches mixer norm layer_scale;
    writes reparam_conv
repcpe: loose; has pe; lacks reparam_conv; branches pe; writes reparam_conv
# timm
timm: has conv_kxk reparam_conv; lacks reparam_conv;
    branches conv_kxk conv_1x1 conv_scale identity drop_path; writes reparam_conv;
    bypass attn se act
timm-large-kernel: has large_conv small_conv reparam_conv; lacks reparam_conv;
    branches large_conv small_conv; writes reparam_conv; bypass se act
timm-repcpe: has pos_enc reparam_conv; lacks reparam_conv; branches pos_enc; writes reparam_conv
ghostnetv3: has primary_rpr_conv cheap_rpr_conv; branches primary_rpr_* cheap_rpr_*;
    writes primary_conv
ghostnetv3-bottleneck: has dw_rpr_conv dw_rpr_scale conv_dw; branches dw_rpr_*; writes conv_dw;
    sets infer_mode
repghost: has fusion_conv fusion_bn cheap_operation; branches fusion_conv fusion_bn;
    writes cheap_operation
# YOLOv6 CSLA: factors instead of BatchNorms in the branches, and no deployed form
yolov6-linear-add: has conv scale_conv conv_1x1 scale_1x1;
    branches conv scale_conv conv_1x1 scale_1x1 scale_identity bn; bypass nonlinearity
# RepViT
repvit-depthwise: loose; has conv conv1 bn; branches conv conv1 bn
repvit-residual: loose; has m drop; branches m
repvit-classifier: loose; has classifier classifier_dist; branches classifier classifier_dist
timm-distilled-classifier: loose; has head head_dist; branches head head_dist
# mmpretrain
mmpretrain-repvgg: has branch_3x3 branch_1x1; branches branch_3x3 branch_1x1 branch_norm;
    writes branch_reparam; bypass se_layer act; sets deploy
mmpretrain-mobileone: has branch_conv_list; branches branch_conv_list branch_scale branch_norm;
    writes branch_reparam; bypass se_layer act; sets deploy
# super-gradients: rbr_reparam is there from the start, unused
super-gradients-qarepvgg: has branch_3x3 branch_1x1 fully_fused partially_fused;
    branches branch_3x3 branch_1x1 identity alpha post_bn id_tensor; writes rbr_reparam;
    bypass se nonlinearity; sets fully_fused no-partially_fused
# Diverse Branch Block, ACNet, UniRepLKNet
dbb: has dbb_origin; lacks dbb_reparam; branches dbb_origin dbb_1x1 dbb_avg dbb_1x1_kxk;
    writes dbb_reparam; bypass nonlinear
acnet: has square_conv ver_conv hor_conv; branches square_* ver_* hor_*; writes fused_conv;
    sets deploy
unireplknet: has lk_origin origin_bn; branches lk_origin origin_bn dil_conv_* dil_bn_*;
    writes lk_origin
# VanillaNet; conv1 and conv2 merge once the slope between them has reached 1
vanillanet-block: loose; has conv1 conv2 act_learn; lacks conv; branches conv1 conv2; writes conv;
    bypass pool act; sets deploy
vanillanet: loose; has stem1 stem2 cls1 cls2 act_learn deploy; branches stem1 stem2 cls1 cls2;
    writes stem
vanillanet-activation: has weight bn act_num dim; branches bn; writes weight
yolov7-implicit: has m ia im; branches ia im; writes m
"""
#: What a table of names cannot say.
_WHEN: dict[str, Callable[[Any], bool]] = {
    "ppyoloe": lambda b: _wraps_layer(b, "conv1") and _wraps_layer(b, "conv2"),
    "repvgg": lambda b: _is_module(b, "rbr_dense"),
    "repvgg-custom-l2": lambda b: (
        _is_module(b, "rbr_dense") and _needs_more_than_one(b)
    ),
    "qarepvgg": lambda b: _is_module(b, "rbr_dense", "bn"),
    "repmixer": lambda b: (
        _is_module(b, "mixer", "norm")
        and (hasattr(b, "reparam_conv") or hasattr(b, "use_layer_scale"))
    ),
    "repcpe": lambda b: is_layer(b.pe),
    "timm-large-kernel": lambda b: _is_module(b, "large_conv"),
    "ghostnetv3-bottleneck": lambda b: (
        _is_module(b, "dw_rpr_conv") and len(b.dw_rpr_conv) > 0
    ),
    "repghost": lambda b: _is_module(b, "fusion_conv") and len(b.fusion_conv) > 0,
    "repvit-depthwise": lambda b: _is_module(b, "conv", "bn") and is_layer(b.conv1),
    "repvit-residual": lambda b: (
        _is_module(b, "m") and not isinstance(b.m, nn.ModuleList)
    ),
    "repvit-classifier": lambda b: _is_module(b, "classifier", "classifier_dist"),
    "timm-distilled-classifier": lambda b: _is_module(b, "head", "head_dist"),
    "super-gradients-qarepvgg": lambda b: not (b.fully_fused or b.partially_fused),
    "yolov7-implicit": _implicit,
}
_LINEAR: dict[str, Callable[[Any, Tensor], Any]] = {
    "repvgg-custom-l2": _add_rbr,
    "ghostnetv3-bottleneck": lambda b, x: sum(
        (conv(x) for conv in b.dw_rpr_conv), start=b.dw_rpr_scale(x)
    ),
    "repghost": _add_ghost,
}
_FINISH: dict[str, Callable[[Any], None]] = {
    "ultralytics-repconv": _use_forward_fuse,
    "ultralytics-conv2": _use_forward_fuse,
    "ultralytics-repvggdw": _use_forward_fuse,
    "repghost": _empty_ghost,
}
_CLASSES: dict[str, type[BlockRule]] = {
    "ghostnetv3": GhostV3Rule,
    "vanillanet": VanillaNetRule,
    "vanillanet-activation": VanillaActivationRule,
    "yolov7-implicit": ImplicitHeadRule,
}


def _rules() -> Iterator[BlockRule]:
    """Yield the rules of the table, whose rows go on in indented lines."""
    for row in re.sub(r"\n    ", " ", _TABLE).splitlines():
        if not row or row.startswith("#"):
            continue
        name, _, settings = row.partition(": ")
        fields = {
            key: tuple(words) for key, *words in map(str.split, settings.split("; "))
        }
        flags = {
            flag.removeprefix("no-"): flag[:3] != "no-"
            for flag in fields.pop("sets", ())
        }
        yield _CLASSES.get(name, BlockRule)(
            name=name,
            writes=next(iter(fields.pop("writes", ())), None),
            loose=fields.pop("loose", None) is not None,
            flags=flags,
            when=_WHEN.get(name),
            linear=_LINEAR.get(name),
            finish=_FINISH.get(name),
            **fields,
        )


FAMILIES: tuple[BlockRule, ...] = tuple(_rules())
for _rule in FAMILIES:
    BLOCKS.add(_rule.name, _rule)
