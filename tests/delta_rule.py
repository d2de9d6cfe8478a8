"""Random inputs of the gated delta rule."""

import numpy as np


def random_inputs(
    length, *, batch=1, key_heads=1, heads=2, key_dim=128, value_dim=128, seed=0, g=None, repeated=False
):
    """state, q, k, v, g, beta in f32: q, k of norm 1, q scaled. repeated: almost equal keys."""
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(batch, heads, value_dim, key_dim))
    q, k = (rng.normal(size=(batch, length, key_heads, key_dim)) for _ in "qk")
    if repeated:
        k = k[:, :1] + 0.01 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, length, heads, value_dim))
    shape = (batch, length, heads)
    g = -rng.exponential(0.1, size=shape) if g is None else np.broadcast_to(g, shape)
    beta = rng.uniform(0.9 if repeated else 0.0, 1.0, size=shape)
    return [np.asarray(x, np.float32) for x in (state, q / np.sqrt(key_dim), k, v, g, beta)]
