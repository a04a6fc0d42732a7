"""Dense layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn

from mlxcel_paged.models.dense_kernel import MIN_ROWS, dense_launch, serves_dense
from mlxcel_paged.models.product_launch import LayersLaunch, ProductLaunch
from mlxcel_paged.models.streamed_layer import ProjectsToLogits, SharesLaunches


def dense_layers_launch(layers: Sequence[nn.Module]) -> LayersLaunch:
    """One launch for dense layers."""
    return LayersLaunch(layers, ("weight", "bias"), _prepare, MIN_ROWS)


# MLX's classes are untyped here.
class StreamedLinear(SharesLaunches, nn.Linear):  # type: ignore[misc]
    """A `Linear` that computes a decode batch with the kernel."""

    layers_launch = staticmethod(dense_layers_launch)


# MLX's classes are untyped here.
class StreamedEmbedding(ProjectsToLogits, nn.Embedding):  # type: ignore[misc]
    """An `Embedding` whose projection to logits computes a decode batch with the kernel."""

    layers_launch = staticmethod(dense_layers_launch)


def _prepare(layers: Sequence[nn.Module]) -> ProductLaunch | None:
    weights = [layer["weight"] for layer in layers]
    biases = [layer.get("bias") for layer in layers]
    dtype, num_inner = weights[0].dtype, weights[0].shape[-1]
    for weight, bias in zip(weights, biases, strict=True):
        if not serves_dense(weight) or weight.dtype != dtype or weight.shape[1] != num_inner:
            return None
        if bias is not None and (bias.dtype != dtype or bias.shape != weight.shape[:1]):
            return None
    return dense_launch(weights, biases)
