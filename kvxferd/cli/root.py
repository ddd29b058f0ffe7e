"""The group that holds the verbs, and how every verb reports an error."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

import kvxferd
from kvxferd.cli import not_installed_message
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.exit_codes import EXIT_ERROR
from kvxferd.tooling.output import printable

# The verbs in the order of the help, each with its module. Only the requested one's is imported: a daemon
# would otherwise hold the others' tables in memory for as long as it runs.
GROUPS = {
    "Run": {"serve": "serve", "config": "config", "keygen": "keygen"},
    "Look at this node": {
        "status": "status",
        "top": "top",
        "engines": "listing",
        "peers": "listing",
        "transfers": "listing",
        "history": "history",
        "inspect": "inspect",
    },
    "Find what is wrong": {
        "doctor": "doctor",
        "ping": "doctor",
        "logs": "logs",
        "support-bundle": "doctor",
    },
    "Change this node": {
        "reload": "operate",
        "drain": "operate",
        "drop-peer": "operate",
        "cancel": "operate",
        "disown": "operate",
    },
    "Try it": {"demo": "demo", "bench": "bench", "explain": "explain"},
}
VERBS = {verb: f"kvxferd.cli.{module}" for verbs in GROUPS.values() for verb, module in verbs.items()}


class VerbGroup(click.Group):
    """A group whose verbs may raise KvxferdError, which prints one line and no traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every verb's name."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb and return it; None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        try:
            module = import_module(VERBS[cmd_name])
        except ModuleNotFoundError as error:
            raise KvxferdError(not_installed_message(error.name), Code.CONFIG_INVALID) from error
        verb = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(verb, click.Command)
        return verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb; for an unknown name, raise click.NoSuchCommand with those that are alike."""
        if args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.NoSuchCommand(args[0], possibilities=VERBS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of verbs, with the first sentence of each."""
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(verb, self._summary(ctx, verb)) for verb in verbs])

    def _summary(self, ctx: click.Context, verb: str) -> str:
        command = self.get_command(ctx, verb)
        return "" if command is None else command.get_short_help_str(limit=200)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the verbs and options that begin so, without an import of the verbs."""
        verbs = [CompletionItem(name) for name in VERBS if name.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except KvxferdError as error:
            # A message may repeat an id of a peer's, or a key of a file.
            text = printable(f"kvxferd: {error.message} [{error.code.value}]", keep="\n")
            click.echo(text, err=True)
            ctx.exit(EXIT_ERROR)


@click.group(
    cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(kvxferd.__version__, prog_name="kvxferd")
def root() -> None:
    """Move KV cache between prefill and decode engines: one daemon per node."""
