"""x @ W.T of a packed matrix in the form that suits the number of rows.

| rows | form | what bounds it |
|---|---|---|
| 1 … 8 | decode kernel | memory: every weight is read once |
| more | wide kernel | decoding in registers, then the tensor core |
| more than MOST_WIDE_ROWS of BF16 | decoded matrix, library product | the tensor core |

Q4_K [37888, 3584] on an H200, µs with the preparation of x: wide 216 for 512 rows, 794 for 2,048, 1,660 for
4,096; decoded (107) and multiplied by the library in f16 303, 854, 1,583, of which scaling x and, not counted
here, the result back would eat the rest. BF16 costs the wide kernel two products: its limit is an estimate.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.quant.mosaic.decode import MAX_BATCH, decode_matmul
from jaxserve.quant.mosaic.dequantise import dequantise
from jaxserve.quant.mosaic.records import ROWS
from jaxserve.quant.mosaic.wide import wide_matmul

MOST_WIDE_ROWS = {"BF16": 512}  # types that are not named have no limit
MOST_DENSE_BYTES = 1 << 29  # of a decoded matrix; larger ones stay with the wide kernel


def matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """x [T, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [T, N]."""
    rows, n = x.shape[0], records.shape[0] * ROWS
    if rows <= MAX_BATCH:
        return decode_matmul(x, records, type_name, k)
    is_wide = rows <= MOST_WIDE_ROWS.get(type_name, rows)
    if is_wide or 2 * n * k > MOST_DENSE_BYTES:
        return wide_matmul(x, records, type_name, k)
    return dense_matmul(x, records, type_name, k)


def dense_matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """The same in bf16 through a decoded matrix, 2 N K bytes of temporaries. Error about 2e-3."""
    w = dequantise(records, type_name, k, jnp.bfloat16)
    return lax.dot_general(
        x.astype(jnp.bfloat16), w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
