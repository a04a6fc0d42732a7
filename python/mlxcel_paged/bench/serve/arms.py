"""The arms: how a server is made to take a path, and how one knows that it did."""

from __future__ import annotations

from collections.abc import Mapping

from mlxcel_paged import env

ARMS = ("dense", "gather", "fused")
ANY = "server"
"""The arm of a server that was there already and may take any path."""


def arm_flags(arm: str) -> list[str]:
    """Flags of `serve` that select the arm's storage."""
    return ["--decode-storage", "dense" if arm == "dense" else "paged"]


def arm_environment(arm: str) -> dict[str, str]:
    """Environment of the arm's server, over what it inherits; a kill switch set around the benchmark has no say."""
    return {env.NATIVE_ATTENTION: {"dense": "", "gather": "0", "fused": "1"}[arm]}


def is_own_path(arm: str, launches: Mapping[str, int], *, num_pages: int) -> bool:
    """Whether decode launches of a turn all took the arm's path.

    Args:
        arm: out of `ARMS`, or `ANY`.
        launches: decode launches of the turn by outcome.
        num_pages: pages of the server's pools; dense storage has none and launches nothing that is counted.
    """
    if arm == ANY:
        return True
    num_launches = sum(launches.values())
    if arm == "dense":
        return num_launches == 0 and num_pages == 0
    return num_launches > 0 and all(outcome.partition(":")[0] == arm for outcome in launches)
