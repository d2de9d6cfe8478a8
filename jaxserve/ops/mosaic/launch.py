"""One launch of a kernel written in `jaxserve.ptx`, which may update some of its operands in place.

`pl.kernel` takes a `Ref` as an operand and makes it an input that aliases an output of the Mosaic call.
`plgpu.kernel` wraps the call in a `custom_vmap`, which loses the effects of a Ref on jax 0.10.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS_PER_THREAD = 4  # Pallas' threads are warpgroups
MAX_CLUSTER = 8  # blocks, on every GPU that has clusters
HOPPER_CLUSTER = 16  # on an H100 or H200
PIECE_BYTES = 1024  # of shared memory


def rounded(nbytes: int) -> int:
    """Shared memory in whole pieces keeps every piece aligned."""
    return -(-nbytes // PIECE_BYTES) * PIECE_BYTES


def scratch(words: int, dtype: jnp.dtype = jnp.uint32) -> plgpu.SMEM:
    """A scratch type: at least so many words of shared memory."""
    return plgpu.SMEM((rounded(4 * words) // 4,), dtype)


def launch(
    program: Callable[..., None],
    updated: Sequence[jax.Array],
    read: Sequence[jax.Array],
    *,
    name: str,
    blocks: int,
    warps: int,
    cluster: int = 1,
    out_types: Sequence[jax.ShapeDtypeStruct],
    scratch_types: Sequence = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs `blocks` blocks of `warps` warps (a multiple of 4), each of them program(*updated, *read,
    *outputs, *scratch) with all arguments memrefs → the arrays of `updated` after it, and the outputs.

    cluster: so many consecutive blocks run together and reach each other's shared memory.
    An array of `updated` is written in place where nothing else needs its old value: donate it.
    """
    if warps % WARPS_PER_THREAD:
        raise ValueError(f"warps={warps}: a block is made of whole warpgroups of {WARPS_PER_THREAD} warps")
    if blocks % cluster or cluster > HOPPER_CLUSTER:
        raise ValueError(
            f"{blocks} blocks in clusters of {cluster}: a cluster is whole and has up to {HOPPER_CLUSTER}"
        )

    def body(*refs):
        def with_scratch(*scratch):
            every = (*refs, *scratch)
            inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(every))
            inline(lambda _, *memrefs: program(*memrefs))(*every)

        pl.run_scoped(with_scratch, *scratch_types, collective_axes="warpgroup")

    kernel = pl.kernel(
        body,
        out_type=tuple(out_types),
        mesh=plgpu.Mesh(
            grid=(blocks // cluster,),
            grid_names=("block",),
            cluster=(cluster,) if cluster > 1 else (),
            cluster_names=("member",) if cluster > 1 else (),
            num_threads=warps // WARPS_PER_THREAD,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        name=name,
    )
    refs = [jax.new_ref(x) for x in updated]
    outputs = kernel(*refs, *read)
    return [jax.freeze(ref) for ref in refs], list(outputs)
