"""Shapes and options of decode launches for the tests on a GPU; without torch, which such a host may lack."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)


@dataclass
class Case:
    lengths: list[int]
    dtype: str = "float16"
    head_dim: int = 128
    group_size: int = 4
    num_kv_heads: int = 2
    page_size: int = 16
    layout: str = "HND"
    offsets: list[int] | None = None
    window: int | None = None
    logits_soft_cap: float = 0.0
    with_sinks: bool = False
    append: bool = False
    num_workers: int = 16
    num_splits: int | None = None
    logit_gain: float = 1.0
    seed: int = 0
    first_page: int = 0
    label: str = field(default="", compare=False)


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)

    def pick(options):
        return options[int(rng.integers(len(options)))]

    page_size = pick(PAGE_SIZES)
    edges = [0, 1, 2, 15, 16, 17, page_size - 1, page_size, page_size + 1, 127, 128, 129, 255, 257, 700, 1999]
    lengths = [pick(edges) for _ in range(int(rng.integers(1, 9)))]
    with_offsets = rng.random() < 0.4
    return Case(
        lengths=lengths,
        dtype=pick(("float16", "bfloat16")),
        head_dim=pick(HEAD_DIMS),
        group_size=int(rng.integers(1, 17)),
        num_kv_heads=pick((1, 2, 3, 8)),
        page_size=page_size,
        layout=pick(("NHD", "HND")),
        offsets=[int(rng.integers(page_size)) for _ in lengths] if with_offsets else None,
        window=pick((None, None, 1, page_size - 1, page_size, page_size + 1, 128, 1000)),
        logits_soft_cap=pick((0.0, 0.0, 1.0, 30.0, 50.0)),
        with_sinks=rng.random() < 0.3,
        append=rng.random() < 0.5,
        num_workers=pick((1, 2, 3, 16, 66)),
        num_splits=pick((None, None, 1, 2, 7)),
        logit_gain=pick((1.0, 1.0, 8.0)),
        seed=seed,
    )
