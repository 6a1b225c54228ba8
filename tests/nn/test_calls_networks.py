"""Function calls with weights in whole networks, on any axes; what stays float; refusals."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import Conv1D, Parts, Projection, simulated
from torchq import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.nn import QuantLinear
from torchq.nn.calls.modules import route_
from torchq.nn.calls.routes import CallSite

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"  # torch 2.9
)


class WindowAttention(nn.Module):
    """As torchvision's Swin: a function gets the weights of children that are never called."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return attention(self.norm(x), self.qkv.weight, self.proj.weight, self.qkv.bias)


def attention(x: Tensor, qkv: Tensor, proj: Tensor, bias: Tensor) -> Tensor:
    q, k, v = F.linear(x, qkv, bias).chunk(3, -1)
    return F.linear((q @ k.transpose(-2, -1)).softmax(-1) @ v, proj)


class Network(nn.Module):
    """A model with such a module in it, and an output that reads the table of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.attention, self.mlp = WindowAttention(), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.mlp(self.attention(x))
        return F.linear(x, self.table.weight)


TOKENS = torch.arange(20).view(4, 5) % 11


@pytest.mark.parametrize("example", [None, TOKENS], ids=["source", "run"])
def test_weights_of_children_are_quantized_where_they_are_used(example: Any) -> None:
    torch.manual_seed(0)
    model = Network().eval()
    report = torchq.quantize_(model, example=example)
    found = {d.name for d in report.replaced}
    assert {"attention", "attention.qkv", "attention.proj", "mlp"} <= found
    assert ("table_weight_call" in found) == (example is not None)
    assert isinstance(model.attention.qkv, QuantLinear)
    torchq.calibrate(model, [TOKENS], progress=False)  # Every quantizer sees data.
    seen: list[Tensor] = []
    handle = model.attention.norm.register_forward_hook(
        lambda m, args, out: seen.append(out)
    )
    got = model(TOKENS)
    handle.remove()
    block: Any = model.attention
    x = block.qkv(seen[0])
    q, k, v = x.chunk(3, -1)
    y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    proj = block.proj
    y = F.linear(proj.input_quantizer(y), proj.weight_quantizer(proj.weight))
    y = model.mlp(y)
    if example is None:
        assert torch.equal(got, F.linear(y, model.table.weight))
    else:
        call: Any = model.table_weight_call
        weight = call.weight_quantizer(model.table.weight)
        assert torch.equal(got, F.linear(call.input_quantizer(y), weight))


@pytest.mark.eight_bit_products
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:While .*, we found certain side effects:UserWarning"
)
def test_a_network_with_calls_goes_all_the_way(tmp_path: Path) -> None:
    """One module makes a call with its own weight, one with a computed weight, others of parts."""

    def build() -> nn.Module:
        return nn.Sequential(Network(), Conv1D(4, 11), Mixed()).eval()

    torch.manual_seed(0)
    model = build()
    before = {name: vars(m).keys() for name, m in model.named_modules()}
    keys = list(model.state_dict())
    expected = model(TOKENS)
    simulated(model, [TOKENS], example=TOKENS)
    torchq.save(model, tmp_path / "m.pt")
    twins = [torchq.load(build(), tmp_path / "m.pt"), copy.deepcopy(model)]
    twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(twin(TOKENS), model(TOKENS))
    twins[-1][1].input_quantizer.set_amax(0.01)
    assert not torch.equal(twins[-1](TOKENS), model(TOKENS))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS)
    torch.testing.assert_close(compiled, model(TOKENS), rtol=1e-4, atol=1e-4)
    deployed = torchq.deploy(model, TOKENS)
    error = (deployed(TOKENS) - model(TOKENS)).norm() / model(TOKENS).norm()
    # An integer kernel sums exactly, so a code may round the other way.
    assert error < 0.02
    with torch.no_grad():
        for strict in (False, True):
            program = torch.export.export(model, (TOKENS,), strict=strict).module()
            assert torch.equal(program(TOKENS), model(TOKENS))
    torchq.restore_(model)
    assert torch.equal(model(TOKENS), expected) and list(model.state_dict()) == keys
    assert {name: vars(m).keys() for name, m in model.named_modules()} == before


def test_rules_select_calls() -> None:
    model = Network()
    kept = torchq.plan(model, exclude="attention.qkv", example=TOKENS)
    sites = next(d.calls for d in kept.replaced if d.name == "attention")
    assert [site.holder for site in sites] == ["proj"]
    kept = torchq.plan(model, exclude="table_weight_call", example=TOKENS)
    assert {d.name: d.reason for d in kept.skipped}["table_weight_call"] == "excluded"
    report = torchq.plan(Conv1D(3, 3), example=torch.ones(2, 3))
    assert report.replaced[0].by == "type:torch.nn.modules.linear.Linear"


class Mixed(nn.Module):
    """Computes the weight of a call beside a child that makes the same kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.linear(x), 2 * self.kernel)


def test_a_computed_weight_beside_a_child_with_the_same_kind_of_call() -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 4)
    assert not torchq.quantize_(model, example=x).skipped
    call: Any = model.linear_call_0
    y = call.input_quantizer(model.linear(x))
    assert torch.equal(model(x), F.linear(y, call.weight_quantizer(2 * model.kernel)))


class Hidden(Parts):
    """Chooses the function of its product at run time, which its source does not show."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(F, self.dims)(x, self.kernel)
        return out


def test_calls_that_the_source_does_not_show_are_reported() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), Hidden(kernel=nn.Parameter(torch.randn(4, 4)), dims="linear")
    )
    (skipped,) = torchq.plan(model, example=torch.randn(2, 4)).skipped
    assert skipped.name == "1"
    assert "linear with a weight, which its source does not show" in skipped.reason


class Attends(nn.Module):
    """Makes one call of attention, or two."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = F.scaled_dot_product_attention(x, x, x)
        return x


class Repeats(nn.Module):
    """Layers that share one attention, as ALBERT's do."""

    def __init__(self, second: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attention = Attends()
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(self.attention(self.linear(x)), self.second)
        return out


ATTENTION = torchq.recipes.int8().with_rules(
    torchq.Rule("type:*ScaledDotProductAttention", input=QuantDescriptor())
)


def test_layers_that_share_a_module_share_its_quantizers() -> None:
    model = Repeats(second=1)
    x = torch.randn(1, 2, 3, 4)
    expected = model(x)
    torchq.quantize_(model, ATTENTION, example=x)
    call: Any = model.attention.attention_call_0
    torchq.calibrate(model, [x], progress=False)
    once = call(model.linear(x), model.linear(x), model.linear(x))
    assert torch.equal(model(x), call(once, once, once))
    torchq.restore_(model)
    assert torch.equal(model(x), expected)


def test_each_round_of_a_loop_has_quantizers_of_its_own() -> None:
    model = Repeats(second=2)
    x = torch.randn(1, 2, 3, 4)
    torchq.quantize_(model, ATTENTION, example=x)
    attention: Any = model.attention
    first, second = attention.attention_call_0, attention.attention_call_1
    y = model.linear(x)
    y = first(y, y, y)
    y = first(y, y, y)
    assert torch.equal(model(x), second(y, y, y))


@pytest.mark.parametrize(
    ("sites", "text"),
    [
        ([CallSite("linear", "missing")], "has no parameter missing"),
        ([CallSite("linear", "no.weight")], "has no attribute"),
        (
            [CallSite("matmul", "kernel"), CallSite("matmul", "kernel")],
            "without a holder among 2",
        ),
        ([CallSite("matmul", "kernel", site="@1")], "no call of matmul at @1"),
        ([CallSite("linear", "kernel", site="@0")], "no call of linear at @0"),
        ([CallSite("matmul", "kernel", "forward")], "not an nn.Module"),
    ],
)
def test_refusals_change_nothing(sites: list[CallSite], text: str) -> None:
    module = Projection()
    before = dict(vars(module))
    with pytest.raises(QuantizationError, match=text):
        route_(module, calls=sites)
    assert type(module) is Projection and vars(module) == before


def test_sites_are_read_strictly() -> None:
    site = CallSite("matmul", "a.kernel", "a_kernel_call", weight_is_left=True)
    assert CallSite.from_dict(site.to_dict()) == site
    for key, value in (
        ("kind", "exec"),
        ("holder", "a b"),
        ("weight", "x()"),
        ("is_unseen", "1"),
    ):
        with pytest.raises(torchq.errors.ConfigError, match="call site"):
            CallSite.from_dict({**site.to_dict(), key: value})


class LayerScale(Parts):
    """A parameter of two dimensions that no product uses, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x)


def test_parameters_outside_of_products_are_no_candidates() -> None:
    """Without a run nobody knows, and the report says how to find out."""
    model = nn.Sequential(
        LayerScale(linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(1, 4)))
    )
    assert [d.name for d in torchq.plan(model, example=torch.ones(2, 4)).decisions] == [
        "0.linear"
    ]
    (skipped,) = torchq.plan(model).skipped
    assert "pass example= to find function calls with them" in skipped.reason


@pytest.mark.filterwarnings("ignore:.*only")  # Little is quantized.
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_cells_are_named_with_the_layer_that_is_quantized(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), getattr(nn, f"{kind}Cell")(4, 4))
    (skipped,) = torchq.plan(model, example=torch.ones(2, 4)).skipped
    assert f"torch.nn.{kind} computes the same for all steps" in skipped.reason
    assert "pass example=" not in skipped.reason
    layer = nn.Sequential(nn.Linear(4, 4), getattr(nn, kind)(4, 4))
    config = torchq.recipes.int8(recurrent=True)
    assert not torchq.plan(layer, config, example=torch.ones(2, 3, 4)).skipped


class Mixer(nn.Module):
    """As Hugging Face's Mamba: a view of the weight of a child that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, groups=4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.view(4, 3)
        return F.conv1d(x, weight.unsqueeze(1), self.conv.bias, groups=4)


def test_a_layer_whose_weight_is_used_after_a_computation() -> None:
    """The call is quantized and the layer is not; a layer that did not run may run elsewhere."""
    model = nn.Sequential(Mixer())
    x = torch.randn(2, 4, 9)
    report = torchq.quantize_(model, example=x)
    assert {d.name for d in report.replaced} == {"0", "0.conv1d_call_0", "0.unused"}
    assert "it is never called" in {d.name: d.reason for d in report.skipped}["0.conv"]
    torchq.calibrate(model, [x], progress=False, on_unseen="disable")
    call: Any = model[0].conv1d_call_0
    weight = call.weight_quantizer(model[0].conv.weight)
    expected = F.conv1d(call.input_quantizer(x), weight, model[0].conv.bias, groups=4)
    assert torch.equal(model(x), expected)


class Contracts(nn.Module):
    """Multiplies by weights in functions that take any axes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 4, 5))
        self.out = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(torch.einsum("ngi,gio->ngo", x, self.mix), self.out, 1)


def test_contractions_of_any_axes_are_quantized() -> None:
    model, x = Contracts(), torch.randn(6, 3, 4)
    simulated(model, [x], example=x)
    first, second = model.mix_call, model.out_call
    y = torch.einsum(
        "ngi,gio->ngo", first.input_quantizer(x), first.weight_quantizer(model.mix)
    )
    expected = second.input_quantizer(y).matmul(second.weight_quantizer(model.out))
    torch.testing.assert_close(model(x), expected)  # The same sums in another order.
    assert first.weight_quantizer.amax.dim() == 0


class Chains(nn.Module):
    """Multiplies by weights in ways that have no quantized form."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.bilinear(x, x, self.a[None]) + torch.einsum(
            "ni,ij,jk->nk", x, self.a, self.b
        )


def test_products_that_no_quantizer_reaches_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Chains())
    (skipped,) = torchq.plan(model, example=torch.randn(2, 4)).skipped
    text = (
        "its forward multiplies by a weight in bilinear and multiplies by a weight in einsum, "
        "which stays float"
    )
    assert (skipped.name, skipped.reason) == ("1", text)


class DynamicFilter(Parts):
    """Computes the kernel of a convolution from its input, as dynamic filter networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.generator(x.mean((0, 2, 3))).view(3, 3, 3, 1))


class Table(nn.Module):
    """Looks up rows of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.embedding(x, self.rows))
        return out


class Blurs(nn.Module):
    """Convolves with a fixed kernel, as anti-aliased networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((3, 1, 3, 3), 1 / 9))
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.conv2d(x, self.kernel, groups=3))
        return out


class Convolves(nn.Module):
    """Calls the general convolution of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 1, 1))
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        options = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        out: Tensor = self.head(torch.convolution(x, self.kernel, None, *options))
        return out


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Blurs(), "calls conv2d with a weight that is no parameter"),
        (Convolves(), "multiplies by a weight in convolution"),
        (
            DynamicFilter(generator=nn.Linear(3, 27)),
            "computes the weight of conv2d from its input",
        ),
        (Table(), "looks up rows of a parameter with F.embedding"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* only .* quantized")
def test_weights_in_other_places_are_reported(model: nn.Module, text: str) -> None:
    x = (
        torch.randint(0, 5, (2, 3))
        if isinstance(model, Table)
        else torch.randn(2, 3, 8, 8)
    )
    (skipped,) = torchq.plan(model, example=x).skipped
    assert (skipped.name, skipped.reason) == (
        "",
        f"its forward {text}, which stays float",
    )


class ReadsTransposed(nn.Module):
    """Multiplies the weight of a child by its input, as Mamba does; nothing calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.steps = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps.weight @ self.first(x).transpose(1, 2)


@pytest.mark.eight_bit_products
def test_a_layer_whose_weight_another_product_uses_holds_its_quantizers() -> None:
    model = ReadsTransposed().eval()
    x = torch.randn(2, 3, 4)
    assert not torchq.quantize_(model, example=x).skipped
    torchq.calibrate(model, [x], progress=False)
    steps: Any = model.steps
    transposed = steps.input_quantizer(model.first(x).transpose(1, 2))
    expected = steps.weight_quantizer(steps.weight) @ transposed
    assert torch.equal(model(x), expected)
    # Two float32 orders of the same sums.
    torch.testing.assert_close(torchq.deploy(model, x)(x), expected)
