"""What ranks' processes of honest engines do, beside what all rank processes of the tests do."""

from __future__ import annotations

import os

import numpy as np

from kvxferd import client
from kvxferd.die_with_parent import die_with_parent
from kvxferd.layout.presets import attention_layout
from kvxferd.tooling import content
from kvxferd.tooling.content import RequestBlocks
from tests.proofs.hostile.users import ENGINES
from tests.support.nodes.agent import Agent
from tests.support.nodes.fleet import FACTS
from tests.support.nodes.requests import spec_of


def become_honest(_: Agent) -> None:
    """Be the engines' user, who may not be able to read where all of this lies."""
    layout = attention_layout(spec=spec_of("warm"), **FACTS)
    memory = np.zeros(layout.regions[0].size_bytes, np.uint8)
    warm = RequestBlocks(1, {"full": np.array([0], np.int32)}, 16)
    content.write(memory, layout, warm)  # what is imported late is imported now
    content.check(memory, layout, warm)
    ENGINES.become()
    die_with_parent(os.getppid())  # which a change of user has taken back


def pass_by(socket: str, _: Agent) -> None:
    """Connect, and leave."""
    client.connect(socket, name="passing").close()
