"""The draft step in PyTorch: the module and function names of ``reference``, on tensors, with autograd.

Storage is float64, float32 or bfloat16. Every sum is accumulated, and every nonlinearity computed, in ``ops.wide`` of
the storage type (float32 for bfloat16, otherwise the type itself) and rounded once when it is stored. Router scores
and weights, logits, losses and the attention's output are kept in the wide type.
"""
