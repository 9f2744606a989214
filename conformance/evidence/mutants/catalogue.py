"""Public faults that no wrong answer of an adapter can express, and why.

The ids are those of a catalogue of 102 faults of public code, gathered before this suite was written; a mutant's source
names its id and where the fault was reported.
"""

NOT_EXPRESSIBLE = {
    "E07": "that a top-k result is unsorted is honest; the nearest fault is last_slot_taken_for_the_smallest",
    "F05": "a draft left in eval mode: this step has no layer that differs between the modes (no dropout)",
    "F11": "sharing a shard of the target's embedding: a wrong shape or an id out of range is refused as an argument",
    "M22": "a ragged last block: widths that are no multiple of 32 are refused (spec.md 1)",
    "M23": "swizzled scale layouts are a kernel's own; scales are compared in plain order",
    "M32": "re-quantising need not return the same bytes: spec.md 2 says so, and no stage quantises twice",
    "S08": "several candidates without replacement: the step proposes one token at a time (spec.md 8)",
    "S10": "acceptance metrics of a training run are no output of the step",
    "T14": "where capture ids stand in a configuration: the step takes the three features as given (spec.md 9)",
    "T32": "a zero loss replaced by a plain 0 has the right value and gradient; expert 0 taken for missing is a mutant",
}
