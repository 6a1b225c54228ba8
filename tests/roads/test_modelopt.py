"""A net that ``train(quantize=8)`` of Ultralytics made: from its maker's doors to other runtimes.

ModelOpt quantizes it while Ultralytics trains, and its exporter writes files for TensorRT and ONNX
alone. torchq takes the model by ``adopt_``, or that ONNX file by ``from_onnx``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.frontends.test_checkpoints import codes_differ
from tests.roads.detectors import Trained
from tests.roads.end import ROAD
from torchq.graph import tensors_in
from torchq.runtime import open_session

pytestmark = ROAD

Door = Callable[[Any, Trained, Path], nn.Module]


@pytest.fixture(scope="module")
def checkpoint(yolo: Any, detector: Trained) -> Path:
    """Return what an epoch of Ultralytics with ModelOpt made of a trained detector."""
    pytest.importorskip("modelopt.torch.quantization", reason="ModelOpt quantizes it")
    model = yolo(detector.checkpoint)
    detector.train(model, epochs=1, lr0=1e-3, quantize=8)
    return Path(model.trainer.last)


def by_adopting(yolo: Any, detector: Trained, checkpoint: Path) -> nn.Module:
    theirs = yolo(checkpoint).model.float().eval()
    network = yolo(detector.checkpoint).model.float().eval()
    torchq.adopt_(network, theirs)
    images = detector.images()[:1]
    # Theirs multiplies by the reciprocal of a scale: two roundings of a quotient of at most 128,
    # each by half a unit in the last place of float32. That decides at the border of two codes,
    # where many weights of a checkpoint in half precision lie.
    two_roundings = 2 * 128 * torch.finfo(torch.float32).eps
    assert codes_differ(network, theirs, images, ties=two_roundings) == 0
    torchq.fuse_(network, images, progress=False)
    return network


def by_file(yolo: Any, detector: Trained, checkpoint: Path) -> nn.Module:
    written = yolo(checkpoint).export(format="onnx", imgsz=64, simplify=False)
    network = torchq.from_onnx(written).eval()
    images = detector.images()[:1]
    (expected,) = open_session(written, optimize=False).run({"images": images})
    with torch.no_grad():
        found = next(tensors_in(network(images)))
    # By the processor the two add in other orders, so that a value at a tie of two codes may fall
    # either way, which moves few boxes. A scale that is one percent off moves six of ten.
    equal = torch.isclose(found, expected, rtol=1e-4, atol=1e-3)
    assert equal.float().mean() > 0.9
    assert (found - expected).norm() < 1e-3 * expected.norm()
    return network


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("door", [by_adopting, by_file])
def test_its_codes_run_in_another_runtime(
    door: Door,
    target: str,
    yolo: Any,
    detector: Trained,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    network = door(yolo, detector, checkpoint)
    images = detector.images()[:1]
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(
        network, images, path, target=target, dynamo=False, progress=False
    )
    report = torchq.verify_onnx(network, path, [images], progress=False)
    print(f"\nUltralytics train(quantize=8), {door.__name__}, {target}: {report}")
    assert report.ok, report
    share = written.coverage.share
    if target == "onnxruntime":
        # ModelOpt quantizes no results, without which ONNX Runtime computes in float; as is said.
        assert share == 0.0
        assert any("runs in float" in warning for warning in written.warnings)
    else:
        assert share is not None and share > 0.9


@pytest.mark.parametrize("door", [by_adopting, by_file])
def test_its_codes_run_in_executorch(
    door: Door, yolo: Any, detector: Trained, checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("executorch", reason="it runs the file")
    network = door(yolo, detector, checkpoint)
    images = detector.images()[:1]
    path = tmp_path / "net.pte"
    report = torchq.runtimes.executorch.export_pte(
        network, images, path, progress=False
    )
    # ModelOpt quantizes no results, without which XNNPACK computes in float; as is said.
    assert not report.integer and "is read in float" in str(report)
    deployed = torchq.deploy(network, images, target="executorch", progress=False)
    with torch.no_grad():
        pairs = zip(
            tensors_in(deployed(images)), tensors_in(network(images)), strict=True
        )
        # One value of a tie that falls the other way moves the boxes by .3 %.
        for got, expected in pairs:
            assert (got - expected).norm() < 0.01 * expected.norm()
    print(f"\nUltralytics train(quantize=8), {door.__name__}: {deployed.checked}")


@pytest.mark.eight_bit_products("onnxruntime")
@pytest.mark.parametrize("target", ["onnxruntime", "executorch"])
def test_adopted_for_a_target_it_runs_on_integers(
    target: str, yolo: Any, detector: Trained, checkpoint: Path, tmp_path: Path
) -> None:
    """What the runtime wants beside is added; ranges of ModelOpt stay as they are."""
    theirs = yolo(checkpoint).model.float().eval()
    network = yolo(detector.checkpoint).model.float().eval()
    images = detector.images()[:1]
    plan = torchq.adopt_(network, theirs, target=target, example=images)
    assert "torchq.calibrate(model, batches)" in plan.verdict()
    quantizers = torchq.workflow.quantizers(network)
    adopted = {name: q.amax.clone() for name, q in quantizers.items() if q.calibrated}
    torchq.calibrate(network, [detector.images()], progress=False)
    for name, amax in adopted.items():
        assert torch.equal(network.get_submodule(name).amax, amax)
    torchq.fuse_(network, images, progress=False)
    if target == "executorch":
        pytest.importorskip("executorch", reason="it runs the file")
        report = torchq.runtimes.executorch.export_pte(
            network, images, tmp_path / "net.pte", progress=False
        )
        assert not report.in_float
        share = f"{len(report.integer)} layers"
        deployed = torchq.deploy(network, images, target=target, progress=False)
        in_file = detector.measured_deployed(network, deployed)
    else:
        path = tmp_path / "net.onnx"
        images = detector.images()
        written = torchq.export_onnx(
            network, images, path, dynamo=False, progress=False
        )
        verified = torchq.verify_onnx(network, path, [images], progress=False)
        assert verified.ok, verified
        assert written.coverage.share is not None and written.coverage.share > 0.98
        share = f"{written.coverage.share:.1%}"
        in_file = detector.measured_file(network, path)
    simulated = detector.measured(detector.checkpoint, network)
    of_maker = detector.measured(checkpoint)
    metrics = (
        f"{of_maker:.3f} ModelOpt / {simulated:.3f} simulation / {in_file:.3f} file"
    )
    print(
        f"\ntrain(quantize=8) for {target}: {share} on integers, mAP "
        f"{detector.metric:.3f} float / {metrics}"
    )
    # Values at a tie between two codes move a box by a pixel of 64 at most.
    assert abs(in_file - simulated) < 0.02
    # What is added beside costs no more than training for integers did.
    assert simulated > min(of_maker, detector.metric) - 0.05
