"""The decode plan of one KV group in device memory.

The core says which words have changed (`_core.DeviceMirror`); they travel as scalars of the launch that also adds the
step's token to every row. A step in which only lengths grow carries none, and nothing is ever uploaded. A batch that is
there from the beginning, as in a CSR view, is uploaded once.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

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
        self.mirror: _core.DeviceMirror
        self._kernel = kernel
        self._plan = plan
        self._num_workers = num_workers
        self._num_rows: int  # of the last step
        self._has_failed: bool  # the last step
        self.table: mx.array
        self.state: mx.array
        self.work_items: mx.array
        self._start_over()
        self._geometry = (self.mirror.num_slots, self.mirror.row_slots_begin)

    def load(self) -> None:
        """Uploads the plan as it is now, in place of a first step; the device has no plan yet."""
        mirror, num_rows = self.mirror, int(self._plan.num_rows)
        words = np.array(mirror.sync(num_rows), np.int32).reshape(-1, 2)
        memory = np.zeros(mirror.num_state_words + mirror.num_table_words, np.int32)
        memory[words[:, 0]] = words[:, 1]
        state, table = memory[: mirror.num_state_words], memory[mirror.num_state_words :]
        slots = table[mirror.row_slots_begin : mirror.row_slots_begin + num_rows]
        state.reshape(2, mirror.num_slots)[:, slots] += 1
        self._place(mx.array(table), mx.array(state))

    def step(self, num_rows: int, after: mx.array) -> mx.array:
        """Moves the device to the plan as it is now; cheapest once after each `DecodePlan.advance`.

        Args:
            num_rows: Rows of the launch; those beyond the plan's are padding.
            after: The last that the step before computes of what reads the table; anything before the first step.

        Returns:
            `[num_rows]` int32, positions of the rows' newest tokens; 0 for padding.
        """
        if self._has_failed:
            self._start_over()
        words: tuple[int, ...] = ()
        if num_rows != self._num_rows or not self.mirror.try_sync():
            words = self.mirror.sync(num_rows)
        self._num_rows = num_rows
        self._has_failed = True  # unless all is launched: the mirror takes the words for written
        begin = 0
        # Launches beside the step's own are evaluated by themselves: the step's graph then looks the same every time.
        while len(words) - begin > 2 * _MAX_WORDS:
            self._launch(words[begin : begin + 2 * _MAX_WORDS], 0, after)
            mx.async_eval(self.state)  # type: ignore[no-untyped-call]
            begin += 2 * _MAX_WORDS
        positions = self._launch(words[begin:], num_rows, after)
        self._has_failed = False
        return positions

    def _start_over(self) -> None:
        """Takes a device of zeros for the one that may lack words."""
        self.mirror = _core.DeviceMirror(self._plan, self._num_workers)
        zeros = (mx.zeros((words,), mx.int32) for words in (self.mirror.num_table_words, self.mirror.num_state_words))
        self._place(*zeros)
        self._num_rows, self._has_failed = 0, False

    def _place(self, table: mx.array, state: mx.array) -> None:
        begin = self.mirror.work_items_begin
        self.table, self.state = table, state
        self.work_items = table[begin : begin + self.mirror.num_items * 8]
        mx.eval(self.table, self.state, self.work_items)

    def _launch(self, words: tuple[int, ...], num_rows: int, after: mx.array) -> mx.array:
        self.state, positions = self._kernel(
            (self.state, self.table, after),
            ((self._geometry[0] * 2,), (max(num_rows, 1),)),
            (mx.int32, mx.int32),
            (*self._geometry, num_rows, len(words) // 2, *words, *_NO_WORDS[len(words) :]),
            (1, 1),
        )
        return positions
