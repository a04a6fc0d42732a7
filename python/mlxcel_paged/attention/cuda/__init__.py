"""Attention on CUDA: launches through MLX of the kernels in `kernels/cuda`."""
