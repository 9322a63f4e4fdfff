"""By which names the call that runs now got at its function: read from the caller's code."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

__all__ = ["names_at_call"]


def names_at_call(caller: FrameType) -> frozenset[str]:
    """The names in the expression that ``caller`` calls just now.

    ``{"torch", "nn", "functional", "scaled_dot_product_attention"}`` for a call of it in full; ``{"f"}`` for
    ``f(x)``. Where Python keeps no columns (``-X no_debug_ranges``) those of the whole line.
    """
    return _names_at(caller.f_code, caller.f_lasti)


@functools.lru_cache(maxsize=1024)
def _names_at(code: CodeType, offset: int) -> frozenset[str]:
    places = [(line, column) for line, _, column, _ in code.co_positions()]  # one for each two bytes of code
    start = places[offset // 2]  # where the call begins, and so what is called
    return frozenset(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if places[instruction.offset // 2] == start and isinstance(instruction.argval, str)
    )
