"""A bar chart as PNG with nothing but the standard library, for machines without a plotting package."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

Color = tuple[int, int, int]
_INK: Color = (40, 44, 52)
_BAR: Color = (160, 174, 192)
_HIGHLIGHT: Color = (47, 111, 186)
_SCALE = 2  # pixels of a dot of a letter
_ADVANCE = 4 * _SCALE
_ROW = 9 * _SCALE
_BAR_PIXELS = 520

# Letters of 3 x 5 dots: 15 bits, row by row from the top left.
_GLYPHS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71122,
    "8": 0o75757, "9": 0o75717, "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647, "F": 0o74644,
    "G": 0o34553, "H": 0o55755, "I": 0o72227, "J": 0o11152, "K": 0o55655, "L": 0o44447, "M": 0o57755, "N": 0o65555,
    "O": 0o25552, "P": 0o65644, "Q": 0o25573, "R": 0o65655, "S": 0o34216, "T": 0o72222, "U": 0o55557, "V": 0o55552,
    "W": 0o55775, "X": 0o55255, "Y": 0o55222, "Z": 0o71247, ".": 0o00002, ",": 0o00024, "-": 0o00700, "_": 0o00007,
    "+": 0o02720, "/": 0o11244, " ": 0,
}  # fmt: skip


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def fill(self, left: int, top: int, width: int, height: int, color: Color) -> None:
        for row in self.rows[top : top + height]:
            row[3 * left : 3 * (left + width)] = bytes(color) * width

    def text(self, left: int, top: int, text: str) -> None:
        for letter in text.upper():
            bits = _GLYPHS.get(letter, _GLYPHS["-"])
            for dot in range(15):
                if bits >> (14 - dot) & 1:
                    self.fill(left + dot % 3 * _SCALE, top + dot // 3 * _SCALE, _SCALE, _SCALE, _INK)
            left += _ADVANCE

    def write(self, path: Path) -> None:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in self.rows))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def write_bars(path: Path, title: str, bars: Sequence[tuple[str, float]], highlight: str = "") -> None:
    """One horizontal bar a (label, value); labels that hold ``highlight`` are coloured."""
    label_pixels = _ADVANCE * (1 + max((len(label) for label, _ in bars), default=0))
    longest = max((value for _, value in bars), default=1.0) or 1.0
    width = max(label_pixels + _BAR_PIXELS + 10 * _ADVANCE, _ADVANCE * (len(title) + 4))
    canvas = _Canvas(width, _ROW * (len(bars) + 3))
    canvas.text(_ADVANCE, _ROW // 2, title)
    for index, (label, value) in enumerate(bars):
        top = _ROW * (index + 2)
        canvas.text(_ADVANCE, top, label)
        length = max(1, round(_BAR_PIXELS * value / longest))
        color = _HIGHLIGHT if highlight and highlight in label else _BAR
        canvas.fill(label_pixels + _ADVANCE, top - _SCALE, length, 7 * _SCALE, color)
        canvas.text(label_pixels + 2 * _ADVANCE + length, top, f"{value:.1f}")
    canvas.write(path)
