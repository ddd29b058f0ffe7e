"""What a peer's question costs the loop, counted in calls: times differ from machine to machine."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import zmq
import zmq.asyncio

from kvxferd.control.peer_socket import PeerSocket
from kvxferd.core.events import Event, PeerRequest
from kvxferd.wire.codec import encode
from kvxferd.wire.peer import Done, RenewGrants

NUM_QUESTIONS = 50
# Functions of Python and of its libraries that the way in and out calls. There were 115, while each
# message came by `recv_multipart` and `zmq.POLLIN` was no plain number; there are 54 with Python 3.11.
# `benchmarks/peer_requests.py` has the times.
MAX_CALLS = 75


class Counted(PeerSocket):
    """Counts the calls that taking messages makes."""

    num_calls = 0

    def _read_ready(self, watched: Any) -> None:
        def count(frame: object, kind: str, what: object) -> None:
            self.num_calls += kind in ("call", "c_call")

        sys.setprofile(count)
        try:
            super()._read_ready(watched)
        finally:
            sys.setprofile(None)


async def test_a_question_and_its_answer_take_few_calls():
    def answer(event: Event) -> None:
        assert isinstance(event, PeerRequest)
        assert isinstance(event.message, RenewGrants)
        peers.reply(event.route, Done(request=event.message.request))

    peers = Counted("tcp://127.0.0.1:0", answer)
    peers.start()
    try:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(peers.bound_endpoint)
            question = encode(RenewGrants(request=1, grants=()))
            for number in range(NUM_QUESTIONS + 1):
                if number == 1:  # the first has the connection admitted
                    before = peers.num_calls
                await dealer.send(question)
                await asyncio.wait_for(dealer.recv(), 30)
        assert 0 < (peers.num_calls - before) / NUM_QUESTIONS <= MAX_CALLS
    finally:
        peers.stop()
