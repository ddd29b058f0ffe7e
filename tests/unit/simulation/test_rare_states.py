"""Each branch of a module is counted by a name that stays, and a place that is no longer met is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.simulation import rare_states
from tests.simulation.branches import count_branches

SAMPLE = '''
"""A sample."""
class Stock:
    """A stock."""

    def take(self, wanted, left):
        """Take."""
        if not wanted:
            return Code.EMPTY
        elif wanted == Code.ALL:
            wanted = left
        else:
            wanted += 0
        for one in range(wanted):
            if one > left:
                break
        else:
            left = -1 if left else 0
        for one in ():
            continue
        try:
            return 1 // left
        except ZeroDivisionError as error:
            raise StockError("none", Code.BUSY) from error

def told(message):
    def inner():
        raise ValueError
    with message:
        state = State.TOLD
    match message:
        case int() if message > 3:
            pass
        case _:
            assert_never(message)
    while message.is_there:
        message.next()
    while message.is_there:
        message.next()
    return 1 if message == Code.ALL else State.UNTOLD

MOVES: dict = {(State.TOLD, Signal.GO): State.UNTOLD, (State.UNTOLD, Signal.GO): State.TOLD}
SETS = frozenset({(State.TOLD, State.UNTOLD)})
OTHER = {(1, 2): 3}
'''

PLACES = """
Stock.take: if not wanted -> Code.EMPTY
Stock.take: if wanted == Code.ALL
Stock.take: else of if wanted == Code.ALL
Stock.take: past if not wanted
Stock.take: for one in range(wanted)
Stock.take: if one > left
Stock.take: else of for one in range(wanted)
Stock.take: value if left
Stock.take: value else of if left
Stock.take: for one in ()
Stock.take: except ZeroDivisionError as error -> Code.BUSY, raise StockError
told.inner: body -> raise ValueError
told: body -> State.TOLD
told: case int() if message > 3
told: while message.is_there
told: while message.is_there #2
told: value if message == Code.ALL
told: value else of if message == Code.ALL -> State.UNTOLD
module: MOVES -> State.TOLD + Signal.GO
module: MOVES -> State.UNTOLD + Signal.GO
module: SETS -> State.TOLD + State.UNTOLD
"""


def test_places_are_named_by_function_and_branch() -> None:
    _, names = count_branches(SAMPLE, "room/sample.py")
    assert names == [f"room/sample.py {line}" for line in PLACES.split("\n")[1:-1]]


def test_a_counted_function_does_what_it_did() -> None:
    source = SAMPLE[: SAMPLE.index("def told")].replace("Code.", "Code_")
    tree, names = count_branches(source, "sample.py", 2)
    met = [0] * (2 + len(names))

    def value(number: int, of: object) -> object:
        met[number] += 1
        return of

    counted = {"_met_": met, "_value_": value, "Code_EMPTY": "empty", "Code_ALL": "all", "Code_BUSY": "busy"}
    exec(compile(ast.fix_missing_locations(tree), "sample.py", "exec"), counted)
    take = counted["Stock"]().take
    assert (take(0, 9), take("all", 3), take(5, 3)) == ("empty", -1, 0)
    with pytest.raises(NameError, match="StockError") as raised:
        take(5, 0)
    assert source.splitlines()[raised.traceback[-1].lineno].strip().startswith("raise StockError")
    assert (counted["__doc__"].strip(), take.__doc__) == ("A sample.", "Take.")
    assert met == [0, 0, 1, 1, 2, 3, 10, 2, 1, 1, 0, 0, 1]


def test_a_place_that_was_met_often_has_to_be_met(tmp_path: Path) -> None:
    record = tmp_path / "met.tsv"
    rare_states.write({"kept": 40, "lost": 30, "gone": 99, "rare": 29}, record)
    assert record.read_text() == "gone\t99\nkept\t40\nlost\t30\n"
    found = rare_states.compare(
        rare_states.read(record), {"kept": 1, "new": 5}, ["kept", "lost", "rare", "new"]
    )
    assert found == [
        "not met, and 30 times in the record: lost",
        "gone from the source, so write the record anew: gone",
    ]
