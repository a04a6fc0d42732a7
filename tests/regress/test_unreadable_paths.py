"""A path that the system refuses to look at ends in a traceback.

The fault class: whether a name is a file is asked as if the answer were yes or no, but it may be an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_paged.cli.main import EXIT_USAGE, main
from mlxcel_paged.errors import ModelNotFoundError
from mlxcel_paged.models.loader import load_model


@pytest.mark.parametrize("spec", ["a" * 5000, "./" + "a" * 300, "x" * 300 + ".gguf"], ids=["word", "path", "file"])
def test_a_name_too_long_for_a_file_names_no_model(spec: str) -> None:
    with pytest.raises(ModelNotFoundError):
        load_model(spec, device="cpu")


def test_a_folder_that_may_not_be_looked_into_holds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_dir(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(ModelNotFoundError, match=r"closed.*Permission denied"):
        load_model("./closed/model", device="cpu")


def test_such_a_model_ends_the_command_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--model", "a" * 5000]) == EXIT_USAGE
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
