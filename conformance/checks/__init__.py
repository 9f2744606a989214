"""The questions: the plan of a run, its cases, and what is asked of each stage, of the unroll and of a pattern."""
