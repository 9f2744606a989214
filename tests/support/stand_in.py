"""A small plan and small adapters, with which the plugin is run by pytester; what such a run leaves behind."""

import json
from pathlib import Path

STAND_IN = '''
"""Loaded with -p: puts a small plan in the place of conformance.checks.plan."""

import sys, types
from dataclasses import dataclass
import numpy as np
from draftconf.reference.config import Choices, DraftConfig

@dataclass(frozen=True)
class Check:
    id: str; kind: str; stage: str; quantity: str; aspect: str; case: str; layout: str; policy: str; order: tuple

    def run(self, subject):
        x = np.arange(4.0)
        result = subject.call(self.stage, config=DraftConfig.tiny(), choices=Choices(), policy=self.policy,
                              inputs={"x": x, "case": self.case}, cotangents={"y": np.ones(4)})
        y = result.outputs["y"]
        outcome = {"verdict": "pass", "ratio": None, "steps": [], "worst": None, "bias": None, "compared": 4,
                   "decisions": {"total": 4, "flipped": 1, "legal": 1, "illegal": 0}, "first_step": None, "message": ""}
        if y.shape != x.shape:
            return outcome | {"verdict": "fail", "message": f"{self.stage} has shape {y.shape}; wanted (4,)"}
        ratio = float(np.abs(y - x).max())
        outcome["ratio"] = np.float64(ratio)  # what travels between processes must not depend on this
        if self.kind == "trace":
            outcome["steps"] = [ratio * k for k in range(7)]
            outcome["first_step"] = 3 if ratio > 1 else None
        if ratio > 1:
            outcome |= {"verdict": "fail", "message": "an element is out of bound",
                        "worst": {"step": 3, "index": [2], "actual": 1.5, "expected": 0.1, "error": 1.4, "bound": 0.1}}
        return outcome

def plan(description, *, policies=None, stages=None, seed=0):
    checks = []
    for kind in ("stage", "trace", "end_to_end"):
        for number, stage in enumerate(("attention", "route", "lk_loss", "align")):
            for policy in policies or description.policies:
                for case in ("tame", "harsh"):
                    name = f"mtp-{policy}-{case}"
                    checks.append(Check(f"{stage}.output.{kind}[{name}]", kind, stage, "output", kind, name, "mtp",
                                        policy, (0, number)))
    return checks if description.name != "empty" else []

sys.modules["draftconf.conformance.checks.plan"] = types.SimpleNamespace(plan=plan)
'''

ADAPTERS = """
import numpy as np

class Good:
    protocol = 1
    name = "good"
    def describe(self):
        return {"name": self.name, "version": "1", "policies": {p: {"storage": p} for p in ("float64", "float32")}}
    def start(self, config, choices, formats): pass
    def attention(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"] + 0.5}
    route = lk_loss = attention

class Nothing(Good):
    name = "nothing"
    attention = route = lk_loss = None

class Empty(Good):
    name = "empty"

class Wrong(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"] + 41.2}

class Raises(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        raise RuntimeError("no kernel")

class Skips(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import pytest
        pytest.skip("I would rather not")

class Mutates(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        inputs["x"].base.setflags(write=True)
        inputs["x"].base[0] = 7
        return {"y": inputs["x"]}

class Shapes(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        return {"y": inputs["x"][:2]}

class Stops(Good):
    def stop(self):
        raise RuntimeError("still busy")

class Dies(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import os
        os._exit(9)

class Hangs(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import time
        time.sleep(300)

class Wanders(Good):
    def route(self, inputs, *, cotangents=None, forced=None):
        import os
        os.chdir("/")
        return self.attention(inputs)
"""

LOSE_ONE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return True if "route.output.trace[mtp-float32-tame]" in item.nodeid else None
"""

NUMPY_PROPERTY = """
import numpy as np, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.user_properties.append(("ratio", np.float64(0.5)))
"""


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def last_line(result) -> str:
    return [line for line in result.outlines if line.strip()][-1]
