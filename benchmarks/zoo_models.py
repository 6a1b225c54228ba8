"""Networks of other libraries, small and with random weights, by name.

A name is ``library/key``. :func:`names` lists them where the library is installed, and
:func:`build` makes one. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_sizes import shortened
from benchmarks.zoo_transformers import HUGGING_FACE, batches, make

__all__ = ["LIBRARIES", "Entry", "build", "call", "load", "names"]


@dataclass(frozen=True)
class Entry:
    """A network in eval mode, one batch, and a batch of another size (None where sizes are fixed).

    Batches are tensors (N, 3, H, W) float32 or mappings of keyword arguments.
    """

    model: nn.Module
    example: Any
    other: Any | None


# --- torchvision ---------------------------------------------------------------------------------

TORCHVISION_SIZES = {"inception_v3": 96, "maxvit_t": 224, "swin_v2_t": 64}
TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "inception_v3": {"init_weights": False, "aux_logits": False},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "vit_b_32": {"image_size": 64},
}
# One network for each module file, the smallest.
TORCHVISION = """
alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5
mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d
shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_32 wide_resnet50_2
deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large
fasterrcnn_mobilenet_v3_large_320_fpn retinanet_resnet50_fpn ssdlite320_mobilenet_v3_large
fcos_resnet50_fpn maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn ssd300_vgg16 r3d_18 mc3_18
r2plus1d_18 swin3d_t mvit_v2_s raft_small
"""
# Detectors and segmenters: their backbones have weights of their own.
DETECTORS = {
    key for key in TORCHVISION.split() if re.search("rcnn|deeplab|fc|lraspp|ssd|retina", key)
}
VIDEO = {"r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t", "mvit_v2_s"}


def _torchvision_names() -> Iterator[str]:
    """Yield a network of each module file, then the other classifiers from small to large."""
    from torchvision import models

    first = TORCHVISION.split()
    yield from first
    rest = [name for name in models.list_models(module=models) if name not in first]
    yield from sorted(rest, key=_parameters)


def _parameters(name: str) -> int:
    from torchvision import models

    return int(next(iter(models.get_model_weights(name))).meta["num_params"])


def _torchvision(key: str) -> Entry:
    from torchvision import models

    options = TORCHVISION_OPTIONS.get(key, {})
    if key in DETECTORS:
        options = {"weights_backbone": None}
    if re.search("rcnn|retina|fcos", key):
        options |= {"min_size": 96, "max_size": 96}  # What it resizes images to.
    if "rcnn" in key:  # Its heads compute each of 1,000 regions otherwise.
        options |= {"rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5}
    model = models.get_model(key, weights=None, **options)
    if key == "raft_small":
        frames = torch.randn(1, 3, 128, 128)
        return Entry(model.eval(), {"image1": frames, "image2": frames.flip(3)}, None)
    if key in VIDEO:
        shape = (16, 224) if key == "mvit_v2_s" else (8, 56)
        clip = torch.randn(1, 3, shape[0], shape[1], shape[1])
        return Entry(
            model.eval(), clip, None if key == "mvit_v2_s" else torch.randn(2, 3, 8, 64, 64)
        )
    size = TORCHVISION_SIZES.get(key, options.get("image_size", 64))
    fixed = key in ("maxvit_t", "vit_b_32")
    if key not in DETECTORS:
        model = shortened(model.eval(), torch.randn(1, 3, size, size))
    return _images(model, size, fixed)


def _images(model: nn.Module, size: int, fixed: bool = False) -> Entry:
    """Return an entry whose batches are images; with ``fixed`` only the batch size changes."""
    example = torch.randn(2, 3, size, size)
    return Entry(model.eval(), example, torch.randn(3, 3, *(2 * [size if fixed else size + 32])))


# --- timm ----------------------------------------------------------------------------------------

# Words in the names of small variants, smallest first; a name without any of them is last.
SMALL = """
test atto femto pico zepto nano xxs xxsmall micro mini tiny t0 t1 t2 xs xsmall s0 b0 a0 s12
small s m0 0 1 18 10 26 34 050 100 base
"""


def _timm_rank(name: str) -> tuple[int, int, str]:
    words = set(re.split(r"[_.]|(?<=[a-z])(?=\d)", name))
    small = SMALL.split()
    found = min((i for i, word in enumerate(small) if word in words), default=len(small))
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return found, sum(numbers), name


def _timm_names() -> Iterator[str]:
    """Yield the smallest network of each module file, by its name."""
    import timm

    for module in sorted(timm.list_modules()):
        found = timm.list_models(module=module)
        if found:
            yield f"{module}.{min(found, key=_timm_rank)}"


def _timm(key: str) -> Entry:
    import timm

    name = key.partition(".")[2]
    size = timm.get_pretrained_cfg(name).input_size
    for options, side in (
        ({"img_size": 96}, 96),
        ({}, 96),
        ({"img_size": 128}, 128),
        ({}, size[1]),
    ):
        try:
            model = timm.create_model(name, pretrained=False, **options).eval()
            image = torch.randn(1, size[0], side, side)
            with torch.no_grad():
                model(image)
        except Exception:  # the network asks for another size
            continue
        return _images(shortened(model, image), side, _is_fixed(model, image))
    raise ValueError(f"{name}: takes no square images of any size tried")


def _is_fixed(model: nn.Module, image: Tensor) -> bool:
    """Return True if the network takes no larger images than this one."""
    try:
        with torch.no_grad():
            model(torch.randn(1, image.shape[1], *(2 * [image.shape[2] + 32])))
    except Exception:
        return True
    return False


# --- Ultralytics ---------------------------------------------------------------------------------

ULTRALYTICS = """
yolov3-tiny yolov5n yolov6n yolov8n yolov8n-seg yolov8n-cls yolov8n-pose yolov8n-obb yolov8-p2
yolov9t yolov10n yolo11n yolo11n-seg yolo11n-cls yolo12n yolov8-world yolov8-ghost rtdetr-l
"""


def _ultralytics_names() -> Iterator[str]:
    yield from ULTRALYTICS.split()


def _ultralytics(key: str) -> Entry:
    from ultralytics.nn import tasks

    config = f"{key}.yaml"
    for part, kind in (
        ("-seg", "SegmentationModel"),
        ("-cls", "ClassificationModel"),
        ("-pose", "PoseModel"),
        ("-obb", "OBBModel"),
        ("-world", "WorldModel"),
        ("rtdetr", "RTDETRDetectionModel"),
    ):
        if part in key:
            return _images(
                getattr(tasks, kind)(config, verbose=False), 64 if part == "-cls" else 128
            )
    return _images(tasks.DetectionModel(config, verbose=False), 128)


# --- segmentation-models-pytorch ----------------------------------------------------------------

SEGMENTERS = (
    "Unet UnetPlusPlus MAnet Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet Segformer"
)


def _smp_names() -> Iterator[str]:
    yield from SEGMENTERS.split()


def _smp(key: str) -> Entry:
    import segmentation_models_pytorch as smp

    size = 128 if key == "PAN" else 96  # PAN halves the last of its features three times.
    return _images(getattr(smp, key)("resnet18", encoder_weights=None), size)


# --- Hugging Face ---------------------------------------------------------------------------------


def _transformers_names() -> Iterator[str]:
    yield from HUGGING_FACE


def _transformers(key: str) -> Entry:
    model = make(key)
    return Entry(model, *batches(key))


# --- all of them ---------------------------------------------------------------------------------

Source = tuple[str, Callable[[], Iterator[str]], Callable[[str], Entry]]
LIBRARIES: dict[str, Source] = {
    "torchvision": ("torchvision", _torchvision_names, _torchvision),
    "timm": ("timm", _timm_names, _timm),
    "ultralytics": ("ultralytics", _ultralytics_names, _ultralytics),
    "smp": ("segmentation_models_pytorch", _smp_names, _smp),
    "transformers": ("transformers", _transformers_names, _transformers),
}


def names(library: str) -> list[str]:
    """Return the names of a library's networks; none if the library is not installed."""
    package, list_keys, _ = LIBRARIES[library]
    if importlib.util.find_spec(package) is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [f"{library}/{key}" for key in list_keys()]


def load(library: str) -> None:
    """Import a library and what it would import later, if it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module(_MODULES.get(library, LIBRARIES[library][0]))


_MODULES = {"ultralytics": "ultralytics.nn.tasks", "transformers": "transformers.modeling_utils"}


def build(name: str) -> Entry:
    """Make the network ``library/key``, with statistics of BatchNorm that fit its weights."""
    library, _, key = name.partition("/")
    torch.manual_seed(0)
    entry = LIBRARIES[library][2](key)
    _collect_statistics(entry)
    return entry


def _collect_statistics(entry: Entry) -> None:
    """Collect running statistics on the example, without which random networks explode."""
    norms = [m for m in entry.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 0.5
    try:
        with torch.no_grad():
            for _ in range(4):
                call(entry.model, entry.example)
    except ValueError:  # one value per channel: this network keeps its initial statistics
        for norm in norms:
            norm.reset_running_stats()
    entry.model.eval()


def call(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a tensor, or a mapping of keyword arguments."""
    return model(batch) if isinstance(batch, Tensor) else model(**batch)
