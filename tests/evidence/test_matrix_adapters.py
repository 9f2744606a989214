"""Adapters of packages that the suite's own environment has not: they say how to get them."""

from importlib.util import find_spec

import pytest

from draftconf.conformance.protocol.loading import load

ADAPTERS = {
    "torchao_qat": ("torchao", "torchao"),
    "compressed_tensors": ("compressed_tensors", "compressed-tensors"),
    "modelopt": ("modelopt", "nvidia-modelopt"),
    "quark": ("quark", "amd-quark"),
    "brevitas": ("brevitas", "brevitas"),
    "ml_dtypes_mx": ("ml_dtypes", "ml-dtypes"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_without_its_package_says_how_to_install_it(name):
    module, package = ADAPTERS[name]
    if find_spec(module):
        pytest.skip(f"{module} is installed here")
    with pytest.raises(ValueError, match=rf"needs the package {package} .*`make matrix PACKAGES={package}`"):
        load(name)
