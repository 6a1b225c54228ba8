"""The layers of SSD."""

from __future__ import annotations

from torchq.frontends.building import Value
from torchq.frontends.caffe.functions.detection import (
    DetectionOptions,
    Detections,
    PriorBoxes,
    PriorOptions,
)
from torchq.frontends.caffe.node import CaffeLayer, Settings
from torchq.frontends.caffe.registry import converter


def _ratios(settings: Settings) -> list[float]:
    """Return the ratios of boxes that are no squares, each once, with their inverses if asked."""
    flip, result = settings.flag("flip", True), list[float]()
    for ratio in settings.numbers("aspect_ratio"):
        if any(abs(ratio - other) < 1e-6 for other in (1.0, *result)):
            continue
        result += [ratio, 1 / ratio] if flip else [ratio]
    return result


@converter("PriorBox")
def _prior_box(layer: CaffeLayer) -> Value:
    settings = layer.settings("prior_box_param")
    small, large = settings.numbers("min_size"), settings.numbers("max_size")
    variances = settings.numbers("variance") or [0.1]
    if not small or (large and len(large) != len(small)) or len(variances) not in (1, 4):
        layer.refuse(f"got min_size {small}, max_size {large}, variance {variances}")
    both, distance = settings.integer("img_size", 0), settings.number("step", 0.0)
    options = PriorOptions(
        min_sizes=tuple(small),
        max_sizes=tuple(large),
        ratios=tuple(_ratios(settings)),
        clip=settings.flag("clip", False),
        variances=tuple(variances),
        image=(settings.integer("img_w", both), settings.integer("img_h", both)),
        steps=(settings.number("step_w", distance), settings.number("step_h", distance)),
        offset=settings.number("offset", 0.5),
    )
    layer.result_ndim = 3
    shapes = [layer.call(getattr, value, "shape") for value in layer.inputs[:2]]
    kind = [layer.call(getattr, layer.inputs[0], name) for name in ("dtype", "device")]
    return layer.module(PriorBoxes(options), *shapes, *kind)


@converter("DetectionOutput")
def _detection_output(layer: CaffeLayer) -> Value:
    settings = layer.settings("detection_output_param")
    nms = settings.settings("nms_param")
    if nms.number("eta", 1.0) != 1:
        layer.refuse("a threshold that changes (eta) is not supported")
    for name in ("save_output_param", "visualize", "visualize_threshold", "save_file"):
        settings.settings(name)  # they write files, and do not change the result
    overlap = nms.number("nms_threshold", 0.3)
    if not 0 <= overlap <= 1:
        layer.refuse(f"nms_threshold is {overlap}; expected 0 to 1")
    options = DetectionOptions(
        classes=settings.integer("num_classes"),
        shared=settings.flag("share_location", True),
        background=settings.integer("background_label_id", 0),
        code=settings.choice("code_type", "CORNER", "CENTER_SIZE", "CORNER_SIZE", first=1),
        scaled=settings.flag("variance_encoded_in_target", False),
        confidence=settings.number("confidence_threshold", -3.4e38),
        overlap=overlap,
        candidates=nms.integer("top_k", -1),
        kept=settings.integer("keep_top_k", -1),
    )
    layer.result_ndim = 4
    return layer.module(Detections(options), *layer.inputs[:3])
