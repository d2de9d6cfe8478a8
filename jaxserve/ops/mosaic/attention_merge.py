"""The end of the decode attention: the warps' shares become one, then the blocks', in an order that only the
row's length decides.

Shares are f32 in the order of mma's registers: item 32j + lane holds four numbers, an even and an odd column
(a lane's j-th pair) for heads 2t and 2t+1. Items are dealt out over threads, and over blocks where several
worked: each sends every one its share of that one's items, counted by an mbarrier there.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_cell import Cell, Reach
from jaxserve.ops.mosaic.attention_plan import ITEM_BYTES, STATS_BYTES, Form, Shared
from jaxserve.ops.mosaic.attention_stream import Share
from jaxserve.ops.mosaic.attention_tile import value_blocks
from jaxserve.ptx import Register, Registers, choose, constant, select, when


class Merge(NamedTuple):
    """What all steps need. out: address of the result, f32 [B, Hq·D]"""

    form: Form
    here: Shared
    cell: Cell
    reach: Reach
    out: Register


def store_zeros(form: Form, cell: Cell, out: Register) -> None:
    """What a cell without keys puts out."""

    def store(item):
        for head, column in _heads(form, item):
            with when(head < form.plan.group):
                ptx.store_global(out + _place(form, cell, head, column), 0, ptx.zeros(2))

    _each_item(form, cell, store)


def merge(m: Merge, share: Share) -> None:
    """Sums the shares of all warps and writes the result."""
    form, here, cell, reach, warps = m.form, m.here, m.cell, m.reach, m.form.plan.warps
    total = share.total
    for distance in (4, 8, 16):
        total = [x + ptx.shuffle_xor(x.as_i32(), distance).as_f32() for x in total]
    tops, totals = (
        [base + (cell.t * 2 + head) * (4 * warps) for head in range(2)] for base in (here.tops, here.totals)
    )
    one_of_each = cell.g.equals(0)
    with when(one_of_each):
        for at, best in zip(tops, share.best, strict=True):
            ptx.store_shared(at + cell.warp * 4, 0, [best])
    ptx.block_sync()
    top = [_fold(ptx.maximum, _floats(at, warps)) for at in tops]
    factors = [ptx.exp2(best - t) for best, t in zip(share.best, top, strict=True)]  # 0 of an idle warp
    with when(one_of_each):
        for at, x, factor in zip(totals, total, factors, strict=True):
            ptx.store_shared(at + cell.warp * 4, 0, [x * factor])
    for j, c in enumerate(share.out):
        at = here.sums + (cell.warp * form.items + cell.lane) * ITEM_BYTES
        ptx.store_shared(at, 32 * j * ITEM_BYTES, [v * factors[i % 2] for i, v in enumerate(c)])
    ptx.block_sync()
    total = [_fold(_plus, _floats(at, warps)) for at in totals]

    def sum_up(item):
        at = here.sums + item * ITEM_BYTES
        parts = [_floats(at + warp * (form.items * ITEM_BYTES), 4) for warp in range(warps)]
        sums = [_fold(_plus, list(column)) for column in zip(*parts, strict=True)]
        if not form.plan.is_cluster:
            _finish(m, item, total, sums)
            return
        with when(reach.blocks.equals(1)):
            _finish(m, item, total, sums)
        with when(reach.blocks >= 2):
            _send_item(m, item, sums)

    if form.plan.is_cluster:
        with when(reach.blocks >= 2):
            _send_stats(m, [top[0], total[0], top[1], total[1]])
    _each_item(form, cell, sum_up)
    if form.plan.is_cluster:
        with when(reach.blocks >= 2):
            _receive(m)


# ---- between blocks


def _send_stats(m: Merge, stats: Registers) -> None:
    """To all blocks, once all their mbarriers stand; says what this block will get."""
    form, here, cell, reach = m.form, m.here, m.cell, m.reach
    with when(cell.thread.equals(0)):
        ptx.barrier_expect(here.arrived, reach.blocks * STATS_BYTES + form.items * ITEM_BYTES)
    ptx.cluster_wait()
    at = here.peer_stats + cell.block * STATS_BYTES + cell.t * 16
    with when(cell.warp.equals(0)):
        for first in range(0, form.plan.blocks, 8):
            owner = cell.g + first
            with when(owner < reach.blocks):
                ptx.send_peer(ptx.peer_address(at, owner), stats, ptx.peer_address(here.arrived, owner))


def _send_item(m: Merge, item: Register, sums: Registers) -> None:
    """To the block that sums this item up."""
    form, here, cell, reach = m.form, m.here, m.cell, m.reach
    owner, each = (item << reach.doublings) // form.items, constant(form.items) >> reach.doublings
    at = here.peer_sums + (cell.block * (each + 1) + item - owner * each) * ITEM_BYTES
    ptx.send_peer(ptx.peer_address(at, owner), sums, ptx.peer_address(here.arrived, owner))


def _receive(m: Merge) -> None:
    """A lane takes an item's share of one block; neighbours hold the other blocks'."""
    form, here, cell, reach = m.form, m.here, m.cell, m.reach
    each = constant(form.items) >> reach.doublings
    ptx.barrier_wait(here.arrived, constant(0))

    def sum_up(index):
        of_owner, block = index >> reach.doublings, index & (reach.blocks - 1)
        item = cell.block * each + of_owner
        stats = _floats(here.peer_stats + block * STATS_BYTES + (item & 3) * 16, 4)
        sums = _floats(here.peer_sums + (block * (each + 1) + of_owner) * ITEM_BYTES, 4)
        top = _over_blocks(m, stats[::2], ptx.maximum)
        factors = [ptx.exp2(best - t) for best, t in zip(stats[::2], top, strict=True)]
        scaled = [v * factors[i % 2] for i, v in enumerate([*stats[1::2], *sums])]
        scaled = _over_blocks(m, scaled, _plus)
        with when(block.equals(0)):
            _finish(m, item, scaled[:2], scaled[2:])

    _each_item(form, cell, sum_up)


def _over_blocks(m: Merge, values: Registers, operation: Callable) -> Registers:
    for i in range(m.form.plan.blocks.bit_length() - 1):
        values = choose(
            m.reach.doublings >= i + 1,
            lambda values=values, i=i: [
                operation(v, ptx.shuffle_xor(v.as_i32(), 1 << i).as_f32()) for v in values
            ],
            values,
        )
    return values


# ---- items


def _each_item(form, cell, do: Callable[[Register], None]) -> None:
    """Over the block's threads; whole warps have one or none."""
    for first in range(0, form.items, form.threads):
        item = cell.thread + first
        with contextlib.nullcontext() if first + form.threads <= form.items else when(item < form.items):
            do(item)


def _finish(m: Merge, item: Register, total: Registers, columns: Registers) -> None:
    form = m.form
    for i, (head, column) in enumerate(_heads(form, item)):
        inverse = ptx.reciprocal(total[i])
        pair = [columns[i] * inverse, columns[2 + i] * inverse]
        with when(head < form.plan.group):
            if form.gated:
                gates = _floats(m.here.gates + (head * form.dim + column) * 4, 2)
                pair = [v * gate for v, gate in zip(pair, gates, strict=True)]
            ptx.store_global(m.out + _place(form, m.cell, head, column), 0, pair)


def _heads(form, item) -> list[tuple[Register, Register]]:
    """The two heads of an item, and its even column."""
    g, t, j = (item >> 2) & 7, item & 3, item >> 5
    column, before = constant(0), 0
    for first, words in value_blocks(form.dim):
        here = g * (2 * words) + (j - before) * 2 + first
        column = select(j >= before, here, column)
        before += words
    return [(t * 2, column), (t * 2 + 1, column)]


def _place(form, cell, head, column) -> Register:
    """Of a column in the result. Heads past those of the key head repeat its last."""
    shared = form.heads // form.kv_heads
    query = (cell.row * form.kv_heads + cell.kv_head) * shared
    query = query + ptx.minimum(cell.first + head, constant(shared - 1))
    return ((query * form.dim + column) * 4).widened()


def _floats(address: Register, count: int) -> Registers:
    step = min(4, count)
    return [w.as_f32() for i in range(0, count, step) for w in ptx.load_shared(address, 4 * i, step)]


def _plus(a: Register, b: Register) -> Register:
    return a + b


def _fold(operation: Callable, values: Registers) -> Register:
    while len(values) > 1:
        values = [operation(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]
