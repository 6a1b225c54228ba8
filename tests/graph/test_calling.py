"""One meaning of an example: every signature against every kind of batch."""

import copy
import functools
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import torchq
from torchq.errors import ConfigError
from torchq.graph import call_arguments, call_model, move_to, tensors_in


class One(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x, y


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return x, mask


class AllOptional(nn.Module):
    def forward(self, ids: Any = None, mask: Any = None) -> Any:
        return ids, mask


class KeywordOnly(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return x, scale


class Open(nn.Module):
    def forward(self, *xs: Tensor) -> Any:
        return xs


class OneAndOpen(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, **named: Tensor) -> Any:
        return x, rest, named


def partial(*args: Any, **kwargs: Any) -> nn.Module:
    model = Two()
    model.forward = functools.partial(model.forward, *args, **kwargs)  # type: ignore[method-assign]
    return model


def decorated() -> nn.Module:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    class Decorated(nn.Module):
        @decorate
        def forward(self, x: Tensor, mask: Any = None) -> Any:
            return x, mask

    return Decorated()


def scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch deprecate it
        return torch.jit.script(model)


compiled = functools.partial(torch.compile, backend="eager")
SIGNATURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    # Model; arguments of a tuple of 0, 1, 2, 3 and 4 values, "?" where it is refused.
    "x": (One, ["?", "a", "a", "a", "a"]),
    "x, y": (Two, ["?", "a", "ab", "ab", "ab"]),
    "x, mask=None": (Optional, ["?", "a", "?", "a", "a"]),
    "ids=None, mask=None": (AllOptional, ["", "a", "?", "?", "?"]),
    "x, *, scale=1.0": (KeywordOnly, ["?", "a", "a", "a", "a"]),
    "*xs": (Open, ["", "a", "?", "?", "?"]),
    "x, *rest": (OneAndOpen, ["?", "a", "?", "?", "?"]),
    "partial(y=)": (lambda: partial(y="fixed"), ["?", "a", "a", "a", "a"]),
    "partial(x)": (lambda: partial("fixed"), ["?", "a", "a", "a", "a"]),
    "wraps": (decorated, ["?", "a", "?", "a", "a"]),
    "Sequential": (lambda: nn.Sequential(One()), ["?", "a", "a", "a", "a"]),
    "DataParallel": (lambda: nn.DataParallel(Two()), ["?", "a", "ab", "ab", "ab"]),
    "AveragedModel": (lambda: AveragedModel(Two()), ["?", "a", "ab", "ab", "ab"]),
    "compiled": (lambda: compiled(Two()), ["?", "a", "ab", "ab", "ab"]),
    "compiled wrapper": (
        lambda: compiled(nn.DataParallel(One())),
        ["?", "a", "a", "a", "a"],
    ),
    "scripted": (lambda: scripted(nn.Bilinear(2, 2, 2)), ["?", "a", "ab", "ab", "ab"]),
    "traced by fx": (
        lambda: torch.fx.symbolic_trace(Two()),
        ["?", "a", "ab", "ab", "ab"],
    ),
}


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("name", SIGNATURES)
def test_tuples_and_tensors(name: str, kind: type) -> None:
    build, expected = SIGNATURES[name]
    model = build()
    (only,), none = call_arguments(model, X)
    assert only is X
    assert none == {}
    for count, wanted in enumerate(expected):
        batch = kind("abcd"[:count])
        if wanted == "?":
            with pytest.raises(
                ConfigError, match=rf"got a batch of {count} values; expected "
            ):
                call_arguments(model, batch)
        else:
            assert call_arguments(model, batch) == (tuple(wanted), {})


X = torch.ones(2, 3)
Pair = namedtuple("Pair", "image label")


def test_named_tuples_are_tuples() -> None:
    assert call_arguments(One(), Pair(1, 2)) == ((1,), {})


def test_other_objects_are_the_one_argument() -> None:
    graph = torch.Generator()
    assert call_arguments(Optional(), graph) == ((graph,), {})
    assert call_arguments(One(), ([X, X],)) == (([X, X],), {})


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings_hold_keyword_arguments(kind: Any) -> None:
    batch = {"x": 1, "mask": 2}
    assert call_arguments(Optional(), kind(batch)) == ((), batch)
    assert call_arguments(OneAndOpen(), kind(batch)) == ((), batch)
    assert (
        call_arguments(KeywordOnly(), kind({"x": 1, "scale": 3.0}))[1]["scale"] == 3.0
    )


def test_unknown_keys_are_named() -> None:
    message = (
        r"Optional.forward\(x, mask=None\): got a mapping with 'label'; "
        r"expected keys among mask"
    )
    with pytest.raises(ConfigError, match=message):
        call_arguments(Optional(), {"x": 1, "label": 2})


def test_the_error_shows_the_signature_and_the_remedies() -> None:
    with pytest.raises(ConfigError) as caught:
        call_arguments(nn.DataParallel(Optional()), (1, 2))
    assert str(caught.value).startswith(
        "Optional.forward(x, mask=None): got a batch of 2 values;"
    )
    for part in ("{'x': batch[0]}", "forward=lambda model, batch: model(batch[0])"):
        assert part in str(caught.value)


@pytest.mark.parametrize("batch", ["text", b"text", 3, 2.0, None, {1, 2}])
def test_plain_data_is_refused(batch: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"got a batch of type {type(batch).__name__}; expected"
    ):
        call_arguments(One(), batch)


def test_a_forward_of_the_users_own_decides() -> None:
    assert (
        call_model(One(), "text", forward=lambda model, batch: model(batch)) == "text"
    )


def test_tensors_are_moved_wherever_they_are() -> None:
    batch = (X, [X, {"k": X}], Pair(X, 1), "text")
    moved = move_to(batch, torch.device("meta"))
    assert [t.device.type for t in tensors_in(moved[:2])] == ["meta"] * 3
    assert moved[3] == "text"
    assert moved[2] is batch[2]  # a class of its own may need more than its values
    assert call_model(One(), X, device=torch.device("meta")).is_meta


def test_a_batch_of_a_loader_means_the_same_to_every_function() -> None:
    """What calibrate understands, fuse_ and quantize_ understand."""
    batch = (torch.randn(2, 3, 4, 4), torch.zeros(2))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    expected = model(batch[0])
    plain = copy.deepcopy(model)
    torchq.fuse_(model, batch)
    torchq.fuse_(plain, batch[0])
    assert torch.equal(
        model(batch[0]),
        plain(batch[0]),
    )
    torch.testing.assert_close(model(batch[0]), expected)
    torchq.quantize_(model, target="onnxruntime", example=batch)
    torchq.calibrate(model, [batch], progress=False)
    assert model[0].input_quantizer.calibrated


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x.missing


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            X.numpy(),
            r"got a batch of ndarray, without a tensor; expected one. Convert arrays with",
        ),
        ({"x": X.numpy()}, r"Layer.forward\(x\): got a batch of ndarray, without"),
        ((3, 1), "got a batch of int, without a tensor; expected one. Pass tensors"),
    ],
)
def test_a_model_that_fails_on_no_tensor_is_named(batch: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call_model(Layer(), batch)


def test_errors_of_the_model_stay_its_own() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        call_model(Broken(), X)


def test_a_model_may_take_arrays() -> None:
    assert call_model(One(), X.numpy()).shape == X.shape
