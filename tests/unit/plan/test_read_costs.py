"""The cost model: what it chooses, by arithmetic written out here, and what it learns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvxferd.ids import AgentName, Rank
from kvxferd.plan.covering import FormCount
from kvxferd.plan.read_costs import PULL_S, Choice, CostModel, LinkCosts, ReadShape
from kvxferd.plan.stretches import Copies, StretchForm

SOURCE = Rank(0, 0)
AGENT = AgentName("p/0")
AGENTS = {SOURCE: AGENT}


def form(num_copies: int, length: int, size_bytes: int = 0) -> StretchForm:
    """Return a form of so many copies; as large as they are unless said otherwise."""
    image = np.arange(num_copies) * length
    return StretchForm(size_bytes or num_copies * length, 1, (Copies(length, image, image, None),))


def connected_model() -> CostModel:
    """Return a model that a first read from the agent is known to."""
    model = CostModel()
    model.link(AGENT).learn(ReadShape(1, 4096), 0.0, 0.005)
    return model


@pytest.mark.parametrize(
    ("one", "count", "descriptor_s", "pays"),
    [
        # 64 MiB as 262,144 runs of 256 bytes: 603 + 8.4 ms. As 8,192 stretches: 18.8 + 8.4, and 1.0 of copy.
        (form(32, 256), 8192, 2.3e-6, True),
        (form(4, 64 << 10), 256, 2.3e-6, False),  # 2.3 us of descriptor, 8.2 of bytes; the copy takes 16
        (form(4, 256, 200_000), 1000, 2.3e-6, False),  # mostly gaps: 9.3 us by runs, 27 by the stretch
        (form(32, 256), 1, 2.3e-6, False),  # 74 us: less than what a chunk costs to be made
        (form(32, 256), 8192, 0.05e-6, False),  # 21.5 ms against 17.8: a gain below the model's own error
        (form(16, 1024), 1024, 2.3e-6, True),
        (form(16, 1024), 1024, 0.05e-6, False),  # 16 MiB take 2.9 ms, and the copy alone 4.2
    ],
)
def test_what_is_covered(one: StretchForm, count: int, descriptor_s: float, pays: bool) -> None:
    model = CostModel()
    model.link(AGENT).descriptor_s = descriptor_s
    choice = model.choose([FormCount(SOURCE, one, count, count)], AGENTS)
    assert choice.pays(SOURCE, one) is pays
    num_bytes = count * one.num_bytes
    assert choice.direct_s == pytest.approx(count * one.num_copies * descriptor_s + num_bytes / 8e9)
    if pays:
        read_s = max(count * descriptor_s + num_bytes / 8e9, num_bytes / 4e9)
        assert choice.chosen_s == pytest.approx(read_s + (4 << 20) / 4e9)


def test_each_form_is_decided_by_itself() -> None:
    small, large = form(32, 256), form(1, 256 << 10)
    choice = CostModel().choose(
        [FormCount(SOURCE, small, 8192, 8192), FormCount(SOURCE, large, 100, 100)], AGENTS
    )
    assert choice.pays(SOURCE, small)
    assert not choice.pays(SOURCE, large)


def test_what_cannot_be_covered_is_predicted_as_it_is_read() -> None:
    small = form(32, 256)
    counts = [FormCount(SOURCE, small, 8192, 8192)]
    choice = CostModel().choose(counts, AGENTS, lambda rank, one: one is not small)
    assert not choice.pays(SOURCE, small)
    assert choice.chosen_s == choice.direct_s == CostModel().choose(counts, AGENTS).direct_s


@pytest.mark.parametrize("descriptor_s", [0.2e-6, 2.3e-6, 9e-6])
@pytest.mark.parametrize("bytes_per_s", [0.4e9, 8e9, 40e9])
def test_the_constants_are_learnt(descriptor_s: float, bytes_per_s: float) -> None:
    """From slices of either kind, with a noise of 20 %: predictions come within a factor of 1.5."""
    rng = random.Random(1)
    link = LinkCosts()
    now = 0.0
    shapes = [ReadShape(2000, 512_000), ReadShape(4, 16 << 20), ReadShape(500, 4 << 20)]
    for _ in range(100):
        for shape in shapes:
            true_s = shape.num_descriptors * descriptor_s + shape.num_bytes / bytes_per_s
            link.learn(shape, now, now + true_s * rng.uniform(0.8, 1.2))
            now += 10.0
    for shape in shapes:
        true_s = shape.num_descriptors * descriptor_s + shape.num_bytes / bytes_per_s
        assert 1 / 1.5 < link.predict_s(shape) / true_s < 1.5


def test_what_says_little_teaches_little() -> None:
    """A slice that waited for the processor; slices of a round trip, and a pull that is as short."""
    link = connected_model().link(AGENT)
    shape = ReadShape(2000, 512_000)
    before = link.predict_s(shape)
    link.learn(shape, 1.0, 10.0)
    link.flush()
    assert before < link.predict_s(shape) < before * 1.5
    link = LinkCosts()
    for number in range(1000):
        link.learn(ReadShape(1, 4096), float(number), number + 50e-6)
    assert link == LinkCosts(last_done_at=999 + 50e-6)
    model = connected_model()
    model.learn_pull(model.choose([FormCount(SOURCE, form(32, 256), 1, 1)], AGENTS), 1.0)
    assert model.link(AGENT) == LinkCosts(last_done_at=0.005)


def test_what_waited_for_the_connection_teaches_nothing() -> None:
    """The first slice from an agent, and the pull that it was of."""
    model = CostModel()
    choice = choose(model, covered=True)
    model.learn(AGENT, ReadShape(2000, 512_000), 0.0, 10.0)
    model.learn_pull(choice, 10.0)
    model.link(AGENT).flush()
    assert model.link(AGENT) == LinkCosts(last_done_at=10.0)


def test_a_pull_that_connects_to_one_agent_teaches_nothing_of_others() -> None:
    model, other = connected_model(), Rank(0, 1)
    before = model.link(AGENT).direct_correction
    forms = [FormCount(rank, form(1, 1 << 20), 64, 64) for rank in (SOURCE, other)]
    choice = model.choose(forms, AGENTS | {other: AgentName("other")})
    model.learn_pull(choice, 50 * choice.chosen_s)
    assert model.link(AGENT).direct_correction == before


def test_what_every_pull_takes_corrects_nothing() -> None:
    model = connected_model()
    choice = choose(model, covered=True)
    model.learn_pull(choice, choice.chosen_s + PULL_S)
    assert model.link(AGENT).covering_correction == pytest.approx(1.0)


def test_stretches_that_follow_one_another_are_one_descriptor() -> None:
    """Of 8,192 stretches of 8 KiB, each alone or four at a time: 18.8 or 4.7 ms beside 8.4 of bytes."""
    one = form(32, 256)
    model = CostModel()
    model.copy_bytes_per_s = 1e12
    apart, joined = (model.choose([FormCount(SOURCE, one, 8192, num)], AGENTS) for num in (8192, 2048))
    assert apart.chosen_s - joined.chosen_s == pytest.approx(6144 * 2.3e-6)
    assert apart.direct_s == joined.direct_s
    run = form(1, 8192)
    assert not model.choose([FormCount(SOURCE, run, 8192, 1)], AGENTS).covered, "it is one read directly too"


def test_slices_that_are_done_in_bursts_teach_their_mean() -> None:
    """Three in flight, of 2 ms each, always seen to be done together: learnt as 2 ms, without end."""
    shape = ReadShape(50, 1 << 20)
    link = LinkCosts()
    posted = now = 1.0
    for _ in range(100):
        posted, now = now, now + 0.006
        for _ in range(3):
            link.learn(shape, posted, now)
    link.flush()
    assert link.predict_s(shape) == pytest.approx(0.002, rel=0.1)


def test_an_agent_that_was_dropped_stays_forgotten() -> None:
    model = CostModel()
    model.link(AGENT).descriptor_s = 1e-5
    model.forget(AGENT)
    model.learn(AGENT, ReadShape(2000, 512_000), 0.0, 1.0)
    assert model.link(AGENT) == LinkCosts()


def test_the_copies_speed_is_learnt() -> None:
    model = CostModel()
    for _ in range(40):
        model.learn_copy(4 << 20, (4 << 20) / 1e9)
    assert model.copy_bytes_per_s == pytest.approx(1e9, rel=0.05)


def choose(model: CostModel, covered: bool) -> Choice:
    one = form(32, 256) if covered else form(4, 64 << 10)
    choice = model.choose([FormCount(SOURCE, one, 8192, 8192)], AGENTS)
    assert bool(choice.covered) == covered
    return choice


@pytest.mark.parametrize("covered", [False, True])
@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
def test_pulls_that_take_longer_than_their_slices_are_predicted_after_eight(
    factor: float, covered: bool
) -> None:
    """The same pull again and again, with a noise of 20 %: from the ninth on within a factor of 1.5."""
    rng = random.Random(3)
    model = connected_model()
    true_s = choose(model, covered).chosen_s * factor
    for _ in range(8):
        model.learn_pull(choose(model, covered), true_s * rng.uniform(0.8, 1.2))
    for _ in range(30):
        elapsed_s = true_s * rng.uniform(0.8, 1.2)
        choice = choose(model, covered)
        assert 1 / 1.5 < choice.chosen_s / elapsed_s < 1.5
        model.learn_pull(choice, elapsed_s)


def test_a_way_that_went_badly_is_tried_again() -> None:
    """8 KiB runs, covered at a gain of 1.4: worse than predicted by far, then not chosen, and then again."""
    model = connected_model()
    one = form(2, 8192)
    counts = [FormCount(SOURCE, one, 4096, 4096)]
    choice = model.choose(counts, AGENTS)
    assert choice.covered
    model.learn_pull(choice, 10.0)
    choice = model.choose(counts, AGENTS)
    assert not choice.covered
    for _ in range(60):
        model.learn_pull(choice, choice.direct_s + PULL_S)
    assert model.choose(counts, AGENTS).covered


def test_one_agents_pulls_teach_nothing_of_anothers() -> None:
    model = connected_model()
    other = AgentName("p/1")
    model.link(other)
    model.learn_pull(choose(model, covered=True), 10.0)
    assert model.link(AGENT).covering_correction > 1.0
    assert model.link(other) == LinkCosts()
