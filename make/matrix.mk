# Public packages under test, each in an environment of its own below .venvs: reports/MATRIX.md.
#   make matrix                               all of them
#   make matrix PACKAGES="torchao gfloat"     these two; the rows of the others stay
PACKAGES ?=

.PHONY: matrix
matrix: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.matrix $(PACKAGES)
