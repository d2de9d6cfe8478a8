"""A warp's tiles in the decode attention: where they are, how they are fetched, what becomes of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxserve import ptx
from jaxserve.ops.mosaic.attention_cell import Cell, Reach, sees
from jaxserve.ops.mosaic.attention_plan import Form, Shared
from jaxserve.ops.mosaic.attention_tile import (
    KEYS,
    gather,
    key_blocks,
    key_rows,
    load_row,
    score,
    value_blocks,
    value_rows,
    weigh,
)
from jaxserve.ops.mosaic.attention_token import OPERAND_BYTES
from jaxserve.ptx import Register, Registers, choose, constant, select

Rows = list[Registers]  # of each of a lane's rows, its words


class Share(NamedTuple):
    """A warp's part of the sums over keys, for heads 2t, 2t+1."""

    best: Registers  # largest score, base 2
    total: Registers  # of the weights of this lane's keys
    out: list[Registers]  # weighted values as `attention_tile.gather` leaves them


class Stream:
    """The tiles of one warp: every (warps × blocks)-th of its row."""

    def __init__(self, form: Form, cell: Cell, reach: Reach, caches: Registers, here: Shared):
        self.form, self.cell, self.reach, self.here = form, cell, reach, here
        first = (cell.warp << reach.doublings) + cell.block
        self.first = reach.start // KEYS + first
        self.stride = constant(form.plan.warps) << reach.doublings
        rounds = ((reach.tiles - first - 1) >> reach.doublings) // form.plan.warps + 1
        self.rounds = select(first < reach.tiles, rounds, constant(0))
        token = here.token, here.token + 2 * form.dim
        self.keys = _Side(form, caches[0], token[0], key_rows(cell.g), cell.t, key_blocks(form.dim))
        self.values = _Side(form, caches[1], token[1], value_rows(cell.t), cell.g, value_blocks(form.dim))

    def start(self) -> tuple[Rows, Rows]:
        """Asks for the first tile."""
        keys, values = (
            side.fetch(self.rounds >= 1, self.first, self.reach.limit, side.nothing())
            for side in (self.keys, self.values)
        )
        return keys, values

    def run(self, keys: Rows, values: Rows) -> Share:
        """Over all tiles, the first already fetched. The new token is in shared memory by now."""
        form, reach, last = self.form, self.reach, self.reach.limit // KEYS
        head = ptx.minimum(
            self.cell.g, constant(form.plan.group - 1)
        )  # surplus columns of mma repeat the last
        query = self.here.queries + head * OPERAND_BYTES + self.cell.t * 16

        def step(i, carry):
            keys, values, share = carry
            tile = self.first + i * self.stride
            is_last, goes_on = tile.equals(last), (i + 1) < self.rounds
            keys = self.keys.renewed(is_last, tile, reach.position, keys)
            scores = score(keys, query, form.dtype, form.dim)
            keys = self.keys.fetch(goes_on, tile + self.stride, reach.limit, keys)
            seen = [sees(form, reach, tile * KEYS + row) for row in self.keys.rows]
            weights, shrink, best, total = weigh(scores, seen, share.best, share.total)
            values = self.values.renewed(is_last, tile, reach.position, values)
            out = gather(share.out, weights, shrink, values, form.dtype)
            values = self.values.fetch(goes_on, tile + self.stride, reach.limit, values)
            return keys, values, Share(best, total, out)

        nothing = [ptx.zeros(4) for _ in range(form.dim // 16)]
        share = Share([constant(float("-inf"))] * 2, ptx.zeros(2), nothing)
        leaves, tree = jax.tree.flatten((keys, values, share))
        leaves = ptx.loop(
            self.rounds, leaves, lambda i, c: jax.tree.leaves(step(i, jax.tree.unflatten(tree, c)))
        )
        return jax.tree.unflatten(tree, leaves)[2]


class _Side:
    """The keys or the values: a lane's rows of a tile."""

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
        """A tile from the cache, where `wanted`. Rows past the last key repeat it."""

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
    """ptx.choose; yes() gives the leaves."""
    leaves, tree = jax.tree.flatten(no)
    return jax.tree.unflatten(tree, choose(predicate, yes, leaves))
