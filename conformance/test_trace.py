"""Trace checks: the oracle walks along the implementation's own recorded steps."""

from draftconf.conformance.plugin import judge


def test_trace(check, request):
    judge(check, request)
