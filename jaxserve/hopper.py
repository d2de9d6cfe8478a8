"""Whether this device runs the kernels written for NVIDIA's Hopper GPUs."""

import functools
import os

import jax

SWITCH = "JAXSERVE_KERNELS"


@functools.cache
def is_available() -> bool:
    """The default device has compute capability 9.0, and JAXSERVE_KERNELS does not say "plain"."""
    choice = os.environ.get(SWITCH, "auto")
    if choice not in ("auto", "plain"):
        raise ValueError(f"{SWITCH}={choice!r}: expected 'auto' or 'plain'")
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return choice == "auto" and str(capability).startswith("9.")
