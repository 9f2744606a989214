"""End-to-end checks: losses and parameter gradients, "undecided" where rounding alone spreads too far."""

from draftconf.conformance.plugin import judge


def test_end_to_end(check, request):
    judge(check, request)
