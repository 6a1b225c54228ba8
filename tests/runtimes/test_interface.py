"""How a deployed graph reads the arguments of a call, and gives results back."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError, InputError
from torchq.runtimes.interface import CallSignature, GraphInput, flatten

CPU = torch.device("cpu")
X = torch.zeros(2, 3)
Y = torch.ones(2, 3)


def signature_of(
    forward: Callable[..., Any], *names: str, **constants: Any
) -> CallSignature:
    inputs = tuple(GraphInput(name, torch.float32, (None, 3)) for name in names)
    return CallSignature("Net", inspect.signature(forward), inputs, constants)


FORWARDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "one": (lambda x: x, ("x",)),
    "two": (lambda x, y: x, ("x", "y")),
    "with a default": (lambda x, y=None, flag=False: x, ("x", "y")),
    "read in another order": (lambda x, y: x, ("y", "x")),
    "the second alone": (lambda x, y=None: x, ("y",)),
    "any number": (lambda *args: args, ("input_0", "input_1")),
    "some by name": (lambda x, **kwargs: x, ("x",)),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_a_call_by_place_is_bound_as_python_binds_it(case: str) -> None:
    forward, names = FORWARDS[case]
    bound = inspect.signature(forward)
    args = (X, Y)[: max(1, len(names))]
    values = bound.bind(*args).arguments
    expected = (
        dict(values) if case != "any number" else dict(zip(names, args, strict=True))
    )
    if set(names) - set(expected):  # the graph reads what this call leaves out
        with pytest.raises(InputError, match="got a NoneType; expected a tensor"):
            signature_of(forward, *names).bind(args, {}, CPU)
        return
    feeds = signature_of(forward, *names).bind(args, {}, CPU)
    assert list(feeds) == list(names)
    assert all(feeds[name] is expected[name] for name in names)


def test_what_a_call_by_place_lacks_is_refused() -> None:
    """Keyword-only arguments without a default are read by nobody, but Python wants them."""

    def forward(x: Any, *, scale: Any) -> Any:
        return x

    with pytest.raises(InputError, match="missing a required"):
        signature_of(forward, "x").bind((X,), {}, CPU)


def test_an_argument_that_is_left_out_has_its_default() -> None:
    """A graph with flag=True built in is not run for a call that means flag=False."""
    signature = signature_of(lambda x, flag=False: x, "x", flag=True)
    assert signature.bind((X, True), {}, CPU) == {"x": X}
    for args, kwargs in (
        ((X,), {}),
        ((), {"x": X}),
        ((X, False), {}),
    ):
        with pytest.raises(
            InputError, match="'flag': got False; expected True, which is built into"
        ):
            signature.bind(args, kwargs, CPU)


class Cache:
    """Holds tensors where nobody finds them, as that of a language model."""

    def __init__(self, x: Tensor) -> None:
        self.keys = x


@dataclass
class Unregistered:
    scores: Tensor


def test_objects_beside_the_tensors_of_results_are_left_out() -> None:
    tensors, structure = flatten({"scores": X, "cache": Cache(Y), "again": X})
    assert tensors == [X]
    assert structure.left_out == (f"{__name__}.Cache",)
    assert structure.rebuild([Y]) == {"scores": Y, "cache": None, "again": Y}
    assert structure.tensors_of({"scores": Y, "cache": Cache(X), "again": Y}) == [Y]


@pytest.mark.parametrize("results", [Cache(X), [Unregistered(X), Y], (None, Cache(X))])
def test_results_in_objects_that_no_graph_returns_are_refused(results: object) -> None:
    with pytest.raises(ExportError, match="expected tensors in tuples, lists"):
        flatten(results)


class Cached(nn.Module):
    """Returns what a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = self.first(x).relu()
        return {"scores": self.last(states), "cache": Cache(states)}


def test_deploy_and_export_leave_a_cache_out_and_say_so(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = Cached().eval(), torch.randn(16, 3)
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    with pytest.warns(UserWarning, match=r"export_onnx: .*Cache, .*leaves it out"):
        torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, progress=False)
    with pytest.warns(UserWarning, match=r"deploy: .*Cache, .*returns None in its"):
        deployed = torchq.deploy(model, x, progress=False)
    expected, got = model(x), deployed(x)
    torch.testing.assert_close(got["scores"], expected["scores"])
    assert got["cache"] is None
