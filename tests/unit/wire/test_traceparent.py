"""The header `traceparent`: what is valid, what is kept of it, and that it is no part of a reference."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.client import TransferRef
from kvxferd.wire.limits import MAX_REF_BYTES
from kvxferd.wire.traceparent import (
    is_sampled,
    parent_id_of,
    read_traceparent,
    root_traceparent,
    span_id_for,
    trace_id_of,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{'a' * 32}-{'b' * 16}-00"
REF = TransferRef("tcp://h:1", "e", "g", "t", "0" * 32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (VALID, VALID),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-ff", VALID),  # of the flags "sampled" alone is known
        (f"00-{TRACE}-{SPAN}-02", f"00-{TRACE}-{SPAN}-00"),
        (f"01-{TRACE}-{SPAN}-01", VALID),  # a later version, in the form of this one
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", VALID),
        (f"00-{TRACE}-{SPAN}-01-more", ""),  # version 00 has no more
        (f"cc-{TRACE}-{SPAN}-01more", ""),
        (f"cc-{TRACE}-{SPAN}-01-{'x' * 600}", ""),
        (f"ff-{TRACE}-{SPAN}-01", ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (VALID.upper(), ""),
        (f" {VALID}", ""),
        (f"{VALID}\n", ""),
        (VALID[:-1], ""),
        (f"00-{TRACE}-{SPAN[:-1]}٣-01", ""),  # a digit, but none of ASCII
        ("", ""),
        (None, ""),
        (b"00", ""),
        (7, ""),
        ([VALID], ""),
    ],
)
def test_what_is_read(given: object, read: str) -> None:
    assert read_traceparent(given) == read
    assert read_traceparent(read) == read


def test_its_fields() -> None:
    assert (trace_id_of(VALID), parent_id_of(VALID)) == (TRACE, SPAN)
    assert [is_sampled(one) for one in (VALID, OTHER, "")] == [True, False, False]


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_root_is_the_same_on_both_nodes_and_a_larger_ratio_samples_more(
    nonce: str, a: float, b: float
) -> None:
    few, many = (root_traceparent(nonce, ratio) for ratio in sorted((a, b)))
    assert few in ("", many)
    assert root_traceparent(nonce, 0.0) == ""
    root = root_traceparent(nonce, 1.0)
    assert read_traceparent(root) == root
    assert parent_id_of(root) == span_id_for(nonce)
    assert len(nonce) < 8 or nonce not in root


# --- in a reference


def test_it_is_no_part_of_a_references_identity_and_every_other_field_is() -> None:
    traced, other = REF.with_trace(VALID), REF.with_trace(OTHER)
    assert REF == traced == other
    assert {REF: 1}[other] == 1
    assert traced.with_trace("").traceparent == ""
    for field in ("endpoint", "engine_id", "generation", "transfer_id", "nonce"):
        assert msgspec.structs.replace(traced, **{field: "other"}) != traced, field
    assert REF != VALID


def test_a_reference_with_one_goes_through_json_and_a_dict() -> None:
    traced = REF.with_trace(VALID)
    for form in (traced, traced.to_json(), traced.to_json().encode(), traced.to_dict()):
        assert TransferRef.parse(form).traceparent == VALID
    assert traced.to_dict() == REF.to_dict() | {"traceparent": VALID}


@pytest.mark.parametrize(
    "bad", ["", "00-00", 7, None, ["a"], {"a": 1}, VALID.upper(), "x" * (MAX_REF_BYTES // 2)]
)
def test_a_reference_with_a_bad_one_is_read_without_it(bad: object) -> None:
    read = TransferRef.parse(REF.to_dict() | {"traceparent": bad})
    assert read == REF
    assert read.traceparent == ""
