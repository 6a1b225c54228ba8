"""What a plan counts as quantized after calibration is what files compute on integers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import torchq
from tests.models import ConvNet
from torchq.lowering.api import simulated_copy
from torchq.runtimes.executorch.program import traced
from torchq.swap import plan_of
from torchq.workflow import added_operators

pytest.importorskip("onnx")
# Plans and files of which little is on integers warn, and torch does of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ["onnxruntime", "openvino", "executorch"]


class Detector(nn.Module):
    """Boxes, which stay float, and scores, which are quantized in front of a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU())
        self.box = nn.Conv2d(16, 8, 1)
        self.score = nn.Conv2d(16, 6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.box(features).flatten(2), self.score(features).sigmoid().flatten(2)


class Segmentation(nn.Module):
    """A U-Net of one level, with a transposed convolution, in some number of dimensions."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        transposed = getattr(nn, f"ConvTranspose{dims}d")
        self.first = conv(3, 16, 3, padding=1)
        self.down = conv(16, 32, 3, 2, 1)
        self.up = transposed(32, 16, 2, 2)
        self.joined = conv(32, 16, 3, padding=1)
        self.head = conv(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x).relu()
        up = self.up(self.down(wide).relu())
        return self.head(self.joined(torch.cat([up, wide], 1)).relu())


class Recurrent(nn.Module):
    """A GRU, which stays float, between a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.conv(x).relu().transpose(1, 2))
        return self.head(states[:, -1])


class Norms(nn.Module):
    """A depthwise convolution in front of a norm that cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.norm = nn.GroupNorm(4, 32)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.first(x))
        return self.last(self.norm(self.depthwise(h))).mean((2, 3))


def grouped() -> nn.Module:
    """Groups that files for ONNX Runtime join, with zeros between them, and a layer in float."""
    layers = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=8), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(32, 8, 3))


class Attention(nn.Module):
    """Attention whose query is a convolution's result, which is scaled before it is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.query, self.key, self.value = (nn.Conv2d(16, 16, 1) for _ in range(3))
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).relu()
        parts = self.query(x), self.key(x), self.value(x)
        heads = [part.reshape(-1, 2, 8, 16).transpose(2, 3) for part in parts]
        found = nn.functional.scaled_dot_product_attention(*heads)
        return self.last(found.transpose(2, 3).reshape(-1, 16, 4, 4))


class Einsums(nn.Module):
    """Attention of two einsums, and a weight that a third one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.queries = nn.Linear(16, 16)
        self.mix = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        queries, keys = (part.unflatten(-1, (2, 8)) for part in (self.queries(x), x))
        weights = torch.einsum("bqhd, bkhd -> bhqk", queries, keys).softmax(-1)
        found = torch.einsum("...qk,...kd->...qd", weights, keys.transpose(1, 2))
        return torch.einsum("bqc,cd->bqd", found.transpose(1, 2).flatten(2), self.mix)


class Unbatched(nn.Module):
    """Convolutions of one image, or one sound, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.sound = nn.Conv1d(8, 4, 3)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.sound(self.image(x).mean(-1)))


class CutBehindMoves(nn.Module):
    """A ReLU behind the Flatten of what a convolution returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.out = nn.Linear(8 * 14 * 14, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).flatten(1).relu())


class Positions(nn.Module):
    """Layers that read a table of positions, which is the same for each sample of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 16))
        self.query = nn.Linear(16, 16)
        self.position = nn.Linear(16, 16, bias=False)
        self.bias = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 9))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        scores = query @ self.position(self.table).t() + self.bias(self.table)
        return self.out(scores.softmax(-1) @ query)


class Patches(nn.Module):
    """Patches of resized images, of which TorchScript asks how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x, size=(24, 24), mode="bilinear")
        rows = self.patches(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(x.shape[0], -1, -1), rows], 1)
        return self.head(self.norm(rows))


class Skips(nn.Module):
    """A WaveNet, whose last residual nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 3, padding=1) for _ in range(2))
        self.residuals = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(2))
        self.last = nn.Conv1d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found = []
        layers = zip(self.gates, self.residuals, self.skips, strict=True)
        for gate, residual, skip in layers:
            states, open_by = gate(x).chunk(2, 1)
            gated = states.tanh() * open_by.sigmoid()
            found.append(skip(gated))
            x = x + residual(gated)
        return self.last((found[0] + found[1]).relu())


class Calls(nn.Module):
    """Convolutions that are calls in one forward; something reads one of the results in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, bias=False)
        self.second = nn.Conv2d(16, 16, 3, bias=False)
        self.third = nn.Conv2d(16, 16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x, self.first.weight).relu()
        x = nn.functional.conv2d(x, self.second.weight).tanh()
        return nn.functional.conv2d(x, self.third.weight)


class TransposedCalls(Calls):
    """The second call is of a transposed convolution, which reads floats in ONNX Runtime."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x, self.first.weight).relu()
        x = nn.functional.conv_transpose2d(x, self.second.weight).relu()
        return nn.functional.conv2d(x, self.third.weight)


def vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=4)


def swin() -> nn.Module:
    """Attention in a function outside of the forward, whose products nothing quantizes."""
    sizes = ([4, 4], 32, [1, 1], [2, 4], [4, 4])
    return torchvision.models.SwinTransformer(*sizes, num_classes=4)


def padded() -> nn.Module:
    """Convolutions that pad with values of the image, behind their quantizers."""

    def conv(channels: int, mode: str) -> nn.Conv2d:
        return nn.Conv2d(channels, 16, 3, padding=1, padding_mode=mode)

    layers = conv(3, "reflect"), nn.ReLU(), conv(16, "circular"), nn.ReLU()
    return nn.Sequential(*layers, conv(16, "replicate"), nn.ReLU(), nn.Conv2d(16, 4, 1))


PICTURES = (3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "torchvision": (lambda: torchvision.models.squeezenet1_1(num_classes=4), PICTURES),
    "residual": (ConvNet, (3, 16, 16)),
    "detector": (Detector, PICTURES),
    "segmentation": (lambda: Segmentation(2), PICTURES),
    "3-d": (lambda: Segmentation(3), (3, 8, 8, 8)),
    "recurrent": (Recurrent, (8, 20)),
    "norms": (Norms, PICTURES),
    "calls": (Calls, PICTURES),
    "transposed calls": (TransposedCalls, PICTURES),
    "padded": (padded, PICTURES),
    "groups": (grouped, PICTURES),
    "attention": (Attention, PICTURES),
    "calls of einsum": (Einsums, PICTURES),
    "patches": (Patches, PICTURES),
    "skips": (Skips, (8, 20)),
    "one layer": (lambda: nn.Conv2d(3, 8, 3), PICTURES),
    "vision transformer": (vision_transformer, PICTURES),
    "swin": (swin, PICTURES),
}


def calibrated(model: nn.Module, batches: list[Tensor], target: str) -> nn.Module:
    torchq.fuse_(model.eval(), batches[0], progress=False)
    torchq.quantize_(model, target=target, example=batches[0], progress=False)
    torchq.calibrate(model, batches, progress=False)
    return model


def share_of_file(
    model: nn.Module, example: Tensor, target: str, folder: Path
) -> float:
    """Return the share of the multiply-adds on integers, as a file tells it."""
    if target == "executorch":
        # The program tells what is delegated as integers; to lower it takes a minute.
        _, layers = traced(simulated_copy(model), example)
        work = plan_of(model).work
        assert work is not None
        done = sum(work.amounts.get(path, 0) for path, why in layers.items() if not why)
        return done / sum(work.amounts.values())
    path = folder / "net.onnx"
    written = torchq.export_onnx(model, example, path, dynamo=False, progress=False)
    assert written.coverage is not None and written.coverage.share is not None
    assert torchq.inspect_onnx(path).coverage == written.coverage
    return written.coverage.share


def check(model: nn.Module, example: Tensor, target: str, folder: Path) -> float:
    share = plan_of(model).share
    assert share is not None
    actual = share_of_file(model, example, target, folder)
    assert share.quantized == pytest.approx(actual, abs=1e-6)
    report = torchq.doctor(model, [example], timed=False, progress=False)
    assert report.share == str(share)
    return actual


@pytest.fixture(autouse=True)
def _numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_planned_share_is_that_of_the_file(
    name: str, target: str, tmp_path: Path
) -> None:
    if "calls" in name and target == "executorch":
        pytest.skip("its programs tell modules apart, not the calls of one module")
    build, shape = NETWORKS[name]
    batches = [torch.rand(4, *shape) - 0.3 for _ in range(3)]
    model = calibrated(build(), batches, target)
    check(model, batches[0], target, tmp_path)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_recurrent_layers_with_and_without_a_quantized_state(
    target: str, tmp_path: Path
) -> None:
    batches = [torch.rand(4, 8, 6) - 0.3 for _ in range(3)]
    model = Recurrent().eval()
    config = torchq.recipes.int8(recurrent=True)
    if target == "tensorrt":  # Its files have scales in float16.
        config = torchq.recipes.int8(recurrent=True, symmetric=True)
    torchq.quantize_(model, config, target=target, example=batches[0], progress=False)
    torchq.calibrate(model, batches, progress=False)
    on_integers = check(model, batches[0], target, tmp_path)
    with torchq.disabled(model, "*.hidden_*"):
        alone = check(model, batches[0], target, tmp_path)
        share = plan_of(model).share
        assert share is not None
        assert "its hidden state is float" in str(share.float_work)
    assert alone < on_integers


def test_a_layer_whose_result_is_asked_for_the_batch_runs_on_integers(
    tmp_path: Path,
) -> None:
    batches = [torch.rand(4, *PICTURES) - 0.3 for _ in range(3)]
    model = calibrated(vision_transformer(), batches, "onnxruntime")
    with torch.no_grad():  # Other weights than zeros, with which it is made.
        model.heads.head.weight.normal_(std=0.2)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, batches[0], path, dynamo=False, progress=False)
    in_float = [node.kind for node in torchq.inspect_onnx(path).fallbacks]
    assert "Conv" not in in_float
    report = torchq.verify_onnx(model, path, [batches[0], batches[1][:2]])
    assert report.ok, report


class Sums(nn.Module):
    """A convolution whose result an addition reads, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x).relu()
        return self.last((first + self.second(first)).tanh())


# OpenVINO gives float results on integers too.
@pytest.mark.parametrize("target", ["onnxruntime", "executorch"])
def test_it_is_so_where_calibration_leaves_an_operator_in_float(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.rand(4, 3, 16, 16) - 0.3 for _ in range(3)]
    untouched = calibrated(Sums(), batches, target)
    before = check(untouched, batches[0], target, tmp_path)
    # As if the addition cost more than it does.
    monkeypatch.setattr(added_operators, "worst_operators", lambda _: ("quant_add",))
    monkeypatch.setattr(added_operators, "_LEAST_EXPECTED", -100.0)
    monkeypatch.setattr(added_operators, "_LEAST_GAIN", -100.0)
    model = calibrated(Sums(), batches, target)
    decision = plan_of(model).decision("quant_add")
    assert decision is not None and decision.left_float
    after = check(model, batches[0], target, tmp_path)
    assert after < before


class Sentences(nn.Module):
    """Attention whose heads are views, with a mask of as many rows as the sentence has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.places = nn.Embedding(64, 32)
        self.query = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch, length = input_ids.shape
        places = torch.arange(length, device=input_ids.device).expand(batch, length)
        x = self.words(input_ids) + self.places(places)
        heads = self.query(x).view(batch, length, 2, 16).transpose(1, 2)
        mask = attention_mask[:, None, None, :].expand(batch, 1, length, length)
        scores = (heads @ heads.transpose(-1, -2)).masked_fill(mask == 0, -9.0)
        mixed = scores.softmax(-1) @ heads
        mixed = mixed.transpose(1, 2).reshape(batch, length, 32)
        return self.head(self.out(mixed)[:, 0])


@pytest.mark.parametrize("dynamo", [False, True])
def test_open_lengths_count_as_in_the_example(dynamo: bool, tmp_path: Path) -> None:
    words = torch.randint(50, (4, 24))
    example = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    model = Sentences().eval()
    # Its products of two activations, which are as large as its layers, stay float.
    torchq.quantize_(
        model,
        target="onnxruntime",
        example=example,
        exclude=["*matmul*"],
        progress=False,
    )
    torchq.calibrate(model, [example], progress=False)
    share = plan_of(model).share
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(model, example, path, dynamo=dynamo, progress=False)
    assert share is not None and written.coverage is not None
    assert 0.5 < share.quantized < 0.8
    assert written.coverage.share == pytest.approx(share.quantized, abs=1e-6)
    shorter = {name: tensor[:2, :9] for name, tensor in example.items()}
    assert torchq.verify_onnx(model, path, [example, shorter], progress=False).ok


class Relative(nn.Module):
    """Attention with positions from the length down to its negative, as XLNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.Linear(16, 16)
        self.position = nn.Linear(16, 16)
        self.register_buffer("frequencies", torch.rand(16))

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        queries = self.layer(self.words(input_ids))
        places = torch.arange(length, -length, -1.0, device=input_ids.device)
        positions = self.position((places[:, None] * self.frequencies).sin())
        scores = torch.einsum("bid,jd->bij", queries, positions)
        return torch.einsum("bij->jbi", scores)


@pytest.mark.parametrize("dynamo", [False, True])
def test_lengths_that_are_terms_count_as_in_the_example(
    dynamo: bool, tmp_path: Path
) -> None:
    """An Einsum that only moves numbers does not count."""
    example = {"input_ids": torch.randint(50, (4, 12))}
    model = Relative().eval()
    torchq.quantize_(
        model,
        target="onnxruntime",
        example=example,
        exclude=["position"],
        progress=False,
    )
    torchq.calibrate(model, [example], progress=False)
    share = plan_of(model).share
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(model, example, path, dynamo=dynamo, progress=False)
    assert share is not None and written.coverage is not None
    assert share.quantized < 0.9
    assert written.coverage.share == pytest.approx(share.quantized, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dynamo", [False, True])
def test_work_that_no_batch_multiplies_counts_as_in_the_run_of_the_plan(
    dynamo: bool, rows: int, tmp_path: Path
) -> None:
    """What reads a table counts once beside the samples that the plan has seen."""
    example = torch.randn(4, 9, 16)
    model = Positions().eval()
    in_float = ["bias.2", "*matmul*"]
    torchq.quantize_(
        model, target="onnxruntime", example=example, exclude=in_float, progress=False
    )
    torchq.calibrate(model, [example], progress=False)
    torchq.save(model, tmp_path / "net.pt")
    loaded = torchq.load(Positions().eval(), tmp_path / "net.pt")
    share = plan_of(loaded).share
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(
        loaded, example[:rows], path, dynamo=dynamo, progress=False
    )
    assert share is not None and written.coverage is not None
    assert 0.5 < share.quantized < 0.8
    assert written.coverage.share == pytest.approx(share.quantized, abs=1e-6)
    assert torchq.inspect_onnx(path).coverage == written.coverage


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_relu_behind_a_move_is_included(target: str, tmp_path: Path) -> None:
    batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    model = calibrated(CutBehindMoves(), batches, target)
    assert check(model, batches[0], target, tmp_path) == 1.0
    path = tmp_path / "net.onnx"
    assert torchq.verify_onnx(model, path, batches, progress=False).ok


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_convolutions_without_a_batch_run_on_integers(
    target: str, dynamo: bool, tmp_path: Path
) -> None:
    batches = [torch.randn(3, 12, 12) for _ in range(3)]
    model = calibrated(Unbatched(), batches, target)
    path = tmp_path / "net.onnx"
    options: Any = {"dynamo": dynamo, "dynamic_batch": False, "progress": False}
    written = torchq.export_onnx(model, batches[0], path, **options)
    share = plan_of(model).share
    assert share is not None and written.coverage is not None
    assert written.coverage.share == share.quantized == 1.0
    assert torchq.verify_onnx(model, path, batches, progress=False).ok


class BesideImage(nn.Module):
    """What a ReLU gives is joined with the image, which no operator shows to be nonnegative."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.joined = nn.Conv2d(19, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)
        with torch.no_grad():
            self.second.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        features = self.second(self.first(x).relu()).relu()
        return self.head(self.joined(torch.cat([features, x], 1)).relu()).mean((2, 3))


def written_whole_on_integers(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """Quantize a model and write its file, with all work on integers as planned."""
    model = calibrated(model, [x], "onnxruntime")
    report = torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    share = plan_of(model).share
    assert share is not None
    assert share.quantized == report.coverage.share == 1.0
    return model


@pytest.mark.parametrize("factor", [1.0, 2.5], ids=["two ranges", "equal ranges"])
def test_a_layer_whose_result_is_joined_with_the_image(
    factor: float, tmp_path: Path
) -> None:
    """The zero point of the image is 0 by its numbers, which planning does not know."""
    torch.manual_seed(0)
    x = torch.rand(4, 3, 64, 64)
    path = tmp_path / "net.onnx"
    model = written_whole_on_integers(BesideImage(factor), x, path)
    verified = torchq.verify_onnx(model, path, [x], progress=False)
    assert verified.ok, verified
    assert sum(layer.differ for layer in verified.layers) == 0


class Scaled(nn.Module):
    """A residual that is multiplied by a number or by stored ones, as in super-resolution."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.gamma = nn.Parameter(torch.rand(16, 1, 1) + 0.5)
        self.register_buffer("shift", torch.rand(16, 1, 1))
        self.head = nn.Conv2d(16, 4, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.second(x)
        if self.kind == "number":
            y = y * 0.25
        elif self.kind == "parameter":
            y = y * self.gamma
        else:
            y = y + self.shift
        return self.head(x + y).mean((2, 3))


@pytest.mark.parametrize("kind", ["number", "parameter", "buffer"])
def test_a_layer_whose_result_is_scaled_runs_on_integers(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 3, 16, 16)
    path = tmp_path / "net.onnx"
    model = written_whole_on_integers(Scaled(kind), x, path)
    found = torchq.inspect_onnx(path)
    assert "3 QLinearConv" in str(found)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
