"""How much memory a function takes beyond what was there: from PyTorch's allocations, or from the process's size."""

import torch


def peak_allocated(function) -> int:
    """Most bytes of tensors that were alive at once, of those that were allocated while ``function`` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
