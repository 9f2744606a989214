"""speculative_sampling adds 1e-9 to every entry of max(p - q, 0), so a token without residual mass can be emitted."""
# checks: speculative_sample.residual.exact[*]

from importlib.metadata import distribution
from runpy import run_path
from unittest import mock

import torch

sampling = run_path(distribution("naive-speculate").locate_file("naive_speculate/speculate/utils.py"))
p, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
with mock.patch.object(torch, "multinomial", wraps=torch.multinomial) as multinomial:
    sampling["speculative_sampling"](torch.cat([p, p]), q, torch.tensor([1]))  # p_1 is 0: always rejected
law = multinomial.call_args.args[0].tolist()
print(f"p = [1, 0, 0], q = [0, 1, 0]: the replacement is drawn from {law}, wanted [1, 0, 0]")
raise SystemExit(law[1:] == [0.0, 0.0])
