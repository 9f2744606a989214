"""Loading an adapter, reading what it declares, and calling it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftconf.conformance.catalogue.skeletons import skeleton
from draftconf.conformance.protocol import loading
from draftconf.conformance.protocol.description import Description
from draftconf.conformance.protocol.keys import BY_NAME, table
from draftconf.conformance.protocol.loading import load
from draftconf.conformance.protocol.plain import plain
from draftconf.conformance.protocol.result import AdapterError, NotOffered, Result
from draftconf.conformance.protocol.subject import Subject
from draftconf.conformance.torch_helper import TorchAdapter
from draftconf.reference.config import Choices, DraftConfig

CONFIG, CHOICES = DraftConfig.tiny(), Choices()
DECLARED = {"name": "a", "formats": {"storage": "float32"}}


def subject_of(method=None, *, describe=DECLARED, **attributes) -> Subject:
    said = SimpleNamespace(protocol=1, describe=lambda: describe, **attributes)
    if method is not None:
        said.lk_loss = method
    return Subject(said)


def call(method, **inputs):
    return subject_of(method).call("lk_loss", config=CONFIG, choices=CHOICES, policy="float32", inputs=inputs)


# -- loading ---------------------------------------------------------------------------------------------------------


def test_load_built_in_by_name():
    assert load("fast").describe()["name"] == "fast"


def test_load_class_factory_and_instance_from_module_and_file(tmp_path, monkeypatch):
    source = """
    import beside

    class Class:
        protocol = 1
        def describe(self): return {"name": beside.NAME}

    def factory(): return Class()
    instance = Class()
    class Holder: inner = instance
    """
    (tmp_path / "mine.py").write_text("\n".join(line[4:] for line in source.splitlines()), encoding="utf-8")
    (tmp_path / "beside.py").write_text("NAME = 'beside'", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for attribute in ("Class", "factory", "instance", "Holder.inner"):
        for place in ("mine", "mine.py", str(tmp_path / "mine.py")):
            assert load(f"{place}:{attribute}").describe() == {"name": "beside"}


def test_load_file_of_a_package_by_its_full_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wrappers").mkdir()
    (tmp_path / "wrappers" / "__init__.py").touch()
    source = "from importlib.util import find_spec\nadapter = find_spec('absent_package')"
    (tmp_path / "wrappers" / "absent_package.py").write_text(source, encoding="utf-8")
    assert load(f"{tmp_path}/wrappers/absent_package.py:adapter") is None
    assert "wrappers.absent_package" in sys.modules


def test_load_entry_point(monkeypatch):
    class Points(list):
        names = property(lambda self: {point.name for point in self})

    points = Points([SimpleNamespace(name="plugged", load=lambda: SimpleNamespace(describe=dict, protocol=1))])
    monkeypatch.setattr(loading, "entry_points", lambda group: points if group == "draftconf.adapters" else None)
    assert load("plugged").protocol == 1
    with pytest.raises(ValueError, match=r"no adapter 'unplugged'; known: .*fast.*plugged"):
        load("unplugged")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ImportError('needs frobnicate 2: pip install frobnicate')", "needs frobnicate 2: pip install"),
        ("def adapter(): raise ImportError('needs a GPU')", "cannot be loaded: needs a GPU"),
        ("def adapter(): return 1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("adapter = (", "cannot be loaded: SyntaxError"),
        ("other = 1", "there is no attribute 'adapter'"),
    ],
)
def test_load_failure_is_a_sentence(tmp_path, monkeypatch, source, sentence):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        load(f"{tmp_path}/broken.py:adapter")


# -- describe() ------------------------------------------------------------------------------------------------------


def test_description_is_completed():
    said = Description.from_dict({"name": "a", "formats": {"storage": "bfloat16"}, "quantized": False})
    wide = dict.fromkeys(("accumulate", "router", "logits"), "float32")
    assert said.formats == {"storage": "bfloat16", "attention_output": "bfloat16"} | wide
    assert said.policies == {"bfloat16": said.formats}
    assert said.layouts == ("mtp", "eagle3")
    assert said.documents is True
    assert said.quantized is False
    assert said.to_dict()["extra"] == {"quantized": False}
    tensor_core = Description.from_dict({"name": "a", "formats": {"storage": "bfloat16", "accumulate": "tensor-core"}})
    assert tensor_core.formats["router"] == "float32"


def test_layout_follows_from_the_choices():
    said = Description.from_dict(DECLARED | {"choices": {"draft_input": "eagle3", "head": "own"}})
    assert said.layouts == ("eagle3",)
    assert said.choices == {"head": "own"}
    assert said.choices_for("eagle3", reduction="all_slots") == Choices(
        draft_input="eagle3", head="own", reduction="all_slots"
    )


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (["a"], r"describe\(\) is \['a'\]; wanted a mapping"),
        ({"formats": {"storage": "float32"}}, "'name'.* is None; wanted a string"),
        ({"name": "a"}, "has no 'formats'"),
        (DECLARED | {"version": 1}, "'version'.* is 1; wanted a string"),
        (DECLARED | {"formats": {"storage": "float8"}}, "'storage': 'float8'; wanted one of float64, float32"),
        (DECLARED | {"formats": {"storage": "tf32"}}, "has storage 'tf32'; wanted one of float64"),
        (DECLARED | {"formats": {"storage": "float32", "router": "double"}}, "'router': 'double'; wanted one of"),
        (DECLARED | {"policies": ["float32"]}, "'policies'.* wanted a mapping"),
        (DECLARED | {"policies": {"low": {"storage": None}}}, r"'low'\].* wanted one of"),
        (DECLARED | {"choices": {"heads": 3}}, "choices has a field 'heads'"),
        (DECLARED | {"choices": {"head": "both"}}, "head is 'both'; wanted one of"),
        (DECLARED | {"choices": {"reduced_target": "renormalized"}}, "needs head 'reduced'"),
        (DECLARED | {"layouts": ["eagle"]}, "wanted some of mtp, eagle3"),
        (DECLARED | {"layouts": "mtp"}, "wanted a list"),
        (DECLARED | {"layouts": ["mtp"], "choices": {"draft_input": "eagle3"}}, "not one of the layouts"),
        (DECLARED | {"documents": "no"}, "wanted True or False"),
        (DECLARED | {"quantized": 0}, "'quantized'.* is 0; wanted True or False"),
        (DECLARED | {"mx_silent": ["zero"]}, r"'mx_silent'.* is \['zero'\]; wanted some of zero_block, nonfinite"),
        (DECLARED | {"sampled_from": "logit"}, "'sampled_from'.* is 'logit'; wanted one of laws, logits"),
        (DECLARED | {"document": False}, "unknown key 'document'; did you mean 'documents'"),
        (DECLARED | {"sampled_form": "logits"}, "unknown key 'sampled_form'; did you mean 'sampled_from'"),
        (DECLARED | {"tolerance": 1}, "unknown key 'tolerance'; known: name, version, url, formats"),
    ],
)
def test_bad_description_is_a_sentence(said, sentence):
    with pytest.raises(ValueError, match=sentence):
        Description.from_dict(said)


@pytest.mark.parametrize("value", [None, 2, True, "1"])
def test_other_protocol_is_refused(value):
    with pytest.raises(ValueError, match="this suite speaks protocol 1"):
        Description.of(SimpleNamespace(protocol=value, describe=lambda: DECLARED))


def test_describe_that_raises_is_a_sentence():
    with pytest.raises(ValueError, match=r"describe\(\) raised ZeroDivisionError"):
        Description.of(SimpleNamespace(protocol=1, describe=lambda: 1 / 0))


# -- the keys, as attributes and on paper ------------------------------------------------------------------------------

SAID = {
    "name": "mine", "version": "2", "url": "https://example.org", "formats": {"storage": "float64"},
    "policies": {"low": {"storage": "bfloat16"}}, "choices": {"head": "own"}, "layouts": ["eagle3"],
    "documents": False, "quantized": False, "mx_silent": ["clamp"], "sampled_from": "logits",
    "losses": {"kl_loss": {}}, "pattern": {"loss": "kl", "step_weights": [1.0]},
}  # fmt: skip
MISSPELT = {
    "name": "names", "version": "versions", "url": "urls", "formats": "format", "policies": "policie",
    "choices": "choice", "layouts": "layout", "documents": "document", "quantized": "quantised",
    "mx_silent": "mx_silents", "sampled_from": "sampled_form", "losses": "losses_declared", "pattern": "patern",
}  # fmt: skip


def adapter_with(**attributes) -> TorchAdapter:
    return type("Mine", (TorchAdapter,), attributes)()


@pytest.mark.parametrize("key", BY_NAME)
def test_every_key_is_honoured_as_an_attribute_of_a_torch_adapter(key):
    described = Description.of(adapter_with(**{key: SAID[key]}))
    assert getattr(described, key) != getattr(Description.of(TorchAdapter()), key)
    assert getattr(described, key) == getattr(Description.from_dict(DECLARED | {key: SAID[key]}), key)


@pytest.mark.parametrize("key", BY_NAME)
@pytest.mark.parametrize("own", [True, False])
def test_a_misspelt_attribute_of_a_torch_adapter_is_refused(key, own):
    adapter = adapter_with() if own else adapter_with(**{MISSPELT[key]: SAID[key]})
    if own:
        setattr(adapter, MISSPELT[key], SAID[key])
    with pytest.raises(ValueError, match=f"attribute '{MISSPELT[key]}'; did you mean '{key}'"):
        Description.of(adapter)


def test_methods_and_other_attributes_of_a_torch_adapter_are_its_own():
    adapter = adapter_with(format=lambda self: "", backend="eager", pattern=lambda self, inputs: None, pattern_declared=
                           SAID["pattern"])  # fmt: skip
    adapter.start(CONFIG.to_dict(), CHOICES.to_dict(), {"storage": "float32"})
    assert Description.of(adapter).pattern == SAID["pattern"]


@pytest.mark.parametrize("name", ["fast", "fast_fused", "reference"])
def test_a_description_goes_to_another_process_and_comes_back(name):
    described = Description.of(load(name))
    there = Description.restored(plain(described.to_dict()))
    assert plain(there.to_dict()) == plain(described.to_dict())
    assert set(described.to_dict()["extra"]) <= {"losses", "pattern"}


def test_the_readme_and_new_adapters_show_every_key():
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in BY_NAME:
        assert (
            f"# {name} = " in skeleton("a.py", False)
            or f"    {name} = " in skeleton("a.py", False)
            or name == "pattern"
        )
        assert f'"{name}": ' in skeleton("a.py", True) or f"# '{name}': " in skeleton("a.py", True)
    assert "# pattern_declared = " in skeleton("a.py", False)


# -- calling ---------------------------------------------------------------------------------------------------------


def test_inputs_are_read_only_copies():
    x = np.arange(3.0)

    def method(inputs, *, cotangents=None, forced=None):
        assert inputs["step"] == 3
        assert cotangents is None
        assert forced is None
        with pytest.raises(ValueError, match="read-only"):
            inputs["x"][0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            inputs["x"].setflags(write=True)
        inputs.clear()  # the mapping is the adapter's own
        return {"loss": np.zeros(3)}

    call(method, x=x, step=3)
    assert x.flags.writeable


@pytest.mark.parametrize("group", ["inputs", "cotangents", "forced"])
def test_changed_input_is_an_error(group):
    def method(inputs, *, cotangents=None, forced=None):
        given = {"inputs": inputs, "cotangents": cotangents, "forced": forced}[group]
        torch.from_numpy(given["x"]).mul_(-1)  # torch writes through the read-only flag, here to -0.0
        return {"loss": np.zeros(1)}

    groups = {"inputs": {}, "cotangents": None, "forced": None} | {group: {"x": np.zeros(1)}}
    with pytest.raises(AdapterError, match="lk_loss changed its input 'x'"):
        subject_of(method).call("lk_loss", config=CONFIG, choices=CHOICES, policy="float32", **groups)


@pytest.mark.parametrize(
    "returned",
    [
        {"loss": [1.0, 2.0]},
        ({"loss": torch.tensor([1.0, 2.0], requires_grad=True)},),
        ({"loss": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, None, {}),
        Result({"loss": np.array([1.0, 2.0], np.float16), "absent": None}),
        SimpleNamespace(outputs={"loss": np.array([1, 2])}, grads={}),
    ],
)
def test_returns_are_normalised(returned):
    result = call(lambda inputs, **_: returned)
    assert isinstance(result, Result)
    np.testing.assert_array_equal(result.outputs["loss"], [1, 2])
    assert set(result.outputs) == {"loss"}
    assert (result.grads, result.decisions, result.trace) == ({}, {}, {})


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32, np.uint8, np.bool_])
def test_types_are_kept(dtype):
    assert call(lambda inputs, **_: {"loss": np.ones(1, dtype)}).outputs["loss"].dtype == dtype


def test_result_outlives_the_adapters_buffers():
    buffer = np.ones(2)
    result = call(lambda inputs, **_: ({"loss": buffer}, {"frozen": None}))
    buffer[:] = 9
    np.testing.assert_array_equal(result.outputs["loss"], [1, 1])
    assert result.grads == {"frozen": None}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned NoneType; wanted a Result"),
        (np.zeros(2), "returned ndarray"),
        (({}, {}, {}, {}, {}), "returned a tuple of 5"),
        (([1.0],), "returned outputs as list"),
        ({1: np.zeros(1)}, "a key that is not a string"),
        ({"loss": np.zeros(1, complex)}, r"outputs\['loss'\] has dtype complex128"),
        ({"loss": "low"}, "has dtype <U3"),
        ({"outputs": {"loss": np.zeros(1)}}, "has dtype object"),
        ({"loss": [[1.0], [1.0, 2.0]]}, "is not an array: ValueError"),
    ],
)
def test_unreadable_return_is_an_error(returned, sentence):
    with pytest.raises(AdapterError, match=sentence):
        call(lambda inputs, **_: returned)


def test_not_offered():
    def method(inputs, **_):
        raise NotImplementedError("only three steps")

    with pytest.raises(NotOffered, match="only three steps"):
        call(method)
    with pytest.raises(NotOffered, match="lk_loss is not offered"):
        call(None)
    assert subject_of(None).about()["offers"] == []
    assert subject_of(method).about()["offers"] == ["lk_loss"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, pytest.skip.Exception])
def test_whatever_a_method_raises_is_its_error(error):
    def method(inputs, **_):
        raise error("first line\nsecond line")

    with pytest.raises(AdapterError, match=rf"^lk_loss raised {error.__name__}: first line$") as caught:
        call(method)
    assert "test_adapter.py" in caught.value.details
    assert "/" not in caught.value.details.split(":")[0]


def test_start_and_stop_follow_config_choices_and_policy():
    log = []

    def start(config, choices, formats):
        log.append((config["num_steps"], choices["head"], formats["storage"]))

    policies = {name: {"storage": name} for name in ("float64", "float32")}
    subject = subject_of(
        lambda inputs, **_: {"loss": 0.0},
        describe={"name": "a", "policies": policies},
        start=start,
        stop=lambda: log.append("stop"),
    )

    def run(choices, policy):
        subject.call("lk_loss", config=CONFIG, choices=choices, policy=policy, inputs={})

    run(CHOICES, "float32")
    run(CHOICES, "float32")
    run(CHOICES.replace(head="own"), "float32")
    run(CHOICES.replace(head="own"), "float64")
    subject.stop()
    subject.stop()
    first, second, third = (7, "frozen_target", "float32"), (7, "own", "float32"), (7, "own", "float64")
    assert log == [first, "stop", second, "stop", third, "stop"]


def test_start_without_formats_serves_one_policy_only():
    seen = []
    subject_of(None, start=lambda config, choices: seen.append(choices))._start(CONFIG, CHOICES, "float32")
    assert seen == [CHOICES.to_dict()]
    policies = {name: {"storage": name} for name in ("float64", "float32")}
    with pytest.raises(ValueError, match=r"start\(\) must take a third argument, formats"):
        subject_of(None, describe={"name": "a", "policies": policies}, start=lambda config, choices: None)


def test_warnings_of_an_adapter_are_its_own():
    def method(inputs, **_):
        return {"loss": np.log(np.zeros(1)) + torch.from_numpy(inputs["x"]).numpy()}

    assert np.isneginf(call(method, x=np.zeros(1)).outputs["loss"]).all()


# -- the example of the README ---------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def test_readme_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "my_lk.py").read_text(encoding="utf-8")
    code = example.split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_computes_the_loss():
    subject = Subject(load(f"{ROOT}/examples/my_lk.py:MyLoss"))
    inputs = {"draft_logits": np.zeros((1, 3), np.float32), "target_logits": np.array([[0, 0, -200]], np.float32)}
    result = subject.call(
        "lk_loss", config=CONFIG, choices=CHOICES, policy="float32", inputs=inputs, cotangents={"loss": np.ones(1)}
    )
    np.testing.assert_allclose(result.outputs["loss"], [np.log(1.5)], rtol=1e-6)
    assert set(result.grads) == {"draft_logits"}
