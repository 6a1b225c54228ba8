"""What must not be fused is refused by name and with its reason, and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.fusion.blocks.layers import BatchNormAct
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import Net, data_dependent, error, outputs, randomized
from torchq.errors import FuseError
from torchq.fusion import fuse_


def two_consumers(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return m.bn(y) + y.relu()


def graph_output(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return m.bn(y), y


def changed_in_place(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y += 1
    return m.bn(y)


FORWARDS = {
    "two consumers": (two_consumers, "conv has 2 consumers: bn, relu"),
    "graph output": (graph_output, "conv is also an output of the model"),
    "shared norm": (
        lambda m, x: m.bn(m.conv(x)) + m.bn(m.other(x)),
        "is shared: it follows conv, other",
    ),
    "shared conv": (
        lambda m, x: m.bn(m.conv(x)) + m.conv(x + 1),
        "its layer conv is shared: it is also called",
    ),
    "in place": (changed_in_place, "conv has 2 consumers|its input comes from"),
    "not a layer": (
        lambda m, x: m.bn(torch.relu(m.conv(x))),
        "its input comes from relu, not from a convolution or linear layer",
    ),
    "weight read": (
        lambda m, x: m.bn(m.conv(x)) + m.conv.weight.abs().mean(),
        "its layer conv has parameters that are also read outside its own forward",
    ),
    "function without bias": (
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, padding=1)),
        "its input comes from conv2d, not from a convolution or linear layer",
    ),
    "function with a foreign bias": (
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, bias=m.other.bias)),
        "its input comes from conv2d, not from a convolution or linear layer",
    ),
    "function with its own padding": (
        lambda m, x: F.conv2d(m.bn(x), m.other.weight, m.other.bias, padding=1),
        "is called as a function, perhaps with another padding than its own|its input comes from x",
    ),
    "shift read": (
        lambda m, x: m.bn(m.conv(x)) - m.bn.bias.sum(),
        "has parameters that are also read outside its own forward",
    ),
    "unused": (lambda m, x: m.conv(x), "is not called in the traced or recorded forward"),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_use_of_the_output_is_respected(name: str, traceable: bool) -> None:
    forward, reason = FORWARDS[name]
    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want, state = outputs(model, x), copy.deepcopy(model.state_dict())
    report = fuse_(model, x)
    assert report.fused == ()
    assert any(part in report.reason("bn") for part in reason.split("|"))
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert error(outputs(model, x), want) == 0
    with pytest.raises(FuseError, match="bn: "):
        report.require_all()


def test_even_the_type_of_a_batchnorm_is_not_there_without_it() -> None:
    model = randomized(Net(lambda m, x: m.bn(m.conv(x.to(m.bn.weight.dtype)))))
    assert "has parameters that are also read outside its own forward" in fuse_(model).reason("bn")


class Before(nn.Module):
    """A BatchNorm in front of a layer."""

    def __init__(self, layer: Any, norm: Any = None, output: bool = False) -> None:
        super().__init__()
        self.norm, self.layer, self.output = norm or nn.BatchNorm2d(4), layer, output

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return (self.layer(x), x) if self.output else self.layer(x)


BEFORE = {
    "transposed": (
        lambda: Before(nn.ConvTranspose2d(4, 6, 3)),
        "layer after it is transposed: how many taps overlap varies",
    ),
    "also an output": (
        lambda: Before(nn.Conv2d(4, 6, 1), output=True),
        "its input comes from x, not from a convolution",
    ),
    "with an activation": (
        lambda: Before(nn.Conv2d(4, 6, 1), BatchNormAct(4)),
        "its input comes from x, not from a convolution",
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_does_not_pass_through_the_layer_behind(name: str) -> None:
    make, reason = BEFORE[name]
    model = randomized(make().double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert reason in fuse_(model).reason("norm")
    assert error(outputs(model, x), want) == 0


def pair(layer: Any = None, norm: Any = None) -> nn.Sequential:
    return nn.Sequential(layer or nn.Conv2d(4, 4, 1), norm or nn.BatchNorm2d(4)).eval()


class Rounding(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).round()


def hooked(model: nn.Module, index: int, kind: str) -> nn.Sequential:
    getattr(model[index], kind)(lambda *args: None)
    return model


def trained(model: nn.Module) -> nn.Sequential:
    model[1].train()
    return model


def not_finite() -> nn.Sequential:
    model = pair()
    model[1].running_var[0] = -1.0
    model[0].weight.data[0] = float("nan")
    return model


def integer() -> nn.Sequential:
    model = pair()
    model[0].weight = nn.Parameter(torch.ones(4, 4, 1, 1, dtype=torch.int8), requires_grad=False)
    return model


def sparse() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = nn.Parameter(model[1].weight.detach().to_sparse_csr())
    return model


class Held(nn.Module):
    def __init__(self, container: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        parts = [self.conv, self.norm]
        self.stages = dict(enumerate(parts)) if container is dict else parts

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


def with_quantizer(index: int) -> nn.Sequential:
    model = pair()
    model[index].weight_quantizer = nn.ReLU()
    return model


MODELS = {
    "one in training mode": (lambda: trained(pair()), "1", "in training mode; call .eval() first"),
    "no statistics": (
        lambda: pair(norm=nn.BatchNorm2d(4, track_running_stats=False)),
        "1",
        "keeps no running statistics",
    ),
    "weight norm": (
        lambda: pair(parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
        "1",
        "is parametrized; call torch",
    ),
    "pruned": (lambda: pair(_pruned(nn.Conv2d(4, 4, 1))), "1", "computes its weight (weight_norm"),
    "lazy": (lambda: pair(nn.LazyConv2d(4, 1)), "1", "an uninitialized weight; run the model once"),
    "meta": (
        lambda: pair(nn.Conv2d(4, 4, 1, device="meta")),
        "1",
        "its weight on the meta device; load",
    ),
    "sparse": (sparse, "2", "has a weight stored as torch.sparse_csr; make it dense with to_d"),
    "integer": (integer, "1", "has a weight of torch.int8; expected a floating-point one"),
    "not finite": (not_finite, "1", "has a weight that is not finite"),
    "own forward": (
        lambda: pair(norm=Rounding(4)),
        "1",
        "is a Rounding, whose forward may do more",
    ),
    "observed layer": (
        lambda: hooked(pair(), 0, "register_forward_hook"),
        "1",
        "its layer 0 has a forward hook",
    ),
    "observed norm": (
        lambda: hooked(pair(), 1, "register_forward_pre_hook"),
        "1",
        "has a forward pre-hook; remove it first",
    ),
    "plain list": (lambda: Held(list), "norm", "is also kept in the list stages, outside"),
    "plain dict": (lambda: Held(dict), "norm", "is also kept in the dict stages, outside"),
    "quantized layer": (lambda: with_quantizer(0), "1", "holds quantizers; expected the order"),
    "quantized norm": (lambda: with_quantizer(1), "1", "holds quantizers; expected the order"),
    "linear, rank unknown": (
        lambda: pair(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "1",
        "dimensions of its result are unknown; give",
    ),
    "channel axis": (lambda: pair(nn.Conv2d(4, 6, 1)), "1", "has 4 channels, its layer 0 6"),
}


def _pruned(layer: Any) -> nn.Module:
    with torch.no_grad():
        return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_not_plain_numbers_are_refused(name: str) -> None:
    make, norm, reason = MODELS[name]
    model = make().eval() if name != "one in training mode" else make()
    report = fuse_(model)
    assert report.fused == ()
    assert reason in report.reason(norm)
    assert isinstance(model.get_submodule(norm), nn.BatchNorm1d | nn.BatchNorm2d)


def test_a_model_in_training_mode_is_an_error() -> None:
    with pytest.raises(
        FuseError, match=r"the model is in training mode; expected eval mode.* Call model.eval"
    ):
        fuse_(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))


def test_linear_and_batchnorm_on_tokens_of_the_same_number_as_features() -> None:
    model = randomized(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    tokens, rows = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    report = fuse_(model, tokens)
    assert "is linear on a 3-d input: its features are the last axis" in report.reason("1")
    want = outputs(model, rows)
    assert fuse_(model, rows).applied
    assert error(outputs(model, rows), want) <= 1e-10


def test_failed_whole_model_check_leaves_everything_as_it_was() -> None:
    class Watching(nn.Module):
        """Its output depends on how it is built, which only the check of the whole model sees."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(self.conv(x)) * (2 if type(self.bn) is nn.Identity else 1)

    model = randomized(Watching())
    conv, norm, weight = model.conv, model.bn, model.conv.weight
    state = copy.deepcopy(model.state_dict())
    with pytest.warns(
        UserWarning,
        match="the fused model is off by 1.0e.00; expected at most 1e-04. The model is left as",
    ):
        report = fuse_(model, torch.randn(2, 4, 5, 5))
    assert not report.applied
    assert report.error == pytest.approx(1.0, rel=1e-3)
    assert (model.conv, model.bn, model.conv.weight) == (conv, norm, weight)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


def test_a_model_that_fails_without_its_batchnorm_is_left_as_it_was() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(self.conv(x)) / self.bn.num_features

    model = randomized(Asks())
    with pytest.warns(
        UserWarning,
        match="the fused model is off by inf; expected at most 1e-04. The model is left as it was",
    ):
        report = fuse_(model, torch.randn(2, 4, 5, 5))
    assert not report.applied
    assert "1 fused, 0 refused, model unchanged (comparison failed), whole" in str(report)
    assert (
        "the fused model fails (AttributeError: 'Identity' object has no attribute 'num_features')"
        in report.notes
    )
    assert type(model.bn) is nn.BatchNorm2d


class Ranked(nn.Module):
    """Returns scores and what belongs to them, in an order that rounding decides."""

    def __init__(self, swap: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.swap = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), swap

    def forward(self, x: Tensor) -> Any:
        scores = self.bn(self.conv(x)).mean(1).flatten()
        values = x.sum(1).flatten()
        if type(self.bn) is nn.Identity:  # ties broken the other way round, as rounding does
            order = torch.arange(len(scores)).flip(0)
            return scores[order], values[order] + self.swap
        return scores, values


def test_results_in_another_order_are_the_same_results() -> None:
    x = torch.randn(1, 4, 5, 5)
    report = fuse_(randomized(Ranked()), x)
    assert report.applied
    assert (
        "the outputs agree, but in another order, as after top-k or NMS with ties" in report.notes
    )
    with pytest.warns(UserWarning, match="the fused model is off by .*; expected at most 1e-04"):
        assert not fuse_(randomized(Ranked(swap=True)), x).applied


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_models_are_an_error_and_scripted_parts_are_left_alone() -> None:
    body = randomized(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    scripted = torch.jit.script(copy.deepcopy(body))
    with pytest.raises(
        FuseError, match=r"got a RecursiveScriptModule; expected a module in Python"
    ):
        fuse_(scripted)
    model = nn.Sequential(
        body, nn.ReLU(), torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval())
    )
    x = torch.randn(1, 3, 5, 5)
    want = outputs(model, x)
    assert len(fuse_(model, x).fused) == 1
    assert error(outputs(model, x), want) <= 1e-5


class Masked(nn.Module):
    """Returns infinities and integers beside its result, and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        x.mul_(0.5)
        y = self.bn(self.conv(x))
        return {"masked": y.masked_fill(y < 0, -torch.inf), "index": y.argmax(1)}


def test_infinities_and_integers_in_the_output_do_not_disturb_the_comparison() -> None:
    x = torch.randn(1, 3, 5, 5, dtype=torch.float64)
    kept = x.clone()
    report = fuse_(randomized(Masked().double()), x)
    assert report.applied
    assert report.error <= 1e-10
    assert torch.equal(x, kept)


def test_a_single_layer_or_norm_as_the_model() -> None:
    assert fuse_(nn.Conv2d(3, 3, 1)).fused == ()
    assert fuse_(nn.BatchNorm2d(3).eval()).refused[0].name == ""
    torch.manual_seed(0)
    block = randomized(RepVGGBlock(4, 4))
    x = torch.randn(2, 4, 6, 6)
    want = outputs(block, x)
    assert fuse_(block, x).fused[0].name == "rbr_reparam"
    assert error(outputs(block, x), want) <= 1e-5


def test_what_is_no_module_is_an_error() -> None:
    report = fuse_(nn.ReLU())
    with pytest.raises(
        FuseError,
        match=r"got a FuseReport; expected a torch.nn.Module. It is changed in place and a report",
    ):
        fuse_(report)


def quantizer_in(block: Any) -> None:
    block.rbr_dense.conv.weight_quantizer = nn.ReLU()


BLOCKS = {
    "holds quantizers; expected the order fuse_, quantize_, calibrate": quantizer_in,
    "rbr_1x1.bn is in training mode; call .eval() first": lambda block: block.rbr_1x1.bn.train(),
    "rbr_dense.conv has a forward hook; remove it first": lambda block: (
        block.rbr_dense.conv.register_forward_hook(lambda *args: None)
    ),
    "rbr_1x1.conv is parametrized": lambda block: parametrizations.weight_norm(block.rbr_1x1.conv),
}


@pytest.mark.parametrize("reason", BLOCKS)
def test_blocks_are_refused_with_the_reason(reason: str) -> None:
    model = randomized(nn.Sequential(RepVGGBlock(4, 4)))
    BLOCKS[reason](model[0])
    report = fuse_(model)
    assert "is a repvgg block; " + reason in report.reason("0")
    assert hasattr(model[0], "rbr_dense")
    assert not hasattr(model[0], "rbr_reparam")


def test_a_block_whose_forward_does_more_is_refused_with_the_size_of_the_error() -> None:
    class Strange(RepVGGBlock):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + (0 if hasattr(self, "rbr_reparam") else 0.25)

    x = torch.randn(1, 4, 6, 6)
    model = randomized(nn.Sequential(Strange(4, 4)))
    want = outputs(model, x)
    report = fuse_(model, x)
    assert "looks like a repvgg block; merging would be off by" in report.reason("0")
    assert len(report.fused) == 2  # two of its BatchNorms still fold into their own convolutions
    assert hasattr(model[0], "rbr_dense")
    assert error(outputs(model, x), want) <= 1e-5


# -- hooks and forwards that were replaced --


class Outside(nn.Module):
    """A convolution and a BatchNorm, each in a container of its own."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1))
        self.post = nn.Sequential(nn.BatchNorm2d(4))
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Any:
        return self.body(self.post(x)) if self.norm_first else self.post(self.body(x))


HOOKS_AROUND = {
    "output of the layer's container": (False, "body", "register_forward_hook", True),
    "input of the norm's container": (False, "post", "register_forward_pre_hook", True),
    "output of the norm's container": (False, "post", "register_forward_hook", False),
    "input of the layer's container": (False, "body", "register_forward_pre_hook", False),
    "output of a norm before": (True, "post", "register_forward_hook", True),
    "input of a layer behind": (True, "body", "register_forward_pre_hook", True),
}


@pytest.mark.parametrize("name", HOOKS_AROUND)
@pytest.mark.parametrize("recorded", [False, True])
def test_hooks_of_containers_see_what_they_saw(name: str, recorded: bool) -> None:
    norm_first, path, kind, refused = HOOKS_AROUND[name]
    model = randomized(Outside(norm_first).double())
    x, seen = torch.randn(2, 4, 5, 5, dtype=torch.float64), []
    getattr(model.get_submodule(path), kind)(lambda *args: seen.append(args[-1]))
    outputs(model, x)
    report = fuse_(model, x if recorded else None)
    seen[1:-1] = []
    outputs(model, x)
    first, last = (v[0] if isinstance(v, tuple) else v for v in seen[:: len(seen) - 1])
    assert error(last, first) <= 1e-10
    assert (report.fused == ()) is refused
    if refused:
        assert "hook; remove the hook first" in report.reason("post.0")


def test_a_forward_set_on_the_layer_object_is_not_folded_through() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).double())
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    want = outputs(model, x)
    for verify in (True, False):
        report = fuse_(model, verify=verify)
        assert "its layer 0 has a forward that was set on the object" in report.reason("1")
    assert torch.equal(outputs(model, x), want)


def test_a_layer_that_cannot_run_on_one_tensor_is_refused() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return super().forward(x) * factor

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = Scaled(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(self.conv(x, 2.0))

    report = fuse_(randomized(Calls()))
    assert "folding it into conv cannot be checked (TypeError: " in report.reason("bn")
