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
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve import ptx
from jaxserve.ops.mosaic.launch import launch
from jaxserve.ptx import Register, Registers, constant, select, when
from jaxserve.quant.mosaic.records import COLUMNS

STEP = 16  # columns that a thread handles at a time
CORE_BYTES = 128  # 8 rows × 8 slots
HALF_STEPS = 8  # of 128 columns
BLOCK_BYTES = 2 * HALF_STEPS * CORE_BYTES  # 8 rows × 128 columns
MAX_WARPS = 32
LARGEST_EXPONENT = 14  # of a scaled row's largest value
SMALLEST_FIELD = 15  # of f32's exponent: below, a row's factor would not be a number


@functools.partial(jax.jit, static_argnums=1)
def slot_order(x: jax.Array, of: str) -> tuple[jax.Array, jax.Array]:
    """x [T, K] f32, f16 or bf16 → operand B in `of` ("f16" or "bf16"), and f32 [ceil(T/8) · 8] that undo the
    rows' factors."""
    rows, k = x.shape
    chunks, blocks, parts = -(-k // COLUMNS), -(-rows // 8), operand_parts(x.dtype, of)
    steps, warps = chunks * COLUMNS // STEP, min(MAX_WARPS, -(-chunks * COLUMNS // STEP // 128) * 4)
    is_scaled = of == "f16" and x.dtype != jnp.float16

    def program(x_ref, o_ref, inverse_ref, largest_ref):
        thread, row = ptx.thread_index(), ptx.block_index()
        source = ptx.global_address(x_ref) + row.widened() * (k * x.dtype.itemsize)
        held = []
        for first in range(0, steps, warps * 32):
            step = thread + first
            held.append((step, _columns(source, step, k, x.dtype)))
        factor = inverse = constant(1.0)
        if is_scaled:
            largest = _reduced([ptx.absolute(v) for _, columns in held for v in columns])
            factor, inverse = _power_of_two(_block_maximum(largest, thread, warps, largest_ref))
        with when(thread.equals(0)):
            ptx.store_global(ptx.global_address(inverse_ref) + (row * 4).widened(), 0, [inverse])
        for step, columns in held:
            place = (step // HALF_STEPS * blocks + row // 8).widened() * BLOCK_BYTES
            place = place + (step % HALF_STEPS * (2 * CORE_BYTES) + row % 8 * 16).widened()
            out = ptx.global_address(o_ref) + place
            with when(step < steps):
                for part, words in enumerate(_operand(columns, factor if is_scaled else None, of, parts)):
                    for half in range(2):
                        offset = part * 2 * chunks * blocks * BLOCK_BYTES + half * CORE_BYTES
                        ptx.store_global(out + offset, 0, words[half::2])

    return tuple(
        launch(
            program,
            [],
            [x],
            name=f"slot_order_{rows}x{k}_{of}",
            blocks=rows,
            warps=warps,
            out_types=[
                jax.ShapeDtypeStruct((parts, 2 * chunks, blocks, BLOCK_BYTES // 4), jnp.uint32),
                jax.ShapeDtypeStruct((blocks * 8,), jnp.float32),
            ],
            scratch_types=[plgpu.SMEM((256,), jnp.float32)],
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


def _columns(source: Register, step: Register, k: int, dtype: jnp.dtype) -> Registers:
    """16 columns in f32, zeros past the last."""
    exists = step < k // STEP
    at = source + (select(exists, step, constant(0)) * (STEP * dtype.itemsize)).widened()
    words = [w for i in range(dtype.itemsize) for w in ptx.load_global(at, 16 * i, 4)]
    words = [select(exists, w, constant(0)) for w in words]
    if dtype == jnp.float32:
        return [w.as_f32() for w in words]
    unpack = ptx.unpack_f16x2 if dtype == jnp.float16 else ptx.unpack_bf16x2
    return [v for w in words for v in unpack(w)]


def _operand(columns: Registers, factor: Register | None, of: str, parts: int) -> list[Registers]:
    """Per part, eight words of two columns each."""
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


def _reduced(values: Registers) -> Register:
    while len(values) > 1:
        values = [ptx.maximum(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)] + (
            values[-1:] if len(values) % 2 else []
        )
    return values[0]


def _block_maximum(value: Register, thread: Register, warps: int, scratch) -> Register:
    """The largest of all threads' values."""
    for distance in (1, 2, 4, 8, 16):
        value = ptx.maximum(value, ptx.shuffle_xor(value.as_i32(), distance).as_f32())
    at = ptx.shared_address(scratch)
    with when((thread & 31).equals(0)):
        ptx.store_shared(at + (thread >> 5) * 4, 0, [value])
    ptx.block_sync()
    values = [w.as_f32() for i in range(0, warps, 4) for w in ptx.load_shared(at, 4 * i, 4)]
    return _reduced(values)


def _power_of_two(largest: Register) -> tuple[Register, Register]:
    """The factor that brings `largest` into [2^14, 2^15), and its inverse."""
    field = largest.as_i32() & 0x7F800000
    field = select(field < SMALLEST_FIELD << 23, constant(SMALLEST_FIELD << 23), field)
    return (
        (constant(254 + LARGEST_EXPONENT << 23) - field).as_f32(),
        (field - (LARGEST_EXPONENT << 23)).as_f32(),
    )
