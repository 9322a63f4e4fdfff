"""``report``: what became of the attention calls of an attached model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from packed_sdpa.attach import Handle
from packed_sdpa.attachment import Attachment, attachment_of
from packed_sdpa.tables import as_text

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class ModuleReport:
    """Calls of one attention module since attach (or since :meth:`Report.reset`)."""

    name: str  # qualified name in the model
    taken: int
    passed: dict[str, int]  # reason -> calls
    backends: dict[str, int]  # name -> calls taken
    windows: dict[tuple[int, int], int]  # window_size -> calls taken
    not_preferred: dict[str, int]  # preferred backend and why it did not run -> calls taken by another


class Report:
    """What :func:`report` returns; ``print`` it for a table."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.route = attachment.route
        self.layouts_built = attachment.ledger.layouts_built
        self.modules = tuple(
            ModuleReport(r.name, r.taken, dict(r.passed), dict(r.backends), dict(r.windows), dict(r.not_preferred))
            for r in attachment.ledger.records.values()
        )

    @property
    def taken(self) -> int:
        """Calls taken, of all modules."""
        return sum(module.taken for module in self.modules)

    @property
    def passed(self) -> int:
        """Calls passed through to stock attention, of all modules."""
        return sum(sum(module.passed.values()) for module in self.modules)

    @property
    def backends(self) -> dict[str, int]:
        """Backend name -> calls taken."""
        return dict(sum((Counter(module.backends) for module in self.modules), Counter()))

    @property
    def reasons(self) -> dict[str, int]:
        """Reason -> calls passed through for it."""
        return dict(sum((Counter(module.passed) for module in self.modules), Counter()))

    @property
    def not_preferred(self) -> dict[str, int]:
        """Preferred backend and why it did not run -> calls taken by another."""
        return dict(sum((Counter(module.not_preferred) for module in self.modules), Counter()))

    def reset(self) -> None:
        """Starts the counters of the model again; this report keeps what it has."""
        for record in self._attachment.ledger.records.values():
            record.reset()
        self._attachment.ledger.layouts_built = 0

    def table(self) -> Table:
        from rich.table import Table

        title = f"packed attention by route {self.route}: {self.taken} calls taken, {self.passed} passed through"
        table = Table(title=title, title_justify="left")
        for heading, justify in (("module", "left"), ("taken", "right"), ("passed", "right")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        not_preferred = any(module.not_preferred for module in self.modules)
        last = ("why not the preferred backend",) if not_preferred else ()
        for heading in ("backend", "window", "why passed through", *last):
            table.add_column(heading, overflow="fold")
        for module in self.modules:
            table.add_row(
                module.name,
                str(module.taken),
                str(sum(module.passed.values())),
                ", ".join(module.backends) or "-",
                ", ".join(_window(window) for window in module.windows) or "-",
                _reasons(module.passed),
                *([_reasons(module.not_preferred)] if not_preferred else []),
            )
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return as_text(self.table())


def _reasons(counts: dict[str, int]) -> str:
    return "; ".join(f"{reason} ({count}x)" for reason, count in counts.items()) or "-"


def _window(window: tuple[int, int]) -> str:
    left, right = window
    return "none" if left < 0 and right < 0 else f"{left} back" + (f", {right} ahead" if right > 0 else "")


def report(model: nn.Module | Handle) -> Report:
    """Calls taken and passed through, and why, with backend and window, of each attention module.

    model: a model that ``attach`` was called on (a wrapper of it or a part of it will do), or the handle.
    Raises ValueError for a model that is not attached.
    """
    attachment = model._attachment if isinstance(model, Handle) else attachment_of(model)
    if attachment is None:
        raise ValueError(f"model: this {type(model).__name__} is not attached; call packed_sdpa.attach(model) first")
    return Report(attachment)
