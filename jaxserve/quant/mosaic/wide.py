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

import jax
import jax.numpy as jnp

from jaxserve import ptx
from jaxserve.ops.mosaic.launch import launch, scratch
from jaxserve.ptx import constant, when
from jaxserve.quant.mosaic.records import FLOATS, ROWS
from jaxserve.quant.mosaic.slots import operand_parts, slot_order
from jaxserve.quant.mosaic.weights import check_records
from jaxserve.quant.mosaic.wide_plan import WidePlan, wide_plan
from jaxserve.quant.mosaic.wide_program import Block, Problem, Refs, Tile, operand_type


@functools.partial(jax.jit, static_argnums=(2, 3))
def wide_matmul(x: jax.Array, records: jax.Array, type_name: str, k: int) -> jax.Array:
    """x [T, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [T, N]."""
    _check(x, records, type_name, k, 3)
    p = wide_plan(type_name, x.shape[0], *records.shape[:2], operand_parts(x.dtype, operand_type(type_name)))
    return _partial_products(x, records, None, type_name, k, p).sum(0)


@functools.partial(jax.jit, static_argnums=(3, 4))
def grouped_wide_matmul(
    x: jax.Array,
    group_sizes: jax.Array,
    records: jax.Array,
    type_name: str,
    k: int,
    *,
    index: jax.Array | None = None,
) -> jax.Array:
    """Rows sorted by expert, `group_sizes` i32 [X] of them for each.

    x [T, K] times a packed stack [X, N, K] → f32 [T, N]; rows beyond the sum of sizes are not written.
    index i32 [P]: x is unsorted; row p of the result, f32 [P, N], is that of row index[p].
    """
    _check(x, records, type_name, k, 4)
    if group_sizes.shape != records.shape[:1]:
        raise ValueError(
            f"group_sizes {group_sizes.shape} must have an entry for each of {len(records)} experts"
        )
    rows, experts = len(x if index is None else index), len(records)
    parts = operand_parts(x.dtype, operand_type(type_name))
    p = wide_plan(type_name, rows, *records.shape[1:3], parts, experts)
    table = tile_table(group_sizes, p.t_tile, most_tiles(rows, experts, p.t_tile))
    return _partial_products(x, records, table, type_name, k, p, index)[0]


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


def _check(x, records, type_name, k, ndim):
    check_records(records, type_name, k)
    if records.ndim != ndim or x.ndim != 2 or x.shape[1] != k or not x.shape[0]:
        raise ValueError(
            f"x {x.shape} and records {records.shape} do not fit a {type_name} matrix of {k} columns"
        )
    if x.dtype.name not in FLOATS:
        raise ValueError(f"x is {x.dtype}: the wide kernel takes {', '.join(FLOATS)}")


def _partial_products(x, records, table, type_name: str, k: int, p: WidePlan, index=None) -> jax.Array:
    """f32 [splits, T, N]"""
    rows, (row_tiles, chunks) = len(x if index is None else index), records.shape[-3:-1]
    operand, inverse = slot_order(x, operand_type(type_name), index)
    tiles = -(-rows // p.t_tile) if table is None else len(table)
    problem = Problem(type_name, p, rows, operand.shape[2], row_tiles, chunks)

    def program(operand_ref, inverse_ref, w_ref, *refs):
        *table_ref, out, operand_ring, record_ring, barriers, counters = refs
        memory = Refs(operand_ref, inverse_ref, w_ref, out, operand_ring, record_ring, barriers, counters)
        block = ptx.block_index()
        if table is None:  # tiles of T that share weights run side by side
            tile, rest = block % tiles, block // tiles
            here = Tile(constant(0), tile * p.t_tile, constant(0), constant(rows))
            Block(problem, memory, here, rest % p.row_blocks, rest // p.row_blocks).run()
        else:
            at = ptx.global_address(*table_ref) + (block // p.row_blocks * 16).widened()
            here = Tile(*ptx.load_global(at, 0, 4))
            with when(here.matrix < len(records)):
                Block(problem, memory, here, block % p.row_blocks, constant(0)).run()

    experts = "" if table is None else f"_experts{len(records)}"
    return launch(
        program,
        [],
        [operand, inverse, records, *([] if table is None else [table])],
        name=f"wide_{type_name.lower()}_{row_tiles * ROWS}x{k}_t{rows}{experts}",
        blocks=p.splits * p.row_blocks * tiles,
        warps=p.warps,
        out_types=[jax.ShapeDtypeStruct((p.splits, rows, row_tiles * ROWS), jnp.float32)],
        scratch_types=[
            scratch(p.operand_ring_bytes // 4),
            scratch(p.record_ring_bytes // 4),
            scratch(256),
            scratch(256),
        ],
    )[1][0]
