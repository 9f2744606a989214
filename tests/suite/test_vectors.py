"""Test vectors: the same verdict as on an adapter, bounds that are the checks' own, and no file that does harm."""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from draftconf.conformance.checks import plan as checks
from draftconf.conformance.vectors import MalformedError, check, export, manifest, strict, tensors
from draftconf.conformance.vectors import writing as vectors_writing
from draftconf.conformance.vectors.__main__ import main
from draftconf.conformance.vectors.expected import ALTERNATIVE, BOUND, EITHER, HIGHEST, LOWEST
from draftconf.conformance.vectors.judging import outcome_of
from draftconf.conformance.vectors.record import DECISION, Oracle, answer_arrays, narrowed, record

ROOT = Path(__file__).resolve().parents[2]
FUZZ = int(os.environ.get("FUZZ", "300"))
ANEW = {"derandomize": "FUZZ" not in os.environ}  # make fuzz tries other files each time
SMALL = ["lk_loss", "mxfp4", "route", "speculative_sample"]


# -- what a program would do -----------------------------------------------------------------------------------------


def write(folder: Path, name: str, arrays: dict) -> Path:
    path = folder / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tensors.dumps(arrays))
    return path


def read(path: Path) -> dict:
    return tensors.loads(path.read_bytes(), path.name)


def oracle_answers(vectors: Path, answers: Path) -> None:
    """Every vector answered by the oracle, in float64."""
    said = manifest.read(vectors)
    description = manifest.described(said)
    subject = Oracle(description)
    for v in record(narrowed(checks.plan(description, seed=said["seed"]), said["stages"]), description):
        result = subject.call(
            v.method, config=v.config, choices=v.choices, policy=v.policy, inputs=v.inputs, cotangents=v.cotangents
        )
        write(answers, v.name, answer_arrays(result))


def verdicts(results: dict) -> dict:
    return {entry["id"]: entry["verdict"] for entry in results["checks"]}


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """The default set. Nobody changes it."""
    folder = tmp_path_factory.mktemp("exported") / "vectors"
    export(folder)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> tuple[Path, Path]:
    """Vectors of a few stages, and the oracle's answers to them. Nobody changes them."""
    folder = tmp_path_factory.mktemp("small")
    export(folder / "vectors", stages=SMALL)
    oracle_answers(folder / "vectors", folder / "answers")
    return folder / "vectors", folder / "answers"


@pytest.fixture
def copies(small, tmp_path) -> tuple[Path, Path]:
    """The same, to be spoilt."""
    return tuple(Path(shutil.copytree(source, tmp_path / source.name)) for source in small)


# -- the same verdict ------------------------------------------------------------------------------------------------


def test_files_get_the_verdict_that_an_adapter_gets(tmp_path):
    """Every field of every outcome, on stages of every kind."""
    losses = {"kl_loss": {}, "hybrid_loss": {"reduction": "supervised", "first": "soft_ce"}}
    description = {"name": "oracle", "formats": {"storage": "float32"}, "layouts": ["eagle3"], "losses": losses}
    stages = [*losses, "lk_loss", "mla*", "align", "mxfp8*", "draft_*", "unroll", "fc.weight", "situ_glu"]
    said = export(tmp_path / "v", description=description, stages=stages)
    oracle_answers(tmp_path / "v", tmp_path / "a")
    found = check(tmp_path / "v", tmp_path / "a")
    described = manifest.described(said)
    subject = Oracle(described)
    for one, entry in zip(narrowed(checks.plan(described), stages), found["checks"], strict=True):
        wanted = outcome_of(one, subject)
        assert {key: entry[key] for key in wanted} == wanted
    assert found["complete"]
    assert found["verdict"] == "no fault found"
    assert found["counts"]["passed"] > 300


def test_the_default_set_is_small_and_whole(exported):
    said = manifest.read(exported)
    files = {str(path.relative_to(exported)) for path in exported.rglob("*.safetensors")}
    assert sum(path.stat().st_size for path in exported.rglob("*") if path.is_file()) < 30e6
    assert files == {entry["path"] for entry in said["files"]}
    assert {one.id for one in checks.plan(manifest.described(said))} == {
        i for v in said["vectors"] for i in v["checks"]
    }
    for entry in said["files"]:  # as the format's own library reads them
        arrays = safetensors.numpy.load_file(exported / entry["path"])
        assert {a["name"]: a["shape"] for a in entry["arrays"]} == {name: list(x.shape) for name, x in arrays.items()}
        ours = read(exported / entry["path"])
        assert all(ours[name].tobytes() == x.tobytes() and ours[name].dtype == x.dtype for name, x in arrays.items())


def test_the_same_export_twice(small, tmp_path):
    export(tmp_path / "again", stages=SMALL)
    for path in small[0].rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(small[0])).read_bytes() == path.read_bytes()


def test_other_formats_choices_and_cases(tmp_path):
    description = {
        "name": "mine", "policies": {"bfloat16": {"storage": "bfloat16"}, "double": {"storage": "float64"}},
        "choices": {"head": "reduced", "mx_scale_rule": "even", "mxfp8_element": "e5m2", "quantize_source": "bfloat16"},
        "layouts": ["mtp"], "documents": False,
    }  # fmt: skip
    said = export(tmp_path / "v", description=description, stages=["lk_loss", "mx*", "fake_*", "moe"], seed=5)
    assert {v["policy"] for v in said["vectors"]} == {"bfloat16", "double"}
    oracle_answers(tmp_path / "v", tmp_path / "a")
    found = check(tmp_path / "v", tmp_path / "a")
    assert found["verdict"] == "no fault found"
    assert found["seed"] == 5
    assert found["counts"]["passed"] > 150


def test_a_partial_directory_gets_a_verdict_on_what_is_there(small, tmp_path):
    vectors, answers = small
    name = "lk_loss/mtp-float32-tame"
    write(tmp_path, name, read(answers / f"{name}.safetensors"))
    found = check(vectors, tmp_path)
    passed = {i for i, verdict in verdicts(found).items() if verdict == "pass"}
    assert passed == set(next(v for v in manifest.read(vectors)["vectors"] if v["name"] == name)["checks"])
    assert set(verdicts(found).values()) == {"pass", "not offered"}
    write(tmp_path, name, {"loss": read(answers / f"{name}.safetensors")["loss"]})
    assert (
        sorted(verdicts(check(vectors, tmp_path)).values()).count("pass") == 2
    )  # the loss; nothing frozen was touched


def test_nothing_is_no_verdict(small, tmp_path, capsys):
    assert main(["check", str(small[0]), str(tmp_path)]) == 1
    assert "no verdict" in capsys.readouterr().out


def test_a_fault_is_found_and_its_check_runs_again(copies, tmp_path, capsys):
    vectors, answers = copies
    path = answers / "lk_loss/mtp-float32-tame.safetensors"
    arrays = read(path)
    path.write_bytes(tensors.dumps(arrays | {"loss": np.where(np.arange(12) == 3, np.nan, arrays["loss"])}))
    report, results = tmp_path / "r.md", tmp_path / "r.json"
    assert main(["check", str(vectors), str(answers), "--report", str(report), "--results", str(results)]) == 1
    found = json.loads(results.read_text())
    failing = "lk_loss.loss.stage[mtp-float32-tame]"
    assert [i for i, verdict in verdicts(found).items() if verdict == "fail"] == [failing]
    assert failing in report.read_text()
    capsys.readouterr()
    command = found["first_fault"]["repeat"]
    assert command.startswith("conform vectors check ")
    assert main(["check", str(vectors), str(answers), "--check", failing]) == 1
    assert "lk_loss.loss" in capsys.readouterr().out
    assert main(["check", str(vectors), str(answers), "--check", failing.replace("mtp", "eagle3")]) == 0
    assert main(["check", str(vectors), str(answers), "--stage", "mxfp4"]) == 0


def test_what_the_program_says_of_itself(copies, capsys):
    vectors, answers = copies
    said = {"name": "mine", "version": "3", "formats": {"storage": "float32", "accumulate": "tensor-core"}}
    (answers / "describe.json").write_text(json.dumps(said))
    found = check(vectors, answers)
    assert (found["subject"]["name"], found["subject"]["formats"]["accumulate"]) == ("mine", "tensor-core")
    for other in (
        {"choices": {"head": "own"}},
        {"formats": {"storage": "bfloat16"}},
        {"documents": False},
        [],
        {"x": 1},
    ):
        (answers / "describe.json").write_text(json.dumps(other))
        assert_refused(capsys, "check", vectors, answers)


# -- bounds and legal sets are the checks' own -----------------------------------------------------------------------


def with_errors(expected: dict, share: float, only: str | None = None) -> dict:
    """The expected values, each bounded one off by ``share`` of its bound; or one element of ``only``."""
    rng, answer = np.random.default_rng(1), {}
    for name, x in expected.items():
        if "/" in name and not name.startswith(("grad/", DECISION)):
            continue
        bound = expected.get(BOUND + name)
        if bound is not None and only in (None, name):
            known = np.where(np.isfinite(bound), bound, 0.0)  # behind a decision that may go either way there is none
            chosen = np.ones(x.shape) if only is None else np.arange(x.size).reshape(x.shape) == np.argmax(known)
            x = x + share * known * chosen * rng.choice([-1.0, 1.0], x.shape)
        answer[name] = x
    return answer


STAGES = ["lk_loss", "situ_glu", "head", "attention", "fusion", "shared_experts", "dense_mlp", "draft_sequence"]


def test_a_published_bound_is_the_one_that_decides(tmp_path):
    """Gradients are rounded to float32 in the files, which may double their bound: hence 0.45 and 2.1."""
    said = export(tmp_path / "v", stages=STAGES)
    tame = [v for v in said["vectors"] if v["case"] == "tame" and (v["layout"] == "mtp" or v["method"] == "dense_mlp")]
    expected = {v["name"]: read(tmp_path / "v" / v["expected"]) for v in tame if v["method"] in STAGES}
    for name, arrays in expected.items():
        write(tmp_path / "inside", name, with_errors(arrays, 0.45))
    found = check(tmp_path / "v", tmp_path / "inside")
    failing = [e["id"] for e in found["checks"] if e["verdict"] == "fail"]
    assert failing == ["lk_loss.gradient_set.stage[mtp-float32-tame]"]  # which no bound on single elements can state
    bounded = {
        name: [n.removeprefix(BOUND) for n in arrays if n.startswith(BOUND)] for name, arrays in expected.items()
    }
    wrong = 0
    for turn in range(max(map(len, bounded.values()))):
        folder, broken = tmp_path / f"outside{turn}", []
        for name, arrays in expected.items():
            if turn < len(bounded[name]):
                broken.append((name, bounded[name][turn]))
                write(folder, name, with_errors(arrays, 2.1, bounded[name][turn]))
        failing = {e["id"] for e in check(tmp_path / "v", folder)["checks"] if e["verdict"] == "fail"}
        for name, array in broken:
            method, place = name.split("/")
            quantity = array.replace("grad/", "d_")
            assert any(i.startswith(f"{method}.{quantity}.") and place in i for i in failing), (name, array)
            wrong += 1
    assert wrong > 20


def test_legal_sets_of_experts(tmp_path):
    vectors, answers, name = tmp_path / "v", tmp_path / "a", "route/mtp-float32-corners"
    formats = {"storage": "float32", "router": "bfloat16"}  # in which experts tie
    export(vectors, description={"name": "x", "formats": formats, "layouts": ["mtp"]}, stages=["route"])
    expected = read(vectors / f"expected/{name}.safetensors")
    lowest, highest = expected[LOWEST + DECISION + "experts"], expected[HIGHEST + DECISION + "experts"]
    ours = expected[DECISION + "experts"]
    tried = {}
    for slot in np.ndindex(ours.shape[:-1]):
        for place, other in itertools.product(range(3), set(range(8)) - set(ours[slot])):
            trial = ours.copy()
            trial[(*slot, place)] = other
            left = [e for e in range(8) if e not in trial[slot]]
            tried[bool(highest[slot][trial[slot]].min() >= lowest[slot][left].max())] = trial
    for legal in (True, False):
        write(answers, name, {"weights": expected["weights"], DECISION + "experts": tried[legal]})
        found = check(vectors, answers, ids=["route.experts.stage[mtp-float32-corners]"])
        assert (found["verdict"] == "no fault found") == legal


def test_legal_masks_of_the_lk_loss(copies):
    vectors, answers = copies
    name, ids = "lk_loss/mtp-float32-tame", ["lk_loss.below.stage[mtp-float32-tame]"]
    expected, path = read(vectors / f"expected/{name}.safetensors"), answers / f"{name}.safetensors"
    below, either = expected[DECISION + "below"], expected[EITHER + DECISION + "below"]
    assert either.any()
    path.write_bytes(tensors.dumps(read(path) | {DECISION + "below": below ^ either}))
    assert check(vectors, answers, ids=ids)["verdict"] == "no fault found"
    other = np.argwhere(~either)[0]
    below = below.copy()
    below[tuple(other)] ^= True
    path.write_bytes(tensors.dumps(read(path) | {DECISION + "below": below}))
    assert check(vectors, answers, ids=ids)["verdict"] == "fault found"


def test_decoded_values_may_overflow_in_float32(exported, tmp_path):
    name = "mxfp4_decode/mtp-float32-all_codes"
    expected = read(exported / f"expected/{name}.safetensors")
    with np.errstate(over="ignore"):
        assert np.isinf(expected["values"].astype(np.float32)).any()
        write(tmp_path, name, {"values": expected["values"].astype(np.float32)})
    assert verdicts(check(exported, tmp_path))["mxfp4_decode.values.exact[mtp-float32-all_codes]"] == "pass"
    write(tmp_path, name, {"values": expected[ALTERNATIVE + "values"]})
    assert verdicts(check(exported, tmp_path))["mxfp4_decode.values.exact[mtp-float32-all_codes]"] == "pass"


# -- a program in C --------------------------------------------------------------------------------------------------

COMPILER = next((path for path in map(shutil.which, ("gcc", "cc", "clang")) if path), None)
needs_c = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "draft_vectors"
    source = ROOT / "examples/c/draft_vectors.c"
    strictly = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2")
    subprocess.run([COMPILER, *strictly, *flags, "-o", program, source, "-lm"], check=True)
    return program


def run_c(program: Path, vectors: Path, answers: Path) -> None:
    subprocess.run(["sh", ROOT / "examples/c/run.sh", program, vectors, answers], check=True)


@pytest.fixture(scope="session")
def for_c(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("for_c") / "vectors"
    export(folder, stages=["lk_loss", "mxfp4*", "fake_mxfp4"])
    return folder


@needs_c
def test_the_c_program_passes_every_check_it_offers(for_c, tmp_path):
    run_c(compiled(tmp_path), for_c, tmp_path / "answers")
    found = check(for_c, tmp_path / "answers")
    assert found["verdict"] == "no fault found"
    absent = {e["stage"] for e in found["checks"] if e["verdict"] == "not offered" and e["kind"] == "stage"}
    assert absent == set()
    assert found["counts"]["passed"] == sum(e["kind"] == "stage" for e in found["checks"])


@needs_c
@pytest.mark.parametrize(
    ("flag", "failing"),
    [
        ("-DCLAMP_IN_LOG", {"lk_loss.loss.stage[mtp-float32-extreme]", "lk_loss.loss.stage[eagle3-float32-extreme]"}),
        ("-DTIES_AWAY", {"mxfp4.codes.exact[mtp-float32-ties]", "fake_mxfp4.y.exact[mtp-float32-ties]"}),
    ],
)
def test_a_broken_copy_of_the_c_program_fails(for_c, tmp_path, flag, failing):
    run_c(compiled(tmp_path, flag), for_c, tmp_path / "answers")
    assert {i for i, verdict in verdicts(check(for_c, tmp_path / "answers")).items() if verdict == "fail"} >= failing


@needs_c
def test_the_c_reader_refuses_what_is_broken(for_c, tmp_path):
    program = compiled(tmp_path)
    good = (for_c / "inputs/lk_loss/mtp-float32-tame.safetensors").read_bytes()
    rng = np.random.default_rng(3)
    broken = [good[:n] for n in (0, 7, 8, 20, 200, len(good) - 1)] + [b"\xff" * 8 + good[8:]]
    for _ in range(60):
        data = bytearray(good)
        data[rng.integers(0, 300)] = rng.integers(0, 256)
        broken.append(bytes(data))
    for data in broken:
        (tmp_path / "in.safetensors").write_bytes(data)
        done = subprocess.run(
            [program, "lk_loss", tmp_path / "in.safetensors", tmp_path / "out.safetensors"], capture_output=True
        )
        assert done.returncode in (0, 1)
        assert done.returncode == 0 or done.stderr


# -- files that cannot be used ---------------------------------------------------------------------------------------


def assert_refused(capsys, *arguments) -> str:
    """Exit code 2 and one sentence."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("conform: ")
    assert told.err.count("\n") == 1
    assert len(told.err) < 500
    return told.err


def file_of(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EIGHT = b"\0" * 8
MALFORMED = {
    "empty": (b"", "begins with 8 bytes"),
    "no header": (EIGHT[:7], "begins with 8 bytes"),
    "truncated header": (file_of({"loss": entry()}, EIGHT)[:30], "cut short"),
    "huge header": (file_of({}, b"", 2**63), "announces a header"),
    "header longer than the file": (file_of({}, b"", 1000), "cut short"),
    "truncated data": (file_of({"loss": entry()}, EIGHT[:5]), "cut short"),
    "data after the end": (file_of({"loss": entry()}, EIGHT * 2), "after its last array"),
    "not JSON": (file_of(b"{'loss': 1}"), "not JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8"),
    "no object": (file_of([1]), "no JSON object"),
    "NaN": (file_of(b'{"loss": NaN}'), "NaN is no JSON number"),
    "beyond float64": (file_of(b'{"loss": 1e999}'), "beyond float64"),
    "endless integer": (file_of(b'{"loss": ' + b"9" * 5000 + b"}"), "not JSON"),
    "deep nesting": (file_of(b'{"loss": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nests deeper"),
    "nesting": (file_of(b'{"loss": ' + b"[" * 100 + b"]" * 100 + b"}"), "nests deeper"),
    "duplicate key": (file_of(b'{"loss": %s, "loss": %s}' % ((json.dumps(entry()).encode(),) * 2), EIGHT), "twice"),
    "duplicate field": (file_of(b'{"loss": {"dtype": "F32", "dtype": "F64"}}'), "twice"),
    "unknown field": (file_of({"loss": entry() | {"x": 1}}, EIGHT), "not described by"),
    "missing field": (file_of({"loss": {"dtype": "F32"}}), "not described by"),
    "unknown dtype": (file_of({"loss": entry("F4")}, EIGHT), "has dtype 'F4'"),
    "dtype that is no string": (file_of({"loss": entry(["F32"])}, EIGHT), "has dtype"),
    "other dtype": (file_of({"loss": entry("F64")}, EIGHT), "takes 16 bytes"),
    "huge size": (file_of({"loss": entry(shape=[2**50, 2**50])}, EIGHT), "bytes; its offsets say 8"),
    "size beyond NumPy": (file_of({"loss": entry(shape=[2**50, 2**50, 0], offsets=[0, 0])}), "has shape"),
    "size beyond integers": (file_of({"loss": entry(shape=[2**64])}, EIGHT), "has shape"),
    "negative size": (file_of({"loss": entry(shape=[-2])}, EIGHT), "has shape"),
    "size that is a bool": (file_of({"loss": entry(shape=[True, 2])}, EIGHT), "has shape"),
    "too many sizes": (file_of({"loss": entry(shape=[1] * 40 + [2])}, EIGHT), "has shape"),
    "negative offset": (file_of({"loss": entry(offsets=[-8, 0])}, EIGHT), "data_offsets"),
    "backward offsets": (file_of({"loss": entry(offsets=[8, 0])}, EIGHT), "data_offsets"),
    "offset beyond the file": (file_of({"loss": entry(shape=[2**40], offsets=[0, 2**42])}, EIGHT), "cut short"),
    "overlap": (file_of({"a": entry(), "loss": entry(offsets=[4, 12])}, EIGHT * 2), "overlaps"),
    "gap": (file_of({"loss": entry(offsets=[8, 16])}, EIGHT * 2), "leaves a gap"),
    "neither true nor false": (file_of({"loss": entry("BOOL", [8])}, EIGHT[:7] + b"\2"), "neither 0 nor 1"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "name with a terminal's escapes": (file_of({"\x1b[2J\ud800\n": entry("F4")}, EIGHT), "x1b"),
    "missing array": (tensors.dumps({"los": np.ones(12)}), "has no array 'loss'"),
    "integers for floats": (tensors.dumps({"loss": np.ones(12, int)}), "has dtype I64; wanted float"),
    "floats for booleans": (tensors.dumps({"loss": np.ones(12), "decision/below": np.ones(12)}), "wanted boolean"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_results(small, tmp_path, capsys, what):
    data, told = MALFORMED[what]
    (tmp_path / "lk_loss").mkdir()
    (tmp_path / "lk_loss/mtp-float32-tame.safetensors").write_bytes(data)
    assert told in assert_refused(capsys, "check", small[0], tmp_path)


@pytest.mark.parametrize("what", [what for what in MALFORMED if what not in ("missing array", "metadata")])
def test_malformed_vectors(copies, capsys, what):
    vectors, answers = copies
    (vectors / "inputs/lk_loss/mtp-float32-tame.safetensors").write_bytes(MALFORMED[what][0])
    assert "lk_loss/mtp-float32-tame" in assert_refused(capsys, "check", vectors, answers)


def edited(change):
    def spoil(vectors: Path) -> None:
        said = json.loads((vectors / "manifest.json").read_text())
        change(said)
        (vectors / "manifest.json").write_text(json.dumps(said))

    return spoil


def replaced(old: bytes, new: bytes):
    def spoil(vectors: Path) -> None:
        path = vectors / "manifest.json"
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return spoil


SPOILT = {
    "no manifest": (lambda v: (v / "manifest.json").unlink(), "there is no file 'manifest.json'"),
    "a directory": (lambda v: ((v / "manifest.json").unlink(), (v / "manifest.json").mkdir()), "cannot be read"),
    "not JSON": (replaced(b"{", b"("), "not JSON"),
    "NaN": (replaced(b'"seed": 0', b'"seed": NaN'), "NaN is no JSON number"),
    "duplicate": (replaced(b'"seed": 0', b'"seed": 0, "seed": 0'), "twice"),
    "negative seed": (replaced(b'"seed": 0', b'"seed": -1'), "seed"),
    "other seed": (replaced(b'"seed": 0', b'"seed": 1'), "export again"),
    "true for one": (replaced(b'"seed": 0', b'"seed": true'), "seed"),
    "deep": (replaced(b'"seed": 0', b'"seed": ' + b"[" * 50_000 + b"]" * 50_000), "nests deeper"),
    "unknown key": (edited(lambda m: m.update(x=1)), "has x"),
    "missing key": (edited(lambda m: m.pop("files")), "has no files"),
    "other schema": (edited(lambda m: m.update(schema=2)), "schema"),
    "parent": (edited(lambda m: m["files"][0].update(path="inputs/../../x.safetensors")), "not below"),
    "absolute": (edited(lambda m: m["files"][0].update(path="/etc/passwd")), "not below"),
    "parent, elsewhere": (edited(lambda m: m["vectors"][0].update(inputs="../x.safetensors")), "not in files"),
    "the same file twice": (edited(lambda m: m["files"].append(m["files"][0])), "twice"),
    "other digest": (edited(lambda m: m["vectors"][0].update(digest="0")), "export again"),
    "no vectors": (edited(lambda m: m.update(vectors=[])), "belongs to none"),
    "unknown stage": (edited(lambda m: m.update(stages=["x"])), "none of the stages"),
    "many policies": (
        edited(lambda m: m["description"].update(policies={f"p{i}": {"storage": "float32"} for i in range(99)})),
        "99 policies",
    ),
    "unknown choice": (edited(lambda m: m["description"].update(choices={"x": 1})), "choices"),
    "description": (edited(lambda m: m.update(description={"layouts": {}})), "describe()"),
    "other shape": (edited(lambda m: m["files"][0]["arrays"][0].update(shape=[1])), "not what manifest.json describes"),
    "other SHA-256": (edited(lambda m: m["files"][0].update(sha256="0")), "SHA-256 differs"),
    "missing file": (lambda v: next(v.glob("expected/lk_loss/*")).unlink(), "there is no file"),
    "missing array": (
        lambda v: spoil_file(v, lambda arrays: arrays.pop("draft_logits")),
        "has no array 'draft_logits'",
    ),
    "other values": (lambda v: spoil_file(v, lambda a: a.update(draft_logits=a["draft_logits"] + 1)), "SHA-256"),
    "other dtype": (lambda v: spoil_file(v, lambda a: a.update(draft_logits=a["draft_logits"].astype(float))), "F64"),
    "further array": (lambda v: spoil_file(v, lambda a: a.update(x=np.ones(1))), "array 'x'"),
    "linked file": (lambda v: linked(v / "inputs/lk_loss/mtp-float32-tame.safetensors"), "symbolic link"),
    "linked directory": (lambda v: linked(v / "inputs"), "symbolic link"),
    "linked manifest": (lambda v: linked(v / "manifest.json"), "symbolic link"),
}


def spoil_file(vectors: Path, change) -> None:
    path = vectors / "inputs/lk_loss/mtp-float32-tame.safetensors"
    arrays = read(path)
    change(arrays)
    path.write_bytes(tensors.dumps(arrays))


def linked(path: Path) -> None:
    """Moved out of vectors or answers, and a link to it left there."""
    root = next(parent for parent in path.parents if parent.name in ("vectors", "answers"))
    outside = root.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_vectors(copies, capsys, what):
    vectors, answers = copies
    spoil, told = SPOILT[what]
    spoil(vectors)
    assert told in assert_refused(capsys, "check", vectors, answers)


def test_results_that_are_not_files(copies, capsys, tmp_path):
    vectors, answers = copies
    path = answers / "lk_loss/mtp-float32-tame.safetensors"
    linked(path)
    assert "symbolic link" in assert_refused(capsys, "check", vectors, answers)
    path.unlink()
    path.mkdir()
    assert main(["check", str(vectors), str(answers)]) == 0  # a directory answers nothing
    path.rmdir()
    os.mkfifo(path)
    assert "no regular file" in assert_refused(capsys, "check", vectors, answers)
    path.unlink()
    (answers / "elsewhere").symlink_to(tmp_path)
    assert "symbolic link" in assert_refused(capsys, "check", vectors, answers)
    (answers / "elsewhere").unlink()
    (answers / "describe.json").symlink_to(tmp_path / "nothing")
    assert "symbolic link" in assert_refused(capsys, "check", vectors, answers)


def test_results_that_belong_to_nothing(copies, capsys):
    vectors, answers = copies
    (answers / "lk_loss/mtp-float32-other.safetensors").write_bytes(tensors.dumps({}))
    assert "belongs to none" in assert_refused(capsys, "check", vectors, answers)


def test_directories_that_are_not_there(small, tmp_path, capsys):
    assert "no directory" in assert_refused(capsys, "check", tmp_path / "nowhere", tmp_path)
    assert "no directory" in assert_refused(capsys, "check", small[0], tmp_path / "nowhere")
    assert "exists already" in assert_refused(capsys, "export", small[0])
    assert "there is no directory" in assert_refused(capsys, "export", tmp_path / "a/b")
    assert "no check" in assert_refused(capsys, "check", *small, "--check", "x")
    assert "none of the stages" in assert_refused(capsys, "check", *small, "--stage", "x")
    assert "none of the stages" in assert_refused(capsys, "export", tmp_path / "v", "--stage", "x")
    assert "storage" in assert_refused(capsys, "export", tmp_path / "v", "--policy", "float3")
    described = {"name": "x", "policies": {"../x": {"storage": "float32"}}}
    (tmp_path / "d.json").write_text(json.dumps(described))
    assert "cannot name files" in assert_refused(capsys, "export", tmp_path / "v", "--describe", tmp_path / "d.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.json"]


def test_an_export_that_is_cut_short_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(vectors_writing, "expect", fails)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "v", stages=["lk_loss"])
    assert calls
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", ".", "..", "a/../b", "/a", "a//b", "a/", "C:/a", "a\\b", "a\0b", "./a"])
def test_paths_that_lead_outside(path, tmp_path):
    with pytest.raises(MalformedError, match="leads outside"):
        strict.read_file(tmp_path, path, 10)


# -- the reader under fire: FUZZ=100000 with make fuzz ---------------------------------------------------------------

SAMPLE = {
    "loss": np.arange(3.0), "x": np.ones((2, 3), np.float32), "grad/x": np.zeros((0, 4), np.float16),
    "codes": np.arange(5, dtype=np.uint8), "below": np.array([True, False]), "step": np.array(3),
}  # fmt: skip
DTYPES = st.sampled_from([*tensors.DTYPES, "F8_E4M3", "f32", ""])
NUMBERS = st.one_of(st.integers(0, 32), st.integers(-(2**70), 2**70), st.booleans(), st.floats(), st.none())
LISTS = st.lists(NUMBERS, max_size=4)
WORDS = st.text(max_size=5)
JSON = st.deferred(lambda: NUMBERS | WORDS | st.lists(JSON, max_size=3) | st.dictionaries(WORDS, JSON, max_size=3))
ENTRIES = st.one_of(
    st.builds(
        entry, DTYPES, st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 40), min_size=2, max_size=2)
    ),
    st.builds(entry, DTYPES, LISTS, LISTS),
    st.dictionaries(st.sampled_from([*tensors.FIELDS, "x"]), st.one_of(LISTS, DTYPES, NUMBERS)),
    JSON,
)
HEADERS = st.dictionaries(st.sampled_from(["loss", "x", tensors.METADATA]) | st.text(), ENTRIES, max_size=4)


@st.composite
def consistent(draw) -> bytes:
    """Arrays that follow one another as they should, with at most one number off."""
    header, end = {}, 0
    for name in draw(st.lists(st.text(max_size=4), max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(list(tensors.DTYPES))), draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(np.prod(shape)) * np.dtype(tensors.DTYPES[dtype]).itemsize
        header[name] = entry(dtype, shape, [end, end + size])
        end += size
    data = draw(st.binary(min_size=end, max_size=end))
    return file_of(header, data + draw(st.sampled_from([b"", b"", b"x"])), None)


@st.composite
def mutated(draw) -> bytes:
    data = bytearray(tensors.dumps(SAMPLE))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data) - 1))
        if draw(st.booleans()):
            data[place] = draw(st.integers(0, 255))
        else:
            data[place : place + draw(st.integers(0, 40))] = draw(st.binary(max_size=12))
        if not data:
            break
    return bytes(data)


FILES = st.one_of(
    st.binary(max_size=200),
    mutated(),
    consistent(),
    st.builds(file_of, HEADERS, st.binary(max_size=64)),
    st.builds(file_of, st.binary(max_size=64), st.binary(max_size=16), st.none() | st.integers(0, 2**64 - 1)),
)


def survived(read, data: bytes):
    """What was read, or None with a sentence fit to print."""
    try:
        return read(data)
    except MalformedError as error:
        told = str(error)
    assert told.isprintable()
    assert 0 < len(told) < 500
    return None


@settings(max_examples=FUZZ, **ANEW)
@given(FILES)
def test_fuzz_safetensors(data):
    """Either a sentence or arrays; and what this reader takes the format's own library takes, and reads alike."""
    arrays = survived(lambda read: tensors.loads(read, "fuzz"), data)
    if arrays is None:
        return
    assert sum(x.nbytes for x in arrays.values()) <= 2 * len(data)
    assert all(not x.flags.writeable for x in arrays.values())
    assert tensors.loads(tensors.dumps(arrays), "again").keys() == arrays.keys()
    if b"BF16" not in data and all("\0" not in name for name in arrays):
        theirs = safetensors.numpy.load(data)
        assert {name: x.tobytes() for name, x in theirs.items()} == {name: x.tobytes() for name, x in arrays.items()}


@pytest.fixture(scope="session")
def short_manifest(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("short") / "v"
    said = export(
        folder, description={"name": "x", "formats": {"storage": "float32"}, "layouts": ["mtp"]}, stages=["fusion"]
    )
    said["files"], said["vectors"] = said["files"][:2], []
    return json.dumps(said).encode()


@settings(max_examples=max(FUZZ // 10, 300), **ANEW)
@given(data=st.data())
def test_fuzz_manifest(short_manifest, data):
    text = bytearray(short_manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        bite = data.draw(st.integers(0, 30))
        fill = data.draw(st.binary(max_size=8) | JSON.map(lambda value: json.dumps(value).encode()))
        text[place : place + bite] = fill
    survived(lambda read: manifest.described(manifest.loads(read)), bytes(text))


@settings(max_examples=max(FUZZ // 10, 300), **ANEW)
@given(st.binary(max_size=100) | JSON.map(json.dumps).map(str.encode) | st.text(max_size=50).map(str.encode))
def test_fuzz_json(data):
    survived(lambda read: strict.load_json(read, "fuzz"), data)
