"""Sequences on a paged model without a scheduler: for checks and benchmarks that drive the model by hand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.models.paged_model import PagedModel


class PagedRows:
    """Keeps page tables and slots of a fixed set of rows and grows them token by token.

    Args:
        paged: The model; its pools and plans must be otherwise unused.
    """

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._tables: list[list[_core.PageTable]] = []
        self._slots: list[list[_core.Slot]] = []

    def add(self, prompt: Sequence[int], *, chunk: int = 512) -> None:
        """Prefills all of `prompt` but its last token, `chunk` tokens at a time, and admits the row."""
        tables = self._new_tables()
        for start in range(0, len(prompt) - 1, chunk):
            tokens = prompt[start : min(start + chunk, len(prompt) - 1)]
            for table in tables:
                table.append(len(tokens))
            self._paged.prefill(tokens, tables, start)
        self._admit(tables)

    def add_synthetic(self, num_tokens: int) -> None:
        """Admits a row that holds `num_tokens` tokens of whatever its pages contain."""
        tables = self._new_tables()
        for table in tables:
            table.append(num_tokens)
        self._admit(tables)

    def __len__(self) -> int:
        return len(self._tables)

    def remove(self, row: int) -> None:
        """Ends a row and gives its pages and slots back; the rows behind it move up."""
        for plan, table, slot in zip(self._paged.plans, self._tables.pop(row), self._slots.pop(row), strict=True):
            plan.retire(slot)
            table.release()

    def decode(self, tokens: mx.array | Sequence[int]) -> mx.array:
        """Appends one token to every row, in the order of `add`, and returns the logits `[rows, vocab]`; see
        `PagedModel.decode` for rows of padding."""
        for tables, slots in zip(self._tables, self._slots, strict=True):
            for plan, table, slot in zip(self._paged.plans, tables, slots, strict=True):
                for page in table.append(1).new_pages:
                    plan.append_page(slot, page)
        for plan in self._paged.plans:
            plan.advance()
        logits = self._paged.decode(tokens)
        self._retire_heads()
        return logits

    def close(self) -> None:
        """Gives all pages and slots back."""
        while self._tables:
            self.remove(len(self) - 1)

    def _new_tables(self) -> list[_core.PageTable]:
        groups = self._paged.layout.groups
        return [
            _core.PageTable(pool, self._paged.page_size, group.window)
            for pool, group in zip(self._paged.page_pools, groups, strict=True)
        ]

    def _admit(self, tables: list[_core.PageTable]) -> None:
        slots = []
        for plan, table in zip(self._paged.plans, tables, strict=True):
            table.retire_head()
            slots.append(plan.admit(table.pages, table.kv_len, table.first_page_offset, table.num_tokens))
        self._tables.append(tables)
        self._slots.append(slots)

    def _retire_heads(self) -> None:
        for tables, slots in zip(self._tables, self._slots, strict=True):
            for plan, table, slot in zip(self._paged.plans, tables, slots, strict=True):
                retired = table.retire_head()
                if retired:
                    plan.retire_head_pages(slot, len(retired), table.first_page_offset)
