"""flashspec's rejection sampling: ``adapter`` is ``rejection_step``, ``batched`` is ``rejection_sample``.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

Both take log probabilities, hence ``sampled_from`` "logits"; random numbers as _uniforms.py says.
"""

from importlib.metadata import version

try:
    import torch
    from flashspec.sampling import rejection
except ImportError as error:
    raise ImportError(
        f"The adapter flashspec needs the package flashspec ({error}). Install it with: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/flashspec.txt"
    ) from error

from conformance.adapters._uniforms import logarithm, sample


class FlashSpec:
    protocol = 1

    def describe(self) -> dict:
        return {
            "name": "flashspec",
            "version": version("flashspec"),
            "url": "https://pypi.org/project/flashspec/",
            "formats": {"storage": "float32"},
            "layouts": ["mtp"],
            "sampled_from": "logits",
        }

    def speculative_sample(self, inputs, *, cotangents=None, forced=None) -> dict:
        return sample(inputs, self.verify)

    def verify(self, p, q, token) -> tuple:
        log_p, log_q = logarithm(p)[None, None], logarithm(q)[None, None]
        step = rejection.rejection_step(torch.tensor([[token]]), log_q, log_p.expand(1, 2, -1))
        accepted, following = step[0].tolist()
        return (token if accepted else following), accepted


class Batched(FlashSpec):
    def verify(self, p, q, token) -> tuple:
        log_p, log_q, ids = logarithm(p)[None, None], logarithm(q)[None, None], torch.tensor([[token]])
        emitted, first_rejection, _ = rejection.rejection_sample(ids, log_q, log_p, ids, gamma=1)
        return emitted[0, 0], first_rejection[0] == 1


adapter = FlashSpec()
batched = Batched()
