"""The operators of detectors: default boxes, detections, suppression."""

from __future__ import annotations

from torchq.frontends.building import Value
from torchq.frontends.mxnet.functions import detection
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter


@converter("_contrib_MultiBoxPrior", "MultiBoxPrior")
def _prior(node: SymbolContext) -> Value:
    sizes, ratios = node.numbers("sizes", (1.0,)), node.numbers("ratios", (1.0,))
    clip = node.flag("clip", False)
    steps, offsets = node.numbers("steps", (-1.0, -1.0)), node.numbers("offsets", (0.5, 0.5))
    kind = [node.call(getattr, node.inputs[0], name) for name in ("shape", "dtype", "device")]
    return node.call(detection.multibox_prior, *kind, sizes, ratios, clip, steps, offsets)


@converter("_contrib_MultiBoxDetection", "MultiBoxDetection")
def _detection(node: SymbolContext) -> Value:
    node.expect("background_id", "0")
    return node.call(
        detection.multibox_detection,
        *node.inputs,
        node.flag("clip", True),
        node.number("threshold", 0.01),
        node.number("nms_threshold", 0.5),
        node.flag("force_suppress", False),
        node.numbers("variances", (0.1, 0.1, 0.2, 0.2)),
        node.integer("nms_topk", -1),
    )


@converter("_contrib_box_nms", "_contrib_box_non_maximum_suppression")
def _box_nms(node: SymbolContext) -> Value:
    kind = node.text("in_format", "corner")
    node.expect("out_format", kind)
    overlap = node.number("overlap_thresh", 0.5)
    if not 0 <= overlap <= 1:
        node.refuse(f"overlap_thresh is {overlap}; expected 0 to 1")
    return node.call(
        detection.box_nms,
        node.inputs[0],
        overlap,
        node.number("valid_thresh", 0.0),
        node.integer("topk", -1),
        node.integer("coord_start", 2),
        node.integer("score_index", 1),
        node.integer("id_index", -1),
        node.integer("background_id", -1),
        node.flag("force_suppress", False),
        kind == "center",
    )
