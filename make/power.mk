# Mutants, null adapters and honest twins against the suite: reports/POWER.md (about fifteen minutes on two cores).
.PHONY: power
power: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.power --data reports/data/power.json --page reports/POWER.md
