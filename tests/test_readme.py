"""The README's promises that can be checked by reading it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()


def test_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)
    check = "\nassert out.shape == (2, 8, 64) and lse.shape == (2, 8)\n"
    subprocess.run([sys.executable, "-W", "error", "-c", example + check], check=True)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", _README))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (_ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "page", [path for path in [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]], ids=lambda page: page.name
)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link
