"""The contract of conversion, over the awkward forwards, the toy networks and the zoo."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from benchmarks import zoo_models
from tests.contracts.awkward_forwards import AWKWARD, Base
from tests.contracts.conversion_contract import (
    RECIPE,
    harm_of_correction,
    lost_by_conversion,
    lost_by_quantizers,
    lost_on_an_engine,
    results,
)
from tests.swap.test_plan_contract import NETWORKS
from torchq.errors import QuantizationError

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
OTHER = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5


def others(name: str) -> Tensor:
    example = NETWORKS[name][1]
    return torch.rand(example.shape, generator=torch.Generator().manual_seed(1)) - 0.5


#: Name -> what makes the network, the example, and another input.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    **{f"awkward: {name}": (make, X, OTHER) for name, make in AWKWARD.items()},
    **{f"toy: {name}": (make, x, others(name)) for name, (make, x) in NETWORKS.items()},
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:FutureWarning",
    "ignore:.*of the multiply-adds quantized:UserWarning",
)


def made(name: str) -> tuple[nn.Module, Any, Any]:
    make, example, other = CASES[name]
    torch.manual_seed(0)
    return make().eval(), example, other


def converted(
    model: nn.Module, example: Any, target: str | None = "onnxruntime"
) -> nn.Module:
    config = torchq.recipes.int8(recurrent=True) if target else RECIPE
    twin = copy.deepcopy(model)
    torchq.quantize_(twin, config, target=target, example=example, progress=False)
    return twin


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", CASES)
def test_off_is_float_bit_for_bit(name: str) -> None:
    model, example, other = made(name)
    assert lost_by_conversion(model, converted(model, example), [example, other]) == ""


#: Two runs draw other numbers where one has calls that the other has not.
RANDOM = (
    "awkward: noise: torch's and Python's",
    "awkward: noise: dropout that is always on",
)
REPEATABLE = [name for name in CASES if name not in RANDOM]
#: torch takes the gradients of no scripted part away, which deployment asks for.
SCRIPTED = "awkward: scripted: a part and a function"
UNSEEN: dict[str, Any] = {"on_unseen": "disable"}


#: Which tokens are chosen depends on the last bit of values.
CHOOSES = "awkward: routing: tokens above the median"
AWKWARD_ONES = [
    name for name in REPEATABLE if name.startswith("awkward:") and name != CHOOSES
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", AWKWARD_ONES)
def test_quantizers_that_are_on_lose_no_effect(name: str) -> None:
    model, example, _ = made(name)
    twin = converted(model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchq.calibrate(twin, [example], correct=False, progress=False, **UNSEEN)
    assert lost_by_quantizers(model, twin, example) == ""


#: torch's kernels return channels in the last place, so that a view becomes a copy.
REFUSED = {"awkward: in place: a view": "iven the inputs of the simulation"}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name in REPEATABLE if name != SCRIPTED])
def test_an_engine_computes_what_the_simulation_does(name: str) -> None:
    model, example, other = made(name)
    simulation = converted(model, example, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchq.calibrate(
            simulation, [with_both(example, other)], progress=False, **UNSEEN
        )
        problem = lost_on_an_engine(simulation, example, other)
    assert REFUSED.get(name, "") in problem
    assert bool(problem) == (name in REFUSED)


def with_both(example: Tensor, other: Tensor) -> Tensor:
    return torch.cat([example, other])


#: Recurrent layers have recipes of 8 bits alone, and no correction.
RECURRENT = "toy: recurrent"


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name in REPEATABLE if name != RECURRENT])
def test_the_correction_makes_nothing_worse(name: str) -> None:
    model, example, _ = made(name)

    def quantized(correct: bool) -> nn.Module:
        twin = copy.deepcopy(model)
        torchq.quantize_(
            twin, torchq.recipes.integer(4, 8), example=example, progress=False
        )
        torchq.calibrate(twin, [example], correct=correct, progress=False, **UNSEEN)
        return twin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert harm_of_correction(model, quantized, example) == ""


# --- networks of other libraries ------------------------------------------------------------------


#: They take long, and others of the same library, or test_zoo.py, have their forwards.
REPEATED = {
    "torchvision/alexnet",
    "torchvision/convnext_tiny",
    "torchvision/deeplabv3_mobilenet_v3_large",
    "torchvision/densenet121",
    "torchvision/fcn_resnet50",
    "torchvision/fcos_resnet50_fpn",
    "torchvision/inception_v3",
    "torchvision/keypointrcnn_resnet50_fpn",
    "torchvision/maskrcnn_resnet50_fpn",
    "torchvision/maxvit_t",
    "torchvision/mc3_18",
    "torchvision/r2plus1d_18",
    "torchvision/r3d_18",
    "torchvision/regnet_x_400mf",
    "torchvision/resnext50_32x4d",
    "torchvision/ssd300_vgg16",
    "torchvision/swin3d_t",
    "torchvision/swin_t",
    "torchvision/vgg11_bn",
    "torchvision/wide_resnet50_2",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", zoo_models.LIBRARIES)
def test_the_networks_of_other_libraries_lose_nothing(library: str) -> None:
    """Look at all of a library in one test, as which ones there are depends on its version."""
    problems = {}
    for name in sorted(set(zoo_models.names(library)) - REPEATED):
        entry = zoo_models.build(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                twin = converted(entry.model, entry.example)
            except QuantizationError as error:
                problems[name] = str(error)
                continue
        lost = lost_by_conversion(entry.model, twin, [entry.example])
        problems |= {name: lost} if lost else {}
    assert problems == {}


# --- the contract itself can say no ---------------------------------------------------------------

DAMAGES: dict[str, Callable[[Any, Any], Any]] = {
    "a lost result in place": lambda a, b: a,
    "operands in each other's place": lambda a, b: b + b,
    "a gain of 1.01": lambda a, b: 1.01 * (a + b),
}


class Damaged(nn.Module):
    """Stands for an operator and computes something else."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.function(a, b)


class Gain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.02 * x


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_conversion_is_seen(name: str) -> None:
    torch.manual_seed(0)
    model = Base().eval()
    twin = converted(model, X)
    assert lost_by_conversion(model, twin, [X, OTHER]) == ""
    twin.quant_add = Damaged(DAMAGES[name])
    assert "is off by up to" in lost_by_conversion(model, twin, [X])


def test_a_damaged_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Base().eval()
    simulation = converted(model, X, None)
    torchq.calibrate(simulation, [with_both(X, OTHER)], progress=False)
    right = torchq.deploy
    assert lost_on_an_engine(simulation, X, OTHER) == ""

    def scaled(*args: Any, **kwargs: Any) -> nn.Module:
        return nn.Sequential(right(*args, **kwargs), Gain())

    monkeypatch.setattr(torchq, "deploy", scaled)
    assert "dB of the simulation" in lost_on_an_engine(simulation, X, OTHER)


def test_a_harmful_correction_is_seen() -> None:
    model = Base().eval()

    def quantized(correct: bool) -> nn.Module:
        twin = converted(model, X, None)
        torchq.calibrate(twin, [X], correct=False, progress=False)
        if correct:
            twin.c.register_forward_hook(lambda module, args, out: out + 0.1)
        return twin

    assert "of noise" in harm_of_correction(model, quantized, X)


def test_state_that_is_lost_in_the_second_call_is_seen() -> None:
    class Counts(Base):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return super().forward(x) * (
                self.calls if self.calls < 2 or self.counts else 1
            )

        counts = True

    model = Counts().eval()
    twin = copy.deepcopy(model)
    twin.counts = False
    assert results(model, X)
    assert lost_by_conversion(model, torchq_all(twin), [X])


def torchq_all(model: nn.Module) -> nn.Module:
    torchq.quantize_(model, example=X, progress=False)
    return model
