"""Whether the suite could have failed: planted faults, null adapters, honest twins, calibration."""
