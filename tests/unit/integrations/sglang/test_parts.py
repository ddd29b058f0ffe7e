"""What the backend's small parts promise: settings, references, messages, and what is held."""

from __future__ import annotations

import pytest

from kvxferd.errors import EngineError
from kvxferd.integrations.sglang import messages
from kvxferd.integrations.sglang.held import HeldRequests
from kvxferd.integrations.sglang.identity import SourceIdentity, next_room, room_of, transfer_id
from kvxferd.integrations.sglang.options import Options, read_options

KEY = "k" * 32
STAGE = messages.StagePages(7, 1, 32, None, {"full.1": messages.ListedPages(b"\3\0\0\0", 16, -1)})
IDENTITY = SourceIdentity("tcp://10.0.0.1:9441", "sglang-p", "g1", "s" * 32)


def test_settings_come_from_the_environment() -> None:
    environ = {"KVXFERD_SGLANG_SOCKET": "/tmp/w.sock", "KVXFERD_SGLANG_LEASE_S": "12.5", "PATH": "/bin"}
    assert read_options(environ) == Options(socket="/tmp/w.sock", lease_s=12.5)
    assert read_options({}) == Options()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SOCKETS", "/tmp/w", "KVXFERD_SGLANG_.*known are socket"),
        ("LEASE_S", "long", "lease_s"),
        ("CONNECT_TIMEOUT_S", "0", "> 0.*connect_timeout_s"),
    ],
)
def test_a_setting_that_is_wrong_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_options({f"KVXFERD_SGLANG_{name}": value})


def test_both_engines_make_one_reference_of_a_room_and_nobody_else_does() -> None:
    ref = IDENTITY.reference(7)
    assert (ref.transfer_id, ref.generation) == ("room-7", "g1")
    assert ref == IDENTITY.reference(7)
    other = SourceIdentity("tcp://10.0.0.1:9441", "sglang-p", "g1", "t" * 32)
    assert len({ref.nonce, IDENTITY.reference(8).nonce, other.reference(7).nonce}) == 3


def test_a_transfer_is_known_by_its_room() -> None:
    assert room_of(transfer_id(2**63 - 1)) == 2**63 - 1
    assert [room_of(other) for other in ("room-", "room-x", "req-1", "7")] == [None] * 4


def test_a_request_that_is_computed_again_stays_with_its_replica() -> None:
    rooms = [1, 2**62 - 1, 2**63 - 1, 720_720]
    assert all(next_room(room) % size == room % size for room in rooms for size in range(1, 17))
    assert all(0 <= next_room(room) < 2**63 and next_room(room) != room for room in rooms)
    assert next_room(next_room(1)) not in (1, next_room(1))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (messages.encode_pulling(7), messages.Pulling(7)),
        (messages.encode_stage(STAGE, KEY), STAGE),
        (messages.encode_stage(STAGE, "k" * 31), None),
        ([messages.STAGE, KEY.encode(), b"\xc1"], None),
        ([b"ABORT", b"7", b"10.0.0.2", b"5000"], messages.Aborted(7)),
        ([], None),
        ([b"ABORT"], None),
        ([b"ABORT", b"-7"], None),
        ([b"ABORT", b"\xff"], None),
        ([b"ABORT", b"9" * 5000], None),
        ([b"BOOTSTRAP", b"7"], None),
    ],
)
def test_what_is_no_message_is_dropped(frames: list[bytes], message: object) -> None:
    assert messages.decode(frames, KEY) == message


class Rank:
    """One of two ranks: what it holds, and what it has given back."""

    def __init__(self, other: list[list[bool]]) -> None:
        self.given_back: list[str] = []
        self.asked = 0
        self._other = other
        self.held = HeldRequests(self._agree)

    def _agree(self, flags: list[bool]) -> list[bool]:
        self.asked += 1
        return [own and theirs for own, theirs in zip(flags, self._other.pop(0), strict=True)]

    def hold(self, request: object, kind: str, name: str, released: list[str]) -> None:
        self.held.hold(request, kind, lambda: self.given_back.append(name), lambda: str(request) in released)


def test_requests_are_given_back_once_all_ranks_have_them_released() -> None:
    released: list[str] = []
    rank = Rank([[True, True], [False, True], [True]])
    rank.hold("a", "pages", "pages of a", released)
    rank.hold("a", "row", "row of a", released)
    rank.hold("b", "pages", "pages of b", released)
    rank.held.give_back()
    assert (rank.given_back, len(rank.held)) == ([], 2)
    released += ["a", "b"]
    rank.held.give_back()
    assert rank.given_back == ["pages of b"]  # the other rank still has a
    rank.held.give_back()
    assert rank.given_back == ["pages of b", "pages of a", "row of a"]
    rank.held.give_back()
    assert rank.asked == 3  # nothing is held: no rank waits for another
