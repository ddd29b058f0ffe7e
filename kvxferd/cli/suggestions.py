"""A group of verbs that names what a mistyped verb may mean."""

from __future__ import annotations

import click


class SuggestingGroup(click.Group):
    """A group whose error for an unknown verb names those that are spelled alike."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb's name, the verb and its arguments. Raises click.UsageError for an unknown one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, known)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)
