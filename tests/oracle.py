"""The reference outputs under tests/data, and the rules by which results are compared with them."""

import functools
import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"


@functools.cache
def tiny_models() -> dict:
    """Name → description of every tiny model."""
    return json.loads((TINY / "tiny.json").read_text())["models"]


def tiny_path(name: str) -> Path:
    return TINY / f"{name}.gguf"


@functools.cache
def tiny_logits(name: str) -> dict[str, np.ndarray]:
    """exact_1, exact_17 [n, V] and exact_130 at positions pos_130."""
    return dict(np.load(TINY / f"{name}.npz"))


@functools.cache
def generations(name: str) -> list[dict]:
    """Prompts with reference generations of a real model: "smollm2" or "gemma3"."""
    return json.loads((DATA / f"{name}.gen.json").read_text())["prompts"]


def relative_error(found, exact) -> float:
    """‖found − exact‖ / ‖exact‖ in float64."""
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def assert_same_up_to_near_tie(tokens, expected, gaps, margin: float) -> int:
    """Greedy tokens must agree until the reference's two best logits lie within `margin`. Returns how many
    agreed.
    """
    for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)):
        if ours != theirs:
            assert gaps[i] < margin, (
                f"token {i} is {ours}, the reference drew {theirs} with a gap of {gaps[i]}"
            )
            return i
    return min(len(tokens), len(expected))
