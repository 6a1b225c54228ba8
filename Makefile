# Every target works in the repository's own environment, .venv. .ci/run runs the same commands.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test test-oldest style types doctest check bench-env clean

install:
	$(PYTHON) -m venv .venv && $(BIN)/pip install -e ".[all]"

# The two commands of README.
demo:
	python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[all]" && torchq demo

test:
	python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[all]" && python -m pytest -n 2

# The oldest torch that is supported, in an environment of its own.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install "torch==2.6.*" "torchvision==0.21.*" -e ".[all]"
	.venv-oldest/bin/python -m pytest -n 2

# The next four expect `make install`.
style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

doctest:
	$(BIN)/python -m pytest -q --doctest-modules torchq

check: style types doctest
	$(BIN)/python -m pytest -n 2

# The tools that benchmarks compare with, in an environment of its own.
bench-env:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -e ".[all]" nvidia-modelopt brevitas torchao requests huggingface_hub

clean:
	rm -rf .venv .venv-oldest .venv-bench build dist torchq.egg-info .pytest_cache .mypy_cache .ruff_cache
