"""Models, data and files for the command line, by name; checks of files before any work."""

import argparse
import glob
import importlib
import os
import random
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from torchq.errors import ConfigError, MissingExtraError, TorchqError
from torchq.frontends import from_caffe, from_mxnet, from_onnx
from torchq.runtime import Writer, runtime_of

#: What names of files with networks end with.
ENDINGS = (".onnx", "-symbol.json", ".prototxt")


#: Arguments that name files to read, or a model or recipe that may be a file.
_READ = ("file", "model", "weights", "recipe", "load")
_FLAGS = {"file": "MODEL"}
#: Arguments that name files to write, and what some of the names must end with.
_WRITTEN = ("export", "save", "report", "out", "to")
_WRITTEN_ENDINGS: dict[str, tuple[str, ...]] = {"export": (".onnx",), "to": (".pt2",)}


def check_paths(args: argparse.Namespace) -> None:
    """Raise an error for files of a command that are not there, or that could not be written."""
    read, written = {}, {}
    for name in _READ:
        path = getattr(args, name, None)
        is_file = name in ("weights", "load") or str(path).endswith((*ENDINGS, ".json"))
        if path is not None and is_file:
            read[option := _FLAGS.get(name, f"--{name}")] = path
            _check_readable(option, path)
    for name in _WRITTEN:
        path = getattr(args, name, None)
        endings = _WRITTEN_ENDINGS.get(name, ("",))
        if path is not None and args.command != "demo":  # which makes its folder
            written[option := _FLAGS.get(name, f"--{name}")] = path
            check_folder(option, path)
            if name == "export":
                endings = (*endings, *writers_of(args))
            if not path.endswith(endings):
                readable_endings = " or ".join(endings)
                raise ConfigError(
                    f"{option} {path}: expected a name that ends in {readable_endings}"
                )
    check_different(written, read)


def writers_of(args: argparse.Namespace) -> Mapping[str, Writer]:
    """Return what writes files of the target's own, by the ending of their names."""
    runtime = runtime_of(getattr(args, "target", None))
    return {} if runtime is None else runtime.writers()


def _check_readable(option: str, path: str) -> None:
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    if not Path(path).exists():
        raise ConfigError(f"{option} {path}: no such file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{option} {path}: is not readable")


def check_folder(option: str, path: str | Path) -> None:
    """Raise an error where a file could not be written later, before any work is done."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: the folder {folder} is not writable")


def check_different(
    written: Mapping[str, str | None], read: Mapping[str, str] | None = None
) -> None:
    """Raise an error where an option names the file of another one, also through links."""
    option_of_path = {
        os.path.realpath(path): option for option, path in (read or {}).items()
    }
    for option, path in written.items():
        if path is None:
            continue
        first = option_of_path.setdefault(os.path.realpath(path), option)
        if first != option:
            raise ConfigError(
                f"{option} {path}: is the file of {first} too; expected another one"
            )


def is_network_file(name: str) -> bool:
    """Return True if a name is that of a file which holds a network."""
    return name.endswith(ENDINGS)


def read_network(name: str, weights: str | None = None) -> fx.GraphModule:
    """Return the network of a file, by default with the weights beside it."""
    if name.endswith(".onnx"):
        return from_onnx(name)
    reader = from_mxnet if name.endswith("-symbol.json") else from_caffe
    return reader(name, weights or _weights_beside(name))


def reader_text(name: str, weights: str | None = None) -> str:
    """Return the Python code of :func:`read_network`."""
    if name.endswith(".onnx"):
        return f"torchq.from_onnx({name!r})"
    function = "from_mxnet" if name.endswith("-symbol.json") else "from_caffe"
    return f"torchq.{function}({name!r}, {weights or _weights_beside(name)!r})"


def _weights_beside(name: str) -> str:
    if name.endswith(".prototxt"):
        stem = name.removesuffix(".prototxt")
        pattern = f"{glob.escape(stem)}.caffemodel"
        kind = "caffemodel"
    else:
        stem = name.removesuffix("-symbol.json")
        pattern = f"{glob.escape(stem)}-[0-9]*.params"
        kind = "params"
    numbered = r"-\d+\.params|\.caffemodel"
    weight_files = [
        path for path in glob.glob(pattern) if re.fullmatch(numbered, path[len(stem) :])
    ]
    if not weight_files:
        raise ConfigError(
            f"{name}: got no .{kind} beside it; expected {Path(pattern).name}. "
            "Name the file with --weights"
        )
    return max(weight_files)


IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what a user's code raises into one line that says where it was raised."""
    try:
        yield
    except TorchqError:
        raise
    except Exception as error:  # whatever a user's code raises
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename != __file__
        ]
        place = (
            f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
            if frames
            else ""
        )
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"{what}: {type(error).__name__}: {line}{place}") from error


def load_object(name: str, what: str) -> Any:
    """Return what ``package.module:attribute`` names, also in the folder; errors name ``what``."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        files = (
            f", or a file that ends in {', '.join(ENDINGS)}"
            if what == "--model"
            else ""
        )
        raise ConfigError(f"{what}: got {name!r}; expected package.module:name{files}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with explained(f"{what} {name}"):
            module = importlib.import_module(module_name)
    except ConfigError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise ConfigError(
            f"{what} {name!r}: cannot import {module_name} ({error.__cause__}); "
            f"expected a module on the path or in {Path.cwd()}"
        ) from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{what} {name!r}: {module_name} has no {attribute}; expected one of its names"
        ) from None


def load_model(name: str, weights: str | None) -> nn.Module:
    """Return a model in eval mode.

    The name is ``torchvision:resnet18``; or ``package.module:factory``, a function without
    arguments, or a module; or the path of a file of ONNX, MXNet or Caffe. The file of weights has
    a state dict, which may be its entry ``state_dict`` or ``model``; or those of MXNet or Caffe.
    """
    if name.startswith("torchvision:"):
        model = _torchvision(name.partition(":")[2])
    elif is_network_file(name):
        model = read_network(name, weights)
        weights = weights if name.endswith(".onnx") else None
    else:
        model = load_object(name, "--model")
        if not isinstance(model, nn.Module):
            with explained(f"--model {name}"):
                model = model()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"--model {name}: got a {kind}; expected a torch.nn.Module")
    if weights is not None:
        _load_weights(model, weights)
    return model.eval()


def _torchvision(name: str) -> nn.Module:
    try:
        from torchvision import models  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            f"--model torchvision:{name}: torchvision cannot be imported ({error}); "
            "expected the build for this torch"
        ) from None
    try:
        return models.get_model(name, weights=None)
    except ValueError:
        close = [
            candidate for candidate in models.list_models() if candidate[:4] == name[:4]
        ]
        raise ConfigError(
            f"--model torchvision:{name}: no such model; "
            f"expected one like {', '.join(close[:6]) or 'resnet18'}"
        ) from None


def _load_weights(model: nn.Module, path: str) -> None:
    with explained(f"--weights {path}"):
        state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    named = isinstance(state, dict) and all(
        isinstance(v, Tensor) for v in state.values()
    )
    if not named:
        raise ConfigError(
            f"--weights {path}: expected a state dict, a file of named tensors"
        )
    # In place, as a state dict holds the versions of classes too, which some ask for.
    consume_prefix_in_state_dict_if_present(state, "module.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"--weights {path}: {error}") from None


def load_text(name: str, path: str, weights: str | None = None) -> str:
    """Return the Python code that loads a saved model."""
    if is_network_file(name):
        return f"import torchq; model = torchq.load({reader_text(name, weights)}, {path!r})"
    module, _, attribute = name.partition(":")
    if module == "torchvision":
        build = f"torchvision.models.get_model({attribute!r}, weights=None)"
        return f"import torchq, torchvision; model = torchq.load({build}, {path!r})"
    model = load_object(name, "--model")
    how = f"torchq.load_model({attribute}, {path!r})"
    if isinstance(model, nn.Module):
        how = f"torchq.load({attribute}, {path!r})"
    return f"import torchq; from {module} import {attribute}; model = {how}"


@dataclass(frozen=True)
class Images:
    """How the images of a folder become batches."""

    batch_size: int
    # Images are resized to cover 8/7 of it, and the centre cut out.
    size: tuple[int, int]
    mean: Sequence[float]  # subtracted from values between 0 and 1
    std: Sequence[float]  # divides the difference
    seed: int = 0  # of the order of the images


def load_batches(name: str, images: Images, *, labelled: bool = False) -> Iterable[Any]:
    """Return batches of a folder of images, or of what ``package.module:loader`` names or returns.

    With ``labelled`` the sub-folders are the classes, in the order of their names, and each batch
    of images comes with its labels.
    """
    folder = Path(name)
    if folder.is_dir():
        return _labelled(folder, images) if labelled else _image_batches(folder, images)
    if ":" not in name:
        raise ConfigError(
            f"--data {name}: no such folder; expected a folder of images or package.module:loader"
        )
    loader = load_object(name, "--data")
    if not isinstance(loader, Iterable):
        with explained(f"--data {name}"):
            loader = loader()
    if not isinstance(loader, Iterable):
        raise ConfigError(
            f"--data {name}: got a {type(loader).__name__}; expected an iterable of batches"
        )
    return loader


def _labelled(folder: Path, images: Images) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images with the numbers of the sub-folders that they lie in."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise ConfigError(
            f"--labels: {folder} has {len(classes)} sub-folders; expected one for each class"
        )
    paths = [p for p in evenly_ordered(folder, images.seed) if p.parent != folder]
    labels = torch.tensor(
        [classes.index(p.relative_to(folder).parts[0]) for p in paths]
    )
    batches = _image_batches(folder, images, paths)
    yield from zip(batches, labels.split(images.batch_size), strict=True)


def _image_batches(
    folder: Path, images: Images, paths: list[Path] | None = None
) -> Iterator[Tensor]:
    """Yield the images of a folder as batches (N, 3, *size), float32, read one by one."""
    from torchvision import transforms as T  # noqa: PLC0415

    paths = evenly_ordered(folder, images.seed) if paths is None else paths
    if not paths:
        raise ConfigError(
            f"--data {folder}: no image in it; expected files like {', '.join(IMAGES[:3])}"
        )
    height, width = images.size
    cover = partial(_covering, height=height * 8 // 7, width=width * 8 // 7)
    normal = T.Normalize(list(images.mean), list(images.std))
    transform = T.Compose([cover, T.CenterCrop(images.size), T.ToTensor(), normal])
    for first in range(0, len(paths), images.batch_size):
        chosen = paths[first : first + images.batch_size]
        yield torch.stack([transform(_read_image(path)) for path in chosen])


def _covering(image: Any, height: int, width: int) -> object:
    """Return an image resized so that it just covers a rectangle, with its sides in proportion."""
    from torchvision.transforms.functional import resize  # noqa: PLC0415

    if image.height * width < image.width * height:
        return resize(image, [height, height * image.width // image.height])
    return resize(image, [width * image.height // image.width, width])


def evenly_ordered(folder: Path, seed: int) -> list[Path]:
    """Return the images below ``folder`` so that every part has some of each sub-folder."""
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES):
        by_folder.setdefault(path.parent, []).append(path)
    source = random.Random(seed)
    groups = list(by_folder.values())
    for group in groups:
        source.shuffle(group)
    source.shuffle(groups)
    return [
        path for path in chain.from_iterable(zip_longest(*groups)) if path is not None
    ]


def _read_image(path: Path) -> object:
    from PIL import Image  # noqa: PLC0415

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise ConfigError(
            f"--data {path}: cannot be read as an image ({error})"
        ) from None
