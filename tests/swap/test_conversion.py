"""A converted model computes, with every quantizer off, what the float model computes, bit for bit.

Where it would not, the call is refused and changes nothing.
"""

import copy
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.contracts.awkward_forwards import Base
from torchq.errors import ConfigError, InputError, QuantizationError
from torchq.swap import apply_, plan_of, planning

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
OTHER = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def is_equal(model: nn.Module, plain: nn.Module, x: Tensor) -> bool:
    with torch.no_grad(), torchq.disabled(model):
        return torch.equal(
            model(x.clone()),
            plain(x.clone()),
        )


def check(
    model: nn.Module, target: str | None = "onnxruntime", example: Any = X
) -> nn.Module:
    """Convert a copy, compare it on two inputs, and return it."""
    plain = copy.deepcopy(model.eval())
    torchq.quantize_(model, target=target, example=example, progress=False)
    assert is_equal(model, plain, X)
    assert is_equal(model, plain, OTHER)
    return model


# --- effects in place -----------------------------------------------------------------------------


class Statement(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        o = self.b(h)
        o.add_(h)
        return self.c(o)


class Alias(Base):
    def forward(self, x: Tensor) -> Any:
        o = kept = self.a(x)
        o += self.b(o)
        o *= self.b(o)
        return self.c(kept)


class Slice(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        half = h[:, :4]
        half.mul_(half)
        return self.c(h + self.b(h))


class Callers(Base):
    def grow(self, h: Tensor) -> None:
        h += self.b(h)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.grow(h)
        return self.c(h)


class Flag(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        F.silu(h, inplace=True)
        F.hardswish(h, True)
        return self.c(h)


class Module(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.act(h)
        return self.c(h)


class Out(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        o = torch.empty_like(h)
        torch.add(h, self.b(h), out=o)
        return self.c(o)


class Narrow(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x).half()
        h += self.b(h.float())
        return self.c(h.float())


IN_PLACE = (Statement, Alias, Slice, Callers, Flag, Module, Out, Narrow)


@pytest.mark.parametrize("cls", IN_PLACE)
def test_effects_in_place_are_kept(cls: type[Base]) -> None:
    check(cls())


@pytest.mark.parametrize("cls", IN_PLACE)
def test_effects_in_place_are_kept_where_only_the_code_is_read(cls: type[Base]) -> None:
    check(cls(), example=None)


def test_a_sum_whose_memory_nobody_else_reads_is_quantized() -> None:
    actual = check(Statement())
    assert isinstance(actual.quant_add, torchq.nn.QuantAdd)


def test_a_sum_that_has_another_reader_stays_float_and_the_report_says_so() -> None:
    report = torchq.plan(Alias().eval(), target="onnxruntime", example=X)
    assert "overwrites a tensor that is read again" in report.explain("")
    assert not list(report.operator_rows())


def test_an_example_that_the_forward_changes_stays_as_it_is() -> None:
    class Normalised(Base):
        def forward(self, x: Tensor) -> Any:
            x.sub_(0.5).div_(0.25)
            return super().forward(x)

    model = Normalised().eval()
    example = X.clone()
    torchq.plan(model, target="onnxruntime", example=example)
    torchq.quantize_(
        model, target="onnxruntime", example={"x": example}, progress=False
    )
    torchq.sensitivity(torchq_calibrated(model), [example], progress=False)
    assert torch.equal(example, X)


def torchq_calibrated(model: nn.Module) -> nn.Module:
    torchq.calibrate(model, [X.clone()], progress=False)
    return model


# --- which code is run ----------------------------------------------------------------------------


def test_a_method_of_the_object_itself_is_run() -> None:
    model = Base()
    model.tail = types.MethodType(lambda self, h: h * 3 - self.b(h), model)  # type: ignore[method-assign]
    check(model)


def test_a_method_that_the_object_gets_after_conversion_is_run() -> None:
    model = Base().eval()
    plain = Base().eval()
    plain.load_state_dict(model.state_dict())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    for net in (model, plain):
        net.tail = functools.partial(lambda net, h: h * 3 - net.b(h), net)  # type: ignore[method-assign]
    assert is_equal(model, plain, X)


def test_a_forward_and_a_helper_that_are_defined_anew_are_run() -> None:
    class Net(Base):
        pass

    def first(self: Any, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(h + self.b(h))

    def second(self: Any, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(h * 3 - self.b(h) + h)

    def new_tail(self: Any, h: Tensor) -> Tensor:
        return h * 2 + self.b(h)

    Net.forward = first  # type: ignore[method-assign]
    check(Net())
    Net.forward = second  # type: ignore[method-assign]
    check(Net())
    Net.forward = Base.forward  # type: ignore[method-assign]
    check(Net())
    Net.tail = new_tail  # type: ignore[method-assign]
    check(Net())


def cached(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As DETR of transformers decorates its tables: it holds the function twice."""
    cache = functools.lru_cache(maxsize=1)(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cache(*args, **kwargs)

    return wrapper


def test_a_decorator_that_keeps_results_runs_as_it_is() -> None:
    class Net(Base):
        @staticmethod
        @cached
        def table(rows: int) -> Tensor:
            return torch.zeros(1, 8, rows, rows) + torch.ones(())

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            return self.c(h + self.table(h.shape[2]))

    check(Net())


def test_a_container_with_operators_counts_and_gives_its_own_children() -> None:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) + x
            return x

    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(
                nn.Conv2d(8, 8, 1),
                nn.Conv2d(8, 8, 1),
            )

        def forward(self, x: Tensor) -> Any:
            h = self.block(self.a(x)) * len(self.block)
            h = self.block[-1](h) + self.block[0:2][1](h)
            return self.c(sum(layer(h) for layer in self.block))

    block = check(Net()).block
    assert isinstance(block.quant_add, torchq.nn.QuantAdd)
    assert len(block) == 2


def test_one_weight_in_two_calls() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + F.linear(x * 2, self.weight)

    check(Net(), None)


def test_a_child_that_has_the_name_of_an_operator_stays() -> None:
    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.quant_add = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            return self.c(self.quant_add(h) + self.b(h))

    actual = check(Net())
    assert type(actual.quant_add) is nn.Identity
    assert isinstance(actual.quant_add_, torchq.nn.QuantAdd)


def test_an_operator_that_is_a_module_already() -> None:
    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.add = torchq.nn.QuantAdd()

        def forward(self, x: Tensor) -> Any:
            h = self.a(x).relu()
            return self.c(self.add(h, self.b(h)))

    model = Net().eval()
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert not model.add.input_quantizer.calibrated


def test_attention_that_is_excluded_as_an_operator_is_no_call_either() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)
            self.o = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            return self.o(F.scaled_dot_product_attention(q, q, q))

    settings: dict[str, Any] = {
        "target": "onnxruntime",
        "example": torch.randn(1, 2, 3, 8),
    }
    report = torchq.plan(
        Net().eval(),
        exclude=["*quant_attention"],
        **settings,
    )
    assert {d.name for d in report.replaced} == {"q", "o"}
    # One linear layer of 8 x 8 for each of 6 rows, twice; two products of 3 x 3 x 8, twice.
    assert report.share is not None
    assert report.share.quantized == pytest.approx(
        2 * 6 * 64 / (2 * 6 * 64 + 2 * 2 * 72)
    )


# --- what is refused ------------------------------------------------------------------------------


class AsksForItsType(Base):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if type(self) is AsksForItsType else y * 5


class AsksForTheTypeOfALayer(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 if type(self.a) is nn.Conv2d else 5)


@pytest.mark.parametrize("cls", [AsksForItsType, AsksForTheTypeOfALayer])
def test_a_forward_that_asks_for_a_type_is_refused_and_nothing_changes(
    cls: type[Base],
) -> None:
    model = cls().eval()
    before = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    with pytest.raises(
        QuantizationError, match=r"\(root\): got a Asks.* is off by .*check=F"
    ):
        torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == keys
    assert plan_of(model).decisions == ()


def test_the_advice_of_a_refusal_works() -> None:
    model = AsksForItsType().eval()
    plain = AsksForItsType().eval()
    plain.load_state_dict(model.state_dict())
    with pytest.raises(QuantizationError) as error:
        torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    excluded = str(error.value).partition("exclude=")[2].partition(", or")[0]
    names = [name.strip("[]' ") for name in excluded.split(",")]
    torchq.quantize_(
        model, target="onnxruntime", example=X, exclude=names, progress=False
    )
    assert is_equal(model, plain, X)


def test_a_comparison_that_is_not_wanted_is_noted_in_report_plan_and_file() -> None:
    model = AsksForItsType().eval()
    report = torchq.quantize_(
        model, target="onnxruntime", example=X, check=False, progress=False
    )
    assert "not compared with the float model (check=False)" in str(report)
    assert plan_of(model).check == "off" == plan_of(model).to_dict()["check"]


class Rolls(Base):
    """Differs from itself: it asks a generator that nobody resets."""

    source = random.Random(0)

    def tail(self, h: Tensor) -> Tensor:
        return h + self.b(h) * self.source.random()


def test_a_model_that_does_not_repeat_itself_cannot_be_compared() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Base()
            self.second = nn.Sequential(
                nn.Conv2d(4, 3, 1),
                Rolls(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Net().eval()
    report = torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert report.check == "not repeatable: second.1"
    assert (
        "cannot be compared with the float model: not repeatable: second.1"
        in report.verdict()
    )


class Noisy(Base):
    def tail(self, h: Tensor) -> Tensor:
        return h + self.b(h + torch.randn_like(h)) * random.random()


def test_random_numbers_of_torch_and_python_are_the_same_in_both_runs() -> None:
    model = Noisy().eval()
    state = torch.get_rng_state()
    python = random.getstate()
    report = torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert report.check == "equal"
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


# --- a damaged conversion is seen -----------------------------------------------------------------


DAMAGES: dict[str, Callable[..., Tensor]] = {
    "a lost result": lambda self, input, other: input,
    "operands in each other's place": lambda self, input, other: other + other,
    "a gain of 1.01": lambda self, input, other: 1.01 * (input + other),
    "another type": lambda self, input, other: (input + other).double(),
    "an error": lambda self, input, other: input.no_such_method(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_conversion_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Base().eval()
    plan = torchq.plan(model, target="onnxruntime", example=X)
    monkeypatch.setattr(planning, "_planned", lambda *args: plan)
    monkeypatch.setattr(torchq.nn.QuantAdd, "forward", DAMAGES[name])
    with pytest.raises(QuantizationError, match="quant_add stands for an operator"):
        torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert type(model) is Base
    assert not hasattr(model, "quant_add")


def test_a_layer_that_is_converted_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cls = torchq.nn.QuantConv2d
    right = torchq.nn.QuantConv2d._conv_forward
    monkeypatch.setattr(
        cls, "_conv_forward", lambda self, *args: 1.01 * right(self, *args)
    )
    with pytest.raises(QuantizationError, match="a: got a Conv2d that, converted"):
        torchq.quantize_(Base().eval(), example=X, progress=False)


# --- a file and its code --------------------------------------------------------------------------


class Ordered(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.b(h)
        u = h + g
        v = h * 100 + g * 100
        return self.c(u) + self.c(v)


class Reordered(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.b(h)
        v = h * 100 + g * 100
        u = h + g
        return self.c(u) + self.c(v)


def test_a_forward_that_changed_since_it_was_saved_is_refused_by_name(
    tmp_path: Any,
) -> None:
    saved, changed = (cls().eval() for cls in (Ordered, Reordered))
    torchq.quantize_(saved, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(saved, [X], progress=False)
    torchq.save(saved, tmp_path / "a.pt")
    torchq.load(Ordered(), tmp_path / "a.pt")
    Reordered.__qualname__ = "Ordered"
    keys = list(changed.state_dict())
    with pytest.raises(
        QuantizationError, match=r"\(root\): .*Ordered: its forward, or a function"
    ):
        torchq.load(changed, tmp_path / "a.pt")
    assert list(changed.state_dict()) == keys


def test_a_graph_whose_nodes_changed_places_is_refused_by_name(tmp_path: Any) -> None:
    saved, changed = (
        torch.fx.symbolic_trace(cls().eval()) for cls in (Ordered, Reordered)
    )
    torchq.quantize_(saved, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(saved, [X], progress=False)
    torchq.save(saved, tmp_path / "a.pt")
    with pytest.raises(QuantizationError, match="its forward, or a function"):
        torchq.load(changed, tmp_path / "a.pt")


# --- loading and restoring with an example --------------------------------------------------------


@pytest.fixture
def file(tmp_path: Any) -> Any:
    model = Base().eval()
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], progress=False)
    torchq.save(model, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_load_with_an_example_compares(
    file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Base().eval()
    assert plan_of(torchq.load(model, file, example=X)).check == "equal"
    damaged = Base().eval()
    monkeypatch.setattr(torchq.nn.QuantAdd, "forward", DAMAGES["a gain of 1.01"])
    with pytest.raises(QuantizationError, match="quant_add stands for an operator"):
        torchq.load(damaged, file, example=X)
    assert type(damaged) is Base
    torchq.load(damaged, file)


def test_restore_with_an_example_compares(
    file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torchq.load(Base().eval(), file)
    plain = Base().eval()
    with monkeypatch.context() as damage:
        damage.setattr(torchq.nn.QuantAdd, "forward", DAMAGES["a gain of 1.01"])
        with pytest.raises(
            QuantizationError, match="restore_: Base: the float model is off"
        ):
            torchq.restore_(model, X)
        assert isinstance(model.quant_add, torchq.nn.QuantAdd)
    assert torchq.restore_(model, X)
    plain.load_state_dict(model.state_dict())
    assert type(model) is Base
    assert torch.equal(model(X), plain(X))


# --- what else is reported ------------------------------------------------------------------------


def test_the_plan_does_not_depend_on_the_number_of_samples() -> None:
    """The first layer has 40,000 results for one sample, which is too few to leave it float."""

    class Stem(nn.Sequential):
        pass

    def planned(x: Tensor) -> Any:
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3),
        )
        return torchq.plan(Stem(*layers).eval(), target="onnxruntime", example=x)

    x = torch.rand(1, 3, 50, 50)
    one = planned(x)
    two = planned(torch.cat([x, x]))
    assert one.decisions == two.decisions
    assert not one.skipped


def test_planning_in_inference_mode_makes_what_can_be_trained() -> None:
    with torch.inference_mode():
        model: Any = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
        ).eval()
        torchq.quantize_(model, example=torch.ones(2, 3, 8, 8), progress=False)
    torchq.calibrate(model, [X], progress=False)
    actual = model[0].input_quantizer
    assert actual.calibrated
    assert not actual.amax.is_inference()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_a_scripted_part_stays_as_it_is() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    model = Net().eval()
    x = torch.rand(2, 8)
    plain = copy.deepcopy(model)
    report = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert [d.name for d in report.replaced] == ["first"]
    assert is_equal(model, plain, x)


def test_complex_weights_stay_float() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(1, 8, 1)
            self.last = nn.Conv1d(8, 1, 1)
            self.weight = nn.Parameter(torch.randn(8, 8, 6, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Any:
            f = torch.fft.rfft(self.first(x))
            f = torch.einsum("bix,iox->box", f[:, :, :6], self.weight)
            return self.last(torch.fft.irfft(f, n=x.shape[-1]))

    model = Net().eval()
    x = torch.rand(2, 1, 32)
    report = torchq.quantize_(model, example=x, progress=False)
    torchq.calibrate(model, [x], progress=False)
    assert {d.name for d in report.replaced} == {"first", "last"}
    assert "multiplies by a weight in einsum" in report.explain("")


def test_a_weight_that_the_forward_writes_keeps_its_layer_float() -> None:
    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(8, 8, 3, 3))

        def forward(self, x: Tensor) -> Any:
            self.b.weight.data = torch.tanh(self.gain)
            return super().forward(x)

    with pytest.warns(UserWarning, match="Float stay Conv2d: its weight is written"):
        report = torchq.plan(Net().eval(), target="onnxruntime", example=X)
    assert "its weight is written while the model runs" in report.explain("b")


def test_an_operator_of_another_library_with_a_weight_is_counted_and_reported() -> None:
    ops = pytest.importorskip("torchvision.ops")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.offset = nn.Conv2d(8, 18, 1)
            self.deformed = ops.DeformConv2d(8, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return self.deformed(h, self.offset(h))

    report = torchq.plan(Net().eval(), example=X)
    assert "hands a weight to torchvision.deform_conv2d" in report.explain("deformed")
    # Multiply-adds of one place: 3 x 8, 8 x 18, and 9 x 8 x 2 that stay float.
    assert report.share is not None
    assert report.share.quantized == pytest.approx((24 + 144) / (24 + 144 + 144))


def test_a_graph_inside_a_model_that_cannot_be_traced_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))
    image = next(iter(graph.graph.nodes))
    with graph.graph.inserting_after(image):
        total = graph.graph.call_method("sum", (image,))
    with graph.graph.inserting_after(total):
        # No symbolic value is a number: an error of the generated code itself.
        graph.graph.call_function(int, (total,))
    graph.recompile()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), graph).eval()
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.restore_(model)
    torchq.fuse_(model, X, progress=False)
    assert capsys.readouterr().err == ""


def test_a_plan_can_be_hashed_and_refuses_what_is_no_path() -> None:
    report = torchq.plan(Base().eval())
    assert hash(report) == hash(copy.deepcopy(report))
    with pytest.raises(InputError, match=r"Plan.explain: got a int; expected the path"):
        report.explain(3)  # type: ignore[arg-type]
    empty = dataclasses.replace(report.decisions[0], names=())
    with pytest.raises(ConfigError, match=r"apply_: decisions\[0\]\.names: got \[\]"):
        apply_(Base(), dataclasses.replace(report, decisions=(empty,)))


def test_a_range_that_does_not_fit_names_its_quantizer() -> None:
    model = Base().eval()
    torchq.quantize_(model, progress=False)
    torchq.calibrate(model, [X], progress=False)
    model.b.weight = nn.Parameter(model.b.weight[:4].detach())
    model.b.bias = None
    with pytest.raises(
        ConfigError, match=r"^b\.weight_quantizer: amax has shape \(8, 1, 1, 1\)"
    ):
        model(X)
    with pytest.raises(
        ConfigError, match=r"amax=3\.0; expected a tensor. Call set_amax"
    ):
        model.a.input_quantizer.amax = 3.0


def test_a_module_that_is_not_initialised_is_named_before_anything_runs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LazyConv2d(4, 1)).eval()
    for call in (torchq.plan, torchq.quantize_):
        with pytest.raises(ConfigError, match=r"1\.weight: is not initialised yet"):
            call(model, example=X)
    assert isinstance(model[1], nn.LazyConv2d)


class Looks(Base):
    """Wants a layer of exactly one class."""

    def forward(self, x: Tensor) -> Any:
        if type(self.a) is not nn.Conv2d:
            raise TypeError("a convolution of torch is wanted")
        return super().forward(x)


class Compares(Base):
    """Wants two layers of the same class, of which a run reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Sequential(nn.Conv2d(3, 8, 3))

    def forward(self, x: Tensor) -> Any:
        if type(self.a) is not type(self.spare[0]):
            raise TypeError("two layers of one class are wanted")
        return super().forward(x)


@pytest.mark.parametrize("cls", [Looks, Compares])
def test_a_forward_that_cannot_run_once_converted_is_refused_by_name(
    cls: type[Base],
) -> None:
    model = cls().eval()
    expected = (
        f"{cls.__name__}: once converted, its forward raises TypeError: .* wanted"
    )
    with pytest.raises(QuantizationError, match=expected):
        torchq.quantize_(model, exclude="spare.0", example=X, progress=False)
    assert type(model.a) is nn.Conv2d
    with pytest.raises(RuntimeError, match=r"size of tensor|channels"):
        torchq.quantize_(model, example=X[:, :2], progress=False)


def test_an_activation_in_place_that_is_read_by_its_input_stays_float() -> None:
    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.SiLU(inplace=True)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            self.act(h)
            return self.c(h)

    model = Net().eval()
    report = torchq.plan(model, target="onnxruntime", example=X)
    assert "overwrites a tensor that is read again" in report.explain("act")
    chain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.SiLU(inplace=True)).eval()
    report = torchq.plan(chain, target="onnxruntime", example=X)
    assert "1" in [decision.name for decision in report.replaced]
