"""Tables on terminals, in files and as text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 160  # columns, where nothing tells how many there are


def make_console() -> Console:
    """Standard output; 160 columns wide where it is no terminal (rich takes 80) and ``COLUMNS`` is not set."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)


def as_text(table: RenderableType) -> str:
    """The table as plain text, 160 columns wide."""
    from rich.console import Console

    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
