# The bounds against a population of honest twins: docs/calibration.md (half an hour on two cores).
.PHONY: calibrate
calibrate: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.calibration docs/calibration.md --seeds 3 --processes 2
