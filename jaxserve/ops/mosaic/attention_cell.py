"""What one thread of the decode attention is there for: its cell, and the keys its row sees."""

from typing import NamedTuple

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_plan import Form, doubling_limits
from jaxserve.ops.mosaic.attention_tile import KEYS
from jaxserve.ptx import Register, both, constant, select


class Cell(NamedTuple):
    """A row, a key head, the query heads from `first` on that share it, and this thread's place in there."""

    thread: Register
    lane: Register
    g: Register  # lane // 4
    t: Register  # lane % 4
    warp: Register
    block: Register  # of the cell
    row: Register
    kv_head: Register
    first: Register  # among the query heads of kv_head


class Reach(NamedTuple):
    """Which keys a row sees, and how many blocks read them."""

    position: Register  # of the new token; beyond `limit`: it is not kept
    start: Register  # first key
    limit: Register  # last key
    tiles: Register
    doublings: Register
    blocks: Register  # 1 << doublings


def find_cell(form: Form) -> Cell:
    """Blocks of a cell are neighbours, then come cells of a key head, key heads, rows."""
    p = form.plan
    thread, block = ptx.thread_index(), ptx.block_index()
    cell = block // p.blocks
    head, lane = cell // p.cells, thread & 31
    return Cell(
        thread=thread,
        lane=lane,
        g=lane >> 2,
        t=lane & 3,
        warp=ptx.shuffle(thread >> 5, 0),
        block=block % p.blocks,
        row=head // form.kv_heads,
        kv_head=head % form.kv_heads,
        first=cell % p.cells * p.group,
    )


def find_reach(form: Form, position: Register) -> Reach:
    """Of the token at `position`."""
    limit, start = ptx.minimum(position, constant(form.capacity - 1)), constant(0)
    if form.window:
        start = select(position >= form.window, position - (form.window - 1), start)
    tiles, doublings = limit // KEYS - start // KEYS + 1, constant(0)
    for most in doubling_limits(form.plan.blocks):
        doublings = doublings + select(tiles >= most + 1, constant(1), constant(0))
    return Reach(position, start, limit, tiles, doublings, constant(1) << doublings)


def sees(form: Form, reach: Reach, key: Register) -> Register:
    """Whether the token attends to a key."""
    seen = reach.limit >= key
    return both(seen, key >= reach.start) if form.window else seen
