"""A hostile or broken implementation loses nothing: its faults are its verdicts, and nobody else's."""

import os
import sys
import time
import venv
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from stand_in import last_line, read

from draftconf.conformance.checks import plan as checks
from draftconf.conformance.protocol.isolation import IsolatedSubject
from draftconf.conformance.protocol.limits import Limits
from draftconf.conformance.protocol.loading import load
from draftconf.conformance.protocol.result import AdapterCrash, AdapterError, NotOffered
from draftconf.conformance.protocol.subject import Subject
from draftconf.conformance.report.results import about, clean
from draftconf.reference.config import Choices, DraftConfig

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
LIMITS = Limits(timeout=60.0)


def subject_of(name: str, **limits) -> IsolatedSubject:
    return IsolatedSubject(f"{ROOT}/tests/support/hostile.py:{name}", Limits(**{"timeout": 60.0} | limits))


def outcome_of(check, subject) -> dict:
    try:
        return clean(check.run(subject), about(check))
    except NotOffered as error:
        return {"verdict": "not offered", "message": str(error)}
    except AdapterError as error:
        return {"verdict": error.verdict, "message": str(error), "details": error.details}


def outcomes(name: str, **limits) -> dict:
    """Of the plan's checks on one case of the offered stages, in plan order."""
    subject = subject_of(name, **limits)
    try:
        plan = checks.plan(subject.description)
        offered = [check for check in plan if check.kind == "stage" and subject.offers(check.stage)]
        return {check.id: outcome_of(check, subject) for check in offered if check.case == "tame"}
    finally:
        subject.close()


@cache
def clean_outcomes(name: str) -> dict:
    return outcomes(name)


def assert_others_unharmed(got: dict, clean_name: str) -> None:
    wanted = clean_outcomes(clean_name)
    assert list(got) == list(wanted)  # nothing lost
    for check_id, outcome in wanted.items():
        if not check_id.startswith("fusion."):
            assert got[check_id] == outcome


def test_clean_adapters_pass():
    for name in ("Clean", "TorchClean"):
        verdicts = {outcome["verdict"] for outcome in clean_outcomes(name).values()}
        assert verdicts == {"pass"}, clean_outcomes(name)


@pytest.mark.parametrize(
    ("name", "verdict", "message"),
    [
        ("SegmentationFault", "crash", "fusion: the process was killed by signal 11 (SIGSEGV)"),
        ("Abort", "crash", "fusion: the process was killed by signal 6 (SIGABRT)"),
        ("Killed", "crash", "fusion: the process was killed by signal 9 (SIGKILL)"),
        ("ExitZero", "crash", "fusion: the process ended with exit code 0"),
        ("ForkAndLeave", "crash", "fusion: the process ended with exit code 3"),
        ("ClosesEverything", "crash", "fusion: "),
        ("Raises", "error", "fusion raised RuntimeError: no kernel"),
        ("ExitsPython", "error", "fusion raised SystemExit: 0"),
        ("Interrupts", "error", "fusion raised KeyboardInterrupt"),
        ("Allocates", "error", "fusion raised MemoryError: Unable to allocate 20.0 GiB"),
        ("NoCuda", "error", "fusion raised "),
        ("WrongKey", "fail", "fusion returned no output 'feature'; wanted feature"),
        ("WrongType", "fail", "fusion.feature"),
        ("WrongShape", "fail", "fusion.feature has shape"),
        ("NotANumber", "fail", "fusion.feature"),
        ("Complex", "error", "outputs['feature'] has dtype complex128; wanted real floats"),
        ("Objects", "error", "outputs['feature'] has dtype object; wanted real floats"),
        ("Random", "fail", "fusion.feature"),
        ("Aliases", "fail", "fusion.feature"),
        ("Overwrites", "error", "fusion changed its input 'low', which is read-only"),
    ],
)
def test_fault_is_the_verdict_of_its_own_method_and_of_no_other(name, verdict, message):
    got = outcomes(name)
    found = got["fusion.feature.stage[mtp-float64-tame]"]
    assert found["verdict"] == verdict
    assert message in found["message"]
    assert_others_unharmed(got, "Clean")


@pytest.mark.parametrize("name", ["Endless", "Sleeps"])
def test_call_without_an_end_is_a_timeout_once(name):
    begun = time.monotonic()
    got = outcomes(name, timeout=4.0)
    fusion = [outcome for check_id, outcome in got.items() if check_id.startswith("fusion.")]
    assert len(fusion) > 1
    assert {(o["verdict"], o["message"]) for o in fusion} == {("timeout", "fusion gave no answer in 4 s")}
    assert time.monotonic() - begun < 60  # the checks of one run share the call that failed
    assert_others_unharmed(got, "Clean")


@pytest.mark.parametrize(
    "name",
    ["Floods", "Warns", "Strided", "BigEndian", "Forks", "ForksAndStays", "StartsThreads", "SetsErrors", "KeepsInputs",
     "StartChanges"],
)  # fmt: skip
def test_harmless_peculiarities_change_nothing(name):
    assert outcomes(name) == clean_outcomes("Clean")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("PatchesNumpy", "fusion left numpy."),
        ("PatchesNumpyInside", "fusion left numpy."),
        ("PatchesBuiltins", "fusion left builtins.max changed"),
        ("ChangesFolder", "fusion left the working directory changed"),
        ("ChangesEnvironment", "fusion left the environment variable PATH changed"),
        ("FlushesSubnormals", "fusion left the floating-point modes changed"),
        ("SetsAlarm", "fusion left a timer changed"),
        ("TorchGradOff", "fusion left torch.is_grad_enabled() changed"),
        ("TorchInference", "fusion left torch.is_"),
        ("TorchDtype", "fusion left torch.get_default_dtype() changed"),
        ("TorchPatched", "fusion left Tensor.einsum changed|fusion left torch.einsum changed"),
    ],
)
def test_process_that_a_call_left_changed_is_replaced(name, note):
    subject = subject_of(name)
    plan = checks.plan(subject.description)
    offered = [check for check in plan if check.kind == "stage" and subject.offers(check.stage)]
    got = {check.id: outcome_of(check, subject) for check in offered if check.case == "tame"}
    subject.close()
    assert any(part in "".join(subject.notes) for part in note.split("|"))
    assert_others_unharmed(got, "TorchClean" if name.startswith("Torch") else "Clean")


def test_failure_stays_one_where_smaller_inputs_crash_or_never_end():
    subject = subject_of("WrongOnceThenEndless", timeout=3.0)
    plan = {check.id: check for check in checks.plan(subject.description)}
    for check_id in ("lk_loss.loss.stage[mtp-float64-tame]", "mxfp4.scales.exact[mtp-float64-normal]"):
        assert outcome_of(plan[check_id], subject)["verdict"] == "fail"
    subject.close()


def test_torch_seeds_are_set_before_each_call():
    assert outcomes("TorchSeeds") == clean_outcomes("TorchClean")


# -- single calls ----------------------------------------------------------------------------------------------------


def call(subject, method="situ_glu", **changes):
    rng = np.random.default_rng(0)
    inputs = {"gate": rng.normal(size=(2, 3)), "up": rng.normal(size=(2, 3))}
    if method == "fusion":
        width = DraftConfig.tiny().hidden_size
        inputs = {name: rng.normal(size=(1, 2, width)) for name in ("low", "mid", "high")}
        inputs["fc.weight"] = rng.normal(size=(width, 3 * width))
    place = {"config": DraftConfig.tiny(), "choices": Choices(), "policy": "float64"} | changes
    return subject.call(method, inputs=inputs, **place)


@pytest.fixture
def subject(request):
    made = []

    def make(name, **limits):
        made.append(subject_of(name, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_answers_are_those_of_the_same_process(subject):
    here = Subject(load(f"{ROOT}/tests/support/hostile.py:Clean"))
    there = subject("Clean")
    assert there.about() == here.about()
    ours, theirs = call(here, "fusion"), call(there, "fusion")
    np.testing.assert_array_equal(ours.outputs["feature"], theirs.outputs["feature"])
    assert theirs.outputs["feature"].flags.writeable
    with pytest.raises(NotOffered):
        call(there, "moe")


def test_random_numbers_do_not_depend_on_earlier_calls(subject):
    drawing = subject("Draws")
    first = call(drawing).outputs["y"]
    call(drawing, "fusion")
    np.testing.assert_array_equal(call(drawing).outputs["y"], first)


def test_large_arrays_go_in_pieces(subject, monkeypatch):
    from draftconf.conformance.protocol import worker

    monkeypatch.setattr(worker, "PIECE", 7)
    inputs = {"gate": np.ones((5, 5)), "up": np.zeros((5, 5))}
    place = {"config": DraftConfig.tiny(), "choices": Choices(), "policy": "float64"}
    assert not subject("Clean").call("situ_glu", inputs=inputs, **place).outputs["y"].any()


def test_crash_says_where_it_stood(subject):
    with pytest.raises(AdapterCrash) as caught:
        call(subject("SegmentationFault"), "fusion")
    assert "hostile.py" in caught.value.details
    assert str(ROOT) not in caught.value.details


def test_failed_call_is_not_made_again(subject):
    crashing = subject("ExitZero")
    for _ in range(2):
        with pytest.raises(AdapterCrash, match="exit code 0"):
            call(crashing, "fusion")
        assert crashing._process is None  # the second time none was started
    call(crashing)


@pytest.mark.parametrize(
    ("name", "problem"), [("StopRaises", "stop raised RuntimeError: still busy"), ("StopCrashes", "stop: the process")]
)
def test_stop_is_nobodys_verdict(subject, name, problem):
    stopping = subject(name)
    call(stopping)
    call(stopping, choices=Choices(head="own"))  # stops what ran for the other choices
    assert problem in stopping.problems[0]
    stopping.close()
    assert len(stopping.problems) == 2


def test_start_that_crashes_is_the_fault_of_each_call(subject):
    starting = subject("StartCrashes")
    for method in ("situ_glu", "fusion"):
        with pytest.raises(AdapterCrash, match=f"{method}: the process ended with exit code 7"):
            call(starting, method)


def alive(session: int) -> list[str]:
    """What runs in the session. What has ended is left out, as nobody may be there to collect it."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            stats.append(path.read_text().rpartition(")")[2].split())
    return [stat for stat in stats if int(stat[3]) == session and stat[0] not in "ZX"]


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
def test_nothing_is_left_running(subject):
    staying = subject("ForksAndStays")
    call(staying, "fusion")
    session = staying._process.pid
    staying.close()
    deadline = time.monotonic() + 20
    while alive(session) and time.monotonic() < deadline:  # a kill takes effect in a while
        time.sleep(0.1)
    assert not alive(session)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import os; os._exit(3)", "cannot be loaded: the process ended with exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "cannot be loaded: the process was killed by signal 11"),
        ("raise ImportError('needs frobnicate')", "cannot be loaded: needs frobnicate"),
        ("raise SystemExit", "SystemExit"),
        ("adapter = 3", "the adapter has protocol None"),
        ("", "there is no attribute 'adapter'"),
    ],
)
def test_adapter_that_cannot_be_loaded_is_a_sentence(tmp_path, source, sentence):
    (tmp_path / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        IsolatedSubject(f"{tmp_path}/broken.py:adapter", LIMITS)


def test_slow_import_is_not_held_against_the_call(tmp_path):
    beside = str(ROOT / "tests" / "support")
    source = f"import sys, time\ntime.sleep(3)\nsys.path.append({beside!r})\nfrom hostile import Clean"
    (tmp_path / "slow.py").write_text(source, encoding="utf-8")
    slow = IsolatedSubject(f"{tmp_path}/slow.py:Clean", Limits(timeout=2.0))
    call(slow)
    slow.close()


# -- other interpreters ----------------------------------------------------------------------------------------------

LONELY = """
from importlib.util import find_spec
import numpy as np

class Lonely:
    protocol = 1
    def describe(self):
        there = [name for name in ("numpy", "execnet", "pytest", "torch", "tests", "draftconf") if find_spec(name)]
        return {"name": "lonely", "formats": {"storage": "float64"}, "version": " ".join(there)}
    def situ_glu(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["gate"]}
"""


@pytest.fixture(scope="module")
def numpy_only(tmp_path_factory):
    """A virtual environment, in a folder with a space in its name, that has nothing but NumPy."""
    folder = tmp_path_factory.mktemp("other env")
    venv.create(folder / "venv", symlinks=True)
    (folder / "packages").mkdir()
    for found in Path(np.__file__).parents[1].glob("numpy*"):
        (folder / "packages" / found.name).symlink_to(found)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "numpy_only.pth").write_text(str(folder / "packages"), encoding="utf-8")
    return folder / "venv"


@pytest.mark.parametrize("place", [".", "bin/python"])
def test_other_environment_needs_numpy_alone(tmp_path, numpy_only, monkeypatch, place):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lonely.py").write_text(LONELY, encoding="utf-8")
    lonely = IsolatedSubject("lonely:Lonely", Limits(python=str(numpy_only / place)))
    call(lonely)
    assert lonely.description.version == "numpy draftconf"
    assert lonely.versions["torch"] is None
    lonely.close()


def test_interpreter_that_is_none_is_a_sentence(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    fake.chmod(0o755)
    with pytest.raises(ValueError, match="python does not serve: it ended with exit code 3"):
        IsolatedSubject("fast", Limits(python=str(fake)))
    with pytest.raises(ValueError, match="there is no interpreter"):
        IsolatedSubject("fast", Limits(python=str(tmp_path / "gone")))


@pytest.mark.skipif(not (PEERS / "bin" / "python").exists(), reason="made by `make peers`")
@pytest.mark.parametrize("name", ["gfloat", "torchao", "speculators", "nemo_automodel", "nemo_automodel_backbone"])
def test_public_packages_load_in_their_own_environment(name):
    there = IsolatedSubject(name, Limits(python=str(PEERS)))
    assert there.about()["offers"]
    there.close()


def test_defaults():
    asked = {"isolate": None, "python": None, "timeout": None, "memory": None}
    assert Limits.of("fast", **asked) == Limits(False, None, None, None)
    assert Limits.of("gfloat", **asked) == Limits(True, None, 120.0, 12.0)
    assert Limits.of("fast", **asked | {"python": "p q"}) == Limits(True, "p q", options="--adapter-python 'p q'")
    assert Limits.of("fast", **asked | {"isolate": True}).isolated
    assert not Limits.of("gfloat", **asked | {"isolate": False}).isolated
    assert Limits(python=None).interpreter() == sys.executable


# -- a run -----------------------------------------------------------------------------------------------------------


def test_crashes_leave_a_complete_report_whatever_the_number_of_workers(suite):
    for workers in ("0", "2"):
        result = suite("Dies", "-n", workers, "--report", f"{workers}.md", "--results", f"{workers}.json")
        assert result.ret == 1
        assert "route: the process ended with exit code 9" in last_line(result)
    counts = read("0.json")["counts"]
    assert (counts["crashes"], counts["passed"], counts["lost"]) == (12, 24, 0)
    assert read("0.json")["complete"] is True
    assert Path("0.md").read_bytes() == Path("2.md").read_bytes()
    assert Path("0.json").read_bytes() == Path("2.json").read_bytes()
    assert "**crash**" in Path("0.md").read_text(encoding="utf-8")


def test_timeouts_are_told_with_the_command_that_repeats_them(suite):
    result = suite("Hangs", "--call-timeout", "2", "--policy", "float32", "-k", "tame", "--results", "r.json")
    assert result.ret == 1
    assert read("r.json")["counts"]["timeouts"] == 3
    assert last_line(result).endswith("--adapter adapters:Hangs --seed 0 --call-timeout 2")
    assert "route gave no answer in 2 s" in last_line(result)


def test_state_left_changed_is_noted_and_no_fault(suite):
    result = suite("Wanders", "--results", "r.json", "--report", "r.md")
    assert result.ret == 0
    note = "route left the working directory changed; its process was replaced"
    assert read("r.json")["notes"] == [note]
    assert note in result.stdout.str()
    assert note in Path("r.md").read_text(encoding="utf-8")
