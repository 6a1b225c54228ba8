# Every target works in the repository's own environment, .venv, which `make install` creates.
# The checks themselves are in .ci/checks, which continuous integration runs too.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test test-fast test-oldest test-targets test-roads style types imports \
	doctests docs package figures check ci release-check bench-env clean

install:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -e ".[all,dev,docs]" -c docs/requirements.txt -c .ci/requirements.txt

demo:
	$(BIN)/torchq demo

# Every test. Without --slow, as in README, the larger tables and networks are left out.
test:
	$(BIN)/python -m pytest -n 2 --slow

# What a change to one package wants, within a minute: make test-fast PACKAGE=nn
test-fast:
	@test -d "tests/$(PACKAGE)" -a -n "$(PACKAGE)" || { \
		echo "test-fast: got PACKAGE='$(PACKAGE)'; expected a folder of tests/, as in PACKAGE=nn" >&2; \
		exit 2; }
	$(BIN)/python -m pytest -n 2 tests/$(PACKAGE) tests/test_architecture.py tests/test_surface.py

style types imports doctests docs package:
	.ci/checks $@

# The pictures and the tables of README and of the site, from benchmarks/results/.
figures:
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python -m benchmarks.figures

check:
	.ci/checks
	$(BIN)/python -m pytest -n 2

# Everything that continuous integration runs, in a fresh .venv.
ci:
	.ci/run

# A release as its users would get it: see .ci/release-check and RELEASE.md.
release-check:
	.ci/release-check

# The oldest torch that is supported, in an environment of its own.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install "torch==2.9.*" "torchvision==0.24.*" -e ".[all,dev]"
	.venv-oldest/bin/python -m pytest -n 2

# Targets whose packages are not in "all", and makers whose models and encodings are read, in
# environments of their own.
test-targets:
	$(PYTHON) -m venv .venv-executorch
	.venv-executorch/bin/pip install -e ".[all,dev,executorch]"
	.venv-executorch/bin/python -m pytest tests/runtimes/test_executorch.py \
		"tests/test_docs.py::test_the_code_runs[docs/platforms.md#ExecuTorch]"
	$(PYTHON) -m venv .venv-qnn
	.venv-qnn/bin/pip install -e ".[all,dev,qnn]"
	.venv-qnn/bin/python -m pytest tests/runtimes/test_qnn.py tests/runtimes/test_qnn_widths.py \
		tests/runtimes/test_qnn_convolutions.py \
		tests/onnx/test_dumps.py \
		"tests/test_docs.py::test_the_code_runs[docs/platforms.md#Qualcomm, emulated here]"
	$(PYTHON) -m venv .venv-makers
	.venv-makers/bin/pip install -e ".[all,dev]" nvidia-modelopt brevitas optimum-quanto torchao \
		aimet-onnx requests huggingface_hub omegaconf
	.venv-makers/bin/python -m pytest tests/frontends/test_checkpoints.py \
		tests/onnx/test_encodings.py

# Whole jobs with the trainers of others, in an environment of its own; -s shows their table.
test-roads:
	$(PYTHON) -m venv .venv-roads
	.venv-roads/bin/pip install -e ".[all,dev,integration,executorch]"
	.venv-roads/bin/python -m pytest -s tests/roads tests/qat/test_trainers.py \
		tests/qat/test_vision_trainers.py tests/workflow/test_other_trainers.py \
		tests/compat/test_scripts.py

# The tools that benchmarks compare with, in an environment of its own.
bench-env:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -e ".[all]" nvidia-modelopt nncf brevitas torchao requests \
		huggingface_hub "setuptools<81"

clean:
	rm -rf .venv .venv-oldest .venv-executorch .venv-qnn .venv-makers .venv-roads .venv-bench build dist torchq.egg-info docs/_build
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
