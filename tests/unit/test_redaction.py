"""What leaves a node has no secrets in it, and what is no secret stays readable."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.redaction import HIDDEN, fingerprint, redact, redact_value

KEY = "354db91c7d2e479b1fdfbd2fd4b3f0240a466b380126cc90cf82185728fcd524"
SECRETS = st.text(string.ascii_letters + string.digits + "+/_.-!", min_size=8, max_size=60).filter(
    lambda text: any(c.isalpha() for c in text) and text[0].isalpha() and "key" not in text.lower()
)
NAMES = st.sampled_from(
    ["AWS_SECRET_ACCESS_KEY", "password", "hf_token", "api-key", "Authorization", "db.passwd", "cookie"]
)


@given(NAMES, SECRETS)
def test_a_value_with_a_telling_name_is_not_shown(name: str, secret: str) -> None:
    for text in (
        f"{name}={secret}", f"{name}: {secret}", f'"{name}": "{secret}"', f"a --{name} {secret} b",
        f"{name} = '{secret}'", json.dumps(json.dumps({name: secret})), f"{name}=Bearer {secret}",
    ):  # fmt: skip
        assert secret not in redact(text), text
    for value in ({name: secret}, {"a": [{name: secret}]}, {name: [secret]}, {name: {"inner": secret}}):
        assert secret not in json.dumps(redact_value(value))


@given(st.text(max_size=40), SECRETS, st.text(max_size=40))
def test_a_known_secret_is_found_anywhere(before: str, secret: str, after: str) -> None:
    assert secret not in redact(f"{before}{secret}{after}", [secret])


@given(
    st.binary(min_size=16, max_size=64), st.sampled_from(["{}", "tcp://h:1#{}", "[{}]", '"{}",', "its {}."])
)
def test_what_looks_like_a_key_has_a_fingerprint(key: bytes, around: str) -> None:
    text = redact(around.format(key.hex()))
    assert key.hex() not in text
    assert fingerprint(key.hex().upper()) in text


@pytest.mark.parametrize(
    "text",
    [
        "a public key of 64 hex digits",
        "num_tokens=4096 block_tokens: 16",
        "curve_secret_key_file = '/etc/kvxferd/peer.key'",
        "cannot reach tcp://10.0.0.1:9441: no reply to PeerHello for 2 s",
        "UCX_TLS=rc,cuda_copy pid=12 uid=0",
        "python3 -m kvxferd.cli drain --wait",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_numbers_and_empty_values_stay() -> None:
    value = {"num_tokens": 5, "key": "", "tokens": [1, 2], "curve_allowed_keys_file": "/a/b", "x": None}
    assert redact_value(value) == value
    assert redact_value({"password": 1234}) == {"password": HIDDEN}
    assert redact_value({"curve_allowed_keys": [KEY]}) == {"curve_allowed_keys": [fingerprint(KEY)]}


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN EC PRIVATE KEY-----\nMHQCAQEE\n-----END EC PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMHQCAQEE and the file ends",
        "postgres://user:MHQCAQEE@host/db",
        "postgres://user:p@MHQCAQEE@host/db",
        "curl -u root:MHQCAQEE --unix-socket control.sock",
        'password = "say \\"MHQCAQEE" and more',
        'Authorization: Digest username="MHQCAQEE", response="MHQCAQEE"',
        "Authorization: Token MHQCAQEE",
        "keys=[[1, 2], MHQCAQEE]",
        "github_pat_MHQCAQEEMHQCAQEEMHQC_AQEE",
        "ghp_MHQCAQEEMHQCAQEEMHQCAQEE",
        "x MHQCAQEEMHQCAQEEMHQCAQEEMHQCAQEEMHQCAQEEMHQ= y",
    ],
)
def test_other_forms_of_secrets(text: str) -> None:
    assert "MHQCAQEE" not in redact(text)


@pytest.mark.parametrize("part", ["a.", "a.a.key", "key-", "--key", "a.token."])
def test_a_long_name_is_looked_at_once(part: str) -> None:
    """Its time is linear: with a quadratic one this would take minutes."""
    text = part * 100_000
    assert redact(text) == text
    assert "hunter2" not in redact(f"{text}key=hunter2")


@pytest.mark.parametrize("part", ["key=[ ", "eyJ-", "sk-", "://a", 'key="\\', "key='"])
def test_a_long_value_is_looked_at_once(part: str) -> None:
    """As for a long name: a text without an end is not read again from each of its beginnings."""
    assert "hunter2" not in redact(f"{part * 40_000} key=hunter2")
