"""The cells, arms and targets of the whole-step benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

K = 1024
MIXED = (700, 4096, 9001, 30000)

CELLS: dict[str, tuple[int, ...]] = {
    "1x64": (64,),
    "4x64": (64,) * 4,
    "4x1K": (K,) * 4,
    "4x4K": (4 * K,) * 4,
    "4x16K": (16 * K,) * 4,
    "16x4K": (4 * K,) * 16,
    "1x16K": (16 * K,),
    "1x32K": (32 * K,),
    "mixed": MIXED,
}
"""Tokens of context that each sequence of the batch begins with."""

ARMS = ("mlx-lm", "fused", "fused-plain", "fused-tolist", "gather", "gather-plain")
"""`-plain`: without our kernels outside attention, whatever the default is. `-tolist`: a step's tokens are read
out of their array, which moves it to managed memory, and not by the engine's `TokenReader`."""

STEP_FUSION = "MLXCEL_PAGED_STEP_FUSION"

# mlx-lm's step over ours, at least.
STEP_TARGETS = {
    "1x64": 1.0,
    "4x64": 1.0,
    "4x1K": 1.35,
    "4x4K": 1.9,
    "4x16K": 3.6,
    "16x4K": 3.7,
    "1x16K": 1.9,
    "1x32K": 2.2,
    "mixed": 6.0,
}
STEP_TARGETS_4BIT = {"16x4K": 3.0}
# The gather arm's step over the fused one's, at least.
GATHER_TARGETS = {"4x4K": 2.0, "4x16K": 2.0, "16x4K": 2.0, "1x16K": 2.0, "1x32K": 2.0, "mixed": 2.0}
# The fused step over the one without our kernels outside attention, at most.
FUSION_TARGETS = {"4x4K": 0.8}
# Our peak memory over mlx-lm's from the prompts on, at most.
MEMORY_TARGETS = {"4x16K": 0.6}


def attention_path(arm: str) -> str:
    """The arm without what it says about products and reads."""
    return arm.removesuffix("-plain").removesuffix("-tolist")


def arm_environment(arm: str, fusion: str) -> dict[str, str]:
    """Variables that the arm's process has beside the others.

    Args:
        arm: One of `ARMS`.
        fusion: `on`, `off` or `default`: our kernels outside attention where the arm does not say.
    """
    if arm == "mlx-lm":
        return {}
    chosen = "off" if arm.endswith("-plain") else fusion
    return {} if chosen == "default" else {STEP_FUSION: "1" if chosen == "on" else "0"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Arguments of an mlx-lm llama model."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    def arguments(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        }


SHAPES = {
    "llama-3.1-8b": ModelShape(4096, 32, 14336, 32, 8, 128256),
    "tiny": ModelShape(256, 2, 512, 4, 2, 1024),  # shows that the script runs, on any machine
}
TARGET_SHAPE = "llama-3.1-8b"
