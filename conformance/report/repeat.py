"""The command that runs one check again."""

import shlex

KINDS = {
    "stage": "conformance/test_stages.py::test_stage",
    "trace": "conformance/test_trace.py::test_trace",
    "end_to_end": "conformance/test_end_to_end.py::test_end_to_end",
}
CONFORM = "conform"
VECTORS = "conform vectors check "


def module_of(test: str) -> str:
    """The name that pytest's --pyargs takes for a test function of a file of the checkout."""
    return f"draftconf.{test.replace('.py', '').replace('/', '.')}"


def repeat_command(
    check: dict, adapter: str, seed: int, pyargs: bool = False, options: str = "", started_by: str = "pytest"
) -> str:
    """A shell command that runs just this check, in a checkout or, with ``pyargs``, where the suite is installed.

    ``options`` are those of the run that bear on the verdict, as they were given; ``started_by`` is pytest or conform.
    """
    if adapter.startswith(VECTORS):  # a program's files, read without pytest
        return f"{adapter} --check {shlex.quote(check['id'])}"
    if started_by == CONFORM:
        command = f"conform run {shlex.quote(adapter)} --check {shlex.quote(check['id'])} --seed {seed}"
        return f"{command} {options}".strip()
    test = KINDS[check["kind"]]
    if pyargs:
        test = module_of(test)
    node = shlex.quote(f"{test}[{check['id']}]")
    command = f"pytest {'--pyargs ' if pyargs else ''}{node} --adapter {shlex.quote(adapter)} --seed {seed}"
    return f"{command} {options}".strip()


def repeat(check: dict, results: dict) -> str:
    """The same, the way that this run was started."""
    selection, options = results["selection"], results["isolation"]["options"]
    way = {"pyargs": selection["pyargs"], "started_by": selection.get("started_by", "pytest")}
    return repeat_command(check, results["subject"]["adapter"], results["seed"], options=options, **way)
