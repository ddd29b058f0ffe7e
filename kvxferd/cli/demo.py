"""`kvxferd demo`: its options and its exit code."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvxferd.layout.presets import LAYOUT_NAMES
from kvxferd.tooling.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_WRONG_BYTES

if TYPE_CHECKING:
    from kvxferd.demo.report import DemoResults
    from kvxferd.demo.runner import Demo
    from kvxferd.tooling.engine_pair import EnginePair


_count = click.IntRange(min=1)


def _engine_options(role: str, tp: int, pp: int, block_tokens: int, layout: str) -> Callable[[Any], Any]:
    def with_options(verb: Any) -> Any:
        for option in (
            click.option(
                f"--{role}-layout", type=click.Choice(LAYOUT_NAMES), default=layout, show_default=True
            ),
            click.option(f"--{role}-block-tokens", type=_count, default=block_tokens, show_default=True),
            click.option(f"--{role}-pp", type=_count, default=pp, show_default=True, help="Pipeline stages."),
            click.option(
                f"--{role}-tp", type=_count, default=tp, show_default=True, help="Ranks of a stage."
            ),
        ):
            verb = option(verb)
        return verb

    return with_options


@click.command()
@_engine_options("prefill", tp=4, pp=2, block_tokens=16, layout="HND")
@_engine_options("decode", tp=2, pp=1, block_tokens=32, layout="NHD")
@click.option("--layers", type=_count, default=16, show_default=True)
@click.option("--heads", type=_count, default=8, show_default=True, help="KV heads of the model.")
@click.option("--head-dim", type=_count, default=128, show_default=True)
@click.option("--requests", type=_count, default=8, show_default=True)
@click.option("--tokens", type=_count, default=500, show_default=True, help="Tokens of a request.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--keep", is_flag=True, help="Then move requests until Ctrl-C, to look at with other verbs.")
# For tests of the demo: corrupt one byte of the first request, to show that the check finds it.
@click.option("--damage", type=click.Choice(["", "item", "spill"]), default="", hidden=True)
@click.pass_context
def demo(
    ctx: click.Context, /, as_json: bool, damage: str, requests: int, keep: bool, **options: Any
) -> None:
    """Move KV cache between two daemons on this machine and check every byte.

    Starts two daemons and two engines of real processes with different layouts, moves requests
    through NIXL, and exits with 1 if a byte is wrong. Everything that it started ends with it.
    Unless an engine is described by flags, it does the same between two equal engines, to compare.
    """
    # Imported here, so that the other verbs do not load numpy.
    from kvxferd.demo.report import print_report
    from kvxferd.demo.runner import Demo
    from kvxferd.tooling.interrupts import interrupted_once
    from kvxferd.tooling.output import print_json

    pairs = pairs_to_run(ctx, options)
    found: list[DemoResults] = []
    is_kept = False
    with interrupted_once():
        running = Demo(pairs, lambda line: click.echo(line, err=as_json))
        try:
            running.start()
            for pair in pairs:
                found.append(running.run(pair, requests, "" if found else damage))
                if not found[-1].is_ok:
                    break
            results, equal = found[0], found[1] if len(found) > 1 else None
            if as_json:
                print_json(results.as_json() | ({} if equal is None else {"equal": equal.as_json()}))
            else:
                print_report(results, equal)
            if keep and found[-1].is_ok:
                is_kept = True
                _say_what_to_try(running, as_json)
                found.append(running.keep_going(dataclasses.replace(pairs[0], name="demo-kept")))
                print_report(found[-1])
        except KeyboardInterrupt:
            if not is_kept:
                click.echo("kvxferd: the demo was interrupted; everything it started is gone", err=True)
                ctx.exit(EXIT_INTERRUPTED)
        finally:
            running.stop()
    ctx.exit(EXIT_OK if all(one.is_ok for one in found) else EXIT_WRONG_BYTES)


def pairs_to_run(ctx: click.Context, options: dict[str, Any]) -> list[EnginePair]:
    """Return the engines that were asked for, and two equal ones unless an engine was described by flags.

    Raises EngineError if a rank would hold no layer.
    """
    from kvxferd.errors import Code, EngineError
    from kvxferd.layout.presets import LayerKind, ModelFacts, key_and_value
    from kvxferd.tooling.engine_pair import EnginePair, EngineShape

    def engine(role: str) -> EngineShape:
        return EngineShape(
            tp=options[f"{role}_tp"],
            pp=options[f"{role}_pp"],
            block_tokens=options[f"{role}_block_tokens"],
            layout=options[f"{role}_layout"],
        )

    for role in ("prefill", "decode"):
        if (stages := options[f"{role}_pp"]) > options["layers"]:
            raise EngineError(
                f"cannot run the demo: --{role}-pp {stages} is more than --layers {options['layers']}",
                Code.LAYOUT_INVALID,
            )
    heads, layers = options["heads"], (LayerKind.FULL,) * options["layers"]
    model = ModelFacts("demo", heads, layers, key_and_value(heads, options["head_dim"]))
    pair = EnginePair(model, engine("prefill"), engine("decode"), options["tokens"], "demo")
    return [pair] if _has_engine_flags(ctx) else [pair, pair.equal("demo-equal")]


def _say_what_to_try(running: Demo, as_json: bool) -> None:
    program = sys.argv[0] if os.path.basename(sys.argv[0]) == "kvxferd" else "kvxferd"
    click.echo("requests go on until Ctrl-C; try, in another terminal:", err=as_json)
    for verb in ("top", "status", "history", "explain @demo-kept-prefill @demo-kept-decode"):
        socket = running.daemons["decode"].control.socket_path
        click.echo(f"  {program} {verb} --socket {socket}", err=as_json)


def _has_engine_flags(ctx: click.Context) -> bool:
    """Whether the shape of an engine was given, and not left to the defaults."""
    return any(
        ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        for name in ctx.params
        if name.startswith(("prefill_", "decode_"))
    )
