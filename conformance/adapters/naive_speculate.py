"""naive-speculate's ``speculative_sampling``, which takes laws; random numbers as _uniforms.py says.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

The package wants Python 3.14 and does not import on 3.11; its ``speculate/utils.py`` needs PyTorch alone and is loaded
from its place in the installed package.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution

try:
    import torch

    PACKAGE = distribution("naive-speculate")
    FILE = PACKAGE.locate_file("naive_speculate/speculate/utils.py")
    SPEC = importlib.util.spec_from_file_location("naive_speculate_utils", FILE)
    utils = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(utils)
except (ImportError, PackageNotFoundError, FileNotFoundError) as error:
    raise ImportError(
        f"The adapter naive_speculate needs the package naive-speculate ({error}). Install it with: pip install "
        "torch==2.13.0 && pip install --no-deps --ignore-requires-python -r requirements/matrix/naive-speculate.txt"
    ) from error

from ._uniforms import Sampler


class NaiveSpeculate(Sampler):
    package, url = "naive-speculate", "https://pypi.org/project/naive-speculate/"
    described = {}

    def verify(self, p, q, token) -> tuple:
        rejected, resampled = utils.speculative_sampling(torch.stack([p, p]), q[None], torch.tensor([token]))
        accepted = int(rejected) == 1
        return (token if accepted else resampled), accepted


adapter = NaiveSpeculate()
