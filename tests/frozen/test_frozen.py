"""No surface differs from what was recorded of it: see the package's docstring for how to record."""

from __future__ import annotations

import json

import pytest

from tests.frozen import record
from tests.frozen.surfaces import SURFACES


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_is_as_recorded(name: str) -> None:
    # Through JSON, as the recorded one came: a tuple is a list there.
    now = json.loads(json.dumps(SURFACES[name]()))
    if changed := record.difference(name, record.read(name), now):
        pytest.fail(changed, pytrace=False)


def test_what_is_recorded_was_recorded_by_the_script() -> None:
    known, now = json.loads(record.DIGESTS.read_text()), record.digests()
    edited = sorted(path for path in known.keys() | now.keys() if known.get(path) != now.get(path))
    how = record.HOW_TO_RECORD.format(name="")
    assert not edited, f"edited, by a search and replace?: {edited}; version 1's never change, others: {how}"


def test_nothing_is_recorded_of_a_surface_that_is_none() -> None:
    assert {path.stem for path in record.RECORDED.glob("*.json")} == set(SURFACES)


def test_a_difference_names_the_value_and_how_to_record_it() -> None:
    old = {"a": {"fields": [{"name": "x", "type": "int"}, {"name": "y", "type": "str"}]}, "b": [1, 2]}
    new = {"a": {"fields": [{"name": "y", "type": "float"}]}, "b": [1, 3]}
    text = record.difference("wire", old, new)
    assert "- a.fields[x].name" in text
    assert '- a.fields[y].type = "str"' in text
    assert '+ a.fields[y].type = "float"' in text
    assert "- b = [1, 2]" in text
    assert "python -m tests.frozen wire" in text
    assert record.difference("wire", old, old) == ""


def test_a_change_of_order_is_a_difference() -> None:
    assert record.difference("wire", {"x": 1, "y": 2}, {"y": 2, "x": 1})
