"""The quantizers that a runtime wants: operators, branches, shared ranges; and their removal."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError
from torchq.graph import record
from torchq.nn.calls.find import find_calls
from torchq.runtimes import RUNTIMES
from torchq.swap.find_operators import find_operators

SMALL = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
KINDS = frozenset(["add", "mul", "matmul", "cat", "pool", "activation"])


class Operators(nn.Module):
    """Every operator that counts, and the same symbols where they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        count = x.size(0) + x.shape[1] * 2  # numbers
        y = self.conv(x) * self.weight + 1  # a parameter, a number
        y = torch.add(y, x) + torch.add(y, x, alpha=2)  # alpha is another operator
        y += x
        y = y.mul(x) @ x
        y = torch.bmm(y.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        y = torch.cat([F.silu(y), x], dim=1) * count
        pooled = F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1)
        return pooled + y.mean((2, 3), keepdim=True) + y.mean()


def test_operators_between_tensors_are_found() -> None:
    found, failed = find_operators(Operators(), KINDS)
    assert failed == []
    words = "add add add mul matmul matmul activation cat pool pool pool add add"
    assert [operator.kind for operator in found] == words.split()
    sums = [operator.child for operator in found if operator.kind == "add"]
    assert sums == ["quant_add", *(f"quant_add_{i}" for i in range(1, 5))]


class Anchors(nn.Module):
    """Places that depend on the size of an image alone, beside what depends on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.flatten = nn.Flatten(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.conv(x)
        rows = torch.arange(y.shape[2]).to(y)
        columns = self.flatten(torch.ones_like(y)) * 2
        anchors = F.relu(torch.cat([rows, columns + columns]))
        written = torch.zeros_like(y)
        written.copy_(y)
        return torch.cat([y, y], 1), anchors, torch.cat([written, written], 1)


def test_what_is_computed_from_sizes_alone_gets_no_quantizers() -> None:
    for example in (None, torch.ones(1, 4, 2, 2)):
        model = Anchors()
        seen = None if example is None else find_calls(model, example)
        found, failed = find_operators(model, KINDS, seen)
        assert failed == [] and [operator.kind for operator in found] == ["cat", "cat"]


class Counted(nn.Module):
    """Notes each call of its forward: whether it ran on numbers, and the mode of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        note_call(x)
        return self.conv(x) + x


class Moody(Counted):
    """Adds in one mode and concatenates in the other."""

    def forward(self, x: Tensor) -> Tensor:
        note_call(x)
        y = self.conv(x)
        return torch.cat([y, x]) if self.training else y + x


class Asking(Moody):
    """Asks for its mode in a method that its forward calls."""

    def forward(self, x: Tensor) -> Tensor:
        note_call(x)
        y = self.conv(x)
        return torch.cat([y, x]) if self.trains() else y + x

    def trains(self) -> bool:
        return bool(getattr(self, "training"))  # noqa: B009


CALLS: list[str] = []


def note_call(x: object) -> None:
    CALLS.append("run" if isinstance(x, Tensor) else "trace")


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("cls", [Moody, Asking])
def test_operators_of_both_modes_are_found(cls: type[nn.Module], mode: bool) -> None:
    model = cls().train(mode)
    found, failed = find_operators(model, KINDS)
    assert failed == [] and sorted(op.kind for op in found) == ["add", "cat"]
    assert type(model) is cls and model.training is mode


def test_a_forward_that_asks_for_no_mode_is_traced_once() -> None:
    traces = {}
    for model in (Counted(), Moody(), Asking()):
        CALLS.clear()
        found, failed = find_operators(model, KINDS)
        assert found and failed == []
        traces[type(model).__name__] = CALLS.count("trace")
    assert traces == {"Counted": 1, "Moody": 2, "Asking": 2}


def test_a_trace_that_fails_leaves_the_class() -> None:
    class Failing(Counted):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.sum() > 0 else x

    model = Failing()
    find_operators(model, KINDS)
    assert type(model) is Failing and "training" in vars(model)


class Registered(nn.Module):
    """Keeps a list of the classes below it, each with a tag that has no default."""

    tags: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tags.append(tag)


class Tagged(Registered, tag="tagged"):
    def __init__(self) -> None:
        super().__init__()
        self.part = TaggedPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + x


class TaggedPart(Registered, tag="part"):
    """It has no operator of its own, and a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.kernel = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.conv(x), self.kernel)


class TaggedParent(Registered, tag="parent"):
    """Its code shows no operator and no call of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class TaggedLayer(nn.Conv2d, Registered, tag="layer"):
    """A convolution that is quantized as torch's is."""


def test_classes_that_conversion_makes_are_in_no_list_of_a_class() -> None:
    tags = [*Registered.tags]
    x = torch.randn(1, 4, 2, 2)
    model = nn.Sequential(Tagged(), TaggedLayer(4, 4, 1)).eval()
    expected = model(x)
    plan = torchq.quantize_(model, target="onnxruntime", example=x)
    names = {d.name for d in plan.replaced}
    assert {"0.quant_add", "0.part.conv", "0.part.kernel_call", "1"} <= names | {
        f"{d.name}.{call.holder}" for d in plan.replaced for call in d.calls
    }
    with torchq.disabled(model):
        assert torch.equal(copy.deepcopy(model)(x), expected)
    torchq.restore_(model)
    assert type(model[0]) is Tagged and type(model[1]) is TaggedLayer
    assert find_operators(TaggedParent(), KINDS) == ([], [])
    assert Registered.tags == tags


@pytest.mark.parametrize("example", [None, torch.ones(1, 4, 2, 2)])
def test_planning_runs_a_model_twice_and_a_comparison_twice_more(
    example: Tensor | None,
) -> None:
    runs = []
    for options in (None, {"check": False}, {}):
        CALLS.clear()
        if options is None:
            torchq.plan(Counted(), target="onnxruntime", example=example)
        else:
            torchq.quantize_(
                Counted(), target="onnxruntime", example=example, **options
            )
        runs.append(CALLS.count("run"))
    assert runs == ([0, 0, 0] if example is None else [2, 2, 4])


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", [r.name for r in RUNTIMES.values() if r.placement])
def test_targets_quantize_what_they_say(target: str) -> None:
    model = Residual().eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    names = {d.name for d in torchq.quantize_(model, target=target, example=x).replaced}
    kinds = (nn.Conv2d, nn.Linear)
    layers = {name for name, m in Residual().named_modules() if isinstance(m, kinds)}
    placed = {"blocks.0.quant_add", "blocks.1.quant_add", "quant_cat", "gap"}
    assert names - layers == placed | (set() if target == "tensorrt" else {"pool"})
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)
    torchq.calibrate(model, [x], progress=False)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_tensorrt_opens_the_branch_that_ends_in_a_layer() -> None:
    model = Residual()
    torchq.quantize_(model, target="tensorrt")
    sums = [block.quant_add for block in model.blocks]
    modes = [(s.input_quantizer.mode, s.other_quantizer.mode) for s in sums]
    # ``out += identity``: out comes from the second convolution, in both
    assert modes == [("off", "quantize")] * 2


def test_kernels_take_no_more_of_a_parametrized_layer_than_of_others() -> None:
    """Its class is one that torch makes, with another name."""
    plain = nn.ConvTranspose2d(16, 4, 2)
    normed = nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(16, 4, 2))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), plain, nn.Conv2d(4, 16, 1), normed)
    for target in ("onnxruntime", "qnn", "tensorrt"):
        plan = torchq.plan(model, target=target, example=torch.randn(1, 3, 8, 8))
        decisions = [plan.decision(path) for path in "13"]
        first, second = (
            (d.input, d.weight, d.one_scale, d.note) for d in decisions if d
        )
        assert first == second
        assert (first[0] is None) == (target == "onnxruntime")
        assert first[2] == (target == "tensorrt")


def test_readers_of_one_tensor_share_their_range() -> None:
    model = Residual().eval()
    x = torch.randn(2, 3, 16, 16)
    torchq.quantize_(model, target="onnxruntime", example=x)
    first, second = model.blocks
    # the stem's output, through max pooling, is read by the first block twice
    pooled = model.pool.input_quantizer
    assert pooled is first.first.input_quantizer is first.quant_add.other_quantizer
    assert second.first.input_quantizer is second.down.input_quantizer
    assert first.first.input_quantizer is not second.first.input_quantizer
    assert model.quant_cat.input_quantizer is model.side.input_quantizer
    plain = Residual()
    torchq.quantize_(plain, target="onnxruntime")
    assert plain.pool.input_quantizer is not plain.blocks[0].first.input_quantizer


class PreActivation(nn.Module):
    """One tensor object with two contents: before and after an activation that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 2, 1)
        self.b = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        return self.a(x).sum() + self.b(x.relu_()).sum()


def test_a_tensor_changed_in_place_is_another_tensor() -> None:
    model = PreActivation()
    torchq.quantize_(model, example=torch.randn(1, 2, 3, 3))
    assert model.a.input_quantizer is not model.b.input_quantizer


@pytest.mark.slow
def test_exclude_and_include_reach_operators() -> None:
    model = Residual()
    names = ["blocks.0.quant_add", "quant_cat"]
    report = torchq.quantize_(model, target="onnxruntime", exclude=names)
    assert not hasattr(model.blocks[0], "quant_add") and hasattr(
        model.blocks[1], "quant_add"
    )
    reasons = {d.name: d.reason for d in report.skipped if "quant" in d.name}
    assert reasons == dict.fromkeys(names, "excluded")
    model = Residual()
    torchq.quantize_(model, target="onnxruntime", include="blocks.1.*")
    assert [hasattr(block, "quant_add") for block in model.blocks] == [False, True]


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x if x.sum() > 0 else x


def test_untraceable_modules_are_reported_and_left() -> None:
    model = nn.Sequential(Untraceable(), Residual().blocks[0])
    report = torchq.quantize_(model, target="openvino")
    reasons = {d.name: d.reason for d in report.skipped}
    assert reasons["0"].startswith(
        "its code decides by the values of tensors; operators in it"
    )
    assert "QuantAdd" in reasons["0"]
    assert type(model[0]) is Untraceable
    assert {d.name for d in report.replaced} >= {"0.conv", "1.quant_add"}


class Hidden(nn.Module):
    """Code that no trace follows, with an operator in a function that its source does not show."""

    def __init__(self, function: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y if y.sum() > 0 else y.clone()
        return y if self.function is None else self.function(y)


def in_other_code(module: Any) -> Any:
    """Let a forward run behind a wrapper, as decorators of transformers do."""
    inner = module.forward
    module.forward = lambda *args: inner(*args)
    return module


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (None, ""),
        (lambda y: y + y.flip(1), ""),
        (lambda y: y @ y.mT, "matmul in it stays float. Write torchq.nn.QuantAdd()"),
        (
            lambda y: nn.functional.scaled_dot_product_attention(y, y, y),
            "attention in it stays float. Models of transformers: "
            "torchq.hugging_face.attend_in_modules_",
        ),
    ],
)
def test_code_that_cannot_be_followed_has_a_row_where_a_run_shows_operators(
    function: Callable[[Tensor], Tensor] | None, what: str
) -> None:
    model = nn.Sequential(in_other_code(Hidden(function)))
    x = torch.randn(2, 4, 8)
    reasons = [d.reason for d in torchq.plan(model, target="onnxruntime").skipped]
    assert any("operators in it stay float" in reason for reason in reasons)
    planned = torchq.plan(model, target="onnxruntime", example=x)
    rows = [d.reason for d in planned.skipped if " in it stay" in d.reason]
    assert all(what in reason for reason in rows) and bool(rows) == bool(what)


def test_transformer_blocks_keep_their_sums_float() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.up(y @ y.transpose(1, 2) @ y)

    names: dict[str, Any] = {}
    for target in RUNTIMES:
        model = nn.Sequential(Block(), nn.Linear(4, 4))
        names[target] = {
            d.name for d in torchq.quantize_(model, target=target).replaced
        }
    products = {"0.quant_matmul", "0.quant_matmul_1"}
    for target in ("onnxruntime", "openvino", "tensorrt"):
        assert names[target] == {"0.up", "1", *products}


def test_configs_without_fixed_ranges_are_refused_and_weights_alone_place_nothing() -> (
    None
):
    rule = Rule("*", input=QuantDescriptor(dynamic=True), weight=QuantDescriptor())
    dynamic = QuantConfig((rule,))
    text = r"target tensorrt: the config quantizes activations as .*; expected a fixed range"
    with pytest.raises(ConfigError, match=text):
        torchq.quantize_(Residual(), dynamic, target="tensorrt")
    model = Residual()
    torchq.quantize_(model, torchq.recipes.integer(4, None), target="onnxruntime")
    assert not any("quant_" in name for name, _ in model.blocks[0].named_children())


def test_four_bit_configs_keep_eight_bits_between_layers() -> None:
    model = Residual()
    torchq.quantize_(model, torchq.recipes.w4a4(), target="onnxruntime")
    assert model.blocks[0].quant_add.input_quantizer.descriptor.num_bits == 8
    assert model.blocks[0].first.input_quantizer.descriptor.num_bits == 4


def test_unknown_targets_are_listed() -> None:
    text = r"unknown target 'tvm'; expected one of: 'ascend', .*'fpga', .* 'tensorrt', 'torch'"
    with pytest.raises(ConfigError, match=text):
        torchq.plan(Residual(), target="tvm")


class Stacks(nn.Module):
    """Concatenates without ``dim``, which for ``torch.cat`` means the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), x])


def test_a_concatenation_without_dim_keeps_its_meaning() -> None:
    model = Stacks().eval()
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    torchq.quantize_(model, target="tensorrt", example=x)
    assert isinstance(model.quant_cat, torchq.nn.QuantCat)
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)


def test_layers_operators_and_containers_are_counted_apart() -> None:
    report = torchq.plan(nn.Sequential(Stacks(), Stacks()), target="openvino")
    assert str(report).splitlines()[-1] == (
        "2 quantized, 2 operators for openvino, 0 skipped, recipe int8; "
        "100.0% of the weights of layers quantized; evaluation simulates"
    )


def test_an_input_that_a_target_leaves_float_is_named() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Conv2d(4, 4, 5))
    decision = torchq.plan(model, target="onnxruntime").replaced[0]
    assert (
        decision.note
        == "its input stays float, as onnxruntime has no integer kernel for it"
    )


class Sizes(nn.Module):
    """Computes with sizes that a trace cannot tell from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        return self.conv(x).flatten(2)[:, :, : height * width]


class CallsSizes(nn.Module):
    """Passes them on, as CoaT does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sizes()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, (x.shape[2], x.shape[3]))


def test_operators_on_numbers_get_no_quantizer() -> None:
    model = CallsSizes().eval()
    report = torchq.quantize_(model, target="openvino", example=SMALL)
    reason = "its operands are no tensors in the run on the example, or it does not run"
    assert {d.name: d.reason for d in report.skipped} == {"inner.quant_mul": reason}
    torchq.calibrate(model, [SMALL], progress=False)
    assert model(SMALL).shape == (4, 4, 64)


class KeepsAnchors(nn.Module):
    """Makes anchors in its first call and keeps them, as heads of detectors do; untraceable."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.strides = torch.tensor([8.0, 16.0])
        self.anchors: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.anchors is None:
            columns = torch.arange(len(list(y[0, 0]))) + 0.5
            self.anchors = torch.cat([columns, y.new_full((8,), self.strides[1])])
        z = torch.cat([y, y], -1)
        return z + self.anchors


def test_operators_on_stored_numbers_get_no_quantizer() -> None:
    model = KeepsAnchors().eval()
    report = torchq.quantize_(model, target="onnxruntime", example=SMALL)
    reason = "it computes with stored numbers alone, so its result is stored too"
    assert {d.name: d.reason for d in report.skipped} == {"quant_cat": reason}
    assert {d.name for d in report.operator_rows() if not d.reason} == {
        "quant_cat_1",
        "quant_add",
    }


class Padded(nn.Module):
    """Writes what it computes into tensors of zeros."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        first, second = torch.zeros_like(y), torch.zeros(y.shape)
        self.write(first, y)
        self.write(second, y)
        return self.last(first + second)


@pytest.mark.parametrize(
    "write",
    [
        lambda zeros, y: zeros.copy_(y),
        lambda zeros, y: zeros.__setitem__((slice(None), slice(2)), y[:, :2]),
        lambda zeros, y: zeros[:, 1:].copy_(y[:, 1:]),
        lambda zeros, y: torch.neg(y, out=zeros),
    ],
    ids=["copy_", "item", "view", "out"],
)
def test_what_the_input_is_written_into_is_not_stored(
    write: Callable[[Tensor, Tensor], object],
) -> None:
    flow = record(Padded(write).eval(), SMALL)
    assert [call.stored for call in flow.calls if call.name == "add"] == [False]


def test_random_numbers_are_not_stored() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.cat([torch.rand_like(x), torch.zeros_like(x)])
            return torch.cat([x, x]) + torch.cat([noise[:1], noise[:1]])

    flow = record(Noisy(), SMALL[:1])
    assert [call.name for call in flow.calls if call.stored] == ["zeros_like"]


# --- what a target computes wrong numbers with ----------------------------------------------------


class Pools(nn.Module):
    """A pool that a layer reads, and one that something in float reads."""

    def __init__(self, pool: nn.Module, reader: nn.Module) -> None:
        super().__init__()
        self.conv, self.end = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.read = nn.MaxPool2d(2)
        self.pool = pool
        self.reader = reader

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.end(F.relu(self.read(y))), self.reader(self.pool(y))


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.MaxPool2d(2)])
@pytest.mark.parametrize("reader", [nn.GroupNorm(2, 8), nn.PReLU(8), nn.Softmax(1)])
def test_a_pool_that_is_read_in_float_stays_float_for_openvino(
    pool: nn.Module, reader: nn.Module
) -> None:
    report = torchq.plan(Pools(pool, reader).eval(), target="openvino", example=SMALL)
    reasons = {d.name: d.reason for d in report.skipped}
    assert "read" not in reasons
    assert (
        reasons["pool"] == "openvino computes wrong numbers where it is read in float"
    )


class Sums(nn.Module):
    """A sum behind which something in float stands, also behind a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.end = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.end((y + y.tanh()).relu()), self.norm(
            (y + y.sigmoid()).flatten(1, 2)
        )


def test_a_sum_that_is_read_in_float_stays_float_for_openvino() -> None:
    report = torchq.plan(Sums().eval(), target="openvino", example=SMALL)
    sums = {d.name: d.reason for d in report.decisions if "add" in d.name}
    wrong = "openvino computes wrong numbers where it is read in float"
    assert sums == {"quant_add": "", "quant_add_1": wrong}


class PooledSum(nn.Module):
    """A pool that a sum reads, behind which a norm stands."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.pool, self.norm = nn.AvgPool2d(2), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm((self.pool(y) + self.side(y)).permute(0, 2, 3, 1))


def test_a_pool_in_front_of_a_sum_that_stays_float_is_read_in_float_for_openvino() -> (
    None
):
    report = torchq.plan(PooledSum().eval(), target="openvino", example=SMALL)
    reasons = {d.name: d.reason for d in report.decisions}
    wrong = "openvino computes wrong numbers where it is read in float"
    assert reasons["quant_add"] == wrong
    assert reasons["pool"] == wrong
    assert reasons["side"] == ""


class Tokens(nn.Module):
    """A stored token in front of those of an image, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.end = (
            nn.Conv2d(3, 8, 4, 4),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        )
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)
        token = (self.token + self.place).expand(len(y), -1, -1)
        y = torch.cat([token, torch.cat([y, y.relu()], 1)], 1)
        end: Tensor = self.end(self.norm(y))
        return end


def test_what_is_joined_with_a_stored_token_stays_float_for_openvino() -> None:
    report = torchq.plan(Tokens().eval(), target="openvino", example=SMALL)
    joins = {d.name: d.reason for d in report.decisions if "cat" in d.name}
    wrong = "openvino computes wrong numbers where stored ones are joined"
    assert joins == {"quant_cat": "", "quant_cat_1": wrong}
