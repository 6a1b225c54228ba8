"""Metadata of torchq. Reads the version as text, so that neither torch nor torchq is imported while building."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The string assigned to ``__version__`` in torchq/version.py."""
    text = (ROOT / "torchq" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('torchq/version.py: no line __version__ = "..."')
    return found[1]


EXTRAS = {
    "export": ["onnx>=1.17", "onnxscript>=0.5", "onnxruntime>=1.20"],
    "openvino": ["openvino"],
    "demo": ["scikit-learn"],
    "report": ["matplotlib"],
    "dev": [
        "pytest",
        "pytest-xdist",
        "ruff",
        "mypy",
        "ml_dtypes",
        "hypothesis",
        "PyYAML",
        "types-PyYAML",
        "types-tqdm",
    ],
}
# openvino is 59 MB, small beside torch; inside "all" its export target is tested wherever the project is.
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="torchq",
    version=read_version(),
    description="Quantization of PyTorch models by swapping modules: calibrate, train, export, deploy.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8")
    if (ROOT / "README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    author="The torchq authors",
    license="Apache-2.0",
    packages=find_packages(include=["torchq", "torchq.*"]),
    package_data={"torchq": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "torchvision", "tqdm"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["torchq = torchq.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
