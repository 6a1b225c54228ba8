"""Write the weights of the networks of this folder, and what OpenCV computes for them.

Needs OpenCV 4, whose module ``dnn`` reads Caffe's files on its own: ``pip install
opencv-python-headless``, then ``python -m tests.frontends.caffe_files.make`` from the root of the
repository. Tests read the files and do not need OpenCV. A further layer is written in the prototxt,
and its weights below.
"""

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


def classifier():
    weights = {
        "conv1": [normal(8, 3, 3, 3)],
        "bn1": [normal(8), positive(8), np.array([2.0], "f")],
        "scale1": [positive(8), normal(8)],
        "branch": [normal(8, 4, 3, 3), normal(8)],
        "prelu": [positive(8) * 0.2],
        "fc": [normal(5, 72), normal(5)],
    }
    return weights, normal(2, 3, 16, 16, scale=1)


def operators():
    weights = {
        "up": [normal(4, 3, 4, 4), normal(6)],
        "wide": [normal(3, 4, 1, 5), normal(3)],
        "holes": [normal(3, 4, 3, 3), normal(3)],
        "bn_alone": [normal(4), positive(4), np.array([0.5], "f")],
        "scale_alone": [positive(4), normal(4)],
        "unit": [positive(4)],
        "unit_all": [positive(1)],
    }
    return weights, normal(1, 4, 9, 10, scale=1)


def detector():
    weights = {"conv": [normal(6, 3, 3, 3), normal(6)]}
    for name, count in (("conv", 4), ("small", 3)):
        weights[f"{name}_loc"] = [normal(4 * count, 6, 3, 3), normal(4 * count)]
        weights[f"{name}_conf"] = [normal(3 * count, 6, 3, 3), normal(3 * count)]
    return weights, normal(1, 3, 32, 32, scale=1)


def write(name, weights, data):
    """Write the weights of a network, its input, and the outputs that OpenCV computes."""
    message = (FOLDER / f"{name}.prototxt").read_bytes()
    binary = caffemodel(weights)
    (FOLDER / f"{name}.caffemodel").write_bytes(binary)
    net = cv2.dnn.readNetFromCaffe(
        np.frombuffer(message, np.uint8), np.frombuffer(binary, np.uint8)
    )
    net.enableFusion(False)
    net.setPreferableBackend(cv2.dnn.DNN_BACKEND_OPENCV)
    net.setInput(data, "data")
    names = net.getUnconnectedOutLayersNames()
    known = {
        f"out:{key}": value
        for key, value in zip(names, net.forward(names), strict=True)
    }
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        **{"in:data": data},
        **known,
    )


if __name__ == "__main__":
    for build in (classifier, operators, detector):
        write(build.__name__, *build())
