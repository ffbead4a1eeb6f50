"""A group of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperGroup

from bpfed.errors import unknown

if TYPE_CHECKING:
    from click import Command, Context


class Group(TyperGroup):
    """Refuses a command that does not exist in one sentence with the nearest; typer and click would each name that."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)
