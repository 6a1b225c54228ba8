"""Ctrl-C at any operation: a model is as before, or every layer of it is whole."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchq
from torchq.ptq import (
    adaround_,
    correct_bias_,
    equalize_,
    equalize_depthwise_,
    gptq_,
    smooth_,
)

# Places, spread evenly over the operations of a call, where it is interrupted.
_PLACES = 12


class Interrupt(TorchDispatchMode):
    """Counts the operations of torch, and raises KeyboardInterrupt once, after some of them."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self.at = at

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        out = func(*args, **(kwargs or {}))
        if self.count == self.at:
            raise KeyboardInterrupt
        return out


BATCHES = [
    torch.rand(16, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(6),
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    ).eval()


IMAGES = [batch.view(-1, 1, 4, 6).repeat(1, 3, 1, 1) for batch in BATCHES]


def depthwise_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=4)
    ).eval()


def quantized(*, ready: bool = False) -> nn.Sequential:
    model = net()
    torchq.quantize_(model, torchq.recipes.integer(3, 8, weight_method="max"))
    if ready:
        torchq.calibrate(model, BATCHES, progress=False)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that a call might leave changed."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    ]
    kinds = [
        (type(module), module.training, "forward" in vars(module))
        for module in model.modules()
    ]
    modes = [q.mode for q in torchq.workflow.quantizers(model).values()]
    flags = [p.requires_grad for p in model.parameters()]
    return {"tensors": tensors, "rest": (hooks, kinds, modes, flags)}


def same(
    one: dict[str, Any], other: dict[str, Any], names: Callable[[str], bool]
) -> bool:
    """Return True if the tensors that ``names`` selects are equal."""
    a = one["tensors"]
    b = other["tensors"]
    assert a.keys() == b.keys()
    assert one["rest"] == other["rest"]
    return all(torch.equal(a[name], b[name]) for name in a if names(name))


def places(function: Callable[[Any], object], model: nn.Module) -> list[int]:
    """Return numbers of operations, from the first to the last one of a call."""
    with Interrupt() as counted:
        function(model)
    return [1 + (counted.count - 1) * i // (_PLACES - 1) for i in range(_PLACES)]


WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "equalize_": (net, lambda m: equalize_(m, BATCHES[0])),
    "equalize_depthwise_": (
        depthwise_net,
        lambda m: equalize_depthwise_(m, IMAGES, progress=False),
    ),
    "smooth_": (quantized, lambda m: smooth_(m, BATCHES, progress=False)),
    "correct_bias_": (
        lambda: quantized(ready=True),
        lambda m: correct_bias_(m, BATCHES, progress=False),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_is_as_before(name: str) -> None:
    build, function = WHOLE[name]
    before = state(build())
    for place in places(function, build()):
        # A new one each time: a model keeps numbers that it would have to compute otherwise.
        model = build()
        with pytest.raises(KeyboardInterrupt), Interrupt(place):
            function(model)
        assert same(state(model), before, lambda _: True), place
    undisturbed = build()
    function(undisturbed)
    function(model)  # A call after this one does what it should.
    assert same(state(model), state(undisturbed), lambda _: True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [gptq_, adaround_])
def test_every_layer_is_whole(function: Any) -> None:
    """Each layer has all of its new weight, bias and ranges, or its old ones."""
    arguments: dict[str, Any] = {"progress": False}
    if function is adaround_:
        arguments |= {"steps": 3}

    def run(model: Any) -> Any:
        return function(model, BATCHES, **arguments)

    done = quantized(ready=True)
    run(done)
    states = [state(quantized(ready=True)), state(done)]
    said = set()
    for place in places(run, quantized(ready=True)):
        model = quantized(ready=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt), Interrupt(place):
                run(model)
        said |= {str(warning.message) for warning in caught}
        actual = state(model)
        for layer in ("1", "3", "5"):

            def own(name: str, layer: str = layer) -> bool:
                return name.startswith(f"{layer}.")

            assert any(same(actual, one, own) for one in states), (place, layer)
    message = "ended after 2 of 3 layers, which keep their new weights; the others are as before"
    assert f"{function.__name__}: {message}" in said
