"""Attention of a prefill chunk over a row's cached keys on Hopper's tensor cores.

FlashAttention with an offset: a block takes one query head and one or two tiles of 64 queries, each with a
warpgroup; another warpgroup copies blocks of keys and values from the resident cache into a ring in shared
memory. Scores live in registers, the softmax runs along. The pipeline is that of jax's own
pallas.ops.gpu.attention_mgpu, after FlashAttention-3 (Shah et al., 2024).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve import ptx

QUERIES = 64  # of a warpgroup: the rows of a wgmma
STAGES = 2  # key blocks in flight
DIMS = (64, 128, 256)
NOTHING = -1e30  # a running maximum before the first key: finite, so that two of them differ by 0


def supported(dim: int, length: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel takes heads of this width, chunks of `length` queries and this cache."""
    return dim in DIMS and length % QUERIES == 0 and jnp.dtype(dtype) in (jnp.float16, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def attend_chunk(
    q: jax.Array, keys: jax.Array, values: jax.Array, rank, slot, start, *, scale: float, window: int
) -> jax.Array:
    """Queries at positions start, start + 1, … of one row over its cached keys: `ops.attention.attend_chunk`.

    q: f32 [T, Hq, D], keys, values: f16 or bf16 [La, slots, Hkv, S, D] → f32 [T, Hq, D]. Queries and
    probabilities are rounded to the cache's type, sums are f32.
    """
    (length, heads, dim), dtype = q.shape, keys.dtype
    _, slots, kv_heads, capacity, _ = keys.shape
    warpgroups = 2 if length % (2 * QUERIES) == 0 else 1
    block = min(64 if dim > 128 else 128, capacity)
    place = jnp.stack([(rank * slots + slot) * kv_heads, start]).astype(jnp.int32)
    rows = [cache.reshape(-1, capacity, dim) for cache in (keys, values)]  # a row of the cache per kv head
    q = (q * (scale * ptx.LOG2_E)).astype(dtype)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [
        plgpu.SMEM((warpgroups, QUERIES, dim), dtype, transforms=tiled),
        plgpu.SMEM((STAGES, block, dim), dtype, transforms=tiled),
        plgpu.SMEM((STAGES, block, dim), dtype, transforms=tiled),
        plgpu.Barrier(num_barriers=warpgroups),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
    ]
    body = functools.partial(
        _program,
        warpgroups=warpgroups,
        block=block,
        group=heads // kv_heads,
        capacity=capacity,
        window=window,
    )
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=(heads, length // (warpgroups * QUERIES)),
        grid_names=("head", "tile"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"attend_chunk_{length}x{heads}x{dim}",
    )
    return kernel(place, q, *rows).astype(jnp.float32)


def _program(
    place_ref, q_ref, k_ref, v_ref, out_ref, q_smem, k_smem, v_smem,
    q_ready, k_ready, v_ready, k_free, v_free,
    *, warpgroups: int, block: int, group: int, capacity: int, window: int,
):  # fmt: skip
    """place: the cache row of kv head 0, and the position of query 0."""
    me, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    first = lax.axis_index("tile") * (warpgroups * QUERIES)  # query of the block
    row, position = place_ref[0] + lax.div(head, jnp.int32(group)), place_ref[1] + first
    end = jnp.minimum(position + warpgroups * QUERIES, capacity)
    begin = lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(block)) if window else jnp.int32(0)
    steps = pl.cdiv(end, jnp.int32(block)) - begin

    @pl.when(me == warpgroups)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(step):
            stage = lax.rem(step, jnp.int32(STAGES))
            at = (row, pl.ds((begin + step) * block, block))
            for source, target, ready, free in (
                (k_ref, k_smem, k_ready, k_free),
                (v_ref, v_smem, v_ready, v_free),
            ):
                pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, free.at[stage]))
                plgpu.copy_gmem_to_smem(source.at[at], target.at[stage], ready.at[stage])

    @pl.when(me < warpgroups)
    def _attend():
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(first + me * QUERIES, QUERIES)
        q_here = q_smem.at[me]
        plgpu.copy_gmem_to_smem(q_ref.at[mine, head], q_here, q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])
        dim = q_here.shape[-1]
        per_query = plgpu.Layout.WGMMA.reduce(1)
        best = plgpu.layout_cast(jnp.full((QUERIES,), NOTHING, jnp.float32), per_query)
        total = plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), per_query)
        acc = plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA)
        shape = (QUERIES, block)
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA)
        position_here = position + me * QUERIES

        def step_(step, carry):
            acc, best, total = carry
            stage = lax.rem(step, jnp.int32(STAGES))

            def scores(out):
                plgpu.barrier_wait(k_ready.at[stage])
                plgpu.wgmma(out, q_here, plgpu.transpose_ref(k_smem.at[stage], (1, 0)))
                return out[...]

            score = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(k_free.at[stage])
            distance = (iota(0) + position_here) - (iota(1) + (begin + step) * block)
            seen = distance >= 0
            if window:
                seen &= distance < window
            score = jnp.where(seen, score, -jnp.inf)
            top = jnp.maximum(best, score.max(axis=1))
            shrink = jnp.exp2(best - top)
            p = jnp.exp2(score - lax.broadcast_in_dim(top, shape, [0]))
            total = total * shrink + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            p = p.astype(v_smem.dtype)

            def weighted(out):
                plgpu.barrier_wait(v_ready.at[stage])
                plgpu.wgmma(out, p, v_smem.at[stage])

            acc = pl.run_state(weighted)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_free.at[stage])
            return acc, top, total

        acc, _, total = lax.fori_loop(0, steps, step_, (acc, best, total))
        acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        q_here[...] = acc.astype(q_here.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_here, out_ref.at[mine, head])
        plgpu.wait_smem_to_gmem(0)
