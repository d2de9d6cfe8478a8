"""Records → rows of numbers: a whole matrix for a library product, or the few rows of an embedding.

A warp decodes one record: its 32 lanes hold 16 rows of 256 columns. For single rows a warp reads eight chunks
of one row instead: four lanes of each record. The values are gguf-py's float32, bit for bit, rounded once
where another type is asked for.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp

from jaxserve import ptx
from jaxserve.ops.mosaic.launch import launch
from jaxserve.ptx import both, constant, select, when
from jaxserve.quant.mosaic.products import from_global, lane_constants
from jaxserve.quant.mosaic.records import COLUMNS, FLOATS, ROWS
from jaxserve.quant.mosaic.weights import check_records, exact_weights

WARPS = 4  # of a block
CHUNKS_OF_A_ROW = 8  # that a warp decodes at a time


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def dequantise(records: jax.Array, type_name: str, k: int, dtype: jnp.dtype) -> jax.Array:
    """Records u32 [(X,) N/16, ceil(K/256), words] of `type_name` → [(X,) N, K] in f32, f16 or bf16."""
    check_records(records, type_name, k)
    dtype = jnp.dtype(dtype)
    if dtype.name not in FLOATS:
        raise ValueError(f"dtype {dtype}: records are decoded to {', '.join(FLOATS)}")
    *stack, row_tiles, chunks, words = records.shape
    tiles = records.size // words
    n = tiles // chunks * ROWS

    def program(w_ref, o_ref):
        thread = ptx.thread_index()
        lane, tile = thread & 31, ptx.block_index() * WARPS + ptx.shuffle(thread >> 5, 0)
        with when(tile < tiles):
            k_ = lane_constants(type_name, lane, from_global)
            record = ptx.global_address(w_ref) + tile.widened() * (words * 4)
            chunk, row = tile % chunks, tile // chunks * ROWS + k_.g
            at = row.widened() * k + (chunk * COLUMNS + k_.t * 4).widened()
            out = ptx.global_address(o_ref) + at * dtype.itemsize
            for step, rows in enumerate(exact_weights(type_name, record, k_)):
                with _exists(step, k, chunk, chunks):
                    for half, values in enumerate(rows):
                        offset = (8 * half * k + 16 * step) * dtype.itemsize
                        ptx.store_global(out, offset, _rounded(values, dtype))

    name = f"dequantise_{type_name.lower()}_{n}x{k}_{dtype.name}"
    out_type = jax.ShapeDtypeStruct((*stack, row_tiles * ROWS, k), dtype)
    return launch(
        program, [], [records], name=name, blocks=-(-tiles // WARPS), warps=WARPS, out_types=[out_type]
    )[1][0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def take_rows(records: jax.Array, type_name: str, k: int, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32 [T] of a packed matrix [N, K] → f32 [T, K]. Ids beyond mean its first or last."""
    check_records(records, type_name, k)
    if records.ndim != 3 or ids.ndim != 1 or ids.dtype != jnp.int32:
        raise ValueError(
            f"ids {ids.dtype}{ids.shape} of records {records.shape}: expected int32 [T] and one matrix"
        )
    row_tiles, chunks, words = records.shape
    last, per_row = row_tiles * ROWS - 1, -(-chunks // CHUNKS_OF_A_ROW)
    count = len(ids)

    def program(w_ref, ids_ref, o_ref):
        thread = ptx.thread_index()
        lane, job = thread & 31, ptx.block_index() * WARPS + ptx.shuffle(thread >> 5, 0)
        place, chunk = job // per_row, job % per_row * CHUNKS_OF_A_ROW + (lane >> 2)
        with when(both(place < count, chunk < chunks)):
            (row,) = ptx.load_global(ptx.global_address(ids_ref) + (place * 4).widened(), 0, 1)
            beyond = select(row < 1 << 31, constant(last), constant(0))
            row = select(row < last + 1, row, beyond)
            within = row % ROWS
            k_ = lane_constants(type_name, (within & 7) * 4 + (lane & 3), from_global)
            record = (row // ROWS * chunks + chunk).widened() * (words * 4) + ptx.global_address(w_ref)
            at = place.widened() * k + (chunk * COLUMNS + k_.t * 4).widened()
            out = ptx.global_address(o_ref) + at * 4
            for step, (values,) in enumerate(exact_weights(type_name, record, k_, within >= 8)):
                with _exists(step, k, chunk, chunks):
                    ptx.store_global(out, 64 * step, values)

    name = f"take_rows_{type_name.lower()}_{count}x{k}"
    out_type = jax.ShapeDtypeStruct((count, k), jnp.float32)
    return launch(
        program,
        [],
        [records, ids],
        name=name,
        blocks=-(-count * per_row // WARPS),
        warps=WARPS,
        out_types=[out_type],
    )[1][0]


def _exists(step: int, k: int, chunk: ptx.Register, chunks: int):
    """Columns 16 · step … of this chunk lie inside the matrix."""
    if chunks * COLUMNS - COLUMNS + 16 * step < k:
        return contextlib.nullcontext()
    return when(chunk < chunks - 1)


def _rounded(values: ptx.Registers, dtype: jnp.dtype) -> ptx.Registers:
    """Four f32 → the words that hold them."""
    if dtype == jnp.float32:
        return values
    pack = ptx.pack_f16x2 if dtype == jnp.float16 else ptx.pack_bf16x2
    return [pack(*values[:2]), pack(*values[2:])]
