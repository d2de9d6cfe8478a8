"""The causal depthwise convolution in front of the delta rule (qwen35, qwen3next): a few taps, no bias."""

import chex
import jax
import jax.numpy as jnp


def short_conv(
    u: jax.Array, tail: jax.Array, kernel: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """silu(Σ_j kernel[:, j] · window[t + j]) in f32, window being the tail followed by u; and the next tail.

    u: [B, T, C] before convolution, tail: [B, W-1, C] the last raw inputs (zeros at a sequence's start),
    kernel: [C, W] with the newest sample last, count: i32 [B] valid leading positions of u, 0 ≤ count ≤ T
    → f32 [B, T, C], [B, W-1, C] in tail.dtype: the W-1 raw inputs before position `count`, so that count 0
    gives `tail` itself.
    """
    batch, length, channels = u.shape
    taps = kernel.shape[1]
    chex.assert_shape(kernel, (channels, taps))
    chex.assert_shape(tail, (batch, taps - 1, channels))
    chex.assert_shape(count, (batch,))
    window = jnp.concatenate([tail.astype(jnp.float32), u.astype(jnp.float32)], axis=1)
    kernel = kernel.astype(jnp.float32)
    out = sum(window[:, j : j + length] * kernel[:, j] for j in range(taps))
    rows = count[:, None] + jnp.arange(taps - 1)
    tail = jnp.take_along_axis(window, rows[..., None], axis=1, mode="promise_in_bounds").astype(tail.dtype)
    return jax.nn.silu(out), tail
