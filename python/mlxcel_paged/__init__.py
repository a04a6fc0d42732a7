"""Paged-attention serving for MLX."""
