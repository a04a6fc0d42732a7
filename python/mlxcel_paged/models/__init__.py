"""The bridge to mlx-lm: loading, the attention hook, KV groups and the models that the engine runs."""
