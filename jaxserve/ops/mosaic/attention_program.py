"""What a thread of the decode attention does.

A warp asks for its first tile of keys and values, then prepares one of the cell's vectors while they travel.
After that it runs alone over every (warps × blocks)-th tile with a running softmax of its own; the next tile's
keys are asked for as soon as this tile's are used, its values likewise. At the end the warps' shares are summed
through shared memory in the order of the warps. Where several blocks worked, each then sums a part of the
columns over all blocks in their order, after one exchange through the cluster's shared memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_plan import Form, Shared, doubling_limits, shared
from jaxserve.ops.mosaic.attention_tile import (
    HEADS,
    KEYS,
    gather,
    key_blocks,
    key_rows,
    load_row,
    score,
    store_sums,
    sum_stride,
    value_blocks,
    value_rows,
    weigh,
)
from jaxserve.ops.mosaic.attention_token import OPERAND_BYTES, Sources, load_vector, store_vector
from jaxserve.ptx import Register, Registers, both, choose, constant, select, when

SHARE_BYTES = 24  # that a block sends of four columns: their sums, the largest score, the sum of weights

Rows = list[Registers]  # of each of a lane's rows, its words


class Operands(NamedTuple):
    """Global addresses."""

    caches: tuple[Register, Register]  # keys, values
    rank: Register
    slot: Register
    position: Register
    sources: Sources
    out: Register
    tickets: Register | None
    shares: Register | None
    stats: Register | None


class Cell(NamedTuple):
    """What this thread works on."""

    thread: Register
    lane: Register
    warp: Register
    member: Register  # block of the cell
    number: Register  # of the cell
    row: Register
    kv_head: Register
    first: Register  # query head among those that share kv_head


class Reach(NamedTuple):
    """Which keys a row sees, and how many blocks read them."""

    position: Register  # of the new token; beyond `limit`: it is not kept
    start: Register  # first key
    limit: Register  # last key
    tiles: Register
    doublings: Register
    blocks: Register  # 1 << doublings


class Share(NamedTuple):
    """Part of the sums over keys, for four columns of a head."""

    best: Register  # largest score, base 2
    total: Register  # of weights
    sums: Registers  # of weighted values


def program(form: Form, *refs) -> None:
    """refs: keys, values, rank, slot, position, parts, then bias, q_norm, k_norm, cos, sin where the form has
    them, output, shared memory.
    """
    operands, base = _operands(form, refs[:-1]), ptx.shared_address(refs[-1])
    here, cell, p = Shared(*(base + offset for offset in shared(form))), _cell(form), form.plan
    if p.clustered:
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
    reach = _reach(form, position)
    sees = both(slot < form.slots, reach.limit >= reach.start)
    with when(both(cell.member.equals(0), select(sees, constant(0), constant(1)).equals(1))):
        _each_quad(form, cell, lambda quad: _store(form, operands, cell, quad, ptx.zeros(4)))
    with when(both(sees, cell.member < reach.blocks)):
        head = ((rank * form.slots + slot) * form.kv_heads + cell.kv_head).widened()
        caches = [cache + head * (form.capacity * form.dim * 2) for cache in operands.caches]
        stream = Stream(form, cell, reach, caches, here)
        fetched = stream.start()
        is_owner = both(position < form.capacity, cell.member.equals((reach.tiles - 1) & (reach.blocks - 1)))
        is_owner = both(is_owner, cell.first.equals(0))
        token = [cache + (position * (2 * form.dim)).widened() for cache in caches]
        for vector in vectors:
            store_vector(form, vector, here, cell, is_owner, token)
        ptx.block_sync()
        stream.run(fetched)
        ptx.block_sync()
        _combine(form, operands, here, cell, reach)


def _operands(form, refs) -> Operands:
    refs = [ptx.global_address(ref) for ref in refs]
    keys, values, *refs = refs
    tickets = shares = stats = None
    if form.plan.ticketed:
        tickets, *refs = refs
        *refs, shares, stats = refs
    rank, slot, position, *rest, out = refs
    parts, rest = rest[: len(form.widths)], iter(rest[len(form.widths) :])
    bias = next(rest) if form.biased else None
    q_norm, k_norm = (next(rest) if form.normed else None for _ in range(2))
    cos, sin = (next(rest) if form.rotary else None for _ in range(2))
    sources = Sources(parts, bias, q_norm, k_norm, cos, sin)
    return Operands((keys, values), rank, slot, position, sources, out, tickets, shares, stats)


def _cell(form) -> Cell:
    p = form.plan
    thread, block = ptx.thread_index(), ptx.block_index()
    member, number = block % p.blocks, block // p.blocks
    of_head, cell = number % p.cells, number // p.cells
    return Cell(
        thread=thread,
        lane=thread & 31,
        warp=ptx.shuffle(thread >> 5, 0),
        member=member,
        number=number,
        row=cell // form.kv_heads,
        kv_head=cell % form.kv_heads,
        first=of_head * p.group,
    )


def _word(address: Register, index: Register) -> Register:
    return address + (index * 4).widened()


def _reach(form, position: Register) -> Reach:
    limit, start = ptx.minimum(position, constant(form.capacity - 1)), constant(0)
    if form.window:
        start = select(position >= form.window, position - (form.window - 1), start)
    tiles, doublings = limit // KEYS - start // KEYS + 1, constant(0)
    for most in doubling_limits(form.plan.blocks):
        doublings = doublings + select(tiles >= most + 1, constant(1), constant(0))
    return Reach(position, start, limit, tiles, doublings, constant(1) << doublings)


class Stream:
    """A warp's tiles: how they are found, fetched and used."""

    def __init__(self, form: Form, cell: Cell, reach: Reach, caches: Registers, here: Shared):
        self.form, self.reach, self.here, self.cell = form, reach, here, cell
        self.g, self.t = cell.lane >> 2, cell.lane & 3
        mine = (cell.warp << reach.doublings) + cell.member
        self.first = reach.start // KEYS + mine
        self.last = reach.limit // KEYS
        self.stride = constant(form.plan.warps) << reach.doublings
        rounds = ((reach.tiles - mine - 1) >> reach.doublings) // form.plan.warps + 1
        self.rounds = select(mine < reach.tiles, rounds, constant(0))
        key, value = key_blocks(form.dim), value_blocks(form.dim)
        self.keys = Side(form, caches[0], here.token, key_rows(self.g), self.t, key)
        self.values = Side(form, caches[1], here.token + 2 * form.dim, value_rows(self.t), self.g, value)

    def start(self) -> tuple[Rows, Rows]:
        """Asks for the first tile."""
        sides = [self.keys, self.values]
        return tuple(
            side.fetch(self.rounds >= 1, self.first, self.reach.limit, side.nothing()) for side in sides
        )

    def run(self, fetched: tuple[Rows, Rows]) -> None:
        """All of the warp's tiles, and its share into shared memory."""
        form, here, g, t, reach = self.form, self.here, self.g, self.t, self.reach
        query = here.queries + ptx.minimum(g, constant(form.plan.group - 1)) * OPERAND_BYTES + t * 16

        def step(i, carry):
            (keys, values), best, total, out = carry
            tile = self.first + i * self.stride
            is_last, goes_on = tile.equals(self.last), (i + 1) < self.rounds
            keys = self.keys.renewed(is_last, tile, reach.position, keys)
            scores = score(keys, query, form.dtype, form.dim)
            keys = self.keys.fetch(goes_on, tile + self.stride, reach.limit, keys)
            seen = [self._sees(tile * KEYS + row) for row in key_rows(g)]
            weights, shrink, best, total = weigh(scores, seen, best, total)
            values = self.values.renewed(is_last, tile, reach.position, values)
            out = gather(out, weights, shrink, values, form.dtype)
            values = self.values.fetch(goes_on, tile + self.stride, reach.limit, values)
            return (keys, values), best, total, out

        best, total = [constant(float("-inf"))] * 2, ptx.zeros(2)
        out = [ptx.zeros(4) for _ in range(form.dim // 16)]
        _, best, total, out = _loop(self.rounds, (fetched, best, total, out), step)
        self._share(best, total, out)

    def _share(self, best, total, out) -> None:
        """Brings the warps' sums to one scale and into shared memory. Those of an idle warp are zeros."""
        form, here, t, warps = self.form, self.here, self.t, self.form.plan.warps
        for distance in (4, 8, 16):
            total = [x + ptx.shuffle_xor(x.as_i32(), distance).as_f32() for x in total]
        tops, totals = (base + t * (2 * warps * 4) for base in (here.tops, here.totals))
        is_first = self.g.equals(0)
        with when(is_first):
            for head in range(2):
                ptx.store_shared(tops + self.cell.warp * 4, head * warps * 4, [best[head]])
        ptx.block_sync()
        factors = []
        for head in range(2):
            top = _over(ptx.maximum, _row(tops + head * warps * 4, warps))
            factors.append(ptx.exp2(best[head] - top))
        with when(is_first):
            for head in range(2):
                value = total[head] * factors[head]
                ptx.store_shared(totals + self.cell.warp * 4, head * warps * 4, [value])
        out = [[v * factors[i % 2] for i, v in enumerate(c)] for c in out]
        store_sums(here.sums + (self.cell.warp * HEADS + t * 2) * sum_stride(form.dim), out, self.g, form.dim)

    def _sees(self, row) -> Register:
        seen = self.reach.limit >= row
        return both(seen, row >= self.reach.start) if self.form.window else seen


class Side:
    """The keys or the values: where a lane's rows are, and how they are fetched."""

    def __init__(
        self, form: Form, cache: Register, token: Register, rows: Registers, index: Register, blocks
    ):
        self.form, self.rows, self.blocks = form, rows, blocks
        sizes = {words for _, words in blocks}
        self.cache = {words: cache + (index * (4 * words)).widened() for words in sizes}
        self.token = {words: token + index * (4 * words) for words in sizes}

    def nothing(self) -> Rows:
        return [[constant(0)] * sum(words for _, words in self.blocks) for _ in self.rows]

    def fetch(self, wanted: Register, tile: Register, limit: Register, otherwise: Rows) -> Rows:
        """A tile from the cache. Rows past the last key repeat it."""

        def load():
            words = []
            for row in self.rows:
                at = (ptx.minimum(tile * KEYS + row, limit) * (2 * self.form.dim)).widened()
                words += load_row(ptx.load_ahead, lambda n, at=at: self.cache[n] + at, self.blocks)
            return words

        return _choose(wanted, load, otherwise)

    def renewed(self, is_last: Register, tile: Register, position: Register, rows: Rows) -> Rows:
        """With the new token, from shared memory, where its row is, and in place of the rows after it."""

        def renew():
            new = load_row(ptx.load_shared, self.token.__getitem__, self.blocks)
            words = []
            for number, row in zip(self.rows, rows, strict=True):
                is_new = tile * KEYS + number >= position
                words += [select(is_new, a, b) for a, b in zip(new, row, strict=True)]
            return words

        return _choose(is_last, renew, rows)


def _choose(predicate: Register, yes: Callable[[], Registers], no: Rows) -> Rows:
    """ptx.choose between trees; yes() gives the leaves."""
    leaves, tree = jax.tree.flatten(no)
    return jax.tree.unflatten(tree, choose(predicate, yes, leaves))


def _loop(count: Register, carry, body: Callable):
    """ptx.loop with a tree for carry."""
    leaves, tree = jax.tree.flatten(carry)
    results = ptx.loop(count, leaves, lambda i, c: jax.tree.leaves(body(i, jax.tree.unflatten(tree, c))))
    return jax.tree.unflatten(tree, results)


# ---- the end: one sum out of many


def _row(address: Register, count: int) -> Registers:
    """f32 side by side in shared memory."""
    step = min(4, count)
    return [w.as_f32() for i in range(0, count, step) for w in ptx.load_shared(address, 4 * i, step)]


def _over(operation: Callable, values: Registers) -> Register:
    while len(values) > 1:
        values = [operation(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _combine(form, operands, here: Shared, cell: Cell, reach: Reach) -> None:
    """Over the warps of this block, then over the blocks."""
    exchange = TICKETS if form.plan.ticketed else PEERS if form.plan.clustered else None
    several = reach.blocks >= 2
    if exchange is PEERS:
        with when(several):
            mine = ((constant(form.quads - 1) - cell.member) >> reach.doublings) + 1
            with when(cell.thread.equals(0)):
                ptx.barrier_expect(here.arrived, (mine << reach.doublings) * SHARE_BYTES)
            ptx.cluster_wait()  # every block's mbarrier stands

    def over_warps(quad):
        head, column, warps = quad // (form.dim // 4), quad % (form.dim // 4), form.plan.warps
        total = _over(lambda a, b: a + b, _row(here.totals + head * (warps * 4), warps))
        at = here.sums + head * sum_stride(form.dim) + column * 16
        sums = ptx.zeros(4)
        for warp in range(warps):
            words = ptx.load_shared(at, warp * HEADS * sum_stride(form.dim), 4)
            sums = [a + b.as_f32() for a, b in zip(sums, words, strict=True)]
        if exchange is None:
            _finish(form, operands, here, cell, quad, total, sums)
            return
        with when(reach.blocks.equals(1)):
            _finish(form, operands, here, cell, quad, total, sums)
        with when(several):
            top = _over(ptx.maximum, _row(here.tops + head * (warps * 4), warps))
            if exchange is PEERS:
                # a peer's place: its quads by number, of each the blocks' shares in order
                owner = quad & (reach.blocks - 1)
                place = quad - owner + cell.member
                arrived = ptx.peer_address(here.arrived, owner)
                for address, words in (
                    (here.peer_sums + place * 16, sums),
                    (here.peer_stats + place * 8, [top, total]),
                ):
                    ptx.send_peer(ptx.peer_address(address, owner), words, arrived)
            else:
                place = (cell.number * form.plan.blocks + cell.member) * form.quads + quad
                ptx.store_global(operands.shares + (place * 16).widened(), 0, sums)
                ptx.store_global(operands.stats + (place * 8).widened(), 0, [top, total])

    _each_quad(form, cell, over_warps)
    if exchange is PEERS:
        with when(several):
            ptx.barrier_wait(here.arrived, constant(0))
            _each_quad(form, cell, over_peers(form, operands, here, cell, reach), -(-form.quads // 2))
    if exchange is TICKETS:
        with when(several):
            ptx.block_sync()
            with when(cell.thread.equals(0)):
                ticket = ptx.count_up(_word(operands.tickets, cell.number), reach.blocks - 1)
                ptx.store_shared(here.ticket, 0, [ticket])
            ptx.block_sync()
            (ticket,) = ptx.load_shared(here.ticket, 0, 1)
            with when(ticket.equals(reach.blocks - 1)):
                _each_quad(form, cell, over_shares(form, operands, here, cell, reach))


TICKETS, PEERS = "tickets", "peers"
CHUNK = 8


def over_peers(form, operands, here, cell, reach):
    def do(index):
        first = index << reach.doublings
        quad = first + cell.member
        with when(quad < form.quads):
            chunk = 2 if form.plan.blocks <= 4 else 4

            def step(i, carry):
                shares = []
                for j in range(chunk):
                    number = i * chunk + j
                    place = first + ptx.minimum(number, reach.blocks - 1)
                    best, total = (w.as_f32() for w in ptx.load_shared(here.peer_stats + place * 8, 0, 2))
                    sums = [w.as_f32() for w in ptx.load_shared(here.peer_sums + place * 16, 0, 4)]
                    best = select(number < reach.blocks, best, constant(float("-inf")))
                    shares.append(Share(best, total, sums))
                return tuple(_merged([Share(*carry), *shares]))

            start = (constant(float("-inf")), constant(0.0), ptx.zeros(4))
            share = Share(*_loop((reach.blocks + (chunk - 1)) // chunk, start, step))
            _finish(form, operands, here, cell, quad, share.total, share.sums)

    return do


def over_shares(form, operands, here, cell, reach):
    def do(quad):
        base = cell.number * form.plan.blocks

        def step(i, carry):
            shares = []
            for j in range(CHUNK):
                number = i * CHUNK + j
                place = (base + ptx.minimum(number, reach.blocks - 1)) * form.quads + quad
                best, total = ptx.load_fresh(operands.stats + (place * 8).widened(), 0, 2)
                sums = ptx.load_fresh(operands.shares + (place * 16).widened(), 0, 4)
                best = select(number < reach.blocks, best.as_f32(), constant(float("-inf")))
                shares.append(Share(best, total.as_f32(), [w.as_f32() for w in sums]))
            return tuple(_merged([Share(*carry), *shares]))

        start = (constant(float("-inf")), constant(0.0), ptx.zeros(4))
        share = Share(*_loop((reach.blocks + (CHUNK - 1)) // CHUNK, start, step))
        _finish(form, operands, here, cell, quad, share.total, share.sums)

    return do


def _each_quad(form, cell, do: Callable[[Register], None], count: int | None = None) -> None:
    """do(i) for i < count (the cell's quads) over the block's threads."""
    count = count or form.quads
    for base in range(0, count, form.threads):
        i = cell.thread + base
        with when(i < count):
            do(i)


def _merged(shares: list[Share]) -> Share:
    best = shares[0].best
    for share in shares[1:]:
        best = ptx.maximum(best, share.best)
    total, sums = constant(0.0), ptx.zeros(4)
    for share in shares:
        factor = ptx.exp2(share.best - best)
        total = ptx.fma(share.total, factor, total)
        sums = [ptx.fma(a, factor, b) for a, b in zip(share.sums, sums, strict=True)]
    return Share(best, total, sums)


def _finish(form, operands, here: Shared, cell: Cell, quad, total, sums) -> None:
    inverse = ptx.reciprocal(total)
    out = [v * inverse for v in sums]
    if form.gated:
        gates = ptx.load_shared(here.gates + quad * 16, 0, 4)
        out = [v * gate.as_f32() for v, gate in zip(out, gates, strict=True)]
    _store(form, operands, cell, quad, out)


def _store(form, operands, cell: Cell, quad, columns: Registers) -> None:
    per_head, shared_by = form.dim // 4, form.heads // form.kv_heads
    of_kv = ptx.minimum(cell.first + quad // per_head, constant(shared_by - 1))
    head = (cell.row * form.kv_heads + cell.kv_head) * shared_by + of_kv
    ptx.store_global(operands.out + ((head * per_head + quad % per_head) * 16).widened(), 0, columns)
