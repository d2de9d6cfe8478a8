"""Where tests find the real models, which are too large to keep beside them."""

from pathlib import Path

import pytest

from fetch_models import MODELS, default_folder, is_present


def path(name: str) -> Path:
    """The model file `name` of `tools/fetch_models.py`; skips the test where it is not there."""
    file = default_folder() / name
    if not is_present(file, MODELS[name]):
        pytest.skip(f"{file} is absent: `python tools/fetch_models.py {name}` fetches it")
    return file
