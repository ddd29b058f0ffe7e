"""A mover that reports for another, and a reader that renews for ever, change nothing of others."""

from __future__ import annotations

import itertools

from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.ids import PullId
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.peer import RenewGrants
from tests.support.simulation import IDS, SINK_IDS, TOKENS, mover_of, spec_of

DELIVERED_BOTH_WAYS = True


def test_another_mover_delivers_no_pull(world, source, sink):
    mover_of(sink).hold = True
    other = mover_of(world.engine(sink.host, "other")[0])
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    (pull,) = sink.host.node.pulls.running()
    other.say(mv.PullDone(pull=pull.pull_id, outcome=mv.PullOutcome(delivered=True)))
    assert sink.ended(ticket) is None
    mover_of(sink).work()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_a_mover_that_mapped_other_regions_serves_no_rank(world):
    host = world.host("p")
    host.give_movers = False
    worker = world.register(host, spec_of("e"))
    host.movers[max(host.movers)].mute = True
    mover = host.bring_mover()
    mover.mute = False
    mover.say(mv.Bound(regions=(), metadata=b""))
    world.settle()
    (refused,) = worker.received(wk.Refused)
    assert refused.code is Code.INTERNAL
    assert not worker.received(wk.Registered)


def test_another_mover_ends_no_doubt(world, source, sink):
    mover = mover_of(sink)
    mover.hold = True
    other = mover_of(world.engine(sink.host, "other")[0])
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=3)
    world.advance(3.1)
    assert not sink.ended(ticket).safe_to_reuse
    (pull,) = sink.host.node.pulls.running()
    other.say(mv.PullQuiesced(pull=PullId(pull.pull_id)))
    assert not sink.received(wk.TicketQuiesced)
    mover.work()
    assert sink.received(wk.TicketQuiesced) == [wk.TicketQuiesced(ticket=ticket)]


def test_another_mover_serves_no_fence_page(world, source, sink):
    """The page's own mover has not replied yet."""
    host = source.host
    other = mover_of(world.engine(host, "other", publish_implies_ready=True)[0])
    pages = host.node.fence_pages
    page = pages.get(source.session)
    own = mover_of(source)
    pages.page_refused(own.mover, source.session)
    own.mute = True
    pages.reassign(source.spec.engine_id)
    host.node.context.pop_effects()
    other.say(mv.FenceMapped(session=source.session, address=page.address, metadata=b"other"))
    assert pages.get(source.session) is None
    own.mute = False
    own.say(mv.FenceMapped(session=source.session, address=page.address, metadata=page.metadata))
    assert pages.get(source.session) == page


def test_a_grant_that_is_renewed_for_ever_ends(world, source, sink):
    """A reader of another version, or a hostile one, does not stop after `max_hold_s`."""
    mover = mover_of(sink)
    mover.hold = mover.mute = True
    sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=7200.0)
    (grant,) = source.host.node.published.table.by_grant
    settings = world.settings
    lasts_s = settings.transfer.max_hold_s + 2 * settings.transfer.lease_s
    for number in itertools.takewhile(
        lambda n: n * settings.transfer.lease_s / 2 < lasts_s, itertools.count()
    ):
        renewal = RenewGrants(request=10_000 + number, grants=(grant,))
        source.host.feed(ev.PeerRequest(b"reader", renewal, ""))
        world.advance(settings.transfer.lease_s / 2)
    assert len(source.received(wk.Released)) == 1
