"""One decode launch that applies RoPE, and the same launch on queries and keys that MLX has turned before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.decode_launch import DecodeLaunch
from mlxcel_paged.attention.cuda.device_plan import DevicePlan
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.attention.cuda.pool_layout import PoolStrides
from mlxcel_paged.attention.rotation_tables import RotationTables
from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.rotation import Rotation

# Nothing ties a row's position to the tokens that it holds.
LENGTHS = (1, 17, 40, 200, 64)
POSITIONS = (0, 5_000, 130_000, 77, 32_767)


@dataclass(frozen=True)
class Case:
    head_dim: int = 128
    rope_dims: int = 128
    traditional: bool = False
    by_freqs: bool = False
    group_size: int = 4
    num_kv_heads: int = 2
    page_size: int = 16
    dtype: mx.Dtype = mx.float16
    append: bool = True

    def rotation(self) -> Rotation:
        freqs = None
        if self.by_freqs:
            freqs = 8.0 * 500_000.0 ** (mx.arange(0, self.rope_dims, 2, dtype=mx.float32) / self.rope_dims)
        base = None if self.by_freqs else 500_000.0
        return Rotation(
            dims=self.rope_dims,
            traditional=self.traditional,
            base=base,
            scale=1.0 if self.by_freqs else 0.5,
            freqs=freqs,
        )

    def turned(self, x: mx.array, *, in_float32: bool) -> mx.array:
        """`mx.fast.rope` of `x`. On the CPU MLX rounds every step to the dtype of `x`, unless that is float32."""
        rotation = self.rotation()
        given = x.astype(mx.float32) if in_float32 else x
        return mx.fast.rope(
            given,
            rotation.dims,
            traditional=rotation.traditional,
            base=rotation.base,
            scale=rotation.scale,
            offset=mx.array(POSITIONS, mx.int32),
            freqs=rotation.freqs,
        ).astype(self.dtype)


@dataclass(frozen=True)
class Outcome:
    """What a launch has left: its output, and the bits of both pools."""

    out: Any
    k_bits: Any
    v_bits: Any


def run(case: Case, kernels: CudaKernels, *, in_float32: bool) -> tuple[Outcome, Outcome]:
    """Launches with RoPE in the kernel, then with RoPE by MLX in front of it.

    Args:
        in_float32: See `Case.turned`.
    """
    mx.random.seed(11)
    num_rows = len(LENGTHS)
    num_heads = case.num_kv_heads * case.group_size

    def rows(heads: int) -> mx.array:
        return mx.random.normal((num_rows, heads, 1, case.head_dim)).astype(case.dtype)

    queries, k_new, v_new = rows(num_heads), rows(case.num_kv_heads), rows(case.num_kv_heads)
    num_pages = sum(-(-length // case.page_size) for length in LENGTHS) + 1
    held = [np.array(mx.random.normal((num_pages, case.num_kv_heads, case.page_size, case.head_dim))) for _ in range(2)]
    tables = RotationTables()
    tables.begin(mx.array(POSITIONS, mx.int32))
    turned = (case.turned(queries, in_float32=in_float32), case.turned(k_new, in_float32=in_float32))
    outcomes = []
    for q, k, rotations in ((queries, k_new, tables.of(case.rotation())), (*turned, None)):
        plan = _plan(case, num_pages)
        device_plan = DevicePlan(plan, kernels.num_workers(case.num_kv_heads), kernels.plan_step())
        device_plan.load()
        ropes = () if rotations is None else (RopeShape(case.rope_dims, case.traditional),)
        launch = DecodeLaunch(plan, device_plan, case.dtype, kernels, ropes)
        pools = [mx.array(values).astype(case.dtype) for values in held]
        mx.eval(pools)
        views = [pool[:1] for pool in pools]
        out, _ = launch(
            q,
            # Nobody reads new tokens without append.
            k if case.append else mx.full(k.shape, float("nan"), case.dtype),
            v_new,
            *views,
            strides=PoolStrides.dense(
                "HND", num_kv_heads=case.num_kv_heads, page_size=case.page_size, head_dim=case.head_dim
            ),
            append=case.append,
            scale=case.head_dim**-0.5,
            sinks=None,
            logits_soft_cap=0.0,
            return_lse=False,
            rotations=rotations,
        )
        mx.eval(out)
        k_bits, v_bits = (np.array(pool.view(mx.uint16)) for pool in pools)
        outcomes.append(Outcome(np.array(out.astype(mx.float32)), k_bits, v_bits))
    return outcomes[0], outcomes[1]


def _plan(case: Case, num_pages: int) -> _core.DecodePlan:
    counts = [-(-length // case.page_size) for length in LENGTHS]
    return _core.DecodePlan.from_csr(
        np.cumsum([0, *counts]).astype(np.int32),
        np.random.default_rng(3).permutation(num_pages)[: sum(counts)].astype(np.int32),
        np.array([(length - 1) % case.page_size + 1 for length in LENGTHS], np.int32),
        num_pages=num_pages,
        page_size=case.page_size,
        num_qo_heads=case.num_kv_heads * case.group_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
    )
