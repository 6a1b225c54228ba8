"""What must not be fused is refused by name and with its reason, and left as it was."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.fusion.blocks.layers import BatchNormAct
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import (
    Net,
    copied,
    data_dependent,
    error,
    fused_exactly,
    image,
    norms,
    outputs,
    randomized,
    same_state,
)
from torchq.errors import FuseError
from torchq.fusion import fuse_

READ = "has parameters that are also read outside its own forward"


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


NO_LAYER = "not from a convolution or linear layer"
OTHER_PADDING = (
    "is called as a function, perhaps with another padding|its input comes from x"
)
FORWARDS: list[tuple[str, Any]] = [
    ("conv has 2 consumers: bn, relu", two_consumers),
    ("conv is also an output of the model", graph_output),
    (
        "is shared: it follows conv, other",
        lambda m, x: m.bn(m.conv(x)) + m.bn(m.other(x)),
    ),
    (
        "its layer conv is shared: it is also",
        lambda m, x: m.bn(m.conv(x)) + m.conv(x + 1),
    ),
    ("conv has 2 consumers|its input comes from", changed_in_place),
    (
        f"its input comes from relu, {NO_LAYER}",
        lambda m, x: m.bn(torch.relu(m.conv(x))),
    ),
    (
        f"its layer conv {READ}",
        lambda m, x: m.bn(m.conv(x)) + m.conv.weight.abs().mean(),
    ),
    (
        f"comes from conv2d, {NO_LAYER}",
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, padding=1)),
    ),
    (
        f"conv2d, {NO_LAYER}",
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, bias=m.other.bias)),
    ),
    (
        OTHER_PADDING,
        lambda m, x: F.conv2d(m.bn(x), m.other.weight, m.other.bias, padding=1),
    ),
    (READ, lambda m, x: m.bn(m.conv(x)) - m.bn.bias.sum()),
    ("is not called in the traced or recorded forward", lambda m, x: m.conv(x)),
]


@pytest.mark.sample(14)
@pytest.mark.parametrize(("reason", "forward"), FORWARDS)
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_use_of_the_output_is_respected(
    reason: str, forward: Any, traceable: bool
) -> None:
    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    state = copied(model)
    x = image()
    report = fuse_(model, x)
    assert report.fused == ()
    assert any(part in report.reason("bn") for part in reason.split("|"))
    assert same_state(model, state)
    with pytest.raises(FuseError, match="bn: "):
        report.require_all()


def test_even_the_type_of_a_batchnorm_is_not_there_without_it() -> None:
    model = randomized(Net(lambda m, x: m.bn(m.conv(x.to(m.bn.weight.dtype)))))
    assert READ in fuse_(model).reason("bn")


def returned_too(m: Any, x: Tensor) -> Any:
    x = m.bn(x)
    return m.other(x), x


def test_what_does_not_pass_through_the_layer_behind() -> None:
    transposed, active = (Net(lambda m, x: m.other(m.bn(x))) for _ in range(2))
    transposed.other = nn.ConvTranspose2d(4, 6, 3)  # type: ignore[assignment]
    active.bn = BatchNormAct(4)
    for model, reason in (
        (transposed, "other after it is transposed: how many taps overlap varies"),
        (Net(returned_too), "its input comes from x, not from a convolution"),
        (active, "its input comes from x, not from a convolution"),
    ):
        state = copied(randomized(model))
        assert reason in fuse_(model).reason("bn")
        assert same_state(model, state)


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
    model[0].weight = nn.Parameter(
        torch.ones(4, 4, 1, 1, dtype=torch.int8), requires_grad=False
    )
    return model


def sparse() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].weight = nn.Parameter(model[1].weight.detach().to_sparse_csr())
    return model


def held(container: Any) -> nn.Sequential:
    model = pair()
    model.stages = (
        container(enumerate(model)) if container is dict else container(model)
    )
    return model


def with_quantizer(index: int) -> nn.Sequential:
    model = pair()
    model[index].weight_quantizer = nn.ReLU()
    return model


def pruned() -> nn.Module:
    with torch.no_grad():
        return prune.l1_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5)


MODELS = {
    "in training mode; call .eval() first": lambda: trained(pair()),
    "keeps no running statistics": lambda: pair(
        norm=nn.BatchNorm2d(4, track_running_stats=False)
    ),
    "parametrized; call torch": lambda: pair(
        parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    ),
    "computes its weight (weight_norm": lambda: pair(pruned()),
    "an uninitialized weight; run the model once": lambda: pair(nn.LazyConv2d(4, 1)),
    "its weight on the meta device; load": lambda: pair(
        nn.Conv2d(4, 4, 1, device="meta")
    ),
    "has a weight stored as torch.sparse_csr; make it dense with to_d": sparse,
    "has a weight of torch.int8; expected a floating-point one": integer,
    "has a weight that is not finite": not_finite,
    "is a Rounding, whose forward may do more": lambda: pair(norm=Rounding(4)),
    "its layer 0 has a forward hook": lambda: hooked(
        pair(), 0, "register_forward_hook"
    ),
    "has a forward pre-hook; remove it": lambda: hooked(
        pair(), 1, "register_forward_pre_hook"
    ),
    "is also kept in the list stages, outside": lambda: held(list),
    "is also kept in the dict stages, outside": lambda: held(dict),
    "its layer 0 holds quantizers; expected the order": lambda: with_quantizer(0),
    "holds quantizers; expected the order": lambda: with_quantizer(1),
    "dimensions of its result are unknown": lambda: pair(
        nn.Linear(4, 4), nn.BatchNorm1d(4)
    ),
    "has 4 channels, its layer 0 6": lambda: pair(nn.Conv2d(4, 6, 1)),
}


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("reason", MODELS)
def test_layers_that_are_not_plain_numbers_are_refused(reason: str) -> None:
    model = MODELS[reason]()
    (norm,) = norms(model)
    report = fuse_(model)
    assert report.fused == ()
    assert reason in report.reason(norm)
    assert norms(model) == [norm]


def test_a_model_in_training_mode_is_an_error() -> None:
    message = r"the model is in training mode; expected eval mode.* Call model.eval"
    with pytest.raises(FuseError, match=message):
        fuse_(pair().train())


def test_linear_and_batchnorm_on_tokens_of_the_same_number_as_features() -> None:
    model = randomized(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    report = fuse_(model, image(2, 4, 4))
    assert "is linear on a 3-d input: its features are the last axis" in report.reason(
        "1"
    )
    rows = image(5, 4)
    assert fused_exactly(model, rows, rows).applied


def test_failed_whole_model_check_leaves_everything_as_it_was() -> None:
    """The output depends on how the model is built, which only the check of the whole sees."""
    model = randomized(
        Net(lambda m, x: m.bn(m.conv(x)) * (2 if type(m.bn) is nn.Identity else 1))
    )
    conv = model.conv
    norm = model.bn
    weight = model.conv.weight
    state = copied(model)
    message = "the fused model is off by 1.0e.00; expected at most 1e-04. The model is left as"
    with pytest.warns(UserWarning, match=message):
        report = fuse_(model, torch.randn(2, 4, 5, 5))
    assert not report.applied
    assert report.error == pytest.approx(1.0, rel=1e-3)
    assert (model.conv, model.bn, model.conv.weight) == (conv, norm, weight)
    assert same_state(model, state)


def test_a_model_that_fails_without_its_batchnorm_is_left_as_it_was() -> None:
    model = randomized(Net(lambda m, x: m.bn(m.conv(x)) / m.bn.num_features))
    message = "the fused model is off by inf; expected at most 1e-04. The model is left as it was"
    with pytest.warns(UserWarning, match=message):
        report = fuse_(model, torch.randn(2, 4, 5, 5))
    assert not report.applied
    assert "1 fused, 0 refused, model unchanged (comparison failed), whole" in str(
        report
    )
    failure = "AttributeError: 'Identity' object has no attribute 'num_features'"
    assert f"the fused model fails ({failure})" in report.notes
    assert type(model.bn) is nn.BatchNorm2d


def ranked(m: Any, x: Tensor) -> Any:
    """Return scores and what belongs to them, in an order that rounding decides."""
    scores = m.bn(m.conv(x)).mean(1).flatten()
    values = x.sum(1).flatten()
    if type(m.bn) is nn.Identity:  # ties broken the other way round, as rounding does
        order = torch.arange(len(scores)).flip(0)
        return scores[order], values[order] + hasattr(m, "swap")
    return scores, values


def test_results_in_another_order_are_the_same_results() -> None:
    x = torch.randn(1, 4, 5, 5)
    swapping = randomized(Net(ranked))
    report = fuse_(randomized(Net(ranked)), x)
    assert report.applied
    note = "the outputs agree, but in another order, as after top-k or NMS with ties"
    assert note in report.notes
    swapping.swap = True
    with pytest.warns(
        UserWarning, match="the fused model is off by .*; expected at most 1e-04"
    ):
        assert not fuse_(swapping, x).applied


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_models_are_an_error_and_scripted_parts_are_left_alone() -> None:
    body = randomized(pair().double())
    with pytest.raises(
        FuseError, match=r"got a RecursiveScriptModule; expected a module in Pyth"
    ):
        fuse_(torch.jit.script(copy.deepcopy(body)))
    part = torch.jit.script(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).double().eval()
    )
    x = image()
    assert len(fused_exactly(nn.Sequential(body, nn.ReLU(), part), x, x).fused) == 1


def masked(m: Any, x: Tensor) -> Any:
    """Return infinities and integers beside a result, and write into the input."""
    x.mul_(0.5)
    y = m.bn(m.conv(x))
    return {"masked": y.masked_fill(y < 0, -torch.inf), "index": y.argmax(1)}


def test_infinities_and_integers_in_the_output_do_not_disturb_the_comparison() -> None:
    x = image()
    kept = x.clone()
    report = fuse_(randomized(Net(masked).double()), x)
    assert report.applied
    assert report.error <= 1e-10
    assert torch.equal(x, kept)


def test_a_single_layer_or_norm_as_the_model() -> None:
    assert fuse_(nn.Conv2d(3, 3, 1)).fused == ()
    assert fuse_(nn.BatchNorm2d(3).eval()).refused[0].name == ""
    torch.manual_seed(0)
    block = randomized(RepVGGBlock(4, 4).double())
    x = image()
    assert fused_exactly(block, x, x).fused[0].name == "rbr_reparam"


def test_what_is_no_module_is_an_error() -> None:
    message = r"got a FuseReport; expected a torch.nn.Module. It is changed in place and a report"
    with pytest.raises(FuseError, match=message):
        fuse_(fuse_(nn.ReLU()))


def quantizer_in(block: Any) -> None:
    block.rbr_dense.conv.weight_quantizer = nn.ReLU()


BLOCKS = {
    "holds quantizers; expected the order fuse_, quantize_, calibrate": quantizer_in,
    "rbr_1x1.bn is in training mode; call .eval() first": lambda block: (
        block.rbr_1x1.bn.train()
    ),
    "rbr_dense.conv has a forward hook; remove it first": lambda block: (
        block.rbr_dense.conv.register_forward_hook(lambda *args: None)
    ),
    "rbr_1x1.conv is parametrized": lambda block: parametrizations.weight_norm(
        block.rbr_1x1.conv
    ),
}


@pytest.mark.parametrize("reason", BLOCKS)
def test_blocks_are_refused_with_the_reason(reason: str) -> None:
    model = randomized(nn.Sequential(RepVGGBlock(4, 4)))
    BLOCKS[reason](model[0])
    report = fuse_(model)
    assert "is a repvgg block; " + reason in report.reason("0")
    assert hasattr(model[0], "rbr_dense")
    assert not hasattr(model[0], "rbr_reparam")


def test_a_block_whose_forward_does_more_is_refused_with_the_size_of_the_error() -> (
    None
):
    class Strange(RepVGGBlock):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + (0 if hasattr(self, "rbr_reparam") else 0.25)

    model = randomized(nn.Sequential(Strange(4, 4)).double())
    x = image()
    report = fused_exactly(model, x, x)
    assert "looks like a repvgg block; merging would be off by" in report.reason("0")
    # Two of its BatchNorms still fold into their own convolutions.
    assert len(report.fused) == 2
    assert hasattr(model[0], "rbr_dense")


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
    "input of the layer's container": (
        False,
        "body",
        "register_forward_pre_hook",
        False,
    ),
    "output of a norm before": (True, "post", "register_forward_hook", True),
    "input of a layer behind": (True, "body", "register_forward_pre_hook", True),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HOOKS_AROUND)
@pytest.mark.parametrize("recorded", [False, True])
def test_hooks_of_containers_see_what_they_saw(name: str, recorded: bool) -> None:
    norm_first, path, kind, refused = HOOKS_AROUND[name]
    model = randomized(Outside(norm_first).double())
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    seen = []
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
    model = randomized(pair().double())
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    for verify in (True, False):
        report = fused_exactly(model, image(), verify=verify)
        assert "its layer 0 has a forward that was set on the object" in report.reason(
            "1"
        )


def test_a_layer_that_cannot_run_on_one_tensor_is_refused() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return super().forward(x) * factor

    model = Net(lambda m, x: m.bn(m.conv(x, 2.0)))
    model.conv = Scaled(4, 4, 1)
    report = fuse_(randomized(model))
    assert "folding it into conv cannot be checked (TypeError: " in report.reason("bn")
