"""Removes secrets from what leaves a node: a support bundle, and requests in the log.

What looks like a secret counts as one: a public key has the same 64 hex digits as a secret key. In its place
stands a fingerprint, the same for the same key, so that the keys of two nodes can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "(not shown)"
# A name with one of these words names a secret.
_WORDS = "KEY|SECRET|TOKEN|PASS|CREDENTIAL|AUTH|COOKIE"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
# `num_tokens=100`, `keys=3`: tokens and keys are counted here, and no secret is a short number.
_COUNTED = re.compile(r"TOKEN|KEY", re.IGNORECASE)
_COUNT = re.compile(r"-?\d{1,12}(?:\.\d+)?")
_FILE_NAME = re.compile(r"[_-]FILE\Z", re.IGNORECASE)  # names a file, which is no secret
# NAME=text, NAME: text, "name": "text", --name text. A name is taken whole or not at all (`++`): a text of
# others must not make this look at it again from each of its letters.
_NAMED = re.compile(
    rf"(?P<name>(?<![\w.-])(?P<flag>--)?(?=[\w.-]*?(?:{_WORDS}))[\w.-]++)"
    r"(?P<between>\\?[\"']?\s*[=:]\s*|(?(flag)\s+|(?!)))"
    r"(?P<value>\"(?:[^\"\\]|\\.)*+\"|\\\"(?:[^\"\\]|\\[^\"])*+\\\"|'[^'\n]*'"
    # A list with one of lists in it; not what follows a bracket that nothing closes, which would be looked at
    # again from each of them.
    r"|\[(?:[^\[\]\n]|\[[^\[\]\n]*\])*+\]"
    r"|(?:Digest|AWS4-HMAC-SHA256)\s[^\n]*|(?:Bearer|Basic|Token|ApiKey|Negotiate)\s+\S+|[^\s,;&}\]]+)",
    re.IGNORECASE,
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL)
_USER_INFO = re.compile(r"(?<=://)[^/\s\"']+@")
_USER_FLAG = re.compile(r"(?<!\S)(-u|--user|--proxy-user)([ =])[^\s:]*:\S+")  # curl's
# Of 16 bytes and more in hex: a CURVE key has 32, the nonce of a reference 16. Of 32 and more in base64.
_KEYS = re.compile(
    r"(?<![0-9A-Za-z])[0-9a-fA-F]{32,}(?![0-9A-Za-z])"
    r"|(?<![0-9A-Za-z+/_-])[0-9A-Za-z+/_-]{43,}={1,2}(?![0-9A-Za-z+/_-])"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]+\.[\w-]*"
    r"|\b(?:sk|hf|gh[opsu]|github_pat|xox[abp]|glpat|AKIA)[-_]?[0-9A-Za-z_-]{16,}"
)
MIN_KNOWN_CHARS = 4  # a shorter known secret is not looked for: it would be found everywhere


def is_secret_name(name: str) -> bool:
    """Whether a setting, variable or field of that name may hold a secret."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str, known: Collection[str] = ()) -> str:
    """Return the text without `known` secrets, those after a telling name, and what looks like a key."""
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= MIN_KNOWN_CHARS:
            text = text.replace(secret, HIDDEN)
    text = _PEM.sub(HIDDEN, text)
    text = _USER_INFO.sub("", text)
    text = _USER_FLAG.sub(rf"\1\2{HIDDEN}", text)
    text = _NAMED.sub(_without_value, text)  # first: a long NAME= looks like base64
    return _KEYS.sub(lambda match: fingerprint(match[0]), text)


def redact_value(value: Any, known: Collection[str] = ()) -> Any:
    """Return JSON data without secrets, as `redact` does for each text and field in it."""
    match value:
        case str():
            return redact(value, known)
        case Mapping():
            return {
                redact(str(name), known): _redact_field(str(name), field, known)
                for name, field in value.items()
            }
        case list() | tuple():
            return [redact_value(item, known) for item in value]
        case _:
            return value


def fingerprint(key: str) -> str:
    """Return what stands for a key: equal keys have equal fingerprints, whatever their case."""
    return f"(key {hashlib.sha256(key.lower().encode()).hexdigest()[:12]})"


def _redact_field(name: str, value: Any, known: Collection[str]) -> Any:
    if not is_secret_name(name) or _FILE_NAME.search(name):
        return redact_value(value, known)
    if value is None or isinstance(value, bool) or value in ("", [], {}):
        return value
    if isinstance(value, int | float):
        return value if _COUNTED.search(name) else HIDDEN
    if isinstance(value, list | tuple):
        return [_redact_field(name, item, known) for item in value]
    if isinstance(value, Mapping):
        return {redact(str(key), known): _redact_field(name, item, known) for key, item in value.items()}
    return fingerprint(value) if _KEYS.fullmatch(str(value)) else HIDDEN


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    plain = value.strip("\\\"'")
    is_shown = (
        plain.startswith(("(key ", HIDDEN[:4]))
        or (_COUNTED.search(name) and _COUNT.fullmatch(plain))
        or (_FILE_NAME.search(name) and plain.startswith("/"))
    )
    if is_shown:
        return match[0]
    return f"{name}{match['between']}{fingerprint(plain) if _KEYS.fullmatch(plain) else HIDDEN}"
