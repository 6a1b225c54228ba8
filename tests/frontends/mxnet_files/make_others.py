"""Write the files of recurrent layers and of boxes; see make.py, which writes the others.

MXNet has recurrent layers for CPUs in the kernels of MKL-DNN alone, so these are in use here.
"""

from __future__ import annotations

import os

os.environ["MXNET_MKLDNN_ENABLED"] = "1"

import mxnet as mx
import numpy as np
from make import S, data, write


def recurrent():
    x = data("sequence", 5, 2, 6)
    outputs = []
    for mode, layers, both in (
        ("lstm", 2, True), ("lstm", 1, False), ("gru", 2, False), ("rnn_tanh", 1, True),
        ("rnn_relu", 1, False),
    ):  # fmt: skip
        shape = (layers * (2 if both else 1), 2, 4)
        names = (f"{mode}{layers}_state", f"{mode}{layers}_cell")
        states = [S.Variable(n, shape=shape) for n in names[: 2 if mode == "lstm" else 1]]
        y = S.RNN(
            x, S.Variable(f"{mode}{layers}_parameters"), *states, mode=mode, state_size=4,
            num_layers=layers, bidirectional=both, p=0.2,
        )  # fmt: skip
        outputs.append(y)
    return S.Group(outputs), {}


def boxes():
    corners = np.random.rand(2, 30, 2)
    rows = np.concatenate(
        [np.random.randint(0, 3, (2, 30, 1)), np.random.rand(2, 30, 1), corners,
         corners + 0.1 + 0.4 * np.random.rand(2, 30, 2)], 2
    )  # fmt: skip
    x, detections = data("data", 1, 4, 5, 6), data("rows", 2, 30, 6)
    centers = data("centers", 2, 30, 6)
    anchors = data("anchors", 1, 30, 4)
    scores, locations = data("scores", 2, 4, 30), data("locations", 2, 120)
    shares = np.exp(3 * np.random.rand(2, 4, 30))
    values = {
        "rows": rows,
        "centers": rows,
        "anchors": rows[:1, :, 2:],
        "scores": shares / shares.sum(1, keepdims=True),
    }
    box = mx.sym.contrib
    outputs = [
        box.MultiBoxPrior(x),
        box.MultiBoxPrior(x, sizes=(0.3, 0.5), ratios=(2, 1, 0.5), clip=True),
        box.MultiBoxPrior(x, sizes=(0.2,), ratios=(1, 3), steps=(0.25, 0.2), offsets=(0.4, 0.6)),
        box.MultiBoxDetection(scores, locations, anchors),
        box.MultiBoxDetection(scores, locations, anchors, threshold=0.4, nms_threshold=0.3,
                              force_suppress=True, clip=False, nms_topk=10),
        box.box_nms(detections, id_index=0),
        box.box_nms(detections, id_index=0, overlap_thresh=0.3, valid_thresh=0.2, topk=15,
                    force_suppress=True),
        box.box_nms(centers, in_format="center", out_format="center", overlap_thresh=0.4),
        box.box_nms(detections, id_index=0, background_id=1, overlap_thresh=0.1),
    ]  # fmt: skip
    return S.Group(outputs), values


if __name__ == "__main__":
    for build in (recurrent, boxes):
        np.random.seed(0)
        mx.random.seed(0)
        with mx.name.NameManager():
            write(build.__name__, *build())
