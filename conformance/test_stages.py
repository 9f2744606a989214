"""Stage checks: each stage by itself, on inputs that its storage format holds exactly."""

from draftconf.conformance.plugin import judge


def test_stage(check, request):
    judge(check, request)
