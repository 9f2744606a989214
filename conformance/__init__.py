"""Conformance suite of the draft step: checks an implementation, through its adapter, against the float64 oracle."""
