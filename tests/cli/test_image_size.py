"""The size of images: given as a rectangle, or taken from the file of a network."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frontends.onnx_writer import Writer
from torchq.cli import main
from torchq.cli.loading import Images, load_batches

onnx = pytest.importorskip("onnx")
image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")
pytest.importorskip("onnxruntime")

HEIGHT = 12
WIDTH = 20
FEATURES = 4 * (HEIGHT - 2) * (WIDTH - 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            pixels = torch.randint(
                0, 255, (40, 30, 3), generator=generator, dtype=torch.uint8
            )
            image.fromarray(pixels.numpy()).save(
                tmp_path / "photos" / name / f"{number}.png"
            )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(
    shape: list[Any], flat: list[int], name: str = "net.onnx", inputs: int = 1
) -> str:
    """Write a convolution, a Reshape to ``flat`` and a matrix product, and return the name."""
    w = Writer(17, seed=1)
    images = [w.input(f"x{number}", shape) for number in range(inputs)]
    y = w.node(
        "Conv",
        images[0],
        w.random(4, shape[1], 3, 3, scale=1.0),
    )
    z = w.node("Add", y, images[1]) if inputs == 2 else w.node("Relu", y)
    v = w.node("Reshape", z, w.weight(torch.tensor(flat)))
    onnx.save(w.model(w.node("MatMul", v, w.random(FEATURES, 2, scale=0.02))), name)
    return name


def shape_of(name: str) -> list[Any]:
    """Return the shape of the input of a file."""
    dims = onnx.load(name).graph.input[0].type.tensor_type.shape.dim
    return [dim.dim_param or dim.dim_value for dim in dims]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("batch", "flat", "written"),
    [
        ("N", [0, -1], "batch"),
        ("N", [-1, FEATURES], "batch"),
        (1, [1, -1], 1),
        (1, [-1, FEATURES], 1),
        (4, [4, FEATURES], 4),
    ],
    ids=["open", "sizes", "batch of one", "batch of one stated", "batch of four"],
)
def test_a_folder_is_read_in_the_shape_that_the_file_fixes(
    batch: Any, flat: list[int], written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write([batch, 3, HEIGHT, WIDTH], flat)
    argv = ["quantize", name, "--data", "photos", "--batch-size", "2", "--labels"]
    assert main([*argv, "--export", "q.onnx", "--no-report"]) == 0
    assert "q.onnx: agrees" in capsys.readouterr().out
    assert shape_of("q.onnx") == [written, 3, HEIGHT, WIDTH]
    # The file computes what the float one does, for the batch that both take.
    session = pytest.importorskip("onnxruntime").InferenceSession
    x = {
        "x0": torch.randn(
            batch if isinstance(batch, int) else 3, 3, HEIGHT, WIDTH
        ).numpy()
    }
    expected = torch.from_numpy(session(name).run(None, x)[0])
    quantized = session("q.onnx")
    renamed = {quantized.get_inputs()[0].name: x["x0"]}
    actual = torch.from_numpy(quantized.run(None, renamed)[0])
    assert actual.shape == expected.shape
    assert (actual - expected).norm() < 0.1 * expected.norm()  # 8 bits


@pytest.mark.parametrize("command", ["doctor", "report", "plan"])
def test_other_commands_read_a_folder_so_too(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write(
        [1, 3, HEIGHT, WIDTH],
        [1, -1],
    )
    options = ["--budget", "mean_bits=8"] if command == "plan" else []
    # 1: of the doctor.
    assert main([command, name, "--data", "photos", *options]) in (
        0,
        1,
    )
    assert capsys.readouterr().err.count("error:") == 0


@pytest.mark.parametrize("size", ["16", f"{WIDTH}x{HEIGHT}", str(HEIGHT)])
def test_another_size_than_that_of_the_file_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write(
        ["N", 3, HEIGHT, WIDTH],
        [0, -1],
    )
    argv = ["quantize", name, "--data", "photos", "--save", "a.pt"]
    assert main([*argv, "--image-size", size]) == 2
    captured = capsys.readouterr()
    assert f"{name} fixes {HEIGHT}x{WIDTH}; leave the option out" in captured.err
    assert "fused" not in captured.out
    assert not Path("a.pt").exists()
    assert main([*argv, "--image-size", f"{HEIGHT}x{WIDTH}"]) == 0


def test_a_size_that_the_file_leaves_open_may_be_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = write(
        ["N", 3, HEIGHT, "W"],
        [0, -1],
    )
    argv = ["quantize", name, "--data", "photos", "--export", "q.onnx", "--no-report"]
    assert main([*argv, "--image-size", f"{HEIGHT}x{WIDTH}"]) == 0
    assert shape_of("q.onnx") == ["batch", 3, HEIGHT, WIDTH]


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        (["N", 1, HEIGHT, WIDTH], 1),
        (["N", HEIGHT, WIDTH, 3], 1),
        (["N", 3, 8, 8], 2),
    ],
    ids=["one channel", "channels last", "two inputs"],
)
def test_inputs_that_are_no_colour_images_are_refused(
    shape: list[Any], inputs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write(shape, [0, -1], inputs=inputs)
    assert main(["quantize", name, "--data", "photos"]) == 2
    error = capsys.readouterr().err
    assert f"{name} takes inputs of shapes [[None, " in error
    assert "Pass package.module:loader" in error


def test_a_folder_with_fewer_images_than_a_fixed_batch_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = write(
        [16, 3, HEIGHT, WIDTH],
        [16, -1],
    )
    assert main(["quantize", name, "--data", "photos"]) == 2
    assert "expected at least 16 images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("height", "width"),
    [(16, 16), (8, 24), (24, 8)],
)
def test_images_are_cut_from_the_centre_in_their_proportion(
    height: int, width: int
) -> None:
    """The left half is black and the right half white, so the edge stays in the middle."""
    Path("halves").mkdir()
    picture = torch.zeros(40, 60, 3, dtype=torch.uint8)
    picture[:, 30:] = 255
    image.fromarray(picture.numpy()).save("halves/a.png")
    images = Images(
        1,
        (height, width),
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
    )
    (batch,) = load_batches("halves", images)
    assert batch.shape == (1, 3, height, width)
    columns = batch.mean((0, 1, 2))
    assert columns[: width // 2 - 2].max() < 0.05
    assert columns[width // 2 + 2 :].min() > 0.95


def test_a_square_is_prepared_as_torchvision_does() -> None:
    from torchvision import transforms as T

    images = Images(
        1,
        (16, 16),
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
    )
    (first, *_) = load_batches("photos/cat", images)
    common = T.Compose([T.Resize(18), T.CenterCrop(16), T.ToTensor()])
    known = [common(image.open(f"photos/cat/{number}.png")) for number in range(5)]
    assert any(torch.equal(first[0], picture) for picture in known)
