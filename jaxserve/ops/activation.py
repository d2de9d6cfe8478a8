"""The activations of gated feed-forward layers."""

import jax
import jax.numpy as jnp

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=True)}


def gated(y: jax.Array, activation: str | None) -> jax.Array:
    """activation(first half) · second half of the last axis; y itself without an activation."""
    if activation is None:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
