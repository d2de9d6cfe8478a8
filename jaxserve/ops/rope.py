"""Rotary position embedding: (a, b) → (a·cosθ − b·sinθ, a·sinθ + b·cosθ) with θ = position · frequency."""

import jax
import jax.numpy as jnp


def rope_tables(
    positions: jax.Array, frequencies: jax.Array, magnitude: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every angle, times yarn's magnitude.

    positions: i32 [B, T], frequencies: f32 [R/2] → f32 [B, T, 1, R/2] each
    """
    angles = (positions.astype(jnp.float32)[..., None] * frequencies)[:, :, None]
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array], interleaved: bool) -> jax.Array:
    """Rotate the first R dims of each head, pass the rest through.

    x: f32 [B, T, H, D], tables: [B, T, 1, R/2] each
    interleaved: pairs are (2j, 2j+1) as llama files store them, else (j, j + R/2).
    """
    cos, sin = tables
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return jnp.concatenate([pairs, rest], axis=-1) if rest.shape[-1] else pairs
