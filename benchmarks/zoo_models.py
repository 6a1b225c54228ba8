"""Networks of other libraries, small and with random weights, by name.

A name is ``library/key``. :func:`names` lists them where the library is installed, and
:func:`build` makes one. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
    key
    for key in TORCHVISION.split()
    if re.search("rcnn|deeplab|fc|lraspp|ssd|retina", key)
}
VIDEO = {"r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t"}


def _torchvision(key: str) -> Entry:
    from torchvision import models

    if key == "mvit_v2_s":
        return Entry(_mvit().eval(), torch.randn(1, 3, 8, 64, 64), None)
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
        return Entry(
            model.eval(), torch.randn(1, 3, 8, 56, 56), torch.randn(2, 3, 8, 64, 64)
        )
    size = TORCHVISION_SIZES.get(key, options.get("image_size", 64))
    fixed = key in ("maxvit_t", "vit_b_32")
    if key not in DETECTORS:
        model = shortened(model.eval(), torch.randn(1, 3, size, size))
    return _images(model, size, fixed)


def _mvit() -> nn.Module:
    """Return the first four blocks of an MViTv2-S, for clips of 8 frames of 64 pixels."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    # Heads, channels in and out, and the strides of queries and of keys, as in mvit_v2_s.
    blocks = [
        (1, 96, 96, [1, 1, 1], [1, 8, 8]),
        (2, 96, 192, [1, 2, 2], [1, 4, 4]),
        (2, 192, 192, [1, 1, 1], [1, 4, 4]),
        (4, 192, 384, [1, 2, 2], [1, 2, 2]),
    ]
    kernel = [3, 3, 3]
    return MViT(
        spatial_size=(64, 64),
        temporal_size=8,
        block_setting=[
            MSBlockConfig(
                heads, inputs, outputs, kernel, kernel, stride_of_q, stride_of_kv
            )
            for heads, inputs, outputs, stride_of_q, stride_of_kv in blocks
        ],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
    )


def _images(model: nn.Module, size: int, fixed: bool = False) -> Entry:
    """Return an entry whose batches are images; with ``fixed`` only the batch size changes."""
    example = torch.randn(2, 3, size, size)
    return Entry(
        model.eval(), example, torch.randn(3, 3, *(2 * [size if fixed else size + 32]))
    )


# --- timm ----------------------------------------------------------------------------------------

# Words in the names of small variants, smallest first; a name without any of them is last.
SMALL = """
test atto femto pico zepto nano xxs xxsmall micro mini tiny t0 t1 t2 xs xsmall s0 b0 a0 s12
small s m0 0 1 18 10 26 34 050 100 base
"""


def _timm_rank(name: str) -> tuple[int, int, str]:
    words = set(re.split(r"[_.]|(?<=[a-z])(?=\d)", name))
    small = SMALL.split()
    place = min(
        (i for i, word in enumerate(small) if word in words), default=len(small)
    )
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return place, sum(numbers), name


def _timm_names() -> Iterator[str]:
    """Yield the smallest network of each module file, by its name."""
    import timm

    for module in sorted(timm.list_modules()):
        matching = timm.list_models(module=module)
        if matching:
            yield f"{module}.{min(matching, key=_timm_rank)}"


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


def _ultralytics(key: str) -> Entry:
    from ultralytics.nn import tasks

    kinds = {
        "-seg": "Segmentation",
        "-cls": "Classification",
        "-pose": "Pose",
        "-obb": "OBB",
    }
    kinds |= {"-world": "World", "rtdetr": "RTDETRDetection"}
    kind = next((kind for part, kind in kinds.items() if part in key), "Detection")
    model = getattr(tasks, f"{kind}Model")(f"{key}.yaml", verbose=False)
    return _images(model, 64 if kind == "Classification" else 128)


# --- segmentation-models-pytorch ----------------------------------------------------------------

SEGMENTERS = (
    "Unet UnetPlusPlus MAnet Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet "
    "Segformer"
)


def _smp(key: str) -> Entry:
    import segmentation_models_pytorch as smp

    # PAN halves the last of its features three times.
    size = 128 if key == "PAN" else 96
    return _images(getattr(smp, key)("resnet18", encoder_weights=None), size)


# --- Hugging Face ---------------------------------------------------------------------------------

_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {**_LAYERS, "intermediate_size": 128, "vocab_size": 200}
# What options begin with that several architectures have.
SHARED: dict[str, dict[str, Any]] = {
    "layers": _LAYERS,
    "words": _WORDS,
    "grouped": {**_WORDS, "num_key_value_heads": 2},
    "vision": {**_LAYERS, "intermediate_size": 128, "image_size": 64, "patch_size": 16},
    "gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200},
    "t5": {
        "d_model": 64,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 200,
    },
    "bart": {
        "d_model": 64,
        "vocab_size": 200,
        **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
    },
    "swin": {
        "image_size": 64,
        "embed_dim": 32,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "speech": {
        **_LAYERS,
        "intermediate_size": 128,
        "vocab_size": 32,
        "conv_dim": [16, 16],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
}
# Each architecture and the options of its configuration, without spaces in a value.
ARCHITECTURES = """
BertForSequenceClassification words
RobertaForSequenceClassification words
DistilBertForSequenceClassification dim=64 n_layers=2 n_heads=4 hidden_dim=128 vocab_size=200
AlbertForSequenceClassification words embedding_size=32
ElectraForSequenceClassification words
GPT2LMHeadModel gpt
OPTForCausalLM layers ffn_dim=128 vocab_size=200 word_embed_proj_dim=64
LlamaForCausalLM grouped
Qwen2ForCausalLM grouped
T5EncoderModel t5
MambaForCausalLM hidden_size=64 num_hidden_layers=2 vocab_size=200
ViTForImageClassification vision
DeiTForImageClassification vision
BeitForImageClassification vision use_relative_position_bias=true
Dinov2ForImageClassification vision
SwinForImageClassification swin
SegformerForSemanticSegmentation depths=[1,1,1,1]
ConvNextV2ForImageClassification depths=[1,1,2,1] hidden_sizes=[16,32,64,128]
ResNetForImageClassification depths=[1,1,1,1] hidden_sizes=[32,64,128,256] embedding_size=16
MobileViTForImageClassification image_size=64
MobileNetV2ForImageClassification image_size=64
DebertaV2ForSequenceClassification words
MobileBertForSequenceClassification words embedding_size=32 intra_bottleneck_size=32 \
    true_hidden_size=32
SqueezeBertForSequenceClassification words embedding_size=64
MPNetForSequenceClassification words
XLNetForSequenceClassification d_model=64 n_layer=2 n_head=4 d_inner=128 vocab_size=200
LongformerForSequenceClassification words attention_window=8
FunnelForSequenceClassification d_model=64 n_head=4 d_head=16 d_inner=128 block_sizes=[1,1] \
    vocab_size=200
FNetForSequenceClassification words max_position_embeddings=64 tpu_short_seq_length=64
ModernBertForSequenceClassification words pad_token_id=0
GPTNeoXForCausalLM words
GPTNeoForCausalLM hidden_size=64 num_layers=2 num_heads=4 \
    attention_types=[[["global","local"],1]] vocab_size=200
GPTJForCausalLM gpt rotary_dim=8
BloomForCausalLM hidden_size=64 n_layer=2 n_head=4 vocab_size=200
MistralForCausalLM grouped
MixtralForCausalLM grouped num_local_experts=2
Phi3ForCausalLM grouped pad_token_id=0
Qwen3ForCausalLM grouped head_dim=16
Gemma2ForCausalLM grouped head_dim=16
FalconForCausalLM layers vocab_size=200
RwkvForCausalLM hidden_size=64 num_hidden_layers=2 vocab_size=200
T5ForConditionalGeneration t5
BartForConditionalGeneration bart
CLIPVisionModel vision
SiglipVisionModel vision
Dinov2WithRegistersForImageClassification vision
DINOv3ViTModel vision
Swinv2ForImageClassification swin
PvtForImageClassification image_size=64 depths=[1,1,1,1]
PvtV2ForImageClassification image_size=64 depths=[1,1,1,1]
LevitForImageClassification image_size=64
PoolFormerForImageClassification depths=[1,1,1,1]
RegNetForImageClassification depths=[1,1,1,1] hidden_sizes=[32,64,96,128] groups_width=16 \
    embedding_size=16
EfficientNetForImageClassification image_size=64 width_coefficient=0.5 depth_coefficient=0.5 \
    hidden_dim=640
BitForImageClassification depths=[1,1,1,1] hidden_sizes=[32,64,128,256] embedding_size=32 \
    num_groups=8
FocalNetForImageClassification image_size=64 embed_dim=32 depths=[1,1,1,1]
ConvNextForImageClassification depths=[1,1,2,1] hidden_sizes=[16,32,64,128]
MobileNetV1ForImageClassification image_size=64
MobileViTV2ForImageClassification image_size=64
ViTMAEModel vision
DPTForDepthEstimation hidden_size=64 num_hidden_layers=4 num_attention_heads=4 \
    intermediate_size=128 image_size=64 patch_size=16 backbone_out_indices=[0,1,2,3] \
    neck_hidden_sizes=[16,16,32,32] fusion_hidden_size=16
Wav2Vec2ForCTC speech
HubertForCTC speech
"""
HUGGING_FACE = {
    line.split()[0]: line.split()[1:] for line in ARCHITECTURES.strip().splitlines()
}


def _transformers(key: str) -> Entry:
    import transformers

    options: dict[str, Any] = {}
    for word in HUGGING_FACE[key]:
        name, _, value = word.partition("=")
        options |= {name: json.loads(value)} if value else SHARED[name]
    config = re.sub(r"(For[A-Z]\w*|EncoderModel|LMHeadModel|Model)$", "Config", key)
    model = getattr(transformers, key)(getattr(transformers, config)(**options))
    return Entry(model.eval(), *_keywords(key))


def _keywords(key: str) -> list[dict[str, Tensor]]:
    """Return two batches of keyword arguments for an architecture, of different sizes."""
    if re.search("Image|Vision|Segmentation|Depth|ViT", key):
        return [{"pixel_values": torch.randn(n, 3, 64, 64)} for n in (2, 3)]
    if key.endswith("ForCTC"):
        return [{"input_values": torch.randn(n, 2000)} for n in (2, 3)]
    words = [{"input_ids": torch.randint(3, 200, size)} for size in ((2, 16), (3, 24))]
    if key.endswith("ForConditionalGeneration"):
        return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in words]
    return words


# --- smaller ones ---------------------------------------------------------------------------------

KEPT = 2
CONTAINERS = (nn.Sequential, nn.ModuleList)  # A subclass may have code of its own.


def shortened(model: nn.Module, *example: Any) -> nn.Module:
    """Return a copy whose repeated blocks are cut to two, or the model if that does not run.

    Blocks repeat where neighbours in a ``Sequential`` or ``ModuleList`` have the same class and
    parameters of the same shapes. What the first two compute, the others compute too.

    Args:
        model: A network in eval mode.
        example: Its positional arguments.
    """
    small = copy.deepcopy(model)
    for parent in small.modules():
        for name, child in parent.named_children():
            if (
                isinstance(child, nn.Sequential | nn.ModuleList)
                and type(child) in CONTAINERS
            ):
                setattr(parent, name, _cut(child))
    try:
        with torch.no_grad():
            results = [tree_leaves(network(*example)) for network in (small, model)]
    except Exception:  # Something counts the blocks.
        return model
    shapes = [[getattr(leaf, "shape", None) for leaf in leaves] for leaves in results]
    return small if shapes[0] == shapes[1] else model


def _cut(blocks: nn.Sequential | nn.ModuleList) -> nn.Module:
    """Return the container without the third and further blocks of each run of equal ones."""
    children: dict[str, nn.Module] = {}
    previous, length = None, 0
    for name, block in blocks.named_children():
        kind = (type(block), [parameter.shape for parameter in block.parameters()])
        length = length + 1 if kind == previous and kind[1] else 1
        previous = kind
        if length <= KEPT:
            children[name] = block
    if len(children) == len(blocks):
        return blocks
    if isinstance(blocks, nn.ModuleList):
        return nn.ModuleList(children.values())
    return nn.Sequential(*children.values())


# --- all of them ---------------------------------------------------------------------------------

# Library -> its package, its networks and what builds one.
Source = tuple[str, Callable[[], Iterable[str]], Callable[[str], Entry]]
LIBRARIES: dict[str, Source] = {
    "torchvision": ("torchvision", TORCHVISION.split, _torchvision),
    "timm": ("timm", _timm_names, _timm),
    "ultralytics": ("ultralytics", ULTRALYTICS.split, _ultralytics),
    "smp": ("segmentation_models_pytorch", SEGMENTERS.split, _smp),
    "transformers": ("transformers", HUGGING_FACE.keys, _transformers),
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


_MODULES = {
    "ultralytics": "ultralytics.nn.tasks",
    "transformers": "transformers.modeling_utils",
}


def build(name: str) -> Entry:
    """Make the network ``library/key``, with statistics of BatchNorm that fit its weights."""
    library, _, key = name.partition("/")
    torch.manual_seed(0)
    entry = LIBRARIES[library][2](key)
    _collect_statistics(entry)
    return entry


def _collect_statistics(entry: Entry) -> None:
    """Collect running statistics on the example, without which random networks explode."""
    norms = [
        m
        for m in entry.model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        norm.train()
        norm.momentum = 0.5
    try:
        with torch.no_grad():
            for _ in range(4):
                call(entry.model, entry.example)
    # One value per channel: this network keeps its initial statistics.
    except ValueError:
        for norm in norms:
            norm.reset_running_stats()
    entry.model.eval()


def call(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a tensor, or a mapping of keyword arguments."""
    return model(batch) if isinstance(batch, Tensor) else model(**batch)
