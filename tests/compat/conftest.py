"""Old names for a test, and everything that old scripts leave behind put back afterwards."""

from collections.abc import Iterator
from types import ModuleType

import pytest

import torchq.compat
from torchq.compat import pytorch_quantization as package
from torchq.compat.pytorch_quantization.mixins import QuantInputMixin, QuantMixin

DEFAULTS = ("default_quant_desc_input", "default_quant_desc_weight")


def mixin_classes() -> list[type]:
    actual: list[type] = [QuantMixin, QuantInputMixin]
    for cls in actual:
        actual += [sub for sub in cls.__subclasses__() if sub not in actual]
    return actual


@pytest.fixture(autouse=True)
def nothing_legacy_leaks() -> Iterator[None]:
    """Restore the global state of the original.

    These are the defaults of its classes, their replacement in torch.nn and the flags of the
    quantizer.
    """
    before = {
        cls: {name: vars(cls)[name] for name in DEFAULTS if name in vars(cls)}
        for cls in mixin_classes()
    }
    default_map = list(package.quant_modules._DEFAULT_QUANT_MAP)
    yield
    package.quant_modules.deactivate()
    package.quant_modules._DEFAULT_QUANT_MAP[:] = default_map
    package.nn.TensorQuantizer.use_fb_fake_quant = False
    for cls, own in before.items():
        for name in DEFAULTS:
            if name in own:
                setattr(cls, name, own[name])
            elif name in vars(cls):
                delattr(cls, name)
    torchq.compat.uninstall()


@pytest.fixture
def legacy() -> ModuleType:
    """``pytorch_quantization``, installed."""
    torchq.compat.install()
    return package
