"""The history: bounded, in order, and the same again after JSON."""

import json

import pytest

from kvxferd.core.snapshot import Record
from kvxferd.telemetry.history import History, record_from_json, record_to_json
from tests.support.node_samples import pull_record, records


def test_the_oldest_goes_first() -> None:
    history = History(max_records=2)
    one, two, three = records()[:3]
    for record in (one, two, three):
        history.add(record)
    assert history.records() == [two, three]


@pytest.mark.parametrize("record", records())
def test_a_record_survives_json(record: Record) -> None:
    assert record_from_json(json.loads(json.dumps(record_to_json(record)))) == record


def test_what_is_returned_is_a_copy() -> None:
    history = History()
    before = history.records()
    history.add(pull_record())
    assert before == []
