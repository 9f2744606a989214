"""A sample of ``make power``: mutants over all areas, null adapters, honest twins; and the catalogue itself."""

import re

import pytest

from draftconf.conformance.evidence import power
from draftconf.conformance.evidence.mutants import MUTANTS, NOT_EXPRESSIBLE
from draftconf.conformance.evidence.mutants.core import DIRECTIONS
from draftconf.conformance.evidence.nulls import NULLS
from draftconf.conformance.evidence.power_report import markdown
from draftconf.conformance.protocol.result import AdapterCrash, AdapterError, AdapterTimeout

SAMPLE = MUTANTS[::20]
PUBLIC_FAULTS = 102


def test_the_catalogue_is_whole():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 150
    assert all(mutant.direction in DIRECTIONS and mutant.rule and mutant.source for mutant in MUTANTS)


def test_every_public_fault_is_a_mutant_or_explained():
    known = {i for mutant in MUTANTS for i in re.findall(r"\b[TLMEASF]\d\d\b", mutant.source)}
    assert len(known | set(NOT_EXPRESSIBLE)) == PUBLIC_FAULTS
    assert not known & set(NOT_EXPRESSIBLE)


def test_a_change_ends_with_its_context():
    before = {module: dict(vars(module)) for module in _fast()}
    for mutant in MUTANTS:
        with mutant.change():
            pass
    assert all(dict(vars(module)) == before[module] for module in _fast())


def _fast():
    from draftconf.fast import attention, fusion, layer, loss, moe, mx, ops, sampling, unroll

    return attention, fusion, layer, loss, moe, mx, ops, sampling, unroll


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_and_blamed(mutant):
    verdict = power.run_mutant(mutant)
    assert verdict.killed
    assert verdict.right, f"wanted {mutant.stage} {mutant.direction} {mutant.step}, got {verdict}"


@pytest.mark.parametrize("name", NULLS)
def test_a_null_adapter_gets_through_nothing(name):
    found = power.run_null(name, "mtp", cases=("tame", "poisoned", "normal", "laws", "plain"))
    assert found.escaped == []
    assert found.failed > 0


@pytest.mark.parametrize(
    ("twin", "layout", "policy"),
    [
        ("sums permuted", "mtp", "bfloat16"),
        ("attention by parts", "eagle3", "float32"),
        ("highest id at ties", "mtp", "float64"),
        ("stochastic rounding", "eagle3", "bfloat16"),
    ],
)
def test_an_honest_twin_raises_no_alarm(twin, layout, policy):
    found = power.run_honest((twin, layout, policy, 5, "trace"))
    assert found.runs == 4
    assert found.alarms == []


def test_the_report_names_survivors_and_alarms():
    mutants = MUTANTS[:2]
    verdicts = [power.Verdict(mutants[0].name), power.Verdict(mutants[1].name, True, "trace", "an.id[x]", "embed")]
    null = power.NullVerdict("zeros", "mtp", 3, 2, 0, ["align"], ["a.b (stage)"])
    honest = power.Honest("as it is", "mtp", "float32", 4, 100, ["as it is, seed 0: something"])
    entries = [power.mutant_entry(*pair) for pair in zip(mutants, verdicts, strict=True)]
    text = markdown(power.everything(entries, [null], [honest]))
    assert "mutants: 2, killed 1, survived 1" in text
    assert "false alarms: 1" in text
    assert "| survived |" in text
    assert "seed 0: something" in text


@pytest.mark.parametrize(
    ("error", "verdict"), [(AdapterError, "error"), (AdapterCrash, "crash"), (AdapterTimeout, "timeout")]
)
def test_an_adapter_that_breaks_keeps_its_own_verdict(error, verdict):
    subject = power.subject_for("mtp", "float32")

    def breaks(*args, **kwargs):
        raise error("it broke", "; at line 3")

    subject.call = breaks
    (found,) = power.outcomes(subject, ("stage",), methods=("situ_glu",), cases=("tame",))[:1]
    assert (found["verdict"], found["message"]) == (verdict, "it broke; at line 3")
