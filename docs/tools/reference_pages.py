"""Write the parts of docs/reference/ whose text the code already holds; --check compares them.

    python docs/tools/reference_pages.py [--check]

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`. What stands
outside is written by hand and stays. The sources: config/kvxferd.toml and `kvxferd.config` for settings,
`kvxferd.errors` for codes, click for verbs, the route table for HTTP, the vLLM connector's tables for what
it supports, and for metrics and log lines what tests/frozen records, which a test compares with the code.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import inspect as types
from msgspec.inspect import type_info

from kvxferd import errors
from kvxferd.bench.results import Result
from kvxferd.cli.root import VERBS, root
from kvxferd.config import RELOADABLE, SETTINGS, Setting, flag_name
from kvxferd.config.sample import sample_comments
from kvxferd.control.http_routes import ROUTES
from kvxferd.doctor.peer_ping import Ping
from kvxferd.integrations.vllm import support

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
RECORDED = ROOT / "tests" / "frozen" / "recorded"
COMMAND = "python docs/tools/reference_pages.py"
WIDTH = 100

_PART = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end of generated -->", re.DOTALL)


def main() -> int:
    """Write the stale pages, or name them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    stale = 0
    for path in sorted(REFERENCE.glob("*.md")):
        old = path.read_text()
        new = rewritten(old)
        if new == old:
            continue
        name = path.relative_to(ROOT).as_posix()
        stale += 1
        if check:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, "what the code says now", lineterm="", n=1
            )
            print("\n".join(lines))
        else:
            path.write_text(new)
            print(f"wrote {name}")
    if check and stale:
        print(f"{stale} page(s) of docs/reference are stale; run: {COMMAND}")
    return 1 if check and stale else 0


def rewritten(page: str) -> str:
    """Return the page with every generated part made anew."""

    def part(match: re.Match[str]) -> str:
        body = "\n".join(PARTS[match[1]]())
        return f"<!-- generated: {match[1]} -->\n\n{body.strip()}\n\n<!-- end of generated -->"

    return _PART.sub(part, page)


def recorded(surface: str) -> Any:
    """Return what tests/frozen records of a surface."""
    return json.loads((RECORDED / f"{surface}.json").read_text())


def filled(text: str) -> str:
    """Return a paragraph of lines of at most `WIDTH` columns."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """Return text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def first_sentence(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    return inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0]


# --- settings


def settings() -> Iterator[str]:
    """Yield a section for each table of the configuration, and each of its keys."""
    of_sections, of_keys = sample_comments()
    section = ""
    for key, setting in SETTINGS.items():
        if setting.section != section:
            section = setting.section
            yield from (f"## `[{section}]`", "")
            if section in of_sections:
                yield from (filled(of_sections[section]), "")
        yield from (f"### `{key}`", "")
        yield from (filled(of_keys[key]), "")
        yield from table(
            ("value", "default", "flag", "variable", "takes effect"),
            [
                (
                    cell(value_of(setting)),
                    f"`{default_of(setting)}`",
                    f"`{flag_name(key)}`",
                    f"`{setting.variable}`",
                    "on reload" if key in RELOADABLE else "at a start",
                )
            ],
        )
        yield ""


def value_of(setting: Setting) -> str:
    """Return what a right value looks like: the title of the setting's type."""
    return next(meta.title for meta in setting.type.__metadata__ if getattr(meta, "title", None))


def default_of(setting: Setting) -> str:
    """Return the default as it is written in the file."""
    value = setting.default
    if setting.field == "mode":  # nobody reads a file mode in decimal
        return f"0o{value:o}"
    if isinstance(value, dict):
        return "{}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


# --- codes


def codes() -> Iterator[str]:
    """Yield a table of codes for each group of `kvxferd.errors.Code`."""
    meanings = meanings_of_codes()
    for group, members in groups_of_codes():
        yield from (f"## {group[0].upper()}{group[1:]}", "")
        yield from table(("code", "meaning"), [(f"`{code}`", meanings[code]) for code in members])
        yield ""


def groups_of_codes() -> Iterator[tuple[str, list[str]]]:
    """Yield the comments in the enum, each with the codes below it."""
    groups: dict[str, list[str]] = {}
    group = ""
    for line in inspect.getsource(errors.Code).splitlines():
        match line.split(maxsplit=1):
            case ["#", text]:
                group = text
            case [name, _] if name in errors.Code.__members__:
                groups.setdefault(group, []).append(errors.Code[name].value)
    yield from groups.items()


def meanings_of_codes() -> dict[str, str]:
    """Return the meaning of each code, from the table of the protocol."""
    section = (REFERENCE / "protocol.md").read_text().partition("### Codes\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `([a-z-]+)` \| (.+?) \|$", section, re.MULTILINE))


def exceptions() -> Iterator[str]:
    """Yield a table of the exceptions that carry codes."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    rows = []
    for kind in kinds:
        default = kind.default_code.value if issubclass(kind, errors.KvxferdError) else ""
        base = kind.__base__.__name__ if kind.__base__ else ""
        rows.append((f"`{kind.__name__}`", f"`{base}`", f"`{default}`", cell(first_sentence(kind))))
    yield from table(("exception", "base", "code, where none is given", "raised when"), rows)


# --- metrics


def metrics() -> Iterator[str]:
    """Yield a table of the daemon's own metrics."""
    rows = []
    for name, family in recorded("metrics")["daemon"].items():
        if name.startswith("process_"):
            continue
        shown = f"{name}_total" if family["type"] == "counter" else name
        rows.append((f"`{shown}`", family["type"], labels_of(family), cell(family["help"])))
    yield from table(("metric", "type", "labels and their values", "help"), rows)


def labels_of(family: dict[str, Any]) -> str:
    """Return the labels of a metric, with their values, all of which are there from the start."""
    codes = {code.value for code in errors.Code}
    shown = []
    for label, values in family["labels"].items():
        if label != "le":
            names = [value for value in values if not codes.issubset(values) or value not in codes]
            names += ["each code"] * codes.issubset(values)
            shown.append(f"`{label}`" + (f": {', '.join(names)}" if names else ""))
    return "; ".join(shown)


def buckets() -> Iterator[str]:
    """Yield a table of the upper bounds of the histograms' buckets."""
    rows = []
    for name, family in recorded("metrics")["daemon"].items():
        if "le" in family["labels"]:
            bounds = sorted(float(bound) for bound in family["labels"]["le"] if bound != "+Inf")
            rows.append((f"`{name}`", ", ".join(f"{bound:g}" for bound in bounds)))
    yield from table(("histogram", "upper bounds of its buckets"), rows)


def connector_metrics() -> Iterator[str]:
    """Yield a table of the metrics that vLLM shows for the connector."""
    rows = [(f"`{name}`", cell(text)) for name, text in recorded("metrics")["connector"].items()]
    yield from table(("metric", "help"), rows)


# --- log lines


def records() -> Iterator[str]:
    """Yield a table of the lines of records, one for each thing that ended."""
    lines: dict[str, dict[str, dict[str, str]]] = {}
    for name, fields in recorded("log_lines")["records"].items():
        event, level = name.split(", ")
        lines.setdefault(event, {})[level] = fields
    rows = []
    for event, levels in lines.items():
        for level, fields in levels.items():
            # The sample of a record has a phase of this name; a pull's line has one for each phase.
            names = [f"`{field}`" for field in fields if field != "key-1_s"]
            rows.append((f"`{event}`", level, ", ".join(names)))
    yield from table(("event", "level", "fields"), rows)


def events() -> Iterator[str]:
    """Yield a table of every other line of the daemon's."""
    rows = []
    for event, lines in recorded("log_lines")["events"].items():
        if event == "(computed)":
            continue
        for line in lines:
            fields = [f"`{field}`" for field in line["fields"] if field != "**"]
            if "**" in line["fields"]:
                fields.append("others")
            rows.append((f"`{cell(event)}`", level_of(line["level"]), ", ".join(fields)))
    yield from table(("event", "level", "fields"), rows)


def sentences() -> Iterator[str]:
    """Yield a table of the lines that movers and workers log as sentences."""
    rows = []
    for line in recorded("log_lines")["lines of movers and workers"]:
        level, _, text = line.partition(": ")
        if re.search(r"[a-z]{2}", text):  # a line may be nothing but placeholders
            rows.append((f"`{cell(text)}`", level_of(level)))
    yield from table(("line", "level"), rows)


def level_of(method: str) -> str:
    """Return the level of a line that a method of a logger writes."""
    return "error, with a traceback" if method == "exception" else method


# --- HTTP


def routes() -> Iterator[str]:
    """Yield a table of the routes: as recorded, with the first paragraph of the handler's docstring."""
    who = {"anyone": "anyone", "admin": "operators"}
    handlers = {f"{route.method} {route.path}": route.handler for route in ROUTES}
    rows = []
    for route in recorded("http")["routes"]:
        method, path = route["name"].split()
        shared = "yes" if route["shared"] else ""
        what = cell(first_sentence(handlers[route["name"]]))
        rows.append((method, f"`{path}`", who[route["access"]], shared, what))
    yield from table(("method", "path", "for", "shared", "what"), rows)


# --- the command line


def verbs() -> Iterator[str]:
    """Yield each verb's `--help`. Of `serve` without the options that are settings."""
    for name in VERBS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        yield from verb(name, command)


def verb(name: str, command: click.Command) -> Iterator[str]:
    """Yield the `--help` of a verb, or of each verb of a group."""
    if isinstance(command, click.Group):
        for part, inner in command.commands.items():
            yield from verb(f"{name} {part}", inner)
    else:
        flags = {flag_name(key) for key in SETTINGS}
        command.params = [param for param in command.params if not flags & set(param.opts)]
        context = click.Context(
            command,
            info_name=f"kvxferd {name}",
            terminal_width=WIDTH,
            max_content_width=WIDTH,
            help_option_names=["-h", "--help"],
        )
        help_text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        yield from (f"## `kvxferd {name}`", "", "```text", help_text, "```", "")


# --- JSON of the verbs

# Shapes that a run against the sample node does not show: those of structs.
STRUCTS: dict[str, type[msgspec.Struct]] = {"ping": Ping, "bench": Result}


def json_shapes() -> Iterator[str]:
    """Yield the shape of each verb's `--json`, as tests/frozen records it of a real run."""
    surface = recorded("command_line")
    shapes: dict[str, list[tuple[str, Any]]] = {}
    for line, run in surface["runs"].items():
        if "shape" in run:
            words = line.split()
            verb = " ".join(words[:2]) if words[0] == "config" else words[0]
            shapes.setdefault(verb, []).append((f"kvxferd {line}", run["shape"]))
    version = {"json_version": "int"}  # of what is recorded without it
    shapes["demo"] = [("kvxferd demo --json", version | surface["demo --json"])]
    found = surface["doctor --json"]
    listed = {"findings": [of_struct(found["finding"])], "placements": [of_struct(found["placement"])]}
    shapes["doctor"] = [("kvxferd doctor --json", version | found["shape"] | listed)]
    for verb, struct in STRUCTS.items():
        shapes[verb] = [(f"kvxferd {verb} --json", version | of_type(type_info(struct)))]
    shapes["ping"][0][1]["status"] = "int"  # the exit code
    for verb, runs in sorted(shapes.items()):
        yield from (f"## `kvxferd {verb}`", "")
        seen: list[Any] = []
        for line, shape in runs:
            if shape not in seen:
                seen.append(shape)
                yield from ("```text", f"$ {line}", *shown_shape(without_settings(shape)), "```", "")


def without_settings(shape: Any) -> Any:
    """Return the shape with one entry in place of one for every setting."""
    if not isinstance(shape, dict):
        return shape
    if shape.keys() == SETTINGS.keys():
        kinds = {json.dumps(value) for value in shape.values()}
        is_object = all(kind.startswith("{") for kind in kinds)
        return {"SECTION.KEY": {"value": "any", "source": "str"} if is_object else "any"}
    return {key: without_settings(value) for key, value in shape.items()}


def of_struct(struct: dict[str, Any]) -> Any:
    """Return the shape of a struct as tests/frozen records it."""
    return {field["name"]: of_recorded(field["type"]) for field in struct["fields"]}


def of_recorded(kind: Any) -> Any:
    """Return the shape of a type as tests/frozen records it."""
    match kind:
        case {"fields": _}:
            return of_struct(kind)
        case {"enum": _}:
            return "str"
        case {"list": inner}:
            return [of_recorded(inner)]
        case {"tuple": inner}:
            return [of_recorded(one.get("type", one)) for one in inner]
        case {"map": [_, value]}:
            return {"NAME": of_recorded(value)}
        case {"any of": inner}:
            return " or ".join(flat_shape(of_recorded(one)) for one in inner)
        case dict():
            return next(iter(kind))
    return kind


def of_type(kind: types.Type) -> Any:
    """Return the shape of a type."""
    match kind:
        case types.StructType(fields=fields):
            return {field.encode_name: of_type(field.type) for field in fields}
        case types.EnumType() | types.LiteralType() | types.StrType():
            return "str"
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return [of_type(item)]
        case types.TupleType(item_types=items):
            return [of_type(item) for item in items]
        case types.NamedTupleType(fields=fields):
            return [of_type(field.type) for field in fields]
        case types.DictType(value_type=value):
            return {"NAME": of_type(value)}
        case types.UnionType(types=inner):
            return " or ".join(dict.fromkeys(flat_shape(of_type(one)) for one in inner))
        case types.Metadata(type=inner):
            return of_type(inner)
    return {types.IntType: "int", types.FloatType: "float", types.BoolType: "bool", types.NoneType: "null"}[
        type(kind)
    ]


def shown_shape(shape: Any, margin: str = "", name: str = "", end: str = "") -> Iterator[str]:
    """Yield a shape as JSON without quotes around types, in lines of at most `WIDTH` columns."""
    flat = f"{margin}{name}{flat_shape(shape)}{end}"
    if len(flat) <= WIDTH or not isinstance(shape, dict | list):
        yield flat
        return
    entries = (
        [(f'"{key}": ', value) for key, value in shape.items()]
        if isinstance(shape, dict)
        else [("", value) for value in shape]
    )
    opening, closing = "{}" if isinstance(shape, dict) else "[]"
    yield f"{margin}{name}{opening}"
    for number, (key, value) in enumerate(entries, 1):
        yield from shown_shape(value, margin + "  ", key, "," if number < len(entries) else "")
    yield f"{margin}{closing}{end}"


def flat_shape(shape: Any) -> str:
    """Return a shape in one line. A list of types is one value of any of them."""
    match shape:
        case dict():
            return "{" + ", ".join(f'"{key}": {flat_shape(value)}' for key, value in shape.items()) + "}"
        case list():
            return "[" + ", ".join(map(flat_shape, shape)) + "]"
    return str(shape)


# --- vLLM


def vllm_versions() -> Iterator[str]:
    """Yield a table of vLLM's versions."""
    rows = ((f"`{version}`", note) for version, note in support.VLLM_VERSIONS.items())
    yield from table(("vLLM", "what was run"), rows)


def vllm_caches() -> Iterator[str]:
    """Yield a table of vLLM's classes of caches."""
    rows = [
        (f"`{name}`", yes_or_no(found.kind is not None), found.note) for name, found in support.CACHES.items()
    ]
    mixed = "one spec for each layer of a group: all of one kind and window"
    rows.insert(len([row for row in rows if row[1] == "yes"]), (f"`{support.UNIFORM_SPEC}`", "yes", mixed))
    yield from table(("cache", "supported", "what moves, or why not"), rows)
    yield from ("", "A recurrent state (`MambaSpec`) is one of these:", "")
    yield from table(
        ("mixer", "what moves"), ((f"`{name}`", note) for name, (_, note) in support.MIXERS.items())
    )


def vllm_backends() -> Iterator[str]:
    """Yield a table of attention backends, those that are alike in one row."""
    alike: dict[support.BackendSupport, list[str]] = {}
    for name, found in support.BACKENDS.items():
        alike.setdefault(found, []).append(f"`{name}`")
    rows = [
        (
            ", ".join(names),
            yes_or_no(found.content is not None),
            found.content.value if found.content else found.note,
        )
        for found, names in alike.items()
    ]
    yield from table(("attention backend", "supported", "what a block holds, or why not"), rows)


def vllm_quantisation() -> Iterator[str]:
    """Yield a table of the quantisation of caches."""
    rows = [
        (f"`{name}`", yes_or_no(found.is_supported), found.note)
        for name, found in support.QUANT_MODES.items()
    ]
    rows += [
        (f"`{name}` of a latent", "yes", "opaque rows, to the same kind alone")
        for name in support.OPAQUE_DTYPES
    ]
    yield from table(("quantisation of the cache", "supported", "what, or why not"), rows)


def vllm_parallelism() -> Iterator[str]:
    """Yield a table of parallel sizes, and one of the fields that have to be as they usually are."""
    yield from table(
        ("parallelism", "above 1", "how, or what to do"),
        (
            (f"`{name}`", yes_or_no(found.is_supported), found.note)
            for name, found in support.PARALLEL_SIZES.items()
        ),
    )
    yield from ("", "These fields have to be:", "")
    rules = (*support.SPEC_RULES, *support.WINDOW_RULES, *support.CACHE_CONFIG_RULES)
    yield from table(("field", "accepted"), ((f"`{rule.field}`", rule.accepted) for rule in rules))
    methods = ", ".join(f"`{name}`" for name in support.METHODS_WITHOUT_DRAFT_CACHE)
    speculation = (
        f"Of speculative decoding, {methods} keep nothing in the cache. Of every other method the draft's "
        "own cache moves with the model's."
    )
    yield from ("", filled(speculation))


def yes_or_no(is_so: bool) -> str:
    """Return a cell of a column of two values."""
    return "yes" if is_so else "no"


# ---


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield re.sub(r"\|  +\|", "| |", f"| {' | '.join(row)} |")


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": settings,
    "codes": codes,
    "exceptions": exceptions,
    "metrics": metrics,
    "buckets": buckets,
    "connector metrics": connector_metrics,
    "records": records,
    "events": events,
    "sentences": sentences,
    "routes": routes,
    "verbs": verbs,
    "json": json_shapes,
    "vllm versions": vllm_versions,
    "vllm caches": vllm_caches,
    "vllm backends": vllm_backends,
    "vllm quantisation": vllm_quantisation,
    "vllm parallelism": vllm_parallelism,
}

if __name__ == "__main__":
    sys.exit(main())
