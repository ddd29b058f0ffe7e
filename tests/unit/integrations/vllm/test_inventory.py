"""What is read of a package's sources: classes by their bases, in whatever file these are."""

from __future__ import annotations

from pathlib import Path

from docs.tools.vllm_tables import vllm_inventory
from tests.proofs.vllm.inventory import inventory_of, kept_inventory

SOURCES = {
    "interface.py": "class KVCacheSpec: ...\nclass Full(KVCacheSpec): ...\n",
    "backend.py": "class AttentionBackend(ABC): ...\nclass Own(AttentionBackend): ...\n",
    "models/one.py": "class Below(Own): ...\nclass NotBackend(ABC): ...\nclass _Hidden(Own): ...\n"
    "class Layer:\n    def get_kv_cache_spec(self):\n        return Full(size=round_up(8))\n",
    "both.py": "Both = create_composite_attention_backend(Own, Below, name='Both')  # AttentionBackend\n",
    "other.py": "class Other: ...\n",
}


def test_each_file_with_its_classes(tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert inventory_of(tmp_path) == {
        "backend.py": {"caches": [], "backends": ["Own"]},
        "both.py": {"caches": [], "backends": ["Both"]},
        "interface.py": {"caches": ["Full"], "backends": []},
        "models/one.py": {"caches": ["Full"], "backends": ["Below"]},
    }


def test_the_table_has_a_row_for_each_file() -> None:
    rows = [line for line in vllm_inventory() if line.startswith("| `")]
    assert len(rows) == len(kept_inventory("0.33")) > 60
    by_file = {row.split("`")[1]: row.split("|")[2].strip() for row in rows}
    assert by_file["models/deepseek_v4/compressor.py"] == "moved"
    assert by_file["models/qwen4_exp/common/qsa_cache.py"] == "moved"
    assert by_file["v1/attention/backends/turboquant_attn.py"] == "opaque"
    assert {reply for path, reply in by_file.items() if "/amd/" in path} == {"refused"}
    assert set(by_file.values()) == {"moved", "opaque", "refused"}
