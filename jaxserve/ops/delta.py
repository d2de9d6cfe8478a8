"""The gated delta rule (qwen35, qwen3next): a memory of keys and values with decay.

Per head: S ← e^g S, then S ← S + β (v − S k) ⊗ k, then o = S q. Three forms of the same recurrence: one
token, a plain scan, and chunks of matrix products for prefill. Everything is f32 at HIGHEST precision: a
half-precision state loses quality with length and then overflows.

The state is [B, Hv, Dv, Dk], the key index contiguous: both reads of a decode step, S k and S q, are then row
reductions over contiguous memory (on a CPU 0.3 ms for 16 heads of 128 × 128, the transpose 2.8 ms).
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST
CHUNK_TOKENS = 64


def l2_normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / max(‖x‖, eps) over the last axis, in f32, as ggml's l2_norm.   x: [..., D]"""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), eps * eps))


def gates(a: jax.Array, b: jax.Array, ssm_a: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-decay g = ssm_a · softplus(a + dt_bias) ≤ 0 and write strength β = σ(b), in f32.

    a, b: [..., Hv] projections, ssm_a: [Hv] holding −exp(A_log) as GGUF stores it, dt_bias: [Hv]
    """
    a, b, ssm_a, dt_bias = (x.astype(jnp.float32) for x in (a, b, ssm_a, dt_bias))
    return ssm_a * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def gated_norm(o: jax.Array, z: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """o / rms(o) · gain · silu(z) per head, in f32: normalised first, gated after.

    o, z: [..., Hv, Dv], gain: [Dv]
    """
    o, z, gain = (x.astype(jnp.float32) for x in (o, z, gain))
    inverse = lax.rsqrt(jnp.mean(jnp.square(o), axis=-1, keepdims=True) + eps)
    return o * inverse * gain * jax.nn.silu(z)


def expand_heads(x: jax.Array, value_heads: int, grouped: bool) -> jax.Array:
    """Each value head's copy of its key head.   x: [..., Hk, D] → [..., Hv, D]

    grouped: value head h reads key head h // (Hv/Hk) (qwen3next), else h % Hk (the order of qwen35 files).
    """
    *lead, key_heads, dim = x.shape
    copies, rest = divmod(value_heads, key_heads)
    if rest:
        raise ValueError(f"{value_heads} value heads are not a multiple of {key_heads} key heads")
    axis = -2 if grouped else -3
    x = jnp.expand_dims(x, axis)
    shape = list(x.shape)
    shape[axis] = copies
    return jnp.broadcast_to(x, shape).reshape(*lead, value_heads, dim)


def delta_step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token.

    state: f32 [B, Hv, Dv, Dk], q, k: [B, Hv, Dk], v: [B, Hv, Dv], decay = e^g, beta: [B, Hv]
    → o f32 [B, Hv, Dv], the next state. q and k come l2-normalised, q scaled by 1/√Dk, both expanded to the
    value heads. A row with decay 1 and beta 0 keeps its state.
    """
    _check(state, q, k, v, decay, beta)
    q, k, v, decay, beta = (x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    # o = S'q = e^g S q + δ (k·q): both reads are of the old state, in one pass before it is rewritten.
    recalled = decay[..., None] * _read(state, k)
    carried = decay[..., None] * _read(state, q)
    delta = beta[..., None] * (v - recalled)
    out = carried + delta * jnp.sum(k * q, axis=-1, keepdims=True)
    return out, decay[..., None, None] * state + delta[..., None] * k[..., None, :]


def delta_scan_reference(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The definition, token by token.

    state: f32 [B, Hv, Dv, Dk], q, k: [B, T, Hv, Dk], v: [B, T, Hv, Dv], g, beta: [B, T, Hv]
    → o f32 [B, T, Hv, Dv], the state after the last token. q, k and v as in `delta_step`.
    """

    def step(s, token):
        q, k, v, g, beta = token
        s = jnp.exp(g)[..., None, None] * s
        error = v - _read(s, k)  # what the memory answers for k, and how far off that is
        s = s + (beta[..., None] * error)[..., None] * k[..., None, :]
        return s, _read(s, q)

    tokens = (jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, g, beta))
    state, out = lax.scan(step, state, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), state


def delta_chunked(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    valid: jax.Array | None = None,
    *,
    chunk: int = CHUNK_TOKENS,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence as matrix products, `chunk` tokens (a power of two) at a time, after Yang et al. 2024,
    "Gated Delta Networks".

    Shapes as in `delta_scan_reference`; any T. valid: bool [B, T], leading positions; the others are inert,
    whatever they hold, and a row without valid positions keeps its state bit for bit. None: all are valid.

    Within a chunk, with Γij = e^(g_j+1 + … + g_i) for i ≥ j, else 0, and Λi = g_1 + … + g_i:
      A = the strictly lower part of β (K Kᵀ) ⊙ Γ,  (I + A) U = β V,  (I + A) W = β e^Λ K,
      N = U − W Sᵀ,  O = e^Λ Q Sᵀ + ((Q Kᵀ) ⊙ Γ) N,  S ← e^Λlast S + Nᵀ (Γlast ⊙ K).
    """
    batch, length, heads, _ = k.shape
    _check(state, q, k, v, g, beta)
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk={chunk}: expected a power of two")
    chunk = min(chunk, 1 << max(length - 1, 0).bit_length())
    valid = jnp.ones((batch, length), bool) if valid is None else valid

    def chunks(x):  # [B, T, Hv, …] → f32 [B, Hv, n, C, …], zero where invalid
        x = jnp.where(valid.reshape(batch, length, *[1] * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 3, 1)

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    position = jnp.arange(chunk)
    lower = position[:, None] >= position
    strictly_lower = position[:, None] > position
    # Every log-decay is a sum of its own terms: a difference of running sums drowns in a long decay.
    steps = jnp.where(strictly_lower, g[..., None], 0.0)
    spans = _product("ts,bhnsj->bhntj", lower.astype(jnp.float32), steps)
    between = jnp.where(lower, jnp.exp(spans), 0.0)  # Γ
    since_start = jnp.exp(spans[..., :1] + g[..., :1, None])  # e^Λ  [B, Hv, n, C, 1]
    overlap = _product("bhntk,bhnsk->bhnts", k, k) * between * beta[..., None]
    inverse = unit_lower_inverse(jnp.where(strictly_lower, overlap, 0.0))
    written = _product("bhnts,bhnsv->bhntv", inverse, beta[..., None] * v)  # U
    recalled = _product("bhnts,bhnsk->bhntk", inverse, beta[..., None] * since_start * k)  # W
    attention = _product("bhntk,bhnsk->bhnts", q, k) * between
    to_end = between[..., -1, :, None] * k  # Γlast ⊙ K
    over_chunk = since_start[..., -1:, :]
    alive = jnp.pad(valid, [(0, 0), (0, -length % chunk)]).reshape(batch, -1, chunk).any(-1)

    def step(s, part):  # only what needs the incoming state stays sequential
        written, recalled, queries, to_end, over_chunk, alive = part
        new = written - _product("bhtk,bhvk->bhtv", recalled, s)
        carried = _product("bhtk,bhvk->bhtv", queries, s)
        following = over_chunk * s + _product("bhtv,bhtk->bhvk", new, to_end)
        return jnp.where(alive[:, None, None, None], following, s), (new, carried)

    parts = [jnp.moveaxis(x, 2, 0) for x in (written, recalled, since_start * q, to_end, over_chunk)]
    state, (new, carried) = lax.scan(step, state, (*parts, alive.T))
    out = jnp.moveaxis(carried, 0, 2) + _product("bhnts,nbhsv->bhntv", attention, new)
    out = jnp.moveaxis(out, 1, 3).reshape(batch, -1, heads, v.shape[-1])
    return out[:, :length], state


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)⁻¹ of strictly lower triangular a: f32 [..., C, C], C a power of two.

    By halving the blocks on accelerators: [[X, 0], [−Y a₂₁ X, Y]] with X, Y the inverses of the diagonal
    blocks. The product (I − a)(I + a²)(I + a⁴) also takes log₂ C steps, but its powers explode where keys
    repeat (relative error 6e7 in f32, here 2e-7); no CUDA graph can hold triangular_solve. Row by row on CPU,
    which runs that in a third of the time and compiles it in a quarter.
    """
    return lax.platform_dependent(a, cpu=_inverse_by_rows, default=_inverse_by_halves)


def _inverse_by_rows(a: jax.Array) -> jax.Array:
    """Forward substitution: row i is e_i − a_i · (the rows above it)."""
    size = a.shape[-1]
    identity = jnp.eye(size, dtype=a.dtype)

    def row(i, x):
        above = _product("...j,...jk->...k", lax.dynamic_index_in_dim(a, i, -2, keepdims=False), x)
        return lax.dynamic_update_index_in_dim(x, identity[i] - above, i, -2)

    return lax.fori_loop(0, size, row, jnp.zeros_like(a))


def _inverse_by_halves(a: jax.Array) -> jax.Array:
    size = a.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=a.dtype) - a
    half = size // 2
    x, y = _inverse_by_halves(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -_product("...ij,...jk->...ik", _product("...ij,...jk->...ik", y, a[..., half:, :half]), x)
    top = jnp.concatenate([x, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, y], axis=-1)], axis=-2)


def _read(state: jax.Array, x: jax.Array) -> jax.Array:
    """S x per head.   state: [B, Hv, Dv, Dk], x: [B, Hv, Dk] → [B, Hv, Dv]

    A matrix-vector dot, not a sum of products: XLA:CPU runs that five times slower.
    """
    return _product("bhvk,bhk->bhv", state, x)


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=HIGHEST)


def _check(state, q, k, v, scale, beta):
    """state: f32 [B, Hv, Dv, Dk], q, k: [B, …, Hv, Dk], v: [B, …, Hv, Dv], scale (or g), beta: [B, …, Hv]"""
    batch, heads, value_dim, key_dim = state.shape
    chex.assert_type(state, jnp.float32)
    chex.assert_shape([q, k], (batch, *k.shape[1:-2], heads, key_dim))
    chex.assert_shape(v, (*k.shape[:-1], value_dim))
    chex.assert_shape([scale, beta], k.shape[:-1])
