"""specdec's ``SpecDecoder.verify`` of one proposed token.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

The class loads two language models from a hub when it is made, so it is made without that: in place of the big model is
a function that gives log p at every position. Hence ``sampled_from``; random numbers as _uniforms.py says.
"""

from types import SimpleNamespace

try:
    import torch
    from specdec import SpecDecoder
except ImportError as error:
    raise ImportError(
        f"The adapter specdec needs the package specdec ({error}). Install it with: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specdec.txt"
    ) from error

from ._uniforms import Sampler, logarithm


class SpecDec(Sampler):
    package, url = "specdec", "https://pypi.org/project/specdec/"

    def verify(self, p, q, token) -> tuple:
        decoder, prompt = SpecDecoder.__new__(SpecDecoder), torch.zeros(1, 1, dtype=torch.long)
        decoder.device = "cpu"
        decoder.big_model = lambda ids: SimpleNamespace(logits=logarithm(p).expand(*ids.shape, -1))
        emitted = decoder.verify(prompt, [token], [q[None]])
        return emitted[0], len(emitted) == 2  # the token after an accepted one is drawn too


adapter = SpecDec()
