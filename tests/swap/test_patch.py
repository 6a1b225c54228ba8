"""patch: whoever builds the model, nested, with exceptions, and nothing left behind."""

import threading

import pytest
from torch import nn
from torch.nn import Conv2d, Linear, Sequential

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError
from torchq.nn import QuantConv2d, QuantLinear

INT8 = QuantDescriptor()


def build() -> nn.Module:
    """Code that imported the classes itself, before the patch."""
    return Sequential(
        Conv2d(3, 4, 3), Sequential(Linear(4, 4), nn.ReLU()), Linear(4, 2)
    )


def kinds(model: nn.Module) -> list[str]:
    return [
        type(m).__name__
        for m in model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]


def test_modules_are_quantized_while_it_runs() -> None:
    with torchq.patch():
        inside = build()
    assert kinds(inside) == ["QuantConv2d", "QuantLinear", "QuantLinear"]
    assert kinds(build()) == ["Conv2d", "Linear", "Linear"]
    assert nn.Conv2d is Conv2d
    assert nn.Linear is Linear


def test_as_a_handle() -> None:
    handle = torchq.patch()
    try:
        inside = build()
    finally:
        handle.restore()
    handle.restore()  # twice does no harm
    assert isinstance(inside[0], QuantConv2d)
    assert type(build()[0]) is Conv2d


def test_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), torchq.patch():
        Sequential(
            build(),
            nn.ReLU() if 1 / 0 else None,
        )
    assert kinds(build()) == ["Conv2d", "Linear", "Linear"]


def test_nested() -> None:
    """The inner patch may end first or last; neither touches what the other has quantized."""
    four = QuantConfig((Rule("type:Linear", weight=QuantDescriptor(4)),))
    with torchq.patch():
        with torchq.patch(four):
            both = build()
        outer = build()
    assert kinds(both) == kinds(outer) == ["QuantConv2d", "QuantLinear", "QuantLinear"]
    assert isinstance(outer[2].input_quantizer, torchq.TensorQuantizer)
    assert sum(isinstance(m, torchq.TensorQuantizer) for m in both.modules()) == 6
    assert kinds(build()) == ["Conv2d", "Linear", "Linear"]


def test_rules_see_the_names_as_they_grow() -> None:
    """A glob on the full path skips a module that a shorter name did not tell apart."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Sequential(
                Linear(2, 2),
                Linear(2, 2),
            )
            self.head = Sequential(Linear(2, 2))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    skips = Rule("head.*", skip=True), Rule("net.body.1", skip=True, optional=True)
    config = QuantConfig((Rule("*", input=INT8, weight=INT8), *skips))
    with torchq.patch(config):
        model = Wrapper()
    actual = [type(m) for m in (*model.net.body, *model.net.head)]
    assert actual == [QuantLinear, Linear, QuantLinear]
    with torchq.patch(config):
        net = Net()
    assert [type(m) for m in (*net.body, *net.head)] == [
        QuantLinear,
        QuantLinear,
        Linear,
    ]


def test_what_the_script_quantized_itself_stays() -> None:
    with torchq.patch():
        own = QuantLinear(2, 2, input_descriptor=QuantDescriptor(4))
        model = Sequential(own, Linear(2, 2))
    assert model[0] is own
    assert own.input_quantizer.descriptor.num_bits == 4
    assert type(model[1]) is QuantLinear


def test_shared_layers_and_lists() -> None:
    with torchq.patch():
        layer = Linear(2, 2)
        model = Sequential(
            layer, nn.ModuleList([layer]), nn.ModuleDict({"a": Linear(2, 2)})
        )
        model.add_module("b", Linear(2, 2))
        model.register_module("c", None)
    assert model[0] is model[1][0] is layer
    assert kinds(model) == ["QuantLinear"] * 3


def test_a_model_built_in_another_thread_meanwhile_is_whole() -> None:
    """The hook acts in every thread: a model built there is quantized too, but never half."""
    built: list[nn.Module] = []
    with torchq.patch():
        thread = threading.Thread(target=lambda: built.append(build()))
        thread.start()
        thread.join()
    assert kinds(built[0]) == ["QuantConv2d", "QuantLinear", "QuantLinear"]


def test_patch_refuses_what_needs_the_whole_model() -> None:
    with pytest.raises(
        ConfigError, match=r"patch: rule .*first layer.*: needs the whole model"
    ):
        torchq.patch(torchq.recipes.w4a4())
    with torchq.patch(torchq.recipes.w4a4(first_last=None)):
        model = nn.Sequential(nn.Linear(2, 2))
    assert model[0].weight_quantizer.descriptor.num_bits == 4
