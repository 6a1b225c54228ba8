"""``import pytorch_quantization`` finds torchq's under every path, only while it is installed."""

import importlib
import importlib.metadata
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchq.compat
from torchq.compat import pytorch_quantization as package

MODULES = """
    calib calib.calibrator calib.histogram calib.max cuda_ext nn nn._functions.quant_rnn
    nn.functional nn.modules nn.modules._utils nn.modules.clip nn.modules.quant_conv
    nn.modules.quant_instancenorm nn.modules.quant_linear nn.modules.quant_pooling
    nn.modules.quant_rnn nn.modules.tensor_quantizer optim optim.helper quant_modules tensor_quant
    utils utils.quant_logging utils.reduce_amax version
"""

SPATIAL = [
    f"{kind}{d}d"
    for kind in (
        "Conv",
        "ConvTranspose",
        "MaxPool",
        "AvgPool",
        "AdaptiveAvgPool",
        "InstanceNorm",
    )
    for d in (1, 2, 3)
]
LAYERS = [*SPATIAL, "Linear", "LSTM", "LSTMCell"]


@pytest.mark.parametrize("name", MODULES.split())
def test_every_path_is_the_same_object(legacy: ModuleType, name: str) -> None:
    old = importlib.import_module(f"pytorch_quantization.{name}")
    assert old is sys.modules[f"torchq.compat.pytorch_quantization.{name}"]


def test_the_old_import_statements(legacy: ModuleType) -> None:
    namespace: dict[str, object] = {}
    lines = [
        "import pytorch_quantization",
        "import pytorch_quantization.nn as quant_nn",
        "import pytorch_quantization.nn.functional as QF",
        "import pytorch_quantization.utils as quant_utils",
        "from pytorch_quantization import cuda_ext, tensor_quant, quant_modules, calib, utils",
        "from pytorch_quantization.nn.modules import _utils, tensor_quantizer, quant_conv",
        "from pytorch_quantization.tensor_quant import QuantDescriptor, QUANT_DESC_8BIT_PER_TENSOR",
        "from pytorch_quantization.calib.calibrator import _Calibrator",
        "from pytorch_quantization.quant_modules import QuantModuleReplacementHelper",
        "from pytorch_quantization.optim import helper",
        "from pytorch_quantization.utils import quant_logging",
    ]
    exec("\n".join(lines), namespace)
    assert namespace["quant_nn"] is package.nn
    assert callable(namespace["quant_utils"].reduce_amax)  # type: ignore[attr-defined]
    assert namespace["pytorch_quantization"].__version__ == "2.2.1"  # type: ignore[attr-defined]
    names = {"initialize", "deactivate", "enable_onnx_export"}
    assert names <= set(dir(namespace["pytorch_quantization"]))


@pytest.mark.parametrize("name", LAYERS)
def test_both_names_of_a_layer_are_one_class(name: str) -> None:
    assert getattr(package.nn, name) is getattr(package.nn, f"Quant{name}")


def test_install_twice_and_uninstall() -> None:
    torchq.compat.install()
    torchq.compat.install()
    assert sys.modules["pytorch_quantization"] is package
    torchq.compat.uninstall()
    assert not [
        name for name in sys.modules if name.split(".")[0] == "pytorch_quantization"
    ]
    torchq.compat.uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("pytorch_quantization")


def test_libraries_find_a_distribution_while_it_is_installed() -> None:
    """transformers asks importlib.metadata whether the package is there."""

    def version() -> str:
        return importlib.metadata.version("pytorch_quantization")

    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version()
    torchq.compat.install()
    torchq.compat.install()
    assert version() == package.__version__
    assert importlib.metadata.version("pytorch-quantization") == version()
    actual = [d.name for d in importlib.metadata.distributions()]
    assert actual.count("pytorch-quantization") == 1
    assert len(actual) > 1
    torchq.compat.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version()


def test_another_package_of_that_name_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = ModuleType("pytorch_quantization")
    other.__file__ = "elsewhere.py"
    monkeypatch.setitem(sys.modules, "pytorch_quantization", other)
    message = r"imported already, from elsewhere\.py\. Call install"
    with pytest.raises(torchq.errors.QuantizationError, match=message):
        torchq.compat.install()
    torchq.compat.uninstall()
    assert sys.modules["pytorch_quantization"] is other


def test_absl_stand_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For environments without absl, whatever this one has."""
    for name in [name for name in sys.modules if name.split(".")[0] == "absl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    torchq.compat.install()
    from absl import logging as quant_logging

    # What OpenVINO does with absl when it is imported.
    logging.getLogger().removeHandler(vars(quant_logging)["_absl_handler"])

    with caplog.at_level(logging.DEBUG, "absl"):
        quant_logging.set_verbosity(quant_logging.ERROR)
        quant_logging.warning("hidden")
        quant_logging.error("shown %d", 1)
        quant_logging.set_verbosity("debug")
        quant_logging.log_first_n(quant_logging.WARNING, "first", 1)
    assert [record.getMessage() for record in caplog.records] == ["shown 1", "first"]
    torchq.compat.uninstall()
    assert "absl" not in sys.modules


def test_names_in_the_guide_of_migration_exist() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
    page = path.read_text(encoding="utf-8").partition(
        "## Names of 0.2.0 that are gone"
    )[0]
    named = set(re.findall(r"`(?:with )?(torchq(?:\.\w+)+)", page))
    assert len(named) > 10
    for name in named:
        actual = torchq
        for part in name.split(".")[1:]:
            actual = getattr(actual, part)
        assert actual is not None


def test_handlers_of_the_root_logger_are_removed(
    legacy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchq.compat.pytorch_quantization.utils import reduce_amax
    from torchq.compat.pytorch_quantization.utils.quant_logging import (  # type: ignore
        reset_logger_handler,
    )

    handlers = [logging.NullHandler(), logging.NullHandler()]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    reset_logger_handler()
    assert logging.getLogger().handlers == []
    assert callable(reduce_amax)
