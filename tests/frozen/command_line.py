"""The command line: verbs, options and defaults; exit codes; the shape of every `--json`.

Sentences of the help are not kept: they may be worded better. What a verb prints for people is not either.
"""

from __future__ import annotations

import ast
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from kvxferd import doctor as doctor_checks
from kvxferd.bench.results import Result
from kvxferd.cli.root import VERBS, root
from kvxferd.demo.report import DemoResults
from kvxferd.doctor import report
from kvxferd.doctor.finding import fail, ok, warn
from kvxferd.doctor.placements import PlacementResult
from kvxferd.doctor.runner import CHECKS
from kvxferd.layout.presets import LayerKind, ModelFacts, key_and_value
from kvxferd.tooling import exit_codes
from kvxferd.tooling.engine_pair import EnginePair, EngineShape
from tests.frozen.serving import Served, run_verb, serving
from tests.frozen.shapes import shape_of, struct_of
from tests.frozen.tree import ROOT, files_in, parsed
from tests.support.node_samples import PEER, SOURCE, StillNode, pull_record

NO_NODE = "NO_NODE"  # in the arguments: a socket that nobody answers
KINDS = {kind.__name__ for kind in (ok, warn, fail)}
SAMPLE, BAD_FILE = "SAMPLE", "BAD_FILE"  # the sample configuration, and one with a bad key
OUTPUT = "OUTPUT"  # in the arguments: a file that is not there
BUNDLE = "BUNDLE"  # likewise

# Against the sample node. With --json where the verb has it, so that the shape is seen too.
RUNS: list[tuple[str, ...]] = [
    ("status", "--json"),
    ("engines", "--json"),
    ("engines", "--topology", "--json"),
    ("engines", "--topology", SOURCE, "--json"),
    ("engines", "--topology", "nobody"),
    ("peers", "--json"),
    ("transfers", "--json"),
    ("history", "--json"),
    ("top", "--once", "--json"),
    ("ping", "tcp://127.0.0.1:1", "--json"),  # nothing listens there
    ("support-bundle", "--no-doctor", "--output", BUNDLE, "--json"),
    ("reload", "--json"),
    ("drain", "--json"),
    ("drain", "--wait", "--json"),
    ("drop-peer", PEER, "--json"),
    ("drop-peer", "tcp://1.2.3.4:5", "--json"),
    ("cancel", "req-1", "--json"),
    ("cancel", "--pull", "9", "--json"),
    ("cancel", "--pull", "8", "--json"),
    ("cancel",),
    ("disown", "gone-0", "--json"),
    ("disown", "decode-0", "--json"),
    ("status", "--socket", NO_NODE),
    ("status", "--config", NO_NODE),
    ("explain", "tiny-dense,tp=2", "tiny-dense", "--json", "--rank", "0,0"),
    ("explain", f"@{SOURCE}", "tiny-dense", "--json"),
    ("explain", "tiny-dense", "tiny-dense,num_blocks=none", "--json"),
    ("explain", "tiny-dense", "tiny-mla", "--json"),
    ("explain", "no-such-model", "tiny-dense", "--json"),
    ("explain", "tiny-dense", "tiny-dense", "--rank", "9,9"),
    ("keygen", "--output", OUTPUT),
    ("keygen", "--output", OUTPUT),
    ("config", "defaults"),
    ("config", "defaults", "--json"),
    ("config", "check", SAMPLE),
    ("config", "check", BAD_FILE, "--json"),
    ("config", "check", NO_NODE),
    ("config", "show", "--json"),
    ("config", "show", "--config", NO_NODE),
    ("doctor", "--check", "no-such-check"),
    ("demo", "--prefill-pp", "9", "--layers", "4"),
    ("bench", "--quick", "--rounds", "3"),
    ("serve", "--transfer-lease-s", "soon"),
    ("serve", "--config", NO_NODE),
    ("serve", "--help"),
    ("no-such-verb",),
    ("status", "--no-such-option"),
    ("--version",),
    ("--help",),
    (),
]


def surface() -> dict[str, Any]:
    """Return verbs, exit codes and shapes."""
    context = click.Context(root)
    verbs = dict(_commands(root, context))
    return {
        "verbs": list(VERBS),
        "program": [_parameter(parameter) for parameter in root.params],
        "options": {
            name: [_parameter(parameter) for parameter in verb.params]
            for name, verb in verbs.items()
            if verb is not None
        },
        "runs": asyncio.run(_runs()),
        "exits that take long to see": {
            "demo, a byte is wrong": exit_codes.EXIT_WRONG_BYTES,
            "demo, interrupted": exit_codes.EXIT_INTERRUPTED,
            "bench, something failed": exit_codes.EXIT_ERROR,
            "bench, interrupted": exit_codes.EXIT_INTERRUPTED,
        },
        "demo --json": shape_of(_demo()),
        "bench --json": struct_of(Result) if issubclass(Result, msgspec.Struct) else shape_of(Result),
        "doctor --json": _doctor(),
        "doctor --check": list(CHECKS),
        "doctor, findings": _findings(),
    }


def _commands(group: click.Group, context: click.Context, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, context, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _parameter(parameter: click.Parameter) -> dict[str, Any]:
    is_option = isinstance(parameter, click.Option)
    found = {
        "name": " ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name,
        "kind": parameter.param_type_name,
        "type": _type(parameter.type),
        "default": _default(parameter),
        "required": parameter.required,
        "multiple": parameter.multiple,
        "flag": getattr(parameter, "is_flag", False),
        "variable": parameter.envvar,
        "hidden": getattr(parameter, "hidden", False),
    }
    return {name: value for name, value in found.items() if value not in (None, False)}


def _type(kind: click.ParamType[Any]) -> Any:
    match kind:
        case click.Choice(choices=choices):
            return list(choices)
        case click.IntRange(min=least, max=most):
            return f"integer {least} to {most}"
    return kind.name


def _default(parameter: click.Parameter) -> Any:
    default = parameter.default
    return default if isinstance(default, str | int | float | bool | list | tuple) else None


async def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        paths = {
            NO_NODE: f"{directory}/nobody.sock",
            OUTPUT: f"{directory}/a.key",
            BUNDLE: f"{directory}/b.tar.gz",
        }
        paths |= {SAMPLE: str(ROOT / "config" / "kvxferd.toml"), BAD_FILE: f"{directory}/bad.toml"}
        Path(paths[BAD_FILE]).write_text("[transfer]\nlease = 3\n")
        async with serving(Path(directory), StillNode()) as served:
            for number, arguments in enumerate(RUNS):
                again = ", again" if arguments in RUNS[:number] else ""
                found[" ".join(arguments) + again] = await _run(served, [paths.get(a, a) for a in arguments])
    return found


async def _run(served: Served, arguments: list[str]) -> dict[str, Any]:
    verb = root.get_command(click.Context(root), arguments[0]) if arguments else None
    takes_socket = verb is not None and any("--socket" in p.opts for p in verb.params)
    if takes_socket and not {"--socket", "--config"} & set(arguments):
        arguments = [*arguments, "--socket", served.socket]
    result = await run_verb(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    run: dict[str, Any] = {"exit": result.exit_code}
    if "--json" in arguments and result.stdout:
        run["shape"] = shape_of(json.loads(result.stdout))
    if "[" in result.stderr and result.stderr.startswith("kvxferd: "):
        run["code"] = result.stderr.strip().rpartition("[")[2].rstrip("]")
    return run


def _demo() -> dict[str, Any]:
    shape = EngineShape(tp=1, pp=1, block_tokens=16, layout="HND")
    model = ModelFacts("demo", 8, (LayerKind.FULL,) * 2, key_and_value(8, 16))
    pair = EnginePair(model, prefill=shape, decode=shape, num_tokens=16, name="demo")
    record = pull_record()
    return DemoResults(
        pair,
        wanted=1,
        failures=Counter({"deadline": 1}),
        releases=Counter({"completed": 1}),
        records={record.pull: record},
    ).as_json()


def _doctor() -> dict[str, Any]:
    findings = [
        ok("a", "is well", number=1),
        warn("b", "is slow", "do"),
        fail("c", "is not", "do", essential=True),
    ]
    return {
        "shape": shape_of(report.as_json(findings, [PlacementResult(placement="direct")])),
        "finding": struct_of(type(findings[0])),
        "placement": struct_of(PlacementResult),
        "exits": {
            "all is well": report.exit_status(findings[:2], None),
            "something needed is not": report.exit_status(findings, None),
            "no GPU": report.exit_status(findings[:2], ()),
            "a placement refuses": report.exit_status(
                [], [PlacementResult(placement="direct", refusal="no")]
            ),
        },
    }


def _findings() -> dict[str, list[str]]:
    """Return the name of each finding and the names of its facts, as the checks' code has them."""
    folder = Path(str(doctor_checks.__file__)).parent.relative_to(ROOT)
    found: dict[str, set[str]] = {}
    for path in files_in(str(folder)):
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(check)), *_]) if (
                    name in KINDS
                ):
                    facts = {k.arg or "**" for k in node.keywords if k.arg != "essential"}
                    found.setdefault(check, set()).update(facts)
    return {check: sorted(facts) for check, facts in sorted(found.items())}
