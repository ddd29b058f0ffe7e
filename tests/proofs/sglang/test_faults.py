"""Every process killed in turn under load: right tokens or an error, and no request waits for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError

from tests.support.nodes.waiting import wait_until
from tests.support.sglang_servers.pairs import Llama, in_use
from tests.support.site_fixtures import EACH_VICTIM, VICTIMS, NewPrompt

LIMIT_S = 90.0
RECOVERY_S = 120.0


def seen(reply: Callable[[], dict[str, Any]], right: tuple[int, ...]) -> str:
    """What a request's client saw."""
    try:
        found = reply()
    except HTTPError as error:
        return f"status {error.code}"
    except TimeoutError:
        return "hung"
    except OSError:
        return "connection lost"
    if found["meta_info"]["finish_reason"]["type"] == "abort":
        return "aborted"
    return "right tokens" if tuple(found["output_ids"]) == right else "other tokens"


@EACH_VICTIM
def test_killed_under_load(llama: Llama, new_prompt: NewPrompt, victim: str) -> None:
    prompts = [new_prompt(200 + 60 * number) for number in range(8)]
    right = [llama.right_tokens(prompt, 40) for prompt in prompts]
    sent = [llama.pair.send(prompt, 40) for prompt in prompts]
    wait_until(lambda: bool(in_use(llama.decode)), "the decode engine has a request")
    VICTIMS[victim](llama)
    if "daemon" in victim:  # a supervisor starts it again
        llama.heal()
    saw = Counter(
        seen(lambda half=half: half.result(LIMIT_S), tokens)
        for (_, half), tokens in zip(sent, right, strict=True)
    )
    print(f"kill -9 of {victim}: {dict(saw)}")
    assert not {"hung", "other tokens"} & set(saw)
    for first, _ in sent:
        with_end = first.exception(LIMIT_S)  # the prefill's half ends too
        assert not isinstance(with_end, TimeoutError)
    llama.heal()

    def works() -> bool:
        prompt = new_prompt(100)
        expected = llama.right_tokens(prompt)
        first, second = llama.pair.send(prompt)
        first.exception(LIMIT_S)
        return seen(lambda: second.result(LIMIT_S), expected) == "right tokens"

    wait_until(works, "requests succeed again", RECOVERY_S)
