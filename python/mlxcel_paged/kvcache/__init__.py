"""KV storage of one model: pools, and the per-layer cache that mlx-lm's model definitions write through."""
