# Mutants, null adapters and honest twins against the suite: POWER.md and power.json (about fifteen minutes on two cores).
.PHONY: power
power: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.power POWER.md
