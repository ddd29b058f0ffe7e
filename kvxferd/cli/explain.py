"""`kvxferd explain`: its arguments and its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.errors import ConfigError
from kvxferd.ids import Rank
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_OK, EXIT_REFUSED
from kvxferd.tooling.output import print_json

if TYPE_CHECKING:
    from kvxferd.explain.engine_spec_parser import EngineDescription

# Listed here so that --help does not load numpy; a test compares them with the module.
LINK_NAMES = ("cma", "tcp", "100g", "400g")


@click.command()
@click.argument("prefill")
@click.argument("decode")
@click.option(
    "--rank",
    "rank",
    metavar="PP,TP",
    help="Also show connectors' terms and the byte ranges of this decode rank.",
)
@click.option(
    "--prefill-rank",
    "prefill_rank",
    metavar="PP,TP",
    help="Also show the byte ranges that this prefill rank gives.",
)
@click.option(
    "--link",
    type=click.Choice(LINK_NAMES),
    default=LINK_NAMES[0],
    show_default=True,
    help="Predict times for this link: copies within the node, TCP, or a network card of 100 or 400 Gbit/s.",
)
@json_option
@with_control_client
@click.pass_context
def explain(
    ctx: click.Context,
    daemon: ControlClient,
    prefill: str,
    decode: str,
    rank: str | None,
    prefill_rank: str | None,
    link: str,
    as_json: bool,
) -> None:
    """Show what DECODE would read from PREFILL: which ranks, layers, heads, bytes and runs, or why it cannot.

    Also in which way each rank is read, how long that is predicted to take, and what layout would be faster.

    Each is PRESET[,key=value...] (keys tp, pp, block_tokens, layout, num_blocks and more), a .json or
    .toml file, or @ENGINE_ID for an engine that is registered in the daemon. No GPU is needed, and a
    daemon only for @ENGINE_ID. Exits with 1 if DECODE cannot read from PREFILL.
    """
    # Imported here, so that the other verbs do not load numpy.
    from kvxferd.explain.advice import advise
    from kvxferd.explain.analysis import explain_pair, explanation_json
    from kvxferd.explain.byte_ranges import byte_ranges
    from kvxferd.explain.engine_spec_parser import parse_engine
    from kvxferd.explain.text_report import print_byte_ranges, print_explanation, print_terms
    from kvxferd.plan import sender_plan

    source, sink = (parse_engine(text, lambda: daemon) for text in (prefill, decode))
    read_by, sent_by = _parse_rank("--rank", rank, sink), _parse_rank("--prefill-rank", prefill_rank, source)
    explanation = explain_pair(source, sink, link)
    advice = advise(explanation)
    reader = next((reads for reads in explanation.ranks if reads.rank == read_by), None)
    sends = None
    if sent_by is not None and explanation.ranks:
        sends = byte_ranges(sender_plan(sent_by, (reads.plan for reads in explanation.ranks)))
    if as_json:
        print_json(explanation_json(explanation, advice, reader, sends))
    else:
        print_explanation(explanation, advice)
        if reader is not None:
            print_terms(reader)
            print_byte_ranges("decode", reader.rank, byte_ranges(reader.plan))
        if sent_by is not None and sends is not None:
            print_byte_ranges("prefill", sent_by, sends)
    ctx.exit(EXIT_REFUSED if explanation.refused else EXIT_OK)


def _parse_rank(option: str, text: str | None, engine: EngineDescription) -> Rank | None:
    """Return the rank of that engine; raises ConfigError for text that names none."""
    if text is None:
        return None
    try:
        pp_rank, tp_rank = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"cannot use {option} {text}: write pp_rank,tp_rank, as in 0,3") from None
    if Rank(pp_rank, tp_rank) not in engine.ranks:
        raise ConfigError(
            f"cannot use {option} {text}: the ranks of {engine.label} are 0 to {engine.spec.pp_size - 1},"
            f"0 to {engine.spec.tp_size - 1}"
        )
    return Rank(pp_rank, tp_rank)
