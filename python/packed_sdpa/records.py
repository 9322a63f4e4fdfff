"""What became of each attention call: taken, or passed through and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Choice(NamedTuple):
    """The backend that takes a call. ``not_preferred``: which one was preferred (``auto:NAME``) and why it did not."""

    backend: str
    not_preferred: str = ""  # "NAME: reasons"; empty where the preferred one ran, or none was preferred


@dataclass
class ModuleRecord:
    """Counts of one attention module. ``name`` is its qualified name in the model."""

    name: str
    taken: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # by reason
    backends: Counter[str] = field(default_factory=Counter)  # by name, taken calls only
    windows: Counter[tuple[int, int]] = field(default_factory=Counter)  # window_size of taken calls
    not_preferred: Counter[str] = field(default_factory=Counter)  # by preferred backend and reason, taken calls only
    last_passed: str = ""  # reason of the latest call that was passed through

    def count_taken(self, choice: Choice, window_size: tuple[int, int] = (-1, -1)) -> None:
        self.taken += 1
        self.backends[choice.backend] += 1
        if choice.not_preferred:
            self.not_preferred[choice.not_preferred] += 1
        self.windows[window_size] += 1

    def count_passed(self, reason: str) -> None:
        self.passed[reason] += 1
        self.last_passed = reason

    @property
    def calls(self) -> int:
        return self.taken + self.passed.total()

    def reset(self) -> None:
        self.taken = 0
        self.last_passed = ""
        for counter in (self.passed, self.backends, self.windows, self.not_preferred):
            counter.clear()
