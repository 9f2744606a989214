"""NeMo AutoModel's speculative acceptance: ``verify_stochastic_chain`` with one candidate (``accept_or_resample``).

Install: as nemo_automodel.py. It takes logits, hence ``sampled_from``; random numbers as _uniforms.py says.
"""

try:
    import torch
    from nemo_automodel.components.speculative.eagle.msd_decode import verify_stochastic_chain
except ImportError as error:
    raise ImportError(
        f"The adapter nemo_automodel_sampling needs the package nemo-automodel ({error}). Install it with `make peers` "
        "and add `--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

from ._uniforms import Sampler, logarithm


class Sampling(Sampler):
    package, url = "nemo-automodel", "https://github.com/NVIDIA-NeMo/Automodel"
    name = "nemo_automodel"

    def verify(self, p, q, token) -> tuple:
        target, draft = (torch.stack([logarithm(law)] * 2) for law in (p, q))  # a row for the token after it as well
        found = verify_stochastic_chain(candidate_token_ids=[token], target_logits=target, draft_logits=draft)
        return found.emitted_token_ids[0], found.accepted_draft_tokens == 1


adapter = Sampling()
