"""Operators get quantizers while the forward around them stays Python that runs at each call."""

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchq
from torchq.nn import QuantAdd
from torchq.nn.calls.modules import RoutedModule
from torchq.workflow import quantizers

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def helper(a: Tensor, b: Tensor) -> Tensor:
    if helper is None:  # it names itself, as torchvision's functions do
        return a
    return a + b


class Base(nn.Module):
    def tail(self, y: Tensor) -> Tensor:
        return F.silu(y) * y


class Net(Base):
    """Attributes, arguments, branches, loops and functions that a trace would fix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.gain = 1.0
        self.rounds = 2
        self.calls = 0
        self.options = {"negate": False}
        self.last: Any = None

    def tail(self, y: Tensor) -> Tensor:
        return super().tail(y) + y

    @staticmethod
    def pooled(y: Tensor) -> Tensor:
        return y.mean((2, 3), keepdim=True)

    def forward(self, x: Tensor, shortcut: Any = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        shortcut = x if shortcut is None else shortcut
        y = x + self.conv(x) * self.gain
        for _ in range(self.rounds):
            y = helper(y, shortcut)
        if self.options["negate"]:
            y = -y
        y += shortcut
        y = self.tail(torch.cat([y, x], dim=1)) * scale
        self.last = y
        return y * self.pooled(y)


def quantized(example: Any = X) -> Net:
    model = Net().eval()
    torchq.quantize_(model, target="onnxruntime", example=example)
    torchq.calibrate(model, [{"x": X}], progress=False)
    return model


def floats_of(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    torchq.restore_(twin)
    return twin


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as calibrated": ({}, {}),
    "attribute": ({"gain": 5.0}, {}),
    "attribute of another type": ({"gain": torch.tensor(3.0)}, {}),
    "fewer rounds": ({"rounds": 0}, {}),
    "more rounds": ({"rounds": 4}, {}),
    "branch": ({"options": {"negate": True}}, {}),
    "argument": ({}, {"shortcut": 2 * X}),
    "number as argument": ({}, {"shortcut": 2.0}),
    "keyword": ({}, {"scale": 3.0}),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("training", [False, True])
def test_everything_that_a_call_can_change_changes_it(
    name: str, training: bool
) -> None:
    """With all quantizers off the result is that of the float model, whatever has changed."""
    attributes, arguments = CALLS[name]
    model = quantized().train(training)
    plain = floats_of(model)
    before = model(X)
    for net in (model, plain):
        for attribute, value in attributes.items():
            setattr(net, attribute, value)
    with torchq.disabled(model):
        assert torch.equal(
            model(X, **arguments),
            plain(X, **arguments),
        )
    assert torch.equal(model(X, **arguments), before) is (name == "as calibrated")


def test_the_operators_of_functions_and_loops_are_found() -> None:
    model = quantized()
    kinds = [name for name, m in model.named_children() if name.startswith("quant_")]
    assert isinstance(model, RoutedModule)
    assert kinds == [
        *("quant_add", "quant_add_1", "quant_add_2", "quant_add_3", "quant_cat"),
        *("quant_activation", "quant_mul", "quant_add_4", "quant_pool", "quant_mul_1"),
    ]
    assert model.quant_add_1.input_quantizer is not model.quant_add_2.input_quantizer


# torch 2.9 warns of itself.
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)
def test_compiled_models_stay_dynamic() -> None:
    model = quantized()
    del model.__dict__["last"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for gain in (1.0, 5.0):
        model.gain = gain
        assert torch.equal(compiled(X), model(X))


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_exported_programs_hold_the_quantizers(target: str) -> None:
    model: Any = Tree().eval()
    torchq.quantize_(model, target=target, example=X)
    torchq.calibrate(model, [X], progress=False)
    program = torch.export.export(model, (X,), strict=False)
    assert torch.equal(program.module()(X), model(X))
    with torch.no_grad(), warnings.catch_warnings():
        # Newer releases of torch deprecate it.
        warnings.simplefilter("ignore", FutureWarning)
        traced = torch.jit.trace(model, X, check_trace=False)
        assert torch.equal(traced(X), model(X))


class Shuffle(nn.Module):
    """The block of ShuffleNetV2 in Megvii's code: an assertion on a shape stops a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(4, 4, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] % 4 == 0
        return torch.cat([x, self.branch(x)], 1)


class OneConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)


class Choosing(OneConv):
    """A branch on the data, and an addition whose first operand comes from a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if x.sum() > 1e6 else y + x


def test_a_run_finds_what_a_trace_cannot() -> None:
    model = nn.Sequential(Shuffle(), nn.Conv2d(8, 4, 1), Choosing()).eval()
    reasons = {d.name: d.reason for d in torchq.plan(model, target="tensorrt").skipped}
    assert set(reasons) == {"0", "2"}
    assert "pass example=" in reasons["0"]
    report = torchq.quantize_(model, target="tensorrt", example=X)
    assert not report.skipped
    assert isinstance(model[2].quant_add, QuantAdd)
    # TensorRT adds the unrounded result of the convolution.
    assert model[2].quant_add.input_quantizer.mode == "off"
    assert model[2].quant_add.other_quantizer.mode == "quantize"
    plain = floats_of(model)
    with torchq.disabled(model):
        for x in (X, X + 1e6):
            assert torch.equal(model(x), plain(x))


class Tree(nn.Module):
    """DLA: a parent gives its block a shortcut, which is None by default."""

    class Block(OneConv):
        def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
            if shortcut is None:
                shortcut = x
            out = self.conv(x)
            out += shortcut
            return F.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 1)
        self.block = Tree.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.down(x))


@pytest.mark.parametrize("example", [None, X])
def test_arguments_that_are_none_by_default_may_be_given(example: Any) -> None:
    model = Tree().eval()
    torchq.quantize_(model, target="onnxruntime", example=example)
    torchq.calibrate(model, [X], progress=False)
    with torchq.disabled(model):
        low, high = torch.aminmax(model.down(X))
    actual = model.block.quant_add.other_quantizer
    assert actual.amin.equal(low)
    assert actual.amax.equal(high)


class Checkpointed(OneConv):
    """Activation checkpointing of a function inside the forward runs it a second time."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            y = self.conv(x)
            return y * y + x

        return checkpoint(inner, x, use_reentrant=False) if self.training else inner(x)


def test_checkpointed_functions_have_the_right_gradients() -> None:
    model = Checkpointed()
    torchq.quantize_(model, torchq.recipes.w4a4(), target="openvino", example=X)
    torchq.calibrate(model, [X], progress=False)
    gradients = []
    for training in (True, False):
        model.train(training).zero_grad()
        model(X).square().mean().backward()
        gradients.append(model.conv.weight.grad.clone())
    assert torch.equal(*gradients)
    assert model.quant_add.input_quantizer.calibrated


class Iterating(nn.Sequential):
    """A forward that meets all children must not meet the new ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


SOURCELESS = """
class Sourceless(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gain = nn.Conv2d(4, 4, 1), 1.0

    def forward(self, x, shortcut=None):
        y = x + self.conv(x) * self.gain
        return y if shortcut is None else y + shortcut
"""


def sourceless() -> nn.Module:
    namespace: dict[str, Any] = {"nn": nn, "__name__": __name__}
    exec(SOURCELESS, namespace)
    model: nn.Module = namespace["Sourceless"]()
    return model.eval()


def test_children_that_are_iterated_over_stay_the_same() -> None:
    model = Iterating(nn.Conv2d(4, 4, 1), nn.ReLU()).eval()
    expected = model(X)
    torchq.quantize_(model, target="openvino")
    assert isinstance(model.quant_add, QuantAdd)
    with torchq.disabled(model):
        assert torch.equal(model(X), expected)


def test_operators_without_source_stay_float_with_a_reason() -> None:
    model = sourceless()
    report = torchq.quantize_(model, target="openvino", example=X)
    reasons = [d.reason for d in report.skipped]
    assert any(
        "its source does not show 1 of its operators" in reason for reason in reasons
    )
    plain = floats_of(model)
    for gain in (1.0, 5.0):
        model.gain = plain.gain = gain
        with torchq.disabled(model):
            assert torch.equal(model(X, X), plain(X, X))


def doubled(forward: Any) -> Any:
    """A decorator that does something of its own."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * forward(self, *args, **kwargs)

    return wrapper


class Decorated(OneConv):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4, 1, 1))

    @torch.autocast("cpu", enabled=False)
    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.conv(x) + x, self.kernel)


def test_decorators_run_around_the_routes() -> None:
    torch.manual_seed(0)
    model: Any = Decorated().eval()
    assert not torchq.quantize_(model, target="openvino", example=X).skipped
    torchq.calibrate(model, [X], progress=False)
    plain = floats_of(model)
    call = model.kernel_call
    with torchq.disabled(model):
        assert torch.equal(model(X), plain(X))
    y = call.input_quantizer(model.quant_add(model.conv(X), X))
    assert torch.equal(
        model(X),
        2 * F.conv2d(y, call.weight_quantizer(model.kernel)),
    )


def of_some_keywords(function: Any) -> Any:
    """A decorator that hands on the keywords it knows, as Transformers has for its kernels."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key in ("x", "weight")}
        return function(*args, **kwargs)

    return wrapper


def of_two_arguments(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(x: Tensor, weight: Tensor) -> Any:
        return function(x, weight)

    return wrapper


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight)


known_keywords = of_some_keywords(convolve)
two_arguments = of_two_arguments(convolve)
all_keywords = torch.autocast("cpu", enabled=False)(convolve)


class KnownKeywords(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        return known_keywords(self.conv(x), weight=self.kernel)


class TwoArguments(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        return two_arguments(self.conv(x), self.kernel)


class AllKeywords(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        return all_keywords(self.conv(x), weight=self.kernel)


@pytest.mark.parametrize("kind", [KnownKeywords, TwoArguments, AllKeywords])
def test_helpers_under_decorators_that_hide_keywords_run_as_they_are(kind: Any) -> None:
    torch.manual_seed(0)
    model: Any = kind().eval()
    torchq.quantize_(model, target="openvino", example=X)
    torchq.calibrate(model, [X], progress=False)
    assert hasattr(model, "kernel_call") is (kind is AllKeywords)
    with torchq.disabled(model):
        assert torch.equal(model(X), floats_of(model)(X))
    assert not torch.equal(model(X), floats_of(model)(X))


class Caching(nn.Module):
    """timm's LeViT keeps biases by device in a dictionary, others count calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.cache = {"deep": [{}]}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if "bias" not in self.cache["deep"][0]:
            self.cache["deep"][0]["bias"] = x.mean(1, keepdim=True)
        return self.conv(x) + x + self.cache["deep"][0]["bias"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("example", [None, X])
@pytest.mark.parametrize(
    "make",
    [Caching, Net, lambda: nn.Sequential(Shuffle(), nn.Conv2d(8, 4, 1), Caching())],
)
def test_planning_leaves_no_trace(make: Any, example: Any) -> None:
    """The dry run changes nothing, not even in containers and buffers."""
    model = make()
    before = pickle.dumps(model)
    hooks = len(model._forward_hooks)
    with_target = torchq.plan(model, target="onnxruntime", example=example)
    assert with_target.replaced
    assert pickle.dumps(model) == before
    assert len(model._forward_hooks) == hooks
    assert torchq.plan(model, target="onnxruntime", example=example).decisions


def test_a_bad_example_leaves_the_model_as_it_was() -> None:
    """All or nothing: the swap without its shared ranges would be another model."""
    model = Net()
    before = pickle.dumps(model)
    with pytest.raises(RuntimeError):
        torchq.quantize_(model, target="openvino", example=torch.ones(2, 3, 4, 4))
    assert pickle.dumps(model) == before
    assert torchq.quantize_(model, target="openvino", example=X).replaced


@pytest.mark.parametrize("number", [1, 5])
def test_ctrl_c_while_swapping_changes_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    calls = []
    before = pickle.dumps(model)
    original = torchq.TensorQuantizer.__init__

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        original(self, *args, **kwargs)

    monkeypatch.setattr(torchq.TensorQuantizer, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchq.quantize_(model, target="openvino")
    monkeypatch.undo()
    assert pickle.dumps(model) == before
    assert not quantizers(model)
