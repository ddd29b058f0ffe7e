"""Every metric: name, type, help text, labels, and the values that a label has from the start."""

from __future__ import annotations

import ast
from typing import Any

from kvxferd.errors import Code
from kvxferd.telemetry.bounded_series import EngineAndPeerCollector
from kvxferd.telemetry.metrics import Metrics
from tests.frozen.shapes import sorted_map
from tests.frozen.tree import files_in, parsed, text_of
from tests.support.node_samples import node_snapshot, pull_record, records

# vLLM's own metrics of the connector are named in tables there; they need vLLM to be made.
FROM_OUTSIDE = {"source", "sink", "peer"}  # labels of any text
_VLLM_PREFIX = "vllm:"


def surface() -> dict[str, Any]:
    """Return the daemon's metrics after one of each record, and the connector's."""
    wanted = EngineAndPeerCollector(by_engine=True, by_peer=True)
    metrics = Metrics(node_snapshot, engines_and_peers=wanted)
    for record in (*records(), pull_record("failed", Code.DEADLINE)):
        metrics.record(record)
    families = {}
    for family in metrics.registry.collect():
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        families[family.name] = {
            "type": family.type,
            "help": family.documentation,
            "series": sorted({sample.name for sample in family.samples}),
            "labels": {label: sorted(values) for label, values in sorted(labels.items())},
        }
    families["kvxferd_build_info"]["labels"] = {"version": []}  # of the release
    for family in families.values():
        for label in FROM_OUTSIDE & family["labels"].keys():
            family["labels"][label] = []
    return {"daemon": sorted_map(families), "connector": _of_connector()}


def _of_connector() -> dict[str, str]:
    """Return name and help text of each metric that the vLLM connector declares."""
    found = {}
    for path in files_in("kvxferd/integrations"):
        if path.suffix != ".py" or _VLLM_PREFIX not in text_of(path):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Tuple):
                texts = [
                    e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)
                ]
                names = [text for text in texts if text.startswith(_VLLM_PREFIX)]
                if names:
                    found[names[0]] = texts[-1]
    return sorted_map(found)
