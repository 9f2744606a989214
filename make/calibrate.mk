# The bounds against a population of honest twins: reports/CALIBRATION.md (half an hour on two cores).
.PHONY: calibrate
calibrate: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.calibration --data reports/data/calibration.json \
		--page reports/CALIBRATION.md --seeds 3 --processes 2
