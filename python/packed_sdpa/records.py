"""What became of each attention call: taken, or passed through and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class ModuleRecord:
    """Counts of one attention module. ``name`` is its qualified name in the model."""

    name: str
    taken: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # by reason
    backends: Counter[str] = field(default_factory=Counter)  # by name, taken calls only
    windows: Counter[tuple[int, int]] = field(default_factory=Counter)  # window_size of taken calls
    last_passed: str = ""  # reason of the latest call that was passed through

    def count_taken(self, backend: str, window_size: tuple[int, int] = (-1, -1)) -> None:
        self.taken += 1
        self.backends[backend] += 1
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
        for counter in (self.passed, self.backends, self.windows):
            counter.clear()
