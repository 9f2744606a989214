# The documentation as a site, in build/site: stages, options, faults and modules from the tables and docstrings. Fails on
# a dead link.
DOCS := .venv-docs

.PHONY: docs
docs: $(VENV)/.installed $(DOCS)/.stamp
	$(VENV)/bin/python docs/pages.py $(OUT)/pages
	$(DOCS)/bin/python -m mkdocs build --quiet --strict

$(DOCS)/.stamp: requirements/docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps -r requirements/docs.txt
	touch $@
