"""kvxferd: the per-node daemon that moves KV cache between prefill and decode engines."""

__version__ = "0.1.0"
