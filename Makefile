# Two commands set up all they need by themselves:
#   make conformance [ADAPTER=fast]   the verdict on an implementation
#   make test                         the tests of the oracle, of fast and of the suite itself
PYTHON ?= python3
ADAPTER ?= fast
PYTEST_FLAGS ?=
VENV := .venv
OUT := build

.DEFAULT_GOAL := conformance
.PHONY: conformance test clean

# The arrays are small, and sums must not depend on the number of cores.
export OMP_NUM_THREADS ?= 1

-include make/*.mk
PEER_ADAPTERS ?= nemo_automodel nemo_automodel_backbone speculators torchao gfloat
NAME := $(basename $(notdir $(ADAPTER)))

# The suite runs in .venv; a public package runs in a process of its own, with the interpreter of its environment.
ifneq ($(filter $(NAME),$(PEER_ADAPTERS)),)
ENVIRONMENT := peers
ELSEWHERE := --adapter-python .venv-peers
endif
RUN := $(VENV)/bin/python -m pytest conformance/ --adapter $(ADAPTER) $(ELSEWHERE)

conformance: $(VENV)/.installed $(ENVIRONMENT)
	$(RUN) --report $(OUT)/REPORT-$(NAME).md --html $(OUT)/report-$(NAME).html --results $(OUT)/results-$(NAME).json \
		$(PYTEST_FLAGS)

test: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest tests -n auto $(PYTEST_FLAGS)

$(VENV)/.installed: constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'python 3.11 or newer is needed: make PYTHON=...')"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -r constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-docs .venvs $(OUT) .pytest_cache .ruff_cache .hypothesis
