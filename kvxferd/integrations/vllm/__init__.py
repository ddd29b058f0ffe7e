"""vLLM's KV connector: ``"kv_connector_module_path": "kvxferd.integrations.vllm"``.

Needs vLLM 0.32 or 0.33 in the engine's environment; docs/how-to/vllm.md says how it is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvxferdConnector"]


def __getattr__(name: str) -> Any:
    # The parts that need no vLLM can be imported, and tested, without it.
    if name == "KvxferdConnector":
        from kvxferd.integrations.vllm.connector import KvxferdConnector

        return KvxferdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
