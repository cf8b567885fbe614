"""The format of plan.json, of a question and of a search: what is said of a file that this memplan cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError

FORMAT = 1  # a reader takes its own and older ones


def check_format(data: Mapping[str, Any], source: str, again: str) -> None:
    """Raises UserError for a format that is none, or newer than this memplan's.  `again`: the command that makes the file."""
    made = data.get("format")
    if not isinstance(made, int) or isinstance(made, bool) or made < 1:
        raise UserError(f"{source}: format {made!r}: expected a number", f"Make it again with `{again}`")
    if made > FORMAT:
        raise UserError(
            f"{source}: format {made} was written by a newer memplan ({data.get('memplan')}); this one reads {FORMAT}",
            f"Upgrade memplan, or make it again with `{again}`",
        )
