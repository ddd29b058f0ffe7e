"""What the vLLM connector supports, as tables."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from docs.tools.markdown_parts import cell, filled, table
from kvxferd.integrations.vllm.layout import support
from tests.proofs.other_nixl import TESTS as MOVER_TESTS
from tests.proofs.vllm.runs import ReleaseRun, kept_runs
from tests.support.repository import files_in, parsed

# vLLM's `KVQuantMode` of a cache whose blocks are described. Of any other, pages are opaque.
QUANT_MODES: Mapping[str, str] = {
    "NONE": "`bfloat16`, `float16`, `float32`, as the model has it",
    "FP8_PER_TENSOR": "`fp8`, `fp8_e4m3`, `fp8_e5m2`, with scales from the checkpoint",
    **dict.fromkeys(
        ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"),
        "of `TritonAttentionBackend` and latents: each head's values, and their scale behind them",
    ),
    "NVFP4_DS_MLA": "of latents: rows of `nvfp4_ds_mla`, to the same kind alone",
}


def vllm_versions() -> Iterator[str]:
    """Yield a table of vLLM's versions."""
    rows = ((f"`{version}`", note) for version, note in support.VLLM_VERSIONS.items())
    yield from table(("vLLM", "what was run"), rows)


def vllm_tests() -> Iterator[str]:
    """Yield a table of the tests of real vLLM, with what became of each with each release, at a commit."""
    runs = kept_runs()
    rows = []
    for path in files_in("tests/proofs/vllm"):
        if path.stem.startswith("test_"):
            purpose = (ast.get_docstring(parsed(path)) or "").partition("\n\n")[0]
            replies = [_reply(run, [path.stem]) for run in runs.values()]
            rows.append((f"`{path.stem}`: {cell(purpose)}", *replies))
    movers = [path.stem for path in files_in(MOVER_TESTS) if path.stem.startswith("test_")]
    replies = [run.nixl and f"nixl {run.nixl}: {_reply(run, movers)}" for run in runs.values()]
    rows.append((f"`{MOVER_TESTS}`, over the NIXL that vLLM pins where the lock has another", *replies))
    yield from table(("tests", *(" ".join(run.build) for run in runs.values())), rows)
    for run in runs.values():
        yield from ("", filled(_remark(run)))


def _reply(run: ReleaseRun, modules: list[str]) -> str:
    """Return what became of the tests of some modules."""
    found = [run.modules[name] for name in modules if name in run.modules]
    counts = {
        "passed": sum(one.passed for one in found),
        "failed": sum(one.failed for one in found),
        "skipped": sum(sum(one.skipped.values()) for one in found),
    }
    if found:
        commits = ", ".join(sorted({one.commit for one in found}))
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count) + f" ({commits})"
    return "not recorded" if run.build.runs_engines else "needs a build for CPUs"


def _remark(run: ReleaseRun) -> str:
    """Return what runs of a build, and why tests were skipped."""
    skips: Counter[str] = Counter()
    for one in run.modules.values():
        skips.update(one.skipped)
    reasons = "; ".join(f"{why} ({count})" for why, count in skips.items())
    kind = "real engines ran" if run.build.runs_engines else "its classes alone were asked"
    return f"With {' '.join(run.build)} {kind}. {reasons and f'Skipped: {reasons}.'}"


def vllm_caches() -> Iterator[str]:
    """Yield a table of vLLM's classes of caches."""
    rows = [
        (f"`{name}`", "refused" if found.kind is None else "moved", found.note)
        for name, found in support.CACHES.items()
    ]
    mixed = "one spec for each layer of a group: all of one kind and window"
    num_moved = len([row for row in rows if row[1] == "moved"])
    rows.insert(num_moved, (f"`{support.UNIFORM_SPEC}`", "moved", mixed))
    yield from table(("cache", "is", "what moves, or why not"), rows)
    yield from ("", "A recurrent state (`MambaSpec`) is one of these, or [opaque](#opaque-pages):", "")
    yield from table(
        ("mixer", "what moves"), ((f"`{name}`", note) for name, (_, note) in support.MIXERS.items())
    )


def vllm_backends() -> Iterator[str]:
    """Yield a table of attention backends, those that are alike in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, content in support.BACKENDS.items():
        alike.setdefault(("moved", content.value), []).append(f"`{name}`")
    alike["opaque", "not described here"] = ["any other"]
    for name, why in support.REFUSED_BACKENDS.items():
        alike.setdefault(("refused", why), []).append(f"`{name}`")
    rows = [(", ".join(names), *reply) for reply, names in alike.items()]
    yield from table(("attention backend", "is", "what a block holds, or why not"), rows)


def vllm_quantisation() -> Iterator[str]:
    """Yield a table of the quantisation of caches."""
    rows = [(f"`{name}`", "moved", note) for name, note in QUANT_MODES.items()]
    rows.append(("any other", "opaque", "packed in a way that is not described here"))
    yield from table(("quantisation of the cache", "is", "what"), rows)


def vllm_parallelism() -> Iterator[str]:
    """Yield a table of parallel sizes, and one of the fields that have to be as they usually are."""
    yield from table(
        ("parallelism", "above 1", "how, or what to do"),
        (
            (f"`{name}`", yes_or_no(found.is_supported), found.note)
            for name, found in support.PARALLEL_SIZES.items()
        ),
    )
    yield from ("", "These fields have to be:", "")
    rules = (*support.SPEC_RULES, *support.QUANTISED_CACHE_RULES)
    yield from table(("field", "accepted"), ((f"`{rule.field}`", rule.accepted) for rule in rules))
    methods = ", ".join(f"`{name}`" for name in support.METHODS_WITHOUT_DRAFT_CACHE)
    speculation = (
        f"Of speculative decoding, {methods} keep nothing in the cache. Of every other method the draft's "
        "own cache moves with the model's."
    )
    yield from ("", filled(speculation))


def yes_or_no(is_so: bool) -> str:
    """Return a cell of a column of two values."""
    return "yes" if is_so else "no"
