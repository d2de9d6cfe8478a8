"""What a thread of the decode attention does, from first to last.

A warp asks for its first tile of keys and values, then prepares one of the cell's vectors while they travel.
After that it runs alone over its tiles with a running softmax of its own; the next tile's keys are asked for
as soon as this tile's are used, its values likewise. At the end the shares of warps and blocks are merged.
"""

from typing import NamedTuple

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_cell import find_cell, find_reach
from jaxserve.ops.mosaic.attention_merge import Merge, merge, store_zeros
from jaxserve.ops.mosaic.attention_plan import Form, Shared, shared
from jaxserve.ops.mosaic.attention_stream import Stream
from jaxserve.ops.mosaic.attention_token import Sources, load_vector, store_vector
from jaxserve.ptx import Register, both, constant, select, when


class Operands(NamedTuple):
    """Global addresses."""

    caches: tuple[Register, Register]  # keys, values
    rank: Register
    slot: Register
    position: Register
    sources: Sources
    out: Register


def program(form: Form, *refs) -> None:
    """refs: keys, values, rank, slot, position, parts, then bias, q_norm, k_norm, cos, sin where the form has
    them, output, shared memory.
    """
    operands, base = _operands(form, refs[:-1]), ptx.shared_address(refs[-1])
    here, cell, p = Shared(*(base + offset for offset in shared(form))), find_cell(form), form.plan
    if p.is_cluster:
        with when(cell.thread.equals(0)):
            ptx.barrier_init(here.arrived)
            ptx.barrier_fence()
        ptx.cluster_arrive("relaxed")
    (rank,), (slot,), (position,) = (
        ptx.load_ahead(at, 0, 1)
        for at in (operands.rank, _word(operands.slot, cell.row), _word(operands.position, cell.row))
    )
    vectors = []
    for first in range(0, p.group + 2, p.warps):
        head = ptx.minimum(cell.warp + first, constant(p.group + 1))  # surplus warps repeat the value
        vectors.append(load_vector(form, operands.sources, cell, head))
    reach = find_reach(form, position)
    is_live = both(slot < form.slots, reach.limit >= reach.start)
    with when(both(cell.block.equals(0), select(is_live, constant(0), constant(1)).equals(1))):
        store_zeros(form, cell, operands.out)
    with when(both(is_live, cell.block < reach.blocks)):
        head_bytes = form.capacity * form.dim * 2
        head = ((rank * form.slots + slot) * form.kv_heads + cell.kv_head).widened()
        caches = [cache + head * head_bytes for cache in operands.caches]
        stream = Stream(form, cell, reach, caches, here)
        fetched = stream.start()
        is_owner = both(cell.first.equals(0), cell.block.equals((reach.tiles - 1) & (reach.blocks - 1)))
        is_owner = both(is_owner, position < form.capacity)
        token = [cache + (position * (2 * form.dim)).widened() for cache in caches]
        for vector in vectors:
            store_vector(form, vector, here, cell, is_owner, token)
        ptx.block_sync()
        share = stream.run(*fetched)
        merge(Merge(form, here, cell, reach, operands.out), share)


def _operands(form, refs) -> Operands:
    keys, values, rank, slot, position, *rest, out = (ptx.global_address(ref) for ref in refs)
    parts, rest = rest[: len(form.widths)], iter(rest[len(form.widths) :])
    bias = next(rest) if form.biased else None
    q_norm, k_norm = (next(rest) if form.normed else None for _ in range(2))
    cos, sin = (next(rest) if form.rotary else None for _ in range(2))
    sources = Sources(parts, bias, q_norm, k_norm, cos, sin)
    return Operands((keys, values), rank, slot, position, sources, out)


def _word(address: Register, index: Register) -> Register:
    return address + (index * 4).widened()
