"""The group that holds the verbs, and how every verb reports an error."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

import kvxferd
from kvxferd.cli import not_installed_message
from kvxferd.cli.suggestions import SuggestingGroup
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.exit_codes import EXIT_ERROR
from kvxferd.tooling.output import printable

# The module of each verb, in the order of the help. Only the requested one is imported: a daemon
# would otherwise hold the others' tables in memory for as long as it runs.
VERBS = {
    "serve": "kvxferd.cli.serve",
    "demo": "kvxferd.cli.demo",
    "bench": "kvxferd.cli.bench",
    "doctor": "kvxferd.cli.doctor",
    "ping": "kvxferd.cli.doctor",
    "support-bundle": "kvxferd.cli.doctor",
    "status": "kvxferd.cli.status",
    "top": "kvxferd.cli.top",
    "engines": "kvxferd.cli.engines",
    "peers": "kvxferd.cli.peers",
    "transfers": "kvxferd.cli.transfers",
    "history": "kvxferd.cli.history",
    "explain": "kvxferd.cli.explain",
    "reload": "kvxferd.cli.reload",
    "drain": "kvxferd.cli.drain",
    "drop-peer": "kvxferd.cli.drop_peer",
    "cancel": "kvxferd.cli.cancel",
    "disown": "kvxferd.cli.disown",
    "keygen": "kvxferd.cli.keygen",
    "config": "kvxferd.cli.config",
}


class VerbGroup(SuggestingGroup):
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
