"""Random attention layers for one token: what the fused kernel and its plain form are both given."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.mosaic.attention import decode_attention_reference


class Case(NamedTuple):
    arguments: tuple
    options: dict

    def lane(self, b: int) -> tuple:
        """The arguments of row b alone."""
        parts, bias, q_norm, k_norm, rope, keys, values, rank, *lanes = self.arguments
        one = slice(b, b + 1)
        rope = None if rope is None else tuple(table[one] for table in rope)
        parts, lanes = tuple(part[one] for part in parts), (x[one] for x in lanes)
        return parts, bias, q_norm, k_norm, rope, keys, values, rank, *lanes


def random_case(
    positions: list[int],
    *,
    heads: int = 12,
    kv_heads: int = 2,
    dim: int = 128,
    capacity: int = 512,
    layers: int = 2,
    slots: int | None = None,
    rows: list[int] | None = None,
    active: list[bool] | None = None,
    cut: int = 1,
    biased: bool = False,
    normed: bool = False,
    rotary: int | None = None,
    interleaved: bool = False,
    gated: bool = False,
    window: int = 0,
    dtype: str = "float16",
    eps: float = 1e-6,
) -> Case:
    """A token at `positions` of as many rows, in the last of `layers`.

    cut: in how many parts q, k and v come (1: all in one, 2: v apart, 3: each); rotary: None for all columns
    """
    rng, batch = np.random.default_rng(len(positions)), len(positions)
    q, kv, rotary = heads * dim * (1 + gated), kv_heads * dim, dim if rotary is None else rotary
    slots = slots or batch + 1

    def normal(*shape, mean=0.0, scale=1.0, dtype="float32"):
        noise = rng.standard_normal(shape, np.float32)
        return (mean + scale * noise).astype(jnp.dtype(dtype))

    parts = np.split(normal(batch, q + 2 * kv, scale=2), [[], [q + kv], [q, q + kv]][cut - 1], axis=1)
    position = np.asarray(positions, np.int32)
    angles = position[:, None, None, None] * 1e4 ** (-np.arange(rotary // 2) / max(1, rotary // 2))
    rope = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if rotary else None
    cache = layers, slots, kv_heads, capacity, dim
    arguments = (
        tuple(parts),
        normal(q + 2 * kv) if biased else None,
        *(normal(dim, mean=1, scale=0.3) if normed else None for _ in range(2)),
        rope,
        normal(*cache, dtype=dtype),
        normal(*cache, dtype=dtype),
        np.int32(layers - 1),
        np.asarray(rng.permutation(slots)[:batch] if rows is None else rows, np.int32),
        position,
        np.asarray([True] * batch if active is None else active),
    )
    options = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "gated": gated,
        "scale": dim**-0.5,
        "window": window,
        "interleaved": interleaved,
        "eps": eps,
    }
    return Case(jax.tree.map(jnp.asarray, arguments), options)


def plain(case: Case) -> tuple[jax.Array, ...]:
    """What the kernel must agree with."""
    with jax.default_matmul_precision("highest"):
        reference = functools.partial(decode_attention_reference, **case.options)
        return jax.jit(reference)(*case.arguments)


# name → arguments of random_case: everything that makes a layer different
LAYERS = {
    "plain": dict(positions=[130, 5], biased=True),
    "qk norms": dict(positions=[130, 5], normed=True),
    "no rotation": dict(positions=[130, 5], rotary=0),
    "partial rotation": dict(positions=[130, 5], rotary=32),
    "interleaved rotation": dict(positions=[130, 5], rotary=64, interleaved=True),
    "gated": dict(positions=[40, 299], capacity=300, heads=4, dim=256, rotary=64, gated=True, normed=True),
    "256 rotary columns": dict(positions=[40, 299], heads=2, dim=256, biased=True),
    "v apart": dict(positions=[130, 5], cut=2, biased=True),
    "three parts": dict(positions=[130, 5], cut=3, gated=True, biased=True),
    "64 columns": dict(positions=[130, 5], dim=64, heads=8, kv_heads=8),
    "80 columns": dict(positions=[130, 5], dim=80, rotary=40),
    "96 columns": dict(positions=[130, 5], dim=96, heads=14),
    "one query head a key head": dict(positions=[130, 5], heads=2),
    "sixteen query heads a key head": dict(positions=[130, 5], heads=32, normed=True),
    "eleven query heads a key head": dict(positions=[130, 5], heads=22, gated=True),
    "bfloat16": dict(positions=[130, 5], dtype="bfloat16", normed=True),
    "a window": dict(positions=[700, 90], capacity=1024, window=300),
    "a window that ends in a tile": dict(positions=[519, 7], capacity=1024, window=8),
    "all blocks": dict(positions=[2000], capacity=2048, biased=True),
    "an odd capacity": dict(positions=[1000, 999], capacity=1001),
}  # fmt: skip
