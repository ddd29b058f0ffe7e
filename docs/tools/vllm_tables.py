"""What the vLLM connector supports, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from docs.tools.markdown_parts import filled, table
from kvxferd.integrations.vllm.layout import support


def vllm_versions() -> Iterator[str]:
    """Yield a table of vLLM's versions."""
    rows = ((f"`{version}`", note) for version, note in support.VLLM_VERSIONS.items())
    yield from table(("vLLM", "what was run"), rows)


def vllm_caches() -> Iterator[str]:
    """Yield a table of vLLM's classes of caches."""
    rows = [
        (f"`{name}`", yes_or_no(found.kind is not None), found.note) for name, found in support.CACHES.items()
    ]
    mixed = "one spec for each layer of a group: all of one kind and window"
    rows.insert(len([row for row in rows if row[1] == "yes"]), (f"`{support.UNIFORM_SPEC}`", "yes", mixed))
    yield from table(("cache", "supported", "what moves, or why not"), rows)
    yield from ("", "A recurrent state (`MambaSpec`) is one of these:", "")
    yield from table(
        ("mixer", "what moves"), ((f"`{name}`", note) for name, (_, note) in support.MIXERS.items())
    )


def vllm_backends() -> Iterator[str]:
    """Yield a table of attention backends, those that are alike in one row."""
    alike: dict[support.BackendSupport, list[str]] = {}
    for name, found in support.BACKENDS.items():
        alike.setdefault(found, []).append(f"`{name}`")
    rows = [
        (
            ", ".join(names),
            yes_or_no(found.content is not None),
            found.content.value if found.content else found.note,
        )
        for found, names in alike.items()
    ]
    yield from table(("attention backend", "supported", "what a block holds, or why not"), rows)


def vllm_quantisation() -> Iterator[str]:
    """Yield a table of the quantisation of caches."""
    rows = [
        (f"`{name}`", yes_or_no(found.is_supported), found.note)
        for name, found in support.QUANT_MODES.items()
    ]
    rows += [
        (f"`{name}` of a latent", "yes", "opaque rows, to the same kind alone")
        for name in support.OPAQUE_DTYPES
    ]
    yield from table(("quantisation of the cache", "supported", "what, or why not"), rows)


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
    rules = (*support.SPEC_RULES, *support.WINDOW_RULES, *support.CACHE_CONFIG_RULES)
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
