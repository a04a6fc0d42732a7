"""The README's promises that can be checked by reading it, and the links of all pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
PAGES = [
    *_ROOT.glob("*.md"),
    *(page for top in ("docs", "benchmarks", "kernels") for page in (_ROOT / top).rglob("*.md")),
]


def test_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)
    check = "\nassert out.shape == (2, 8, 64) and lse.shape == (2, 8)\n"
    subprocess.run([sys.executable, "-W", "error", "-c", example + check], check=True)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", _README))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (_ROOT / "Makefile").read_text(), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
