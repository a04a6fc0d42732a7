"""The shapes that the CUDA decode benchmark times."""

from __future__ import annotations

from dataclasses import dataclass

K = 1024
SKEW = (64 * K, *[K] * 127)
MIXED = (700, 4096, 9001, 30000)


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape. `lengths` are visible tokens a row; with `context`, rows hold that many and see `lengths` of them."""

    name: str
    lengths: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    context: int | None = None

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def useful_bytes(self) -> int:
        """K and V of the visible tokens, 16 bits an element."""
        return 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim * 2


def _uniform(batch: int, tokens: int) -> tuple[int, ...]:
    return (tokens,) * batch


def _family(num_qo_heads: int, shapes: list[tuple[int, int]]) -> list[Cell]:
    return [
        Cell(f"{num_qo_heads}/8 {batch}x{tokens // K}K", _uniform(batch, tokens), num_qo_heads)
        for batch, tokens in shapes
    ]


CELLS = [
    *_family(32, [(1, K), (1, 4 * K), (1, 32 * K), (4, K), (4, 4 * K), (4, 16 * K), (16, 4 * K), (16, 16 * K)]),
    *_family(32, [(64, 4 * K)]),
    Cell("32/8 mixed", MIXED),
    Cell("32/8 skew", SKEW),
    *_family(64, [(1, 4 * K), (4, 4 * K), (16, 4 * K), (16, 16 * K), (64, 4 * K)]),
    Cell("64/8 mixed", MIXED, 64),
    Cell("32/32 16x4K", _uniform(16, 4 * K), 32, 32),
    Cell("16/8 D256 16x4K", _uniform(16, 4 * K), 16, 8, 256),
    Cell("24/8 D64 16x4K", _uniform(16, 4 * K), 24, 8, 64),
    Cell("32/8 4x1K window at 128K", _uniform(4, K), context=128 * K),
]
