"""Assisted generation accepts on r <= p/q, so a draw of 0 emits a token that the target gives probability 0."""
# checks: speculative_sample.accepted.exact[*] speculative_sample.token.exact[*]

import torch
from transformers.generation.utils import _speculative_sampling

p, q = torch.tensor([0.0, 0.75, 0.25]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
torch.manual_seed(5528393)  # the next torch.rand is 0.0, as one in 2^24 is
tokens, matches = _speculative_sampling(torch.tensor([[0]]), q[None, None], 1, p.expand(1, 2, 3))
print(f"token 0 proposed, p = [0, 0.75, 0.25], r = 0: emitted {tokens[0, 0]}, accepted {int(matches)}; wanted 1 or 2")
raise SystemExit(int(tokens[0, 0]) != 0)
