"""Models and data for the command line, by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, MissingExtraError

__all__ = ["load_model", "load_batches", "load_object"]

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def load_object(name: str, what: str) -> Any:
    """What ``package.module:attribute`` names; the current folder is searched too.

    Raises:
        ConfigError: not of that form, no such module, or no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what}: got {name!r}; expected package.module:name")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} {name!r}: cannot import {module_name} ({error}); expected a module on the path or in {Path.cwd()}"
        ) from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{what} {name!r}: {module_name} has no {attribute}; expected one of its names"
        ) from None


def load_model(name: str, weights: str | None) -> nn.Module:
    """A model in eval mode.

    Args:
        name: ``torchvision:resnet18``, or ``package.module:factory``, a function without arguments (or a module).
        weights: a state dict file, or None. A dict with an entry ``state_dict`` or ``model`` is looked into.

    Raises:
        ConfigError: the name, the file or the keys do not fit.
    """
    if name.startswith("torchvision:"):
        model = _torchvision(name.partition(":")[2])
    else:
        model = load_object(name, "--model")
        model = model if isinstance(model, nn.Module) else model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"--model {name}: got a {type(model).__name__}; expected a torch.nn.Module"
        )
    if weights is not None:
        _load_weights(model, weights)
    return model.eval()


def _torchvision(name: str) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingExtraError(
            f"--model torchvision:{name}: torchvision cannot be imported ({error}); expected the build for this torch"
        ) from None
    try:
        return models.get_model(name, weights=None)
    except ValueError:
        close = [known for known in models.list_models() if known[:4] == name[:4]]
        raise ConfigError(
            f"--model torchvision:{name}: no such model; expected one like {', '.join(close[:6]) or 'resnet18'}"
        ) from None


def _load_weights(model: nn.Module, path: str) -> None:
    if not Path(path).is_file():
        raise ConfigError(f"--weights {path}: no such file")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ConfigError(f"--weights {path}: expected a state dict, a file of named tensors")
    state = {key.removeprefix("module."): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"--weights {path}: {error}") from None


def load_batches(
    name: str, *, batch_size: int, image_size: int, mean: Sequence[float], std: Sequence[float]
) -> Iterable[Any]:
    """Batches to calibrate with.

    Args:
        name: a folder with images, searched recursively, or ``package.module:loader``: an iterable of batches or a function
            that returns one.
        batch_size, image_size, mean, std: for a folder: the short side is resized to 8/7 of ``image_size``, the centre cut
            out, values scaled to 0..1 and normalised.

    Raises:
        ConfigError: no such folder, no image in it, or the object is not iterable.
    """
    folder = Path(name)
    if folder.is_dir():
        return _image_batches(folder, batch_size, image_size, mean, std)
    if ":" not in name:
        raise ConfigError(
            f"--data {name}: no such folder; expected a folder of images or package.module:loader"
        )
    loader = load_object(name, "--data")
    loader = loader if isinstance(loader, Iterable) else loader()
    if not isinstance(loader, Iterable):
        raise ConfigError(
            f"--data {name}: got a {type(loader).__name__}; expected an iterable of batches"
        )
    return loader


def _image_batches(
    folder: Path, batch_size: int, size: int, mean: Sequence[float], std: Sequence[float]
) -> Iterator[Tensor]:
    """The images of a folder as batches (N, 3, size, size), float32, read as they are asked for."""
    from torchvision import transforms as T

    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES)
    if not paths:
        raise ConfigError(
            f"--data {folder}: no image in it; expected files like {', '.join(IMAGES[:3])}"
        )
    transform = T.Compose(
        [
            T.Resize(size * 8 // 7),
            T.CenterCrop(size),
            T.ToTensor(),
            T.Normalize(list(mean), list(std)),
        ]
    )
    for first in range(0, len(paths), batch_size):
        yield torch.stack(
            [transform(_read_image(path)) for path in paths[first : first + batch_size]]
        )


def _read_image(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read as an image ({error})") from None
