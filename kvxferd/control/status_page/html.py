"""Text from outside as HTML: escaped, without control characters, and in URLs percent-encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import quote

MAX_ROWS = 100  # of one table: a browser renews it every few seconds
MAX_ID_CHARS = 72  # of an id in a table; its own page has all of it
MAX_CHARS = 2_000  # of one cell; a message of a library may be long


class Html(str):
    """Text that is HTML already. Every other text is escaped where it is used."""

    __slots__ = ()


def html(value: object) -> Html:
    """Return the value as HTML: escaped, unless it is HTML. Control characters are replaced."""
    if isinstance(value, Html):
        return value
    text = str(value)
    if len(text) > MAX_CHARS:
        text = text[: MAX_CHARS - 1] + "…"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Html(escape(text))


def tag(name: str, content: object = "", css: str = "") -> Html:
    """Return an element with that content. `css`: its classes."""
    attribute = f' class="{css}"' if css else ""
    return Html(f"<{name}{attribute}>{html(content)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Html:
    """Return the parts as one piece of HTML."""
    return Html(separator.join(html(part) for part in parts))


def transfer_link(transfer_id: str) -> Html:
    """Return a link to the page of that transfer's records."""
    # Every byte but letters, digits and "-._~" is encoded, so that no id leaves the query. One with lone
    # surrogates, which no JSON or msgpack text has, would be no error either.
    query = quote(transfer_id, safe="", errors="surrogatepass")
    shown = transfer_id if len(transfer_id) <= MAX_ID_CHARS else transfer_id[: MAX_ID_CHARS - 1] + "…"
    return Html(f'<a href="/transfers?id={query}">{html(shown)}</a>')


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    empty: str = "none",
    note: str = "",
    total: int = 0,
) -> Html:
    """Return a heading and a table, or the sentence `empty`. A cell is a value, or HTML.

    A head that begins with ">" is of numbers: its column is aligned to the right. One that begins with "|" is
    of words that are not broken. `total`: how many rows there are, where only the first are given.
    """
    rows = list(rows)
    heading = tag("h2", title) + (tag("p", note, "note") if note else "")
    if not rows:
        return Html(heading + tag("p", empty, "note"))
    num_more = max(total, len(rows)) - min(len(rows), MAX_ROWS)
    more = tag("p", f"and {num_more:,} more", "note") if num_more > 0 else ""
    styles = [{">": "num", "|": "word"}.get(head[:1], "") for head in heads]
    head = join(tag("th", name.lstrip(">|"), css) for name, css in zip(heads, styles, strict=True))
    body = join(
        tag("tr", join(tag("td", cell, css) for cell, css in zip(row, styles, strict=True)))
        for row in rows[:MAX_ROWS]
    )
    return Html(
        f'{heading}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{more}"
    )
