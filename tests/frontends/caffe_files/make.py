"""Write the files of this folder: networks of Caffe, with what OpenCV computes for them.

Needs OpenCV 4, whose module ``dnn`` reads Caffe's files on its own: ``pip install
opencv-python-headless``, then ``python -m tests.frontends.caffe_files.make`` from the root of the
repository. Tests read the files and do not need OpenCV.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from tests.frontends.caffe_writer import caffemodel

FOLDER = Path(__file__).parent
RANDOM = np.random.default_rng(0)


def normal(*shape, scale=0.3):
    return (RANDOM.standard_normal(shape) * scale).astype("f")


def positive(*shape):
    return RANDOM.uniform(0.5, 1.5, shape).astype("f")


def layer(kind, name, bottoms, top=None, **messages):
    """Return a layer as text; messages hold the text of their fields."""
    lines = [f'  name: "{name}"', f'  type: "{kind}"']
    lines += [f'  bottom: "{bottom}"' for bottom in bottoms.split()]
    lines += [f'  top: "{each}"' for each in (top or name).split()]
    lines += [f"  {key} {{ {value} }}" for key, value in messages.items()]
    return "layer {\n" + "\n".join(lines) + "\n}\n"


def data(*shape, name="data"):
    sizes = " ".join(f"dim: {size}" for size in shape)
    return layer("Input", name, "", input_param=f"shape {{ {sizes} }}").replace('bottom: ""', "")


def classifier():
    text = 'name: "classifier"\n' + data(2, 3, 16, 16)
    text += layer(
        "Convolution",
        "conv1",
        "data",
        convolution_param="num_output: 8 kernel_size: 3 pad: 1 stride: 2 bias_term: false",
    )
    text += layer(
        "BatchNorm", "bn1", "conv1", "conv1", batch_norm_param="use_global_stats: true eps: 1e-4"
    )
    text += layer("Scale", "scale1", "conv1", "conv1", scale_param="bias_term: true")
    text += layer("ReLU", "relu1", "conv1", "conv1")
    text += layer("Pooling", "pool1", "conv1", pooling_param="pool: MAX kernel_size: 3 stride: 2")
    text += layer(
        "Convolution",
        "branch",
        "pool1",
        convolution_param="num_output: 8 kernel_size: 3 pad: 1 group: 2",
    )
    text += layer(
        "Eltwise", "sum", "pool1 branch", eltwise_param="operation: SUM coeff: 1 coeff: -0.5"
    )
    text += layer("PReLU", "prelu", "sum", "sum")
    text += layer("LRN", "norm", "sum", lrn_param="local_size: 3 alpha: 0.5 beta: 0.75")
    text += layer(
        "Pooling", "pool2", "norm", pooling_param="pool: AVE kernel_size: 3 stride: 2 pad: 1"
    )
    text += layer("InnerProduct", "fc", "pool2", inner_product_param="num_output: 5")
    text += layer("Dropout", "drop", "fc", "fc", dropout_param="dropout_ratio: 0.5")
    text += layer("Softmax", "prob", "fc")
    weights = {
        "conv1": [normal(8, 3, 3, 3)],
        "bn1": [normal(8), positive(8), np.array([2.0], "f")],
        "scale1": [positive(8), normal(8)],
        "branch": [normal(8, 4, 3, 3), normal(8)],
        "prelu": [positive(8) * 0.2],
        "fc": [normal(5, 72), normal(5)],
    }
    return text, weights, {"data": normal(2, 3, 16, 16, scale=1)}


def arithmetic(put):
    put("ReLU", "leaky", relu_param="negative_slope: 0.1")
    for kind in ("Sigmoid", "TanH", "AbsVal", "BNLL"):
        put(kind, kind.lower())
    put("ELU", "elu")
    put("Power", "power", "sigmoid", power_param="power: 2 scale: 0.5 shift: 1.5")
    put("Exp", "exp", exp_param="base: 2 scale: 0.5 shift: 0.25")
    put("LRN", "within", lrn_param="norm_region: WITHIN_CHANNEL local_size: 3 alpha: 0.5")
    put("BatchNorm", "bn_alone")
    put("Scale", "scale_alone", scale_param="bias_term: true")
    put("Eltwise", "product", "data tanh", eltwise_param="operation: PROD")
    put("Eltwise", "largest", "data tanh", eltwise_param="operation: MAX")
    put("Eltwise", "total", "data tanh absval")


def movement(put):
    put("Concat", "join", "data tanh")
    put("Concat", "below", "data tanh", concat_param="axis: 2")
    put(
        "Slice",
        "parts",
        "data",
        "part0 part1 part2",
        slice_param="axis: 1 slice_point: 1 slice_point: 3",
    )
    put("Slice", "halves", "data", "half0 half1", slice_param="axis: 3 slice_point: 5")
    put("Split", "copies", "exp", "copy0 copy1")
    put("Softmax", "softmax")
    put("Softmax", "softmax_last", softmax_param="axis: 3")
    put("Flatten", "flat")
    put("Reshape", "shaped", reshape_param="shape { dim: 0 dim: 2 dim: -1 }")
    put("Permute", "permuted", permute_param="order: 0 order: 2 order: 3 order: 1")
    put("Crop", "cropped", "up data", crop_param="axis: 2 offset: 3 offset: 4")
    put("MVN", "mvn", mvn_param="eps: 1e-5")
    put("MVN", "mvn_across", mvn_param="across_channels: true eps: 1e-5")
    put("Normalize", "unit", norm_param="across_spatial: false channel_shared: false")
    put("Normalize", "unit_all", norm_param="across_spatial: true channel_shared: true")
    put("ShuffleChannel", "shuffled", shuffle_channel_param="group: 2")
    put("Interp", "resized", interp_param="height: 15 width: 21")
    put("Interp", "zoomed", interp_param="zoom_factor: 2")


def operators():
    text = 'name: "operators"\n' + data(1, 4, 9, 10)
    add = []

    def put(kind, name, bottoms="data", top=None, **messages):
        add.append(layer(kind, name, bottoms, top, **messages))

    put(
        "Deconvolution",
        "up",
        convolution_param="num_output: 6 kernel_size: 4 stride: 2 pad: 1 group: 2",
    )
    put(
        "Convolution",
        "wide",
        convolution_param="num_output: 3 kernel_h: 1 kernel_w: 5 pad_h: 0 pad_w: 2 dilation: 1",
    )
    put("Convolution", "holes", convolution_param="num_output: 3 kernel_size: 3 dilation: 2 pad: 2")
    for number, field in enumerate(
        ("pool: MAX kernel_size: 2 stride: 2", "pool: AVE kernel_size: 3 stride: 2",
         "pool: AVE kernel_size: 3 stride: 2 pad: 1", "pool: MAX kernel_size: 3 stride: 2 pad: 1",
         "pool: AVE global_pooling: true", "pool: MAX global_pooling: true")
    ):  # fmt: skip
        put("Pooling", f"pool{number}", pooling_param=field)
    arithmetic(put)
    movement(put)
    weights = {
        "up": [normal(4, 3, 4, 4), normal(6)],
        "wide": [normal(3, 4, 1, 5), normal(3)],
        "holes": [normal(3, 4, 3, 3), normal(3)],
        "bn_alone": [normal(4), positive(4), np.array([0.5], "f")],
        "scale_alone": [positive(4), normal(4)],
        "unit": [positive(4)],
        "unit_all": [positive(1)],
    }
    return text + "".join(add), weights, {"data": normal(1, 4, 9, 10, scale=1)}


def heads(name, count):
    """Return the layers that read one map of a detector."""
    text = ""
    box = (
        "min_size: 6 max_size: 12 aspect_ratio: 2 flip: true clip: false"
        if name == "conv"
        else "min_size: 14 aspect_ratio: 2 clip: true step: 8"
    )
    variances = "variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2"
    text += layer(
        "PriorBox",
        f"{name}_prior",
        f"{name} data",
        prior_box_param=f"{box} {variances} offset: 0.5",
    )
    for part, depth in (("loc", 4), ("conf", 3)):
        text += layer(
            "Convolution",
            f"{name}_{part}",
            name,
            convolution_param=f"num_output: {depth * count} kernel_size: 3 pad: 1",
        )
        text += layer(
            "Permute",
            f"{name}_{part}_perm",
            f"{name}_{part}",
            permute_param="order: 0 order: 2 order: 3 order: 1",
        )
        text += layer(
            "Flatten", f"{name}_{part}_flat", f"{name}_{part}_perm", flatten_param="axis: 1"
        )
    return text


def detector():
    text = 'name: "detector"\n' + data(1, 3, 32, 32)
    text += layer(
        "Convolution",
        "conv",
        "data",
        convolution_param="num_output: 6 kernel_size: 3 pad: 1 stride: 4",
    )
    text += layer("ReLU", "relu", "conv", "conv")
    text += layer("Pooling", "small", "conv", pooling_param="pool: MAX kernel_size: 2 stride: 2")
    text += heads("conv", 4) + heads("small", 3)
    text += layer("Concat", "loc", "conv_loc_flat small_loc_flat")
    text += layer("Concat", "conf", "conv_conf_flat small_conf_flat")
    text += layer("Concat", "prior", "conv_prior small_prior", concat_param="axis: 2")
    text += layer("Reshape", "conf_shaped", "conf", reshape_param="shape { dim: 0 dim: -1 dim: 3 }")
    text += layer("Softmax", "conf_soft", "conf_shaped", softmax_param="axis: 2")
    text += layer("Flatten", "conf_flat", "conf_soft", flatten_param="axis: 1")
    nms = "nms_param { nms_threshold: 0.45 top_k: 50 }"
    fields = f"num_classes: 3 share_location: true background_label_id: 0 {nms}"
    fields += " code_type: CENTER_SIZE keep_top_k: 20 confidence_threshold: 0.3"
    text += layer("DetectionOutput", "found", "loc conf_flat prior", detection_output_param=fields)
    weights = {"conv": [normal(6, 3, 3, 3), normal(6)]}
    for name, count in (("conv", 4), ("small", 3)):
        weights[f"{name}_loc"] = [normal(4 * count, 6, 3, 3), normal(4 * count)]
        weights[f"{name}_conf"] = [normal(3 * count, 6, 3, 3), normal(3 * count)]
    return text, weights, {"data": normal(1, 3, 32, 32, scale=1)}


def write(name, text, weights, inputs):
    """Write a network, its inputs, and the outputs that OpenCV computes."""
    binary = caffemodel(weights)
    (FOLDER / f"{name}.prototxt").write_text(text)
    (FOLDER / f"{name}.caffemodel").write_bytes(binary)
    net = cv2.dnn.readNetFromCaffe(
        np.frombuffer(text.encode(), np.uint8), np.frombuffer(binary, np.uint8)
    )
    net.enableFusion(False)
    net.setPreferableBackend(cv2.dnn.DNN_BACKEND_OPENCV)
    for key, value in inputs.items():
        net.setInput(value, key)
    names = net.getUnconnectedOutLayersNames()
    known = {f"in:{key}": value for key, value in inputs.items()}
    known |= {f"out:{key}": value for key, value in zip(names, net.forward(names), strict=True)}
    np.savez_compressed(FOLDER / f"{name}.npz", **known)


if __name__ == "__main__":
    for build in (classifier, operators, detector):
        write(build.__name__, *build())
