"""The decode plan of one KV group in device memory.

The core says which words have changed (`_core.DeviceMirror`); they travel as scalars of the launch that also adds the
step's token to every row. A step in which only lengths grow carries none, and nothing is ever uploaded.
"""

from __future__ import annotations

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.kernel import Kernel

_MAX_WORDS = 24  # kMaxStepWords
_NO_WORDS = [0] * (2 * _MAX_WORDS)


class DevicePlan:
    """One group's plan on the device.

    Args:
        plan: The plan that the scheduler edits.
        num_workers: Workers per KV head of the decode launches.
        kernel: `mlxcel_plan_step`.

    Attributes:
        mirror: What the device has.
        table: `[num_table_words]` int32, page ids first; written in place.
        work_items: `[num_items * 8]` int32, a view of `table`.
        state: `[2 * num_slots]` int32: lengths, which decode launches take, then positions. A new array each step.
    """

    def __init__(self, plan: _core.DecodePlan, num_workers: int, kernel: Kernel) -> None:
        self.mirror = _core.DeviceMirror(plan, num_workers)
        self._kernel = kernel
        self.table = mx.zeros((self.mirror.num_table_words,), mx.int32)
        self.state = mx.zeros((self.mirror.num_state_words,), mx.int32)
        begin = self.mirror.work_items_begin
        self.work_items = self.table[begin : begin + self.mirror.num_items * 8]
        mx.eval(self.table, self.state, self.work_items)
        self._geometry = (self.mirror.num_slots, self.mirror.row_slots_begin)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.table.nbytes + self.state.nbytes)

    def step(self, num_rows: int, after: mx.array) -> mx.array:
        """Moves the device to the plan as it is now; to be called once after each `DecodePlan.advance`.

        Args:
            num_rows: Rows of the launch; those beyond the plan's are padding.
            after: The last that the step before computes of what reads the table; anything before the first step.

        Returns:
            `[num_rows]` int32, positions of the rows' newest tokens; 0 for padding.
        """
        words = self.mirror.sync(num_rows)
        begin = 0
        # Launches beside the step's own are evaluated by themselves: the step's graph then looks the same every time.
        while len(words) - begin > 2 * _MAX_WORDS:
            self._launch(words[begin : begin + 2 * _MAX_WORDS], 0, after)
            mx.async_eval(self.state)  # type: ignore[no-untyped-call]
            begin += 2 * _MAX_WORDS
        return self._launch(words[begin:], num_rows, after)

    def _launch(self, words: list[int], num_rows: int, after: mx.array) -> mx.array:
        self.state, positions = self._kernel(
            (self.state, self.table, after),
            ((self._geometry[0] * 2,), (max(num_rows, 1),)),
            (mx.int32, mx.int32),
            (*self._geometry, num_rows, len(words) // 2, *words, *_NO_WORDS[len(words) :]),
            (1, 1),
        )
        return positions
