"""flashspec's rejection sampling: ``adapter`` is ``rejection_step``, ``batched`` is ``rejection_sample``.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

Both take log probabilities, hence ``sampled_from`` "logits"; random numbers as _uniforms.py says.
"""

try:
    import torch
    from flashspec.sampling import rejection
except ImportError as error:
    raise ImportError(
        f"The adapter flashspec needs the package flashspec ({error}). Install it with: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/flashspec.txt"
    ) from error

from ._uniforms import Sampler, logarithm


class FlashSpec(Sampler):
    package, url = "flashspec", "https://pypi.org/project/flashspec/"

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
