"""Write the parameters of the networks of this folder, and what MXNet itself computes for them.

Needs MXNet 1.9.1, which runs on Python 3.8 to 3.11 with numpy 1.23.5 in an environment of its own:
``pip install mxnet==1.9.1 numpy==1.23.5``, then ``python tests/frontends/mxnet_files/make.py``.
Tests read the files and do not need MXNet. A further operator is a further output of a symbol::

    symbol = mx.sym.load("unary-symbol.json")
    mx.sym.Group([*symbol, mx.sym.cbrt(symbol.get_internals()["data"])]).save("unary-symbol.json")
"""

import os
from pathlib import Path

# MXNet's own kernels: those of MKL-DNN take SoftmaxOutput of images over their last dimension.
os.environ.setdefault("MXNET_MKLDNN_ENABLED", "0")

import mxnet as mx
import numpy as np

FOLDER = Path(__file__).parent
#: Variables with a stated shape that are parameters.
STORED = {"weight", "side", "stored", "scale"}


def special_values(name):
    """Return the inputs of a network that are not just normally distributed."""
    if name == "unary":
        halves = [-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, -0.2, 0.2, 3, -3, 1.4]
        return {
            "data": np.concatenate([halves, np.random.randn(12)]).reshape(2, 3, 4),
            "large": np.random.uniform(1.1, 3, (2, 3, 4)),
        }
    if name == "binary":
        a = np.random.choice(
            [0.5, 1.0, 1.5, 2.25, 3.0],
            (2, 3, 4),
        )
        b = np.where(
            np.random.rand(2, 3, 4) < 0.3,
            a,
            np.random.rand(2, 3, 4) + 0.5,
        )
        return {"a": a, "b": b, "row": np.array([0.5, 1.5, 3.0]).reshape(1, 3, 1)}
    if name == "lookups":
        values = {
            "data": np.array([[0, 3, 1], [2, 0, 3]]),
            "row": np.array([0, 3, 1, 5, 2]),
        }
        return values | {"condition": (np.random.rand(5, 4) > 0.5)}
    return {}


def write(name, symbol, values):
    """Write random parameters of a network, its inputs and its outputs."""
    shapes = {v.name for v in symbol.get_internals() if v.attr("__shape__")}
    labels = {n for n in symbol.list_arguments() if n.endswith("_label")}
    arg_shapes, _, aux_shapes = symbol.infer_shape()
    named = dict(zip(symbol.list_arguments(), arg_shapes, strict=True))
    inputs = {n for n in named if n in shapes and n not in STORED}
    arrays = {}
    aux = {}
    for n, shape in named.items():
        value = values.get(n, np.random.randn(*shape) * (1 if n in inputs else 0.5))
        arrays[n] = mx.nd.array(value.astype("f"))
    for n, shape in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True):
        value = (
            np.random.rand(*shape) + 0.5
            if n.endswith("var")
            else np.random.randn(*shape)
        )
        aux[n] = mx.nd.array(value.astype("f"))
    bound = symbol.bind(
        mx.cpu(), args=dict(arrays), aux_states=dict(aux), grad_req="null"
    )
    outputs = bound.forward(is_train=False)
    saved = {f"arg:{n}": a for n, a in arrays.items() if n not in inputs | labels}
    saved.update({f"aux:{n}": a for n, a in aux.items()})
    mx.nd.save(str(FOLDER / f"{name}-0000.params"), saved)
    known = {f"in:{n}": arrays[n].asnumpy() for n in sorted(inputs)}
    known.update({f"out:{i}": output.asnumpy() for i, output in enumerate(outputs)})
    np.savez_compressed(FOLDER / f"{name}.npz", **known)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*-symbol.json")):
        network = path.name[: -len("-symbol.json")]
        np.random.seed(0)
        mx.random.seed(0)
        write(
            network,
            mx.sym.load(str(path)),
            special_values(network),
        )
