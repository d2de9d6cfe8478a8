"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * gain over the last axis, in f32.   x: [..., E], gain: [E]

    GGUF files of the "(1 + w)" families hold the 1 already: gain is always the final multiplier.
    """
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * inverse * gain.astype(jnp.float32)
