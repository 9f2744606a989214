# The smallest fault that the walk still catches, by stage and policy: docs/sensitivity.md (about a minute).
.PHONY: sensitivity
sensitivity: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.sensitivity docs/sensitivity.md
