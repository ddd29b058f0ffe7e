"""A node that many read from is lost."""

from __future__ import annotations

from collections import Counter

from kvxferd.wire.common import TransferRef
from tests.support.simulation import IDS, TOKENS, World, spec_of

NUM_PULLS = 4  # that each reader has open when the node is lost
AWAY_S = 60.0


class CountingWorld(World):
    """Counts what each host sends, whether it arrives or not."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sent: Counter[str] = Counter()

    def post(self, source: str, target: str, *message) -> None:
        self.num_sent[source] += 1
        super().post(source, target, *message)


def sent_after_a_loss(num_readers: int) -> tuple[int, int]:
    """Return the most that a reader sends in the minute after the loss, and what the node would send."""
    world = CountingWorld()
    (source,) = world.engine(world.host("hub"), "prefill")
    names = [f"n{number}" for number in range(num_readers)]
    sinks = [world.register(world.host(name), spec_of(f"decode-{name}")) for name in names]
    for number, sink in enumerate(sinks):
        for pull in range(NUM_PULLS):
            ref = source.publish(f"t{number}-{pull}", IDS, TOKENS, ready_tokens=0)
            sink.pull(ref, IDS, TOKENS, deadline_s=2 * AWAY_S)
    world.cut |= {pair for name in names for pair in ((name, "hub"), ("hub", name))}
    world.num_sent.clear()
    world.advance(AWAY_S)
    of_hub = world.num_sent.pop("hub")
    return max(world.num_sent.values()), of_hub


def test_readers_of_a_lost_node_send_it_a_bounded_number_of_messages_whatever_others_do():
    of_reader, of_hub = sent_after_a_loss(4)
    of_one_of_many, of_hub_of_many = sent_after_a_loss(12)
    assert of_one_of_many <= of_reader <= 50
    assert of_hub_of_many <= 3 * of_hub <= 3 * 50


def test_behind_a_hello_without_reply_no_request_is_sent_twice():
    world = CountingWorld()
    sink = world.register(world.host("n"), spec_of("decode"))
    world.host("hub")
    world.cut |= {("n", "hub"), ("hub", "n")}
    sent: list[str] = []
    post = world.post
    world.post = lambda *args: [sent.append(type(args[-1]).__name__), post(*args)]
    for number in range(3):
        ref = TransferRef("tcp://hub:9441", f"prefill{number}", "g1", "t", "n")
        sink.pull(ref, IDS, TOKENS, deadline_s=AWAY_S)
    world.advance(world.settings.silent_after_s / 2)
    assert (sent.count("ManifestRequest"), sent.count("PeerHello")) == (1, 3)
    world.cut.clear()
    world.advance(world.settings.resend_s)
    assert sent.count("ManifestRequest") == 1 + 3
