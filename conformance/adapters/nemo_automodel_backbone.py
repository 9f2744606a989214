"""NeMo AutoModel's Kimi K3 backbone modules (``KimiMLAAttention``, ``KimiK3MoE``); see nemo_automodel.py."""

from conformance.adapters.nemo_automodel import backbone as adapter

__all__ = ["adapter"]
