"""x @ W.T of a packed matrix in the form that suits the number of rows.

| rows | form | what bounds it |
|---|---|---|
| 1 … 8 | decode kernel | memory: every weight is read once |
| up to `most_wide_rows` | wide kernel | decoding in registers, then the tensor core |
| more | decode the matrix, library product | the tensor core |
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.quant.mosaic.decode import MAX_BATCH, decode_matmul
from jaxserve.quant.mosaic.dequantise import dequantise
from jaxserve.quant.mosaic.wide import wide_matmul

MOST_WIDE_ROWS = {}
MOST_WIDE_ROWS_ELSE = 1536
MOST_DENSE_BYTES = 1 << 29  # of a decoded matrix; larger ones stay with the wide kernel


def matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """x [T, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [T, N]."""
    rows, n = x.shape[0], records.shape[0] * 16
    if rows <= MAX_BATCH:
        return decode_matmul(x, records, type_name, k)
    if rows <= most_wide_rows(type_name) or 2 * n * k > MOST_DENSE_BYTES:
        return wide_matmul(x, records, type_name, k)
    return dense_matmul(x, records, type_name, k)


def most_wide_rows(type_name: str) -> int:
    return MOST_WIDE_ROWS.get(type_name, MOST_WIDE_ROWS_ELSE)


def dense_matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """The same through a decoded matrix: 2 N K bytes of temporaries.

    In f16, each row of x multiplied by the power of two that brings its largest value into [2^14, 2^15); in
    bf16 for BF16 matrices.
    """
    w = dequantise(records, type_name, k, jnp.bfloat16 if type_name == "BF16" else jnp.float16)
    if type_name == "BF16":
        return _product(x.astype(jnp.bfloat16), w)
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), 1, keepdims=True)
    exponent = jnp.clip(jnp.frexp(largest)[1], -111, 128)
    y = _product(jnp.ldexp(x.astype(jnp.float32), 15 - exponent).astype(jnp.float16), w)
    return jnp.ldexp(y, exponent - 15)


def _product(x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
