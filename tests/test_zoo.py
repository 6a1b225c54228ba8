"""Every classification model of torchvision is swapped and restored.

Swapping changes nothing while quantizers are off, and restoring gives everything back.
"""

from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.nn import QuantModule, TensorQuantizer
from torchq.swap import Plan, plan_of

models = pytest.importorskip("torchvision.models")

# Larger models are the same blocks, repeated; they would need most of the time.
MAX_PARAMETERS = 12_000_000
# Else there would be none of their family.
KEPT = {
    *("alexnet", "convnext_tiny", "efficientnet_v2_s", "inception_v3", "maxvit_t"),
    *("resnet50", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32"),
}
RANDOM = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
)
SIZES = {"inception_v3": 75, "maxvit_t": 224}
OPTIONS: dict[str, dict[str, Any]] = {
    "inception_v3": {"init_weights": False, "aux_logits": False},
    "googlenet": {"init_weights": False, "aux_logits": False},
    **{f"vit_{name}": {"image_size": 64} for name in ("b_16", "b_32", "l_16", "l_32")},
    "vit_h_14": {"image_size": 56},
}


def build(name: str) -> nn.Module:
    return models.get_model(name, weights=None, **OPTIONS.get(name, {})).eval()


def parameters(name: str) -> int:
    return next(iter(models.get_model_weights(name))).meta["num_params"]


# One of each family, as small as it comes; the others are slow.
SMALL = [
    *(
        "alexnet",
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "googlenet",
        "mnasnet0_5",
    ),
    *(
        "mobilenet_v2",
        "mobilenet_v3_small",
        "regnet_y_400mf",
        "resnet18",
        "shufflenet_v2_x0_5",
    ),
    *("squeezenet1_1", "swin_t"),
]
NAMES = [
    pytest.param(name, marks=[] if name in SMALL else [pytest.mark.slow])
    for name in models.list_models(module=models)
]


@pytest.fixture
def cheap_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip initial weights, which need more time than most models; one fill replaces them."""
    for name in RANDOM:
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)


def weighted(model: nn.Module) -> set[int]:
    """Return the modules with a matrix or kernel of their own.

    The output layer of attention is a part of the attention.
    """
    inside = {
        id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)
    }
    modules = [
        m
        for m in model.modules()
        if id(m) not in inside and not isinstance(m, TensorQuantizer)
    ]
    return {
        id(m) for m in modules if any(p.dim() > 1 for p in m.parameters(recurse=False))
    }


@pytest.mark.sample(4)
@pytest.mark.usefixtures("cheap_init")
@pytest.mark.parametrize("name", NAMES)
def test_swap_and_restore(name: str) -> None:
    if parameters(name) > MAX_PARAMETERS and name not in KEPT:
        pytest.skip(f"more than {MAX_PARAMETERS} parameters")
    model = build(name)
    size = SIZES.get(name, OPTIONS.get(name, {}).get("image_size", 64))
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.1, 0.1)
        expected = model(x)
        objects = {n: (id(m), type(m)) for n, m in model.named_modules()}
        tensors = {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
        candidates = weighted(model)

        planned = torchq.plan(model)
        report = torchq.quantize_(model)
        assert planned == report == plan_of(model) == Plan.from_dict(report.to_dict())
        decided = {id(model.get_submodule(d.name)) for d in report.decisions}
        assert decided >= candidates, "silently skipped"
        assert {id(model.get_submodule(d.name)) for d in report.replaced} == {
            id(m) for m in model.modules() if isinstance(m, QuantModule)
        }
        assert all(d.reason for d in report.skipped)
        with torchq.disabled(model):
            assert torch.equal(model(x), expected)

        torchq.restore_(model)
        assert {n: (id(m), type(m)) for n, m in model.named_modules()} == objects
        assert {
            n: id(t) for n, t in model.state_dict(keep_vars=True).items()
        } == tensors
        assert torch.equal(model(x), expected)
    assert bool(expected.isfinite().all())
    assert len(report.replaced) > 5
