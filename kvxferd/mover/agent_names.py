"""Names of movers' agents: the daemon's boot id and a random part, so that no name is ever used twice."""

from __future__ import annotations

import secrets

from kvxferd.ids import AgentName, BootId
from kvxferd.wire.limits import MAX_NAME_CHARS


def new_agent_name(boot: BootId) -> AgentName:
    """Return a name for a mover of that daemon."""
    return AgentName(f"{boot}/{secrets.token_hex(8)}")


def is_agent_name(agent: AgentName, boot: BootId) -> bool:
    """Whether a mover of that daemon may have this name, which its worker has chosen."""
    return agent.startswith(f"{boot}/") and len(agent) <= MAX_NAME_CHARS
