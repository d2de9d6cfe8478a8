"""Activations as the wide kernel wants them in shared memory: operand B of wgmma, ready to be copied in bulk.

    u32 [parts, 2 · ceil(K/256), ceil(T/8), 512]: per 128 columns and 8 rows [8 steps][slot half][8 rows][8]

of 16-bit floats. Slot 8h+2t+p of a step holds column 4t+2h+p, as in records.py. So a tile of rows of one half
of a chunk is one piece of memory, and its core matrices (8 rows × 16 bytes) need no swizzle.

f32 and bf16 rows are multiplied by the power of two that brings their largest value into [2^14, 2^15): f16
neither overflows nor starves small values. BF16 matrices take x as two bf16 halves (parts = 2) instead. Rows
past T and their factors are not written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import ptx
from jaxserve.ops.mosaic.launch import launch, scratch
from jaxserve.ptx import Register, Registers, both, constant, select, when
from jaxserve.quant.mosaic.records import COLUMNS

STEP = 16  # columns
CORE_BYTES = 128  # 8 rows × 8 slots
HALF_STEPS = 8  # of 128 columns
BLOCK_BYTES = 2 * HALF_STEPS * CORE_BYTES  # 8 rows × 128 columns
LARGEST_EXPONENT = 14  # of a scaled row's largest value
SMALLEST_FIELD = 15  # of f32's exponent: below, a row's factor would not be a number
MANY_ROWS = 1024  # from here on there are blocks enough if each takes 8 rows, whose writes then fill lines
MOST_HELD = 16  # columns / 4 that a thread keeps in registers; of longer rows it reads all twice
UNROLLED = 8  # of these that it reads at a time


@functools.partial(jax.jit, static_argnums=1)
def slot_order(x: jax.Array, of: str, index: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """x [T, K] f32, f16 or bf16 → operand B in `of` ("f16" or "bf16"), and f32 [ceil(T/8) · 8] that undo the
    rows' factors.

    index i32 [P]: the operand has P rows, and row p is row index[p] of x.
    """
    rows, k = len(x if index is None else index), x.shape[1]
    chunks, blocks, parts = -(-k // COLUMNS), -(-rows // 8), operand_parts(x.dtype, of)
    at_once = 8 if rows >= MANY_ROWS else 1  # rows of a block
    steps, warp_steps = chunks * COLUMNS // STEP, 8 // at_once  # four lanes take a step of a row
    warps = 16 if at_once == 8 else min(32, -(-steps // (16 * warp_steps)) * 4)
    turns = -(-steps // (warps * warp_steps))
    is_scaled = of == "f16" and x.dtype != jnp.float16

    def program(x_ref, *refs):
        *index_ref, o_ref, inverse_ref, largest_ref = refs
        thread = ptx.thread_index()
        t, eighth, warp = thread & 3, thread >> 2 & 7, thread >> 5
        row = ptx.block_index() * at_once + eighth % at_once
        from_row = select(row < rows, row, constant(rows - 1))
        if index_ref:
            (from_row,) = ptx.load_global(ptx.global_address(*index_ref) + (from_row * 4).widened(), 0, 1)
            from_row = select(from_row < len(x), from_row, constant(len(x) - 1))
        source = ptx.global_address(x_ref) + from_row.widened() * (k * x.dtype.itemsize)
        first = warp * warp_steps + eighth // at_once

        def columns(turn):
            """Columns 4t … 4t+3 of a step."""
            return _columns(source, (first + turn * (warps * warp_steps)) * STEP + t * 4, k, x.dtype)

        def write(turn, values, factor):
            step = first + turn * (warps * warp_steps)
            place = (step // HALF_STEPS * blocks + row // 8).widened() * BLOCK_BYTES
            place = place + (step % HALF_STEPS * (2 * CORE_BYTES) + row % 8 * 16 + t * 4).widened()
            out = ptx.global_address(o_ref) + place
            with when(step < steps):
                for part, words in enumerate(_operand(values, factor, of, parts)):
                    for half, word in enumerate(words):
                        offset = part * 2 * chunks * blocks * BLOCK_BYTES + half * CORE_BYTES
                        ptx.store_global(out + offset, 0, [word])

        def in_turn(visit, carry):
            """carry = visit(turn, columns, carry) for every turn, UNROLLED of them read together."""

            def some(i, carry):
                some_turns = [i * UNROLLED + j for j in range(UNROLLED)]
                for turn, values in [(turn, columns(turn)) for turn in some_turns]:
                    carry = visit(turn, values, carry)
                return carry

            return ptx.loop(-(-turns // UNROLLED), carry, some)

        held = [columns(constant(turn)) for turn in range(turns)] if turns <= MOST_HELD else []
        factor, inverse = None, constant(1.0)
        if is_scaled:
            if held:
                largest = _largest([v for values in held for v in values])
            else:
                (largest,) = in_turn(lambda _, values, so_far: [_largest(so_far + values)], ptx.zeros(1))
            largest = _block_maximum(largest, eighth, warp, warps, at_once, largest_ref)
            factor, inverse = _power_of_two(largest)
        with when(both(warp.equals(0), t.equals(0))):
            with when(eighth < at_once):
                ptx.store_global(ptx.global_address(inverse_ref) + (row * 4).widened(), 0, [inverse])
        for turn, values in enumerate(held):
            write(constant(turn), values, factor)
        if not held:
            in_turn(lambda turn, values, _: write(turn, values, factor) or [], [])

    words = jax.ShapeDtypeStruct((parts, 2 * chunks, blocks, BLOCK_BYTES // 4), jnp.uint32)
    return tuple(
        launch(
            program,
            [],
            [x] if index is None else [x, index],
            name=f"slot_order_{rows}x{k}_{of}",
            blocks=-(-rows // at_once),
            warps=warps,
            out_types=[words, jax.ShapeDtypeStruct((blocks * 8,), jnp.float32)],
            scratch_types=[scratch(256, jnp.float32)],
        )[1]
    )


def plain_slot_order(x: jax.Array, of: str) -> tuple[jax.Array, jax.Array]:
    """`slot_order` in plain JAX, with zeros in the rows past T: the reference."""
    rows, k = x.shape
    parts, v = operand_parts(x.dtype, of), x.astype(jnp.float32)
    factor = jnp.ones((rows, 1))
    if of == "f16" and x.dtype != jnp.float16:
        bits = lax.bitcast_convert_type(jnp.max(jnp.abs(v), 1, keepdims=True), jnp.int32)
        field = jnp.maximum(bits & 0x7F800000, SMALLEST_FIELD << 23)
        factor = lax.bitcast_convert_type(
            jnp.uint32(254 + LARGEST_EXPONENT << 23) - field.astype(jnp.uint32), jnp.float32
        )
    dtype = {"f16": jnp.float16, "bf16": jnp.bfloat16}[of]
    v = jnp.pad(v * factor, ((0, -rows % 8), (0, -k % COLUMNS)))
    split = [v.astype(dtype)]
    if parts == 2:
        split.append((v - lax.reduce_precision(v, 8, 7)).astype(dtype))
    # part, block, row, half of a chunk, step, t, slot half, p
    v = jnp.stack(split).reshape(parts, -1, 8, 2 * -(-k // COLUMNS), HALF_STEPS, 4, 2, 2)
    v = v.transpose(0, 3, 1, 4, 6, 2, 5, 7)
    words = lax.bitcast_convert_type(v, jnp.uint32).reshape(*v.shape[:3], -1)
    return words, jnp.pad(1 / factor[:, 0], (0, -rows % 8))


def operand_parts(dtype: jnp.dtype, of: str) -> int:
    """Into how many numbers of type `of` an activation is split."""
    return 2 if of == "bf16" and dtype != jnp.bfloat16 else 1


def _columns(source: Register, column: Register, k: int, dtype: jnp.dtype) -> Registers:
    """Four columns in f32, zeros past the last."""
    exists = column < k
    at = source + (select(exists, column, constant(0)) * dtype.itemsize).widened()
    words = [select(exists, w, constant(0)) for w in ptx.load_global(at, 0, dtype.itemsize)]
    if dtype == jnp.float32:
        return [w.as_f32() for w in words]
    unpack = ptx.unpack_f16x2 if dtype == jnp.float16 else ptx.unpack_bf16x2
    return [v for w in words for v in unpack(w)]


def _operand(columns: Registers, factor: Register | None, of: str, parts: int) -> list[Registers]:
    """Per part, two words of two columns each."""
    pairs = list(zip(columns[::2], columns[1::2], strict=True))
    if of == "f16":
        if factor is not None:
            pairs = [(a * factor, b * factor) for a, b in pairs]
        return [[ptx.pack_f16x2(*pair) for pair in pairs]]
    words = [[ptx.pack_bf16x2(*pair) for pair in pairs]]
    if parts == 2:
        rest = [
            [v - high for v, high in zip(pair, ptx.unpack_bf16x2(word), strict=True)]
            for pair, word in zip(pairs, words[0], strict=True)
        ]
        words.append([ptx.pack_bf16x2(*pair) for pair in rest])
    return words


def _largest(values: Registers) -> Register:
    """The largest magnitude."""
    values = [ptx.absolute(v) for v in values]
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [ptx.maximum(*pair) for pair in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def _block_maximum(
    value: Register, eighth: Register, warp: Register, warps: int, rows: int, scratch
) -> Register:
    """The largest of all values of a thread's row: four lanes of each warp (8 rows), or all of them (1)."""
    for distance in (1, 2) if rows == 8 else (1, 2, 4, 8, 16):
        value = ptx.maximum(value, ptx.shuffle_xor(value.as_i32(), distance).as_f32())
    at = ptx.shared_address(scratch) + eighth % rows * 4
    with when(eighth < rows):
        ptx.store_shared(at + warp * (4 * rows), 0, [value])
    ptx.block_sync()
    return _largest([ptx.load_shared(at, 4 * rows * w, 1)[0].as_f32() for w in range(warps)])


def _power_of_two(largest: Register) -> tuple[Register, Register]:
    """The factor that brings `largest` into [2^14, 2^15), and its inverse."""
    field = largest.as_i32() & 0x7F800000
    field = select(field < SMALLEST_FIELD << 23, constant(SMALLEST_FIELD << 23), field)
    return (
        (constant(254 + LARGEST_EXPONENT << 23) - field).as_f32(),
        (field - (LARGEST_EXPONENT << 23)).as_f32(),
    )
