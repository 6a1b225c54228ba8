"""Write the files of this folder: small networks, with what MXNet itself computes for them.

Needs MXNet 1.9.1, which runs on Python 3.8 to 3.11 with numpy 1.23.5 in an environment of its own:
``pip install mxnet==1.9.1 numpy==1.23.5``, then ``python tests/frontends/mxnet_files/make.py``.
Tests read the files and do not need MXNet.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

# MXNet's own kernels: those of MKL-DNN take SoftmaxOutput of images over their last dimension.
os.environ.setdefault("MXNET_MKLDNN_ENABLED", "0")

import mxnet as mx
import numpy as np

S = mx.sym
FOLDER = Path(__file__).parent
NETWORKS = {}


def network(function):
    NETWORKS[function.__name__] = function
    return function


def data(name="data", *shape):
    return S.Variable(name, shape=shape)


@network
def classifier():
    x = data("data", 2, 3, 16, 16)
    x = S.BatchNorm(x, name="bn_data", fix_gamma=True, eps=2e-5, momentum=0.9)
    x = S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True, name="conv0")
    x = S.BatchNorm(x, name="bn0", fix_gamma=False, eps=2e-5)
    x = S.Activation(x, act_type="relu", name="relu0")
    x = S.Pooling(x, kernel=(3, 3), stride=(2, 2), pooling_convention="full", name="pool0")
    branch = S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), num_group=2, name="unit1")
    x = S.BatchNorm(x + branch, name="bn1", use_global_stats=True)
    x = S.LeakyReLU(x, act_type="prelu", name="prelu0")
    x = S.Pooling(x, global_pool=True, pool_type="avg", name="pool1")
    x = S.Dropout(S.Flatten(x), p=0.3)
    x = S.FullyConnected(x, num_hidden=5, name="fc1")
    return S.SoftmaxOutput(x, name="softmax"), {}


@network
def convolutions():
    line, image, volume = (
        data("line", 1, 4, 9),
        data("image", 1, 4, 7, 8),
        data("volume", 1, 2, 5, 5, 5),
    )
    outputs = [
        S.Convolution(line, num_filter=4, kernel=(3,), stride=(2,), num_group=2),
        S.Convolution(volume, num_filter=3, kernel=(2, 2, 2), dilate=(2, 1, 1), pad=(1, 0, 0)),
        S.Convolution(image, num_filter=4, kernel=(3, 3), dilate=(2, 2), pad=(2, 2)),
        S.Deconvolution(line, num_filter=4, kernel=(3,), stride=(2,)),
        S.Deconvolution(image, num_filter=6, kernel=(3, 4), stride=(2, 2), pad=(1, 0), adj=(1, 0)),
        S.Deconvolution(
            image, num_filter=4, kernel=(2, 2), stride=(2, 2), num_group=2, no_bias=False
        ),
        S.UpSampling(image, scale=2, sample_type="nearest"),
        S.UpSampling(image, scale=2, sample_type="bilinear", num_filter=4),
        S.UpSampling(image, scale=3, sample_type="bilinear", num_filter=4),
        S.FullyConnected(image, num_hidden=3, no_bias=True),
        S.FullyConnected(image, num_hidden=3, flatten=False),
    ]
    return S.Group(outputs), {}


@network
def poolings():
    x, line, volume = (
        data("data", 1, 2, 10, 11),
        data("line", 1, 2, 9),
        data("volume", 1, 1, 6, 5, 7),
    )
    outputs = []
    shapes = [((3, 3), (2, 2), (1, 1)), ((2, 3), (2, 2), (0, 1)), ((1, 1), (2, 2), (0, 0))]
    shapes += [((3, 3), (3, 3), (1, 1)), ((2, 2), (1, 1), (0, 0))]
    kinds = [("max", True), ("avg", True), ("avg", False), ("sum", True)]
    for (kernel, stride, pad), (kind, include), convention in itertools.product(
        shapes, kinds, ["valid", "full"]
    ):
        empty = kernel == (1, 1) or (stride == (3, 3) and not include)
        if empty and convention == "full" and kind != "max":
            continue  # a window without elements: MXNet divides by zero
        outputs.append(
            S.Pooling(
                x, pool_type=kind, kernel=kernel, stride=stride, pad=pad,
                pooling_convention=convention, count_include_pad=include,
            )
        )  # fmt: skip
    outputs.append(S.Pooling(line, kernel=(3,), stride=(2,), pool_type="avg"))
    outputs.append(S.Pooling(volume, kernel=(2, 2, 2), stride=(2, 2, 2)))
    for kind in ("max", "avg", "sum"):
        outputs.append(S.Pooling(x, pool_type=kind, kernel=(2, 2), global_pool=True))
    outputs.append(S.contrib.AdaptiveAvgPooling2D(x, output_size=(3, 4)))
    outputs.append(S.contrib.AdaptiveAvgPooling2D(x, output_size=2))
    outputs.append(S.contrib.BilinearResize2D(x, height=15, width=7))
    outputs.append(S.contrib.BilinearResize2D(x, height=15, width=7, align_corners=False))
    outputs.append(S.contrib.BilinearResize2D(x, scale_height=1.5, scale_width=2.5))
    outputs.append(S.Crop(x, h_w=(4, 5), offset=(1, 2), num_args=1))
    outputs.append(
        S.Crop(x, S.Pooling(x, kernel=(2, 2), stride=(2, 2)), center_crop=True, num_args=2)
    )
    return S.Group(outputs), {}


@network
def activations():
    x = data("data", 2, 3, 4, 4)
    outputs = [S.Activation(x, act_type=kind) for kind in
               ("relu", "sigmoid", "tanh", "softrelu", "softsign")]  # fmt: skip
    outputs += [S.LeakyReLU(x, act_type=kind) for kind in
                ("leaky", "elu", "selu", "gelu", "prelu")]  # fmt: skip
    outputs += [S.LeakyReLU(x, act_type="rrelu")[0]]
    outputs += [
        S.LeakyReLU(x, act_type="leaky", slope=0.1),
        S.LeakyReLU(x, act_type="elu", slope=0.7),
    ]
    outputs += [S.relu(x), S.sigmoid(x), S.tanh(x), S.softsign(x)]
    outputs += [S.hard_sigmoid(x), S.hard_sigmoid(x, alpha=0.3, beta=0.4)]
    outputs += [S.softmax(x), S.softmax(x, axis=1, temperature=2.0), S.log_softmax(x, axis=1)]
    outputs += [S.SoftmaxActivation(x), S.SoftmaxActivation(x, mode="channel")]
    outputs += [S.Dropout(x), S.BlockGrad(x), S.identity(x), S.MakeLoss(S.exp(x))]
    outputs += [S.SoftmaxOutput(x, multi_output=True), S.SoftmaxOutput(x, preserve_shape=True)]
    outputs += [S.SoftmaxOutput(x), S.LogisticRegressionOutput(x), S.LinearRegressionOutput(x)]
    outputs += [S.MAERegressionOutput(x), S.clip(x, -0.5, 0.5), S.clip(x, 0, 6)]
    return S.Group(outputs), {}


@network
def unary():
    x, large = data("data", 2, 3, 4), data("large", 2, 3, 4)
    names = "abs ceil cos erf exp floor negative ones_like sign sin square tanh zeros_like"
    outputs = [getattr(S, name)(x) for name in names.split()]
    outputs += [getattr(S, name)(large) for name in ["log", "reciprocal", "rsqrt", "sqrt"]]
    outputs += [S.cast(x, dtype="int32"), S.Cast(x, dtype="float64")]
    halves = np.array([-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, -0.2, 0.2, 3, -3, 1.4], "f")
    values = {"data": np.concatenate([halves, np.random.randn(12)]).reshape(2, 3, 4).astype("f")}
    values["large"] = np.random.uniform(1.1, 3, (2, 3, 4)).astype("f")
    return S.Group(outputs), values


@network
def binary():
    a, b, row = data("a", 2, 3, 4), data("b", 2, 3, 4), data("row", 1, 3, 1)
    names = """elemwise_add elemwise_sub elemwise_mul elemwise_div _maximum _minimum _power
        _equal _not_equal _greater _greater_equal _lesser _lesser_equal"""
    outputs = [getattr(S, name, None) or getattr(S._internal, name) for name in names.split()]
    outputs = [function(a, b) for function in outputs]
    names = """add sub mul div maximum minimum power equal not_equal greater greater_equal
        lesser lesser_equal"""
    outputs += [getattr(S, f"broadcast_{name}")(a, row) for name in names.split()]
    names = """plus minus rminus mul div rdiv power rpower maximum minimum equal not_equal
        greater greater_equal lesser lesser_equal"""
    outputs += [getattr(S._internal, f"_{name}_scalar")(a, scalar=1.5) for name in names.split()]
    outputs += [S.add_n(a, b, a), S.elemwise_add(a, S.Variable("weight", shape=(2, 3, 4)))]
    values = {"a": np.random.choice([0.5, 1.0, 1.5, 2.25, 3.0], (2, 3, 4)).astype("f")}
    values["b"] = np.where(
        np.random.rand(2, 3, 4) < 0.3, values["a"], np.random.rand(2, 3, 4) + 0.5
    )
    values["row"] = np.array([0.5, 1.5, 3.0], "f").reshape(1, 3, 1)
    return S.Group(outputs), values


@network
def reductions():
    x, flat = data("data", 2, 3, 4, 5), data("flat", 6, 7)
    outputs = []
    for name in ("sum", "mean", "max", "min"):
        function = getattr(S, name)
        outputs += [function(x), function(x, axis=1), function(x, axis=(2, 3), keepdims=True)]
        outputs += [
            function(x, axis=1, exclude=True),
            function(x, axis=-1, exclude=True, keepdims=True),
        ]
    outputs += [S.norm(x), S.norm(x, ord=1, axis=1), S.norm(x, axis=(1, 2), keepdims=True)]
    outputs += [S.argmax(x, axis=1), S.argmax(x, axis=2, keepdims=True), S.argmin(x, axis=-1)]
    outputs += [S.argmax(flat)]
    outputs += [
        S.dot(flat, S.Variable("weight", shape=(7, 3))),
        S.dot(flat, flat, transpose_b=True),
    ]
    outputs += [S.dot(flat, flat, transpose_a=True), S.dot(x, S.Variable("side", shape=(5, 2)))]
    a, b = data("first", 2, 3, 4), data("second", 2, 5, 4)
    outputs += [
        S.batch_dot(a, b, transpose_b=True),
        S.batch_dot(S.transpose(a, axes=(0, 2, 1)), b, transpose_a=True, transpose_b=True),
    ]
    return S.Group(outputs), {}


@network
def movement():
    x, line = data("data", 2, 3, 4, 5), data("line", 3, 1, 4)
    codes = [(0, -1), (-2,), (0, -3, -2), (0, -4, -1, 3, -2), (-3, -3), (0, 0, -1), (4, 30)]
    outputs = [S.reshape(x, shape=code) for code in codes]
    outputs += [S.reshape(x, shape=code, reverse=True) for code in [(-1, 0), (0, -1, 0)]]
    outputs += [S.transpose(x), S.flatten(x)]
    outputs += [
        S.transpose(x, axes=(0, 2, 3, 1)),
        S.SwapAxis(x, dim1=1, dim2=3),
        S.expand_dims(x, axis=2),
    ]
    outputs += [S.squeeze(line), S.squeeze(line, axis=1), S.Concat(x, x), S.concat(x, x, dim=3)]
    outputs += [S.stack(x, x, axis=1), *S.SliceChannel(x, num_outputs=2, axis=2)]
    outputs += [*S.split(x, num_outputs=3, axis=1, squeeze_axis=True)]
    outputs += [*S.split_v2(x, (1, 3), axis=3), *S.split_v2(x, 2, axis=0, squeeze_axis=True)]
    return S.Group(outputs), {}


@network
def slices():
    x, line, like = data("data", 2, 3, 4, 5), data("line", 3, 1, 4), data("like", 2, 2, 3, 4)
    outputs = [S.slice(x, begin=(0, 1), end=(1, 3)), S.slice(x, begin=(None, 2), end=(None, None))]
    outputs += [S.slice(x, begin=(None, None, 3), end=(None, None, 0), step=(1, 1, -2))]
    outputs += [
        S.slice_axis(x, axis=2, begin=1, end=3),
        S.slice_axis(x, axis=-1, begin=-3, end=None),
    ]
    outputs += [S.slice_like(x, like), S.slice_like(x, like, axes=(2, -1)), S.tile(x, reps=(2, 1))]
    outputs += [
        S.tile(line, reps=(2, 1, 1, 3)),
        S.repeat(x, repeats=2, axis=1),
        S.repeat(line, repeats=2),
    ]
    outputs += [S.reverse(x, axis=(1, 2)), S.flip(x, axis=0), S.broadcast_to(line, shape=(0, 2, 4))]
    outputs += [S.broadcast_like(line, S.broadcast_to(line, shape=(3, 6, 4)))]
    outputs += [S.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 2, 3, 0), constant_value=0.5)]
    outputs += [S.pad(x, mode="edge", pad_width=(0, 0, 0, 0, 1, 2, 3, 0))]
    outputs += [S.pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 3, 0))]
    outputs += [S.depth_to_space(S.tile(x, reps=(1, 4, 1, 1)), block_size=2)]
    outputs += [S.space_to_depth(S.tile(x, reps=(1, 1, 1, 2)), block_size=2)]
    outputs += [S.broadcast_add(line, S.ones((3, 1, 4))), S.broadcast_mul(line, S.arange(0, 4) + 1)]
    outputs += [S.broadcast_add(line, S.zeros((1, 1, 4)) + S.full((1, 1, 4), 2.5))]
    outputs += [
        S.broadcast_add(line, S.arange(1, 3, 0.5)),
        S.broadcast_add(line, S.arange(0, 2, repeat=2)),
    ]
    return S.Group(outputs), {}


@network
def lookups():
    x, table = data("data", 2, 3), data("table", 5, 4)
    condition, row = data("condition", 5, 4), data("row", 5)
    outputs = [
        S.Embedding(x, input_dim=5, output_dim=3),
        S.take(table, x),
        S.take(table, x, axis=1, mode="wrap"),
        S.take(S.Variable("stored", shape=(5, 2)), x),
        S.where(condition, table, -table),
        S.where(row, table, -table),
    ]
    values = {"data": np.array([[0, 3, 1], [2, 0, 3]], "f"), "row": np.array([0, 3, 1, 5, 2], "f")}
    values["condition"] = (np.random.rand(5, 4) > 0.5).astype("f")
    return S.Group(outputs), values


@network
def norms():
    x, line, volume = data("data", 2, 4, 5, 6), data("line", 2, 4, 5), data("volume", 2, 3, 4, 4, 4)
    outputs = [
        S.BatchNorm(S.Convolution(line, num_filter=4, kernel=(1,)), fix_gamma=False),
        S.BatchNorm(S.Pooling(volume, kernel=(1, 1, 1)), fix_gamma=False, eps=0.1),
        S.BatchNorm(x, fix_gamma=False, axis=3),
        S.BatchNorm(x),
        S.BatchNorm(S.FullyConnected(x, num_hidden=4), fix_gamma=False),
        S.InstanceNorm(x),
        S.InstanceNorm(line, eps=0.01),
        S.LayerNorm(x),
        S.LRN(x, nsize=3),
        S.LRN(S.Concat(x, x), nsize=5, alpha=0.1, beta=0.5, knorm=1),
        S.L2Normalization(x),
        S.L2Normalization(x, mode="channel"),
        S.L2Normalization(x, mode="spatial", eps=0.1),
        S.broadcast_mul(
            S.L2Normalization(x, mode="channel"), S.Variable("scale", shape=(1, 4, 1, 1))
        ),
    ]
    return S.Group(outputs), {}


def write(name, symbol, values):
    """Write a network with random parameters, its inputs and its outputs."""
    shapes = {v.name for v in symbol.get_internals() if v.attr("__shape__")}
    labels = {n for n in symbol.list_arguments() if n.endswith("_label")}
    arg_shapes, _, aux_shapes = symbol.infer_shape()
    named = dict(zip(symbol.list_arguments(), arg_shapes, strict=True))
    inputs = {n for n in named if n in shapes and n not in STORED}
    arrays, aux = {}, {}
    for n, shape in named.items():
        arrays[n] = mx.nd.array(
            values.get(n, np.random.randn(*shape) * (1 if n in inputs else 0.5)).astype("f")
        )
    for n, shape in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True):
        value = np.random.rand(*shape) + 0.5 if n.endswith("var") else np.random.randn(*shape)
        aux[n] = mx.nd.array(value.astype("f"))
    bound = symbol.bind(mx.cpu(), args=dict(arrays), aux_states=dict(aux), grad_req="null")
    outputs = bound.forward(is_train=False)
    saved = {f"arg:{n}": a for n, a in arrays.items() if n not in inputs | labels}
    saved.update({f"aux:{n}": a for n, a in aux.items()})
    symbol.save(str(FOLDER / f"{name}-symbol.json"))
    mx.nd.save(str(FOLDER / f"{name}-0000.params"), saved)
    known = {f"in:{n}": arrays[n].asnumpy() for n in sorted(inputs)}
    known.update({f"out:{i}": output.asnumpy() for i, output in enumerate(outputs)})
    np.savez_compressed(FOLDER / f"{name}.npz", **known)


#: Variables with a stated shape that are parameters.
STORED = {"weight", "side", "stored", "scale"}

if __name__ == "__main__":
    for name, build in NETWORKS.items():
        np.random.seed(0)
        mx.random.seed(0)
        with mx.name.NameManager():
            write(name, *build())
