# The two commands are `make test` and `make demo`. Both first create .venv and install the pinned environment into it;
# that is repeated only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
# Two test workers with one computing thread each: more would compete for the cores of a small machine.
WORKERS ?= 2
PYTEST_ARGS ?=
# For `make other-torch`.
TORCH ?= 2.15.0
# Not in constraints.txt: each build of torch for GPUs asks for a version of its own.
TRITON_VERSION := 3.6.0

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# What is installed is installed once, before the steps that run side by side.
ifndef AT_ONCE
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALLED := .venv/.installed
TRITON := .triton/.installed
TRAINERS := .integrations/.installed
WHEEL_BIN := .wheel-venv/bin
WHEEL_VENV := .wheel-venv/.created
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
EXTRAS := dev,docs,demo,plot

# $(call step,what it does) { commands; } prints what it does and then how long it took.
step = @echo "==> $(1)"; TIMEFORMAT="    %1R s"; time

.PHONY: help test test-all others demo env lint types browser unit kernels integrations other-torch docs wheel format clean distclean

help:
	@echo "make test    everything that continuous integration checks: lint, types, unit, kernels, integrations, docs, wheel"
	@echo "make test-all the same with the slow tests too, and with new random examples in each run"
	@echo "make demo    run examples/demo.py"
	@echo "make env     only create .venv with the pinned environment"
	@echo "make lint    ruff: rules and formatting"
	@echo "make types   basedpyright, strict, on autocastfx/"
	@echo "make browser install Debian's chromium for the tests of the HTML page, as root where apt-get exists"
	@echo "make others  integrations, kernels, types, docs and wheel, side by side"
	@echo "make unit    pytest; options go in PYTEST_ARGS, for example PYTEST_ARGS='-k place -x'"
	@echo "make kernels pytest on the Triton kernels by Triton's interpreter, which needs no GPU; Triton goes into .triton"
	@echo "make integrations pytest with Accelerate, Lightning, PEFT and ONNX Runtime, which go into .integrations"
	@echo "make other-torch TORCH=2.11.0: pytest with another torch, in an environment of its own (several gigabytes)"
	@echo "make docs    the documentation, into docs/_build/html; a warning is an error"
	@echo "make wheel   build the sdist and the wheel, install the wheel in a clean environment, use it there"
	@echo "make format  apply ruff's fixes and formatting"
	@echo "make clean   remove what was built; distclean also removes .venv, .triton, .integrations and .torch-*"

test: lint others unit
	@echo "==> make $@: every step passed"

# The later -m wins over the one of pyproject.toml.
test-all: export SLOW := -m 'slow or not slow' --hypothesis-profile=new
test-all: lint others unit
	@echo "==> make $@: every step passed"

# As many at once as there are workers, in one process each; what a step prints stands together, when it ends.
others: $(INSTALLED) $(TRITON) $(TRAINERS) $(WHEEL_VENV)
	@$(MAKE) --no-print-directory --jobs=$(WORKERS) --output-sync=target WORKERS=0 AT_ONCE=1 integrations kernels types docs wheel

env: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(call step,env: install the pinned environment into .venv) { \
	  if [ ! -x $(BIN)/python ]; then \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	      { echo "constraints.txt needs Python 3.11 or newer; say which to use: make PYTHON=python3.11"; exit 1; }; \
	    $(PYTHON) -m venv .venv; \
	  fi; \
	  $(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'; \
	  touch $@; \
	}

lint: $(INSTALLED)
	$(call step,lint: ruff check and ruff format --check) { \
	  $(BIN)/ruff check .; \
	  $(BIN)/ruff format --check .; \
	}

types: $(INSTALLED) $(TRAINERS)
	$(call step,types: basedpyright) { $(BIN)/basedpyright; }

# Never fails: without a browser the tests of the page are skipped.
browser:
	@if [ -x /usr/bin/chromium ] && [ -x /usr/bin/chromedriver ]; then exit 0; fi; \
	if [ -z "$${CI:-}$${BROWSER:-}" ]; then \
	  echo "==> browser: no chromium and chromium-driver here: the browser tests will be skipped; BROWSER=1 installs them"; \
	  exit 0; \
	fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "==> browser: no chromium and chromium-driver here: the browser tests will be skipped"; exit 0; \
	fi; \
	echo "==> browser: install chromium and chromium-driver"; \
	install="timeout 300 apt-get -o DPkg::Lock::Timeout=60 install -y -qq --no-install-recommends chromium chromium-driver"; \
	export DEBIAN_FRONTEND=noninteractive; \
	$$install >/dev/null 2>&1 || { timeout 120 apt-get update -qq >/dev/null 2>&1 && $$install >/dev/null 2>&1; } || \
	  echo "    not possible: the browser tests will be skipped"

unit: $(INSTALLED) browser
	$(call step,unit: pytest on $(WORKERS) workers) { \
	  $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(SLOW) $(PYTEST_ARGS); \
	}

# Triton is large, and without a GPU nothing else needs it: it stays out of .venv. Elsewhere than on Linux there is none, and
# its tests are skipped.
$(TRITON): Makefile
	@rm -rf .triton
	$(call step,kernels: install Triton into .triton) { \
	  mkdir -p .triton; \
	  [ "$$(uname -s)" != Linux ] || \
	    $(BIN)/python -m pip install -q --no-deps --target .triton triton==$(TRITON_VERSION); \
	  touch $@; \
	}

kernels: $(INSTALLED) $(TRITON)
	$(call step,kernels: pytest by Triton's interpreter) { \
	  PYTHONPATH=.triton TRITON_INTERPRET=1 $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(SLOW) \
	    tests/runtime/kernels tests/training/test_step_kernel.py; \
	}

# They stay out of .venv, so that all else is tested as it is for those who have none of them.
$(TRAINERS): constraints.txt
	@rm -rf .integrations
	$(call step,integrations: install trainers and ONNX Runtime into .integrations) { \
	  $(BIN)/python -m pip install -q --no-deps --target .integrations -c constraints.txt \
	    accelerate lightning lightning-utilities peft psutil torchao torchmetrics \
	    onnx onnxruntime onnxscript onnx-ir flatbuffers ml_dtypes protobuf; \
	  touch $@; \
	}

integrations: $(INSTALLED) $(TRAINERS)
	$(call step,integrations: pytest with trainers and ONNX Runtime) { \
	  PYTHONPATH=.integrations $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(SLOW) \
	    $(addprefix tests/integrations/test_,accelerate.py lightning.py onnx.py peft.py torchao.py trainers_page.py); \
	}

# Not a part of `make test`: torch comes with the libraries of its GPU build, several gigabytes. Each version of torch asks
# for its own setuptools and Triton.
other-torch:
	$(call step,other-torch: pytest with torch $(TORCH)) { \
	  [ -x .torch-$(TORCH)/bin/python ] || $(PYTHON) -m venv .torch-$(TORCH); \
	  { grep -v '^torch==\|^setuptools==' constraints.txt; echo "torch==$(TORCH)"; } > .torch-$(TORCH)/constraints.txt; \
	  .torch-$(TORCH)/bin/python -m pip install -q -c .torch-$(TORCH)/constraints.txt -e '.[$(EXTRAS)]'; \
	  $(ONE_THREAD) .torch-$(TORCH)/bin/python -m pytest -q -n $(WORKERS) $(PYTEST_ARGS); \
	}

docs: $(INSTALLED)
	$(call step,docs: sphinx-build -W) { \
	  $(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html; \
	}

# The wheel is built from the sdist, so this also shows that the sdist is complete. Its environment holds the run-time
# dependencies only, and is made anew when they may have changed.
wheel: $(INSTALLED) $(WHEEL_VENV)
	$(call step,wheel: build it and use it from .wheel-venv outside the repository) { \
	  mkdir -p dist; rm -f dist/autocastfx-*; \
	  $(BIN)/python -m build --no-isolation --outdir dist . >dist/build.log 2>&1 || { cat dist/build.log; exit 1; }; \
	  rm -f dist/build.log; \
	  $(WHEEL_BIN)/python -m pip uninstall -q -y autocastfx 2>/dev/null; \
	  $(WHEEL_BIN)/python -m pip install -q -c constraints.txt dist/autocastfx-*.whl; \
	  $(WHEEL_BIN)/python -m pip check; \
	  here="$$PWD"; elsewhere="$$(mktemp -d)"; trap 'rm -rf "$$elsewhere"' EXIT; \
	  cd "$$elsewhere"; \
	  "$$here/$(WHEEL_BIN)/python" -I "$$here/tests/wheel_smoke.py"; \
	  cp "$$here/tests/typed_consumer.py" .; echo '{"typeCheckingMode": "strict"}' >pyrightconfig.json; \
	  "$$here/$(BIN)/basedpyright" --pythonpath "$$here/$(WHEEL_BIN)/python" typed_consumer.py; \
	}

$(WHEEL_VENV): pyproject.toml constraints.txt | $(INSTALLED)
	@rm -rf .wheel-venv
	@$(BIN)/python -m venv .wheel-venv
	@touch $@

demo: $(INSTALLED)
	$(call step,demo: examples/demo.py) { $(BIN)/python examples/demo.py; }

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	@rm -rf build dist docs/_build .wheel-venv .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./.triton -prune -o -path ./.integrations -prune -o -path "./.torch-*" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .triton .integrations .torch-*
