# The generated pages, each the rendering of its file in reports/data.
#   make stale      lists those that another suite measured, or on other code (seconds)
#   make pages      renders them again from their data, as after a change of a page's words (seconds)
#   make report     REPORT.md, from a run of the suite on fast (two minutes)
#   make reports    measures all of them anew, for a release (hours: the matrix and the peers have environments to build)
.PHONY: stale pages report reports
reports: power calibrate sensitivity matrix bench report stale

stale: $(VENV)/.installed
	$(VENV)/bin/python -m reports.pages --stale

pages: $(VENV)/.installed
	$(VENV)/bin/python -m reports.pages

report: $(VENV)/.installed
	$(VENV)/bin/python -m pytest conformance/ --adapter fast --results $(OUT)/results-fast.json $(PYTEST_FLAGS)
	$(VENV)/bin/python -m reports.pages --report $(OUT)/results-fast.json
