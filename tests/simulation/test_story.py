"""Of an episode's story, what concerns the broken promise is told."""

from __future__ import annotations

from tests.simulation import story

CHECK, PROBLEM = "RIGHT_BYTES", "pull 7 of decode1.1/0.0: 3 of 64"
CONCERNS = """\
  1.000000 prefill0.1/0.0: publishes t4, [3] tokens in full@prefill0 [11]
  1.010000 decode1.1/0.0: pulls t4 of prefill0 into full@decode1 [1], 7
  1.020000 fault: kill-daemon n1
  1.030000 network: n1 sends n0 GrantRequest t4
  1.040000 network: n1 is cut off from n0
  1.050000 n0 logs: transfer=t4 source=prefill0 sink=decode1 outcome=delivered
  1.060000 decode1.1/0.0: Delivered 7""".splitlines()
OTHERS = """\
  1.000000 prefill2.1/0.0: publishes t4, [3] tokens in full@prefill2 [11]
  1.010000 decode1.1/0.0: pulls t4 of prefill2 into full@decode1 [2], 8
  1.020000 fault: kill-daemon n2
  1.030000 network: n1 sends n0 PeerHello
  1.040000 network: n1 sends n0 GrantRequest t3
  1.050000 n0 logs: transfer=t3 source=prefill0 sink=decode1 outcome=delivered
  1.060000 decode1.1/0.0: Delivered 8""".splitlines()
STATES = """\
  1.070000 oracle: prefill0.1/0.0 at n0: ready=True connected=True pulls=0
  1.070000 oracle: decode1.1/0.0 at n1: ready=False connected=False pulls=1
  1.070000 oracle: decode3.1/0.0 at n2: ready=False connected=False pulls=1""".splitlines()
AFTER = ["  1.090000 decode1.1/0.0: dies"]
WHOLE = [*sorted(CONCERNS + OTHERS), f"  1.070000 oracle: {CHECK}: {PROBLEM}", *STATES, *AFTER]


def test_the_parties_of_a_broken_promise_are_told_and_it_comes_last() -> None:
    told = story.tell(WHOLE, CHECK, PROBLEM, 60)
    assert told == [
        "... 7 of 14 lines are left out",
        *CONCERNS[:-1],
        f"{CONCERNS[-1]}, t4 of prefill0",
        STATES[1],
        f"{CHECK}: {PROBLEM}",
    ]


def test_the_last_lines_are_told_where_there_are_more() -> None:
    told = story.tell(WHOLE, CHECK, PROBLEM, 5)
    assert told[1:] == [CONCERNS[-2], f"{CONCERNS[-1]}, t4 of prefill0", STATES[1], f"{CHECK}: {PROBLEM}"]


def test_what_names_no_party_leaves_nothing_out() -> None:
    assert story.tell(WHOLE, "HUNG", "nothing moves", 60)[1:-1] == [
        line.replace("Delivered 7", "Delivered 7, t4 of prefill0").replace(
            "Delivered 8", "Delivered 8, t4 of prefill2"
        )
        for line in WHOLE
        if "PeerHello" not in line
    ]
