"""Where a command writes: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def json_document(enabled: bool) -> Iterator[Callable[[Any], None]]:
    """Yields a function that writes one JSON document to stdout.

    While the block runs with `enabled`, file descriptor 1 points to stderr, so nothing that a library prints can
    reach the document. With `enabled` false the function does nothing.
    """
    if not enabled:
        yield lambda document: None
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    documents: list[str] = []
    try:
        yield lambda document: documents.append(json.dumps(document, indent=2, allow_nan=False))
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
    for document in documents:
        sys.stdout.write(document + "\n")
    sys.stdout.flush()


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows that share their keys as a table on stdout."""
    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # A pipe has no width; cutting cells there would lose numbers.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    return str(value)
