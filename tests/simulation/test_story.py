"""Of an episode's story, what concerns the broken promise is told."""

from __future__ import annotations

from tests.simulation import story

PROBLEM = "pull 7 of decode1.1/0.0: 3 of 64"
CONCERNS = """\
  1.000000 prefill0.1/0.0: publishes t4, [3] tokens in full@prefill0 [11]
  1.010000 decode1.1/0.0: pulls t4 of prefill0 into full@decode1 [1], 7
  1.020000 fault: kill-daemon n1
  1.030000 network: n1 sends n0 GrantRequest t4
  1.060000 decode1.1/0.0: Delivered 7""".splitlines()
OTHERS = """\
  1.001000 prefill2.1/0.0: publishes t4, [3] tokens in full@prefill2 [11]
  1.030001 network: n1 sends n0 PeerHello
  1.040000 network: n1 sends n0 GrantRequest t3""".splitlines()


def test_the_parties_of_a_broken_promise_are_told_and_it_comes_last() -> None:
    told = story.tell(sorted(CONCERNS + OTHERS), "RIGHT_BYTES", PROBLEM, 4)
    assert told == ["... of 8 lines", *CONCERNS[1:], f"RIGHT_BYTES: {PROBLEM}"]
    assert len(story.tell(sorted(CONCERNS + OTHERS), "HUNG", "nothing moves", 60)) == 2 + 7
