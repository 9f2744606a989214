"""Trace checks: the oracle walks along the implementation's own recorded steps."""

from conformance.plugin import judge


def test_trace(check, request):
    judge(check, request)
