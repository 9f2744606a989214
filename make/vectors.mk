# Broken files for the reader of test vectors, other ones each time (a few minutes).
FUZZ ?= 100000

.PHONY: fuzz
fuzz: $(VENV)/.installed
	FUZZ=$(FUZZ) $(VENV)/bin/python -m pytest tests/suite/test_vectors.py -k fuzz -n 2
