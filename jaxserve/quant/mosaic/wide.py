"""x @ W.T for more rows than decode takes: the tensor core (wgmma) on weights decoded in registers (Hopper).

    y.T [N, T] = W [N, K] · x.T [K, T]

A warpgroup multiplies 64 rows of W with a tile of T: its four warps decode a record each straight into
operand A (a record's order is that of the fragments), operand B are activations in shared memory
(`slots.py`), and the sums stay in registers over all of K. While the tensor core multiplies one quarter of a
record the warp decodes the next.

Nobody is told to copy. A warp fetches its own records, one ahead; a chunk of activations, shared by the
warpgroups that multiply it, is followed by the next one as soon as the last of their warps is done with it.
Within a block, k_groups warpgroups share a range of K (their sums meet in shared memory, in fixed order);
what splits K over blocks XLA adds up.

Experts: tiles of rows belong to one expert each. A tile begins at a multiple of 8 rows and may contain rows
of its neighbours, which it multiplies and does not write: no row is moved or padded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve import ptx
from jaxserve.ops.mosaic.launch import launch
from jaxserve.ptx import Register, Registers, both, constant, select, when
from jaxserve.quant.mosaic.products import lane_constants
from jaxserve.quant.mosaic.records import ROWS
from jaxserve.quant.mosaic.slots import BLOCK_BYTES, CORE_BYTES, operand_parts, slot_order
from jaxserve.quant.mosaic.weights import TENSOR_SHIFT, check_records, tensor_weights
from jaxserve.quant.mosaic.wide_plan import WidePlan, wide_plan

DTYPES = ("float32", "float16", "bfloat16")
STEP_BYTES = 2 * CORE_BYTES  # of 8 rows


class Tile(NamedTuple):
    """Which rows of x a block multiplies with which matrix."""

    matrix: Register
    first: Register  # a multiple of 8
    start: Register  # rows start ≤ t < end are written
    end: Register


@functools.partial(jax.jit, static_argnums=(2, 3))
def wide_matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """x [T, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [T, N]."""
    _check(x, records, type_name, k, 3)
    p = wide_plan(type_name, x.shape[0], *records.shape[:2], operand_parts(x.dtype, _operand_type(type_name)))
    return _partial_products(x, records, None, type_name, k, p).sum(0)


@functools.partial(jax.jit, static_argnums=(3, 4))
def grouped_wide_matmul(
    x: jax.Array, group_sizes: jax.Array, records: jax.Array, type_name: str, k: int
) -> jax.Array:
    """Rows sorted by expert, `group_sizes` i32 [X] of them for each.

    x [T, K] times a packed stack [X, N, K] → f32 [T, N]; rows beyond the sum of sizes are not written.
    """
    _check(x, records, type_name, k, 4)
    if group_sizes.shape != records.shape[:1]:
        raise ValueError(
            f"group_sizes {group_sizes.shape} must have an entry for each of {len(records)} experts"
        )
    rows, experts = x.shape[0], len(records)
    parts = operand_parts(x.dtype, _operand_type(type_name))
    p = wide_plan(type_name, -(-rows // min(rows, experts)), *records.shape[1:3], parts, experts)
    table = tile_table(group_sizes, p.t_tile, most_tiles(rows, experts, p.t_tile))
    return _partial_products(x, records, table, type_name, k, p)[0]


def most_tiles(rows: int, experts: int, t_tile: int) -> int:
    """Tiles that the least even split of `rows` into groups needs, each beginning at a multiple of 8 rows."""
    used = min(rows, experts)
    return (rows + 7 * used) // t_tile + used


def tile_table(group_sizes: jax.Array, t_tile: int, tiles: int) -> jax.Array:
    """i32 [tiles, 4]: expert, first row (a multiple of 8), start and end of the expert's rows; tiles that
    nobody needs have the expert X."""
    index = jnp.arange(len(group_sizes))
    before = index[:, None] > index
    start = jnp.sum(jnp.where(before, group_sizes, 0), 1)
    counts = jnp.where(group_sizes > 0, -(-(start % 8 + group_sizes) // t_tile), 0)
    first_tile = jnp.sum(jnp.where(before, counts, 0), 1)
    tile = jnp.arange(tiles)
    expert = jnp.sum(tile[:, None] >= first_tile + counts, 1)
    mine = expert[:, None] == index  # one expert, or none
    pick = lambda v: jnp.sum(jnp.where(mine, v, 0), 1)  # noqa: E731
    first = pick(start // 8 * 8) + (tile - pick(first_tile)) * t_tile
    return jnp.stack([expert, first, pick(start), pick(start + group_sizes)], 1).astype(jnp.int32)


def _operand_type(type_name: str) -> str:
    return "bf16" if type_name == "BF16" else "f16"


def _check(x, records, type_name, k, ndim):
    check_records(records, type_name, k)
    if records.ndim != ndim or x.ndim != 2 or x.shape[1] != k or not x.shape[0]:
        raise ValueError(
            f"x {x.shape} and records {records.shape} do not fit a {type_name} matrix of {k} columns"
        )
    if x.dtype.name not in DTYPES:
        raise ValueError(f"x is {x.dtype}: the wide kernel takes {', '.join(DTYPES)}")


def _partial_products(x, records, table, type_name: str, k: int, p: WidePlan) -> jax.Array:
    """f32 [splits, T, N]"""
    rows, n = x.shape[0], records.shape[-3] * ROWS
    operand, inverse = slot_order(x, _operand_type(type_name))
    tiles = -(-rows // p.t_tile) if table is None else len(table)
    program = functools.partial(
        _program, type_name, p, rows, tiles, operand.shape, records.shape, table is not None
    )
    experts = "" if table is None else f"_experts{len(records)}"
    return launch(
        program,
        [],
        [operand, inverse, records, *([] if table is None else [table])],
        name=f"wide_{type_name.lower()}_{n}x{k}_t{rows}{experts}",
        blocks=p.splits * p.row_blocks * tiles,
        warps=p.warps,
        out_types=[jax.ShapeDtypeStruct((p.splits, rows, n), jnp.float32)],
        scratch_types=[
            plgpu.SMEM((p.operand_ring_bytes // 4,), jnp.uint32),
            plgpu.SMEM((p.record_ring_bytes // 4,), jnp.uint32),
            plgpu.SMEM((256,), jnp.uint32),
            plgpu.SMEM((256,), jnp.uint32),
        ],
    )[1][0]


def _program(type_name, p: WidePlan, rows, tiles, operand_shape, records_shape, is_grouped, *refs):
    """What a thread does. refs: activations, their inverse factors, records, table of tiles (experts only),
    output; rings of activations and records, barriers, counters."""
    x_ref, inverse_ref, w_ref, *table_ref, o_ref, operand_ref, record_ref, barrier_ref, counter_ref = refs
    thread, block = ptx.thread_index(), ptx.block_index()
    tile, rest = (
        (block // p.row_blocks, block % p.row_blocks) if is_grouped else (block % tiles, block // tiles)
    )
    row_block, split = (rest % p.row_blocks, rest // p.row_blocks) if p.splits > 1 else (rest, constant(0))
    if is_grouped:
        here = Tile(*ptx.load_global(ptx.global_address(*table_ref) + (tile * 16).widened(), 0, 4))
        is_used = here.matrix < records_shape[0]
    else:
        here = Tile(constant(0), tile * p.t_tile, constant(0), constant(rows))
        is_used = None

    def multiply():
        _multiply(
            type_name, p, rows, operand_shape, records_shape, here, thread, row_block, split,
            (x_ref, inverse_ref, w_ref, o_ref, operand_ref, record_ref, barrier_ref, counter_ref),
        )  # fmt: skip

    if is_used is None:
        multiply()
    else:
        with when(is_used):
            multiply()


def _multiply(type_name, p, rows, operand_shape, records_shape, here: Tile, thread, row_block, split, refs):
    x_ref, inverse_ref, w_ref, o_ref, operand_ref, record_ref, barrier_ref, counter_ref = refs
    parts, halves, blocks, _ = operand_shape
    chunks, units = halves // 2, 2 // p.halves  # stages of activations for each chunk
    row_tiles, record = records_shape[-3], p.record_bytes
    half_bytes = p.t_tile // 8 * BLOCK_BYTES
    stage_bytes = p.halves * parts * half_bytes
    lane, warp = thread & 31, ptx.shuffle(thread >> 5, 0)
    group = warp >> 2
    row_group, k_group = group % p.row_groups, group // p.row_groups
    row_tile = (row_block * p.row_groups + row_group) * 4 + (warp & 3)
    exists = row_tile < row_tiles

    # the chunks of this warpgroup are begin, begin + k_groups, …
    begin = split * p.chunks + k_group
    stop = select((split + 1) * p.chunks < chunks, (split + 1) * p.chunks, constant(chunks))
    count = select(begin < stop, (stop - begin + (p.k_groups - 1)) // p.k_groups, constant(0))

    is_first_lane = lane.equals(0)
    barriers = ptx.shared_address(barrier_ref)
    full = barriers + k_group * (p.operand_stages * 8)
    counters = ptx.shared_address(counter_ref) + k_group * (p.operand_stages * 4)
    operands = ptx.shared_address(operand_ref) + k_group * (p.operand_stages * stage_bytes)
    arrived = barriers + (warp * p.record_stages + p.k_groups * p.operand_stages) * 8
    ring = ptx.shared_address(record_ref) + warp * (p.record_stages * record)

    row_source = here.matrix.widened() * row_tiles + select(exists, row_tile, constant(0)).widened()
    source = ptx.global_address(w_ref) + (row_source * chunks + begin.widened()) * record
    first_block = here.first // 8
    rest = constant(blocks) - first_block
    nbytes = select(rest < p.t_tile // 8, rest, constant(p.t_tile // 8)) * BLOCK_BYTES
    x_source = ptx.global_address(x_ref) + (begin * (2 * blocks) + first_block).widened() * BLOCK_BYTES

    def fetch_record(i, stage):
        at = source + i.widened() * (p.k_groups * record)
        ptx.bulk_copy(ring + stage * record, at, record, arrived + stage * 8)

    def fetch_operand(unit, stage):
        barrier, target = full + stage * 8, operands + stage * stage_bytes
        ptx.barrier_expect(barrier, nbytes * (p.halves * parts))
        half = unit // units * (2 * p.k_groups) + unit % units
        for part in range(parts):
            for h in range(p.halves):
                at = x_source + half.widened() * (blocks * BLOCK_BYTES)
                at = at + (part * halves + h) * blocks * BLOCK_BYTES
                ptx.bulk_copy_kept(target + (part * p.halves + h) * half_bytes, at, nbytes, barrier)

    with when(is_first_lane):
        for i in range(p.record_stages):
            ptx.barrier_init(arrived + i * 8)
        with when(both(row_group.equals(0), (warp & 3).equals(0))):
            for i in range(p.operand_stages):
                ptx.barrier_init(full + i * 8)
                ptx.store_shared(counters, 4 * i, [constant(0)])
        ptx.barrier_fence()
        for i in range(p.record_stages):
            with when(both(exists, constant(i) < count)):
                fetch_record(constant(i), constant(i))
        with when(both(row_group.equals(0), (warp & 3).equals(0))):
            for i in range(p.operand_stages):
                with when(constant(i) < count * units):
                    fetch_operand(constant(i), constant(i))
    ptx.block_sync()
    lanes = lane_constants(type_name, lane)
    users = p.row_groups * 4  # warps that share a chunk of activations

    def release(unit):
        """The warp is done with a stage of activations; the last of its users fetches what comes next."""
        stage, ahead = unit % p.operand_stages, unit + p.operand_stages
        with when(is_first_lane):
            before = ptx.add_shared(counters + stage * 4, 1)
            with when(both((before % users).equals(users - 1), ahead < count * units)):
                fetch_operand(ahead, stage)

    def chunk(i, acc):
        record_stage = i % p.record_stages
        # Into the slot of record i − 1, only now: wgmma has consumed what was decoded from it.
        ahead = i + (p.record_stages - 1)
        with when(both(both(is_first_lane, exists), both(i >= 1, ahead < count))):
            fetch_record(ahead, ahead % p.record_stages)
        with when(exists):
            ptx.barrier_wait(arrived + record_stage * 8, i // p.record_stages & 1)
        weights = tensor_weights(type_name, ring + record_stage * record, lanes)
        for quarter, steps in enumerate(weights):
            if quarter % (2 * p.halves) == 0:
                unit = i * units + quarter // 2 // p.halves
                stage = unit % p.operand_stages
                ptx.barrier_wait(full + stage * 8, unit // p.operand_stages & 1)
                descriptor = ptx.wgmma_descriptor(operands + stage * stage_bytes, CORE_BYTES, BLOCK_BYTES)
            held = ptx.held([register for step in steps for register in step])
            ptx.wgmma_fence()
            for s in range(4):
                for part in range(parts):
                    half = part * p.halves + quarter // 2 % p.halves
                    offset = half * half_bytes + (quarter % 2 * 4 + s) * STEP_BYTES
                    a = held[4 * s : 4 * s + 4]
                    acc = ptx.wgmma(acc, a, descriptor + offset // 16, _operand_type(type_name))
            ptx.wgmma_commit()
            ptx.wgmma_wait(1 if quarter < 3 else 0)
            if quarter == 2 and units == 2:
                release(i * 2)  # quarters 0 and 1 are finished
        release(i * units + (units - 1))
        return acc

    acc = ptx.loop(count, ptx.zeros(p.t_tile // 2), chunk)
    acc = ptx.held(acc)
    if p.k_groups > 1:
        acc = _sum_over_k_groups(p, acc, thread, group, k_group, operand_ref)
    out = ptx.global_address(o_ref)
    n = row_tiles * ROWS
    row = row_tile * ROWS + lanes.g
    with when(both(exists, k_group.equals(0))):
        for column in range(p.t_tile // 8):
            for i in range(2):
                t = here.first + (column * 8 + i) + lanes.t * 2
                with when(both(t >= here.start, t < here.end)):
                    (inverse,) = ptx.load_global(ptx.global_address(inverse_ref) + (t * 4).widened(), 0, 1)
                    factor = inverse.as_f32() * 2.0 ** -TENSOR_SHIFT[type_name]
                    at = out + (((split * rows + t).widened() * n) + row.widened()) * 4
                    for half in range(2):
                        ptx.store_global(at, 32 * half, [acc[4 * column + 2 * half + i] * factor])


def _sum_over_k_groups(p: WidePlan, acc: Registers, thread, group, k_group, scratch_ref) -> Registers:
    """The sums of k group 0 plus those of the others in turn, through the ring of activations."""
    ptx.block_sync()
    words = len(acc) * 128
    at = ptx.shared_address(scratch_ref) + (thread & 127) * 4
    with when(k_group >= 1):
        for i, value in enumerate(acc):
            ptx.store_shared(at + (group - p.row_groups) * (words * 4), 512 * i, [value])
    ptx.block_sync()
    row_group = group % p.row_groups
    for other in range(p.k_groups - 1):
        place = at + (row_group + other * p.row_groups) * (words * 4)
        acc = [a + ptx.load_shared(place, 512 * i, 1)[0].as_f32() for i, a in enumerate(acc)]
    return acc
