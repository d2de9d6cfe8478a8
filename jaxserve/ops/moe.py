"""Mixture of experts: every token runs through the few experts its router likes best.

    y = Σ_j weight_j · down_j(activation(gate_j x) · up_j x), summed in selection order, largest weight first

Decode gathers: it reads the packed weights of the chosen experts and no others. Prefill sorts the pairs of
token and expert by expert, so that each expert's weights meet all of its tokens in one product.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import quant
from jaxserve.ops.activation import gated

MIN_WEIGHT_SUM = 2.0**-14  # llama.cpp's floor: the smallest normal half-precision number
RANKED_TOKENS = 64  # up to here experts are ranked without a sort: every batch of decode

Projection = tuple  # expert matrices [X, N, K] (Packed or arrays) whose outputs stand side by side


def route(x: jax.Array, router: jax.Array, used: int) -> tuple[jax.Array, jax.Array]:
    """The `used` likeliest experts of each token: softmax over all X, renormalised over the chosen ones.

    x: [T, E], router: [X, E] → weights f32 [T, used], experts i32 [T, used], descending; ties go to the
    lowest expert.
    """
    experts = router.shape[0]
    if not 1 <= used <= experts:
        raise ValueError(f"used={used}: expected 1 ≤ used ≤ {experts}, the number of experts")
    x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    p = jax.nn.softmax(jnp.einsum("te,xe->tx", x, router, precision=lax.Precision.HIGHEST), axis=-1)
    few = x.shape[0] <= RANKED_TOKENS
    weights, chosen = (_top_by_rank if few else lax.top_k)(p, used)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.maximum(total, MIN_WEIGHT_SUM), chosen


def moe_decode(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_up: Projection,
    down: Projection,
    activation: str,
) -> jax.Array:
    """A few tokens: each chosen expert's matrices are read for its token alone.

    x: [T, E], weights: f32 [T, used], experts: i32 [T, used], down: ([X, E, Fe],) → f32 [T, E]
    gate_up: ([X, Fe, E], [X, Fe, E]), or ([X, 2·Fe, E],) with the gate rows first.
    """
    tokens, used = experts.shape
    index = experts.reshape(-1)
    pairs = jnp.repeat(x.astype(jnp.float32), used, axis=0)
    hidden = _hidden(lambda w, **tail: quant.expert_matmul(pairs, w, index, **tail), gate_up, activation)
    out = quant.expert_matmul(hidden, down[0], index)
    return _combine(out.reshape(tokens, used, -1), weights)


def moe_prefill(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_up: Projection,
    down: Projection,
    activation: str,
) -> jax.Array:
    """Many tokens: pairs sorted by expert, one grouped product per matrix.   Arguments as in `moe_decode`."""
    tokens, used = experts.shape
    index = experts.reshape(-1)
    order = jnp.argsort(index, stable=True)
    sizes = jnp.sum(index[:, None] == jnp.arange(down[0].shape[0]), axis=0, dtype=jnp.int32)
    token = order // used  # of each pair
    hidden = _hidden(
        lambda w, **tail: quant.grouped_matmul(x, w, sizes, index=token, **tail), gate_up, activation
    )
    out = quant.grouped_matmul(hidden, down[0], sizes)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    return _combine(jnp.take(out, place, axis=0).reshape(tokens, used, -1), weights)


def _top_by_rank(p: jax.Array, used: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k(p, used) without its sort, which would cut decode's GPU graph; X² comparisons for each token.

    An expert's rank is the number of experts that beat it. The two comparisons exclude each other: even a row
    of NaN names valid experts.   p: f32 [T, X] → f32 [T, used], i32 [T, used]
    """
    index = jnp.arange(p.shape[-1])
    mine, other = p[:, :, None], p[:, None, :]
    beaten = jnp.where(index < index[:, None], ~(mine > other), other > mine)
    rank = jnp.sum(beaten, axis=-1, dtype=jnp.int32)
    chosen = rank[:, None, :] == jnp.arange(used)[:, None]  # [T, used, X], one expert each
    values = jnp.sum(jnp.where(chosen, p[:, None, :], 0.0), axis=-1)
    return values, jnp.sum(jnp.where(chosen, index, 0), axis=-1, dtype=jnp.int32)


def _hidden(product, gate_up: Projection, activation: str) -> jax.Array:
    """activation(gate x) · up x of every token-expert pair, f32 [P, Fe].   product(w): x @ w.T, f32 [P, N]"""
    if len(gate_up) == 1:
        return product(gate_up[0], activation=activation)
    return gated(jnp.concatenate([product(w) for w in gate_up], axis=-1), activation)


def _combine(out: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ_j weights[:, j] · out[:, j] from the first to the last.   out: f32 [T, used, E] → f32 [T, E]"""
    return sum(weights[:, j, None] * out[:, j] for j in range(out.shape[1]))
