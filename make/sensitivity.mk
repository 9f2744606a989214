# The smallest fault that the walk still catches, by stage and policy: reports/SENSITIVITY.md (about a minute).
.PHONY: sensitivity
sensitivity: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.sensitivity reports/data/sensitivity.json reports/SENSITIVITY.md
