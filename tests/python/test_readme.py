"""What the README shows is run: its Python blocks in order, in one namespace."""

from __future__ import annotations

import pathlib
import re

import pytest

pytest.importorskip("transformers", reason="the README's examples use Transformers")

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.S | re.M)
    assert len(blocks) >= 4
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md block {number}", "exec"), namespace)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if "://" not in target:
            assert (README.parent / target).exists(), target
