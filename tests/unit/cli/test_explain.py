"""`kvxferd explain` as a command: what may be written, what is printed, and with which code it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvxferd.cli.root import root
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import deploy

LLAMA = 80 * 2 * 8 * 128 * 2 * 1000


def run(*arguments: str) -> Result:
    """Run the verb."""
    return CliRunner().invoke(root, ["explain", *arguments])


def report(*arguments: str) -> Any:
    """Run the verb with --json; returns the object."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_what_was_promised() -> None:
    found = report("llama-3-70b,tp=8,pp=2,layout=HND", "llama-3-70b,tp=4")
    assert [rank["rank"] for rank in found["ranks"]] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    reads = found["ranks"][1]["reads"]
    assert [(read["source"], read["layers"], read["kind"]) for read in reads] == [
        ([0, 2], list(range(40)), "attention"),
        ([0, 3], list(range(40)), "attention"),
        ([1, 2], list(range(40, 80)), "attention"),
        ([1, 3], list(range(40, 80)), "attention"),
    ]
    assert [rank["num_bytes"] for rank in found["ranks"]] == [LLAMA // 4] * 4
    assert {read["num_bytes"] for read in reads} == {LLAMA // 16}
    assert {read["num_runs"] for read in reads} == {5000}  # 62.5 blocks, 40 layers, K and V


def test_json_of_a_refusal() -> None:
    """Exit code 1, and nothing but what is refused."""
    result = run("llama-3-70b,tp=8", "qwen3-8b,tp=8", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert "ranks" not in found
    assert found["refused"][0] == {
        "field": "fingerprint",
        "prefill": "llama-3-70b",
        "decode": "qwen3-8b",
        "message": "fingerprint of the engines is 'llama-3-70b' at prefill and 'qwen3-8b' at decode",
    }


def written(tmp_path: Path, ranks: Sequence[tuple[EngineSpec, RankLayout]]) -> str:
    """Write an engine's ranks as a description; returns its path."""
    file = tmp_path / "engine.json"
    file.write_bytes(msgspec.json.encode({"ranks": [{"spec": spec, "layout": made} for spec, made in ranks]}))
    return str(file)


def test_a_range_that_nobody_holds_is_refused_by_name(tmp_path: Path) -> None:
    whole, (spec, layout) = deploy("tiny-dense", tp=2).values()
    lacking = msgspec.structs.replace(layout, tensors=())
    result = run(written(tmp_path, [whole, (spec, lacking)]), "tiny-dense", "--json")
    assert result.exit_code == 1
    (refused,) = json.loads(result.stdout)["refused"]
    assert refused["field"] == "coverage-gap"
    assert "unit range [2, 4) of layer 0's component 'k'" in refused["message"]


def test_text_draws_a_matrix_and_lists_reads() -> None:
    result = run("llama-3-70b,tp=8,pp=2", "llama-3-70b,tp=4")
    assert result.exit_code == 0
    assert "pp0.tp1 |····████············████········| 78.1 MiB" in result.stdout
    rows = [line for line in result.stdout.splitlines() if "  attention  " in line]
    assert len(rows) == 16
    assert "16 reads: attention: runs of 4.0 KiB" in result.stdout
    assert re.search(r"pp0\.tp0-7, pp1\.tp0-7 +19\.5 MiB +100% ", result.stdout)


@pytest.mark.slow
def test_byte_ranges_of_a_rank_of_either_side_in_text_and_json() -> None:
    """A rank's own bytes come first, of the decode rank and of the prefill rank that four read."""
    asked = ("nemotron-h-8b", "nemotron-h-8b,tp=4", "--rank", "0,3", "--prefill-rank", "0,0")
    text = run(*asked).stdout
    assert "Byte ranges of decode pp0.tp3" in text
    assert "kv [36864, 49152)" in text
    assert "TransferTopology(local_engine_id=decode, local_rank=pp0.tp3, local_tp_size=4, " in text
    assert "Byte ranges of prefill pp0.tp0: its block 0 to decode's" in text
    found = report(*asked)
    (terms,) = found["terms"]
    assert (terms["tp_ratio"], terms["target_remote_ranks"], terms["fa_head_slots"]) == (4, [0], {"0": 0})

    def conv_runs(ranges: list[Any]) -> list[Any]:
        of_conv = [one for one in ranges if (one["layer"], one["component"]) == (0, "conv.x")]
        return [(one["remote_rank"], one["runs"]) for one in of_conv]

    assert conv_runs(found["byte_ranges"]) == [([0, 0], [[0, 36864, 12288]])]
    assert conv_runs(found["sent_byte_ranges"]) == [
        ([0, rank], [[rank * 12288, 0, 12288]]) for rank in range(4)
    ]


@pytest.mark.slow
def test_files_say_the_same_as_keys(tmp_path: Path) -> None:
    """A preset with keys, a model, and full layouts, in TOML and JSON."""
    preset = tmp_path / "preset.toml"
    preset.write_text('preset = "llama-3-8b"\ntp = 4\npp = 2\n[num_blocks]\nfull = 64\n')
    model = tmp_path / "model.toml"
    model.write_text(
        'tp = 4\npp = 2\n[model]\nname = "llama-3-8b"\nnum_layers = 32\nnum_kv_heads = 8\nhead_dim = 128\n'
    )
    whole = written(tmp_path, list(deploy("llama-3-8b", tp=4, pp=2).values()))
    want = report("llama-3-8b,tp=4,pp=2", "llama-3-8b,tp=8")["ranks"]
    for file in (preset, model, whole):
        assert report(str(file), "llama-3-8b,tp=8")["ranks"] == want


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("llama-9", ["'llama-9'", "llama-3-70b"]),
        ("llama-3-8b,tp", ["'tp' is no key=value"]),
        ("llama-3-8b,tp=four", ["`int`", "$.tp"]),
        ("llama-3-8b,tp=2,tp=4", ["tp is given twice"]),
        ("llama-3-8b,size=2", ["'size'", "block_tokens"]),
        ("llama-3-8b,layout=DNH", ["'DNH'", "NHD-packed"]),
        ("llama-3-8b,tp=0", ["tp 0"]),
        ("llama-3-8b,tp=512,pp=512", ["512 x 512 ranks", "1024 is the limit"]),
        ("llama-3-8b,kv_dtype=int3", ["int3", "bfloat16"]),
        ("llama-3-8b,stages=10+10", ["10, 10", "32"]),
        ("nemotron-h-8b,shared_pages=none", ["`bool`", "$.shared_pages"]),
        ("/nowhere/engine.json", ["/nowhere/engine.json", "No such file"]),
    ],
)
def test_bad_descriptions_are_one_line_and_2(description: str, words: list[str]) -> None:
    result = run(description, "llama-3-8b")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvxferd: cannot ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", "{", "as JSON"),
        ("x.toml", "= 1", "as TOML"),
        ("x.json", "[]", "no object"),
        ("x.json", "{}", "exactly one of preset, model and ranks"),
        ("x.json", '{"preset": "llama-3-8b", "ranks": []}', "exactly one of preset, model and ranks"),
        ("x.json", '{"ranks": []}', "lists no rank"),
        ("x.json", '{"ranks": [{"spec": {}}]}', "$.ranks[0]"),
        ("x.json", '{"preset": "llama-3-8b", "tp": 1.5}', "$.tp"),
        ("x.toml", 'tp = 2\n[model]\nname = "x"\nlayers = 2', "field `"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    result = run(str(file), "llama-3-8b")
    assert result.exit_code == 2
    assert words in result.stderr


def test_layouts_that_contradict_themselves_are_bad_descriptions(tmp_path: Path) -> None:
    """An engine that lacks a rank, one with a tensor beyond its region, and a gap between stages."""
    ranks = list(deploy("tiny-dense", tp=2, pp=2).values())
    spec, layout = ranks[0]
    small = tuple(msgspec.structs.replace(region, size_bytes=8) for region in layout.regions)
    beyond = msgspec.structs.replace(layout, regions=small)
    late = [
        (spec, msgspec.structs.replace(made, start_layer=3, tensors=()) if spec.pp_rank else made)
        for spec, made in ranks
    ]
    for broken, words in (
        (ranks[:3], "lacks pp1.tp1"),
        ([(spec, beyond), *ranks[1:]], "reaches to byte"),
        (late, "layers [2, 3) are held by no stage"),
        ([*ranks, ranks[0]], "listed twice"),
    ):
        result = run(written(tmp_path, broken), "tiny-dense")
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.parametrize("option", ["--rank", "--prefill-rank"])
@pytest.mark.parametrize(("rank", "words"), [("3", "write pp_rank,tp_rank"), ("0,9", "0 to 0,0 to 3")])
def test_a_rank_that_is_not_there(option: str, rank: str, words: str) -> None:
    result = run("llama-3-8b,tp=4", "llama-3-8b,tp=4", option, rank)
    assert result.exit_code == 2
    assert words in result.stderr
