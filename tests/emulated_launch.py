"""A whole launch in numpy, all threads in step: stands in for `jaxserve.ptx`, so that a kernel of several
warps and blocks runs without a GPU.

A register is an array with an entry a thread. Branches mask stores, loads and what loops carry. Every access
is checked: inside an array, aligned, in shared memory ordered by a barrier where two warps meet in a word.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import emulated_arithmetic as arithmetic
from tests.emulated_register import Register, install

THREADS_AT_ONCE = 4096
GUARD = 256  # bytes between arrays that no access may touch
PEER = 24  # a peer's shared address: its number in the cluster + 1 above these bits


class Shared:
    """Shared memory of all blocks in words, and who touched each since the last barrier."""

    def __init__(self, blocks: int, words: int):
        self.words = np.full((blocks, words), 0x7FC00000, np.uint32)
        self.writer, self.reader = np.full((2, blocks, words), -1)  # warp; -2: several

    def barrier(self):
        self.writer[:], self.reader[:] = -1, -1

    def read(self, block, word, warp):
        writer, reader = self.writer[block, word], self.reader[block, word]
        assert ((writer == -1) | (writer == warp)).all(), "read of another warp's word without a barrier"
        self.reader[block, word] = np.where((reader == -1) | (reader == warp), warp, -2)
        return self.words[block, word]

    def write(self, block, word, warp, value):
        for touched in (self.writer[block, word], self.reader[block, word]):
            assert ((touched == -1) | (touched == warp)).all(), (
                "write to another warp's word without a barrier"
            )
        self.words[block, word], self.writer[block, word] = value, warp


class Launch:
    """What `jaxserve.ptx` offers, for blocks of `warps` warps in clusters.

    arrays: in global memory, written in place when the launch is over.
    """

    def __init__(self, blocks: int, warps: int, cluster: int, arrays, shared_words: list[int]):
        self.blocks, self.threads, self.cluster, self.shared_words = blocks, 32 * warps, cluster, shared_words
        self.shared_starts = [4 * sum(shared_words[:i]) for i in range(len(shared_words))]
        self.arrays, self.starts, at = list(arrays), [], GUARD
        for array in self.arrays:
            self.starts.append(at)
            at += -(-array.nbytes // GUARD) * GUARD + GUARD
        self.memory, self.exists = np.zeros(at, np.uint8), np.zeros(at, bool)
        for array, start in zip(self.arrays, self.starts, strict=True):
            self.memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            self.exists[start : start + array.nbytes] = True
        self._become(0, blocks)

    def _become(self, first: int, blocks: int) -> None:
        """The threads of so many blocks."""
        self.first, self.count = first, blocks * self.threads
        thread = np.arange(self.count)
        self.block, self.thread = thread // self.threads, thread % self.threads
        self.warp = thread // 32
        self.mask = np.ones(self.count, bool)
        self.shared = Shared(blocks, sum(self.shared_words))

    def run(self, program) -> None:
        """Some blocks after the others: arrays of few threads stay in the CPU's caches."""
        together = max(1, THREADS_AT_ONCE // (self.threads * self.cluster)) * self.cluster
        for first in range(0, self.blocks, together):
            self._become(first, min(together, self.blocks - first))
            program(*range(len(self.arrays)), *range(len(self.shared_starts)))
        for array, start in zip(self.arrays, self.starts, strict=True):
            array.reshape(-1).view(np.uint8)[:] = self.memory[start : start + array.nbytes]

    def install(self, monkeypatch, modules) -> None:
        """This launch in the place of `jaxserve.ptx` for these modules."""
        names = [name for name in dir(self) if not name.startswith("_") and callable(getattr(self, name))]
        own = {name: getattr(self, name) for name in names} | {"Register": Register}
        install(monkeypatch, arithmetic.FUNCTIONS | own, modules)

    def _full(self, value, dtype):
        return Register(np.full(self.count, value, dtype))

    # ---- values, choices, loops

    def constant(self, x):
        return self._full(x, np.float32 if isinstance(x, float) else np.uint32)

    def pinned(self, bits):
        return self.constant(bits)

    def zeros(self, count):
        return [self.constant(0.0)] * count

    @contextlib.contextmanager
    def when(self, predicate):
        before = self.mask
        self.mask = before & predicate.lanes
        yield
        self.mask = before

    def choose(self, predicate, yes, no):
        with self.when(predicate):
            taken = yes()
        return [arithmetic.select(predicate, a, b) for a, b in zip(taken, no, strict=True)]

    def loop(self, count, carry, body):
        count = count if isinstance(count, Register) else self.constant(count)
        for i in range(int(count.lanes[self.mask].max(initial=0))):
            runs = Register(count.lanes > i)
            with self.when(runs):
                after = body(self.constant(i), carry)
            carry = [arithmetic.select(runs, a, b) for a, b in zip(after, carry, strict=True)]
        return carry

    def thread_index(self):
        return Register(self.thread.astype(np.uint32))

    def block_index(self):
        return Register((self.first + self.block).astype(np.uint32))

    def global_address(self, ref):
        return self._full(self.starts[ref], np.uint64)

    def shared_address(self, ref):
        return self.constant(self.shared_starts[ref])

    # ---- memory

    def _bytes(self, address, offset, nbytes):
        """Where every thread's bytes lie in memory: checked for those that take part."""
        at = np.where(self.mask, address.lanes.astype(np.int64) + offset, GUARD)
        at = at[:, None] + np.arange(nbytes)
        assert self.exists[at[self.mask]].all(), "outside of the arrays"
        assert (at[self.mask, 0] % min(nbytes, 16) == 0).all(), "misaligned"
        return at

    def load_global(self, address, offset, count):
        return self.load_ahead(address, offset, count)

    def load_ahead(self, address, offset, count):
        words = self.memory[self._bytes(address, offset, 4 * count)].view(np.uint32)
        return [Register(words[:, i].copy()) for i in range(count)]

    def load_ahead_where(self, predicate, address, offset, count):
        with self.when(predicate):
            words = self.load_ahead(address, offset, count)
            return [Register(np.where(self.mask, word.lanes, np.uint32(0))) for word in words]

    def load_byte_ahead(self, address):
        return Register(self.memory[self._bytes(address, 0, 1)[:, 0]].astype(np.uint32))

    def store_global_where(self, predicate, address, offset, values):
        with self.when(predicate):
            self.store_global(address, offset, values)

    def bulk_copy_kept(self, target, source, nbytes, barrier):
        for size in np.unique(nbytes.lanes[self.mask]):
            with self.when(nbytes.equals(size)):
                words = self.memory[self._bytes(source, 0, int(size))].view(np.uint32)
                for i in range(int(size) // 4):
                    self.store_shared(target, 4 * i, [Register(words[:, i])])
                self._arrived(barrier, int(size))

    def store_global(self, address, offset, values):
        at = self._bytes(address, offset, 4 * len(values))[self.mask]
        words = np.stack([v.lanes[self.mask].view(np.uint32) for v in values], 1)
        self.memory[at] = np.ascontiguousarray(words).view(np.uint8)

    def _shared_words(self, address, offset, count):
        at = address.lanes[self.mask].astype(np.int64) + offset
        local = at & ((1 << PEER) - 1)
        assert (local % (4 * count) == 0).all(), "misaligned"
        block = self.block[self.mask]
        peer = at >> PEER
        block = np.where(peer > 0, block // self.cluster * self.cluster + peer - 1, block)
        return block, local // 4

    def load_shared(self, address, offset, count):
        block, word = self._shared_words(address, offset, count)
        result = []
        for i in range(count):
            lanes = np.zeros(self.count, np.uint32)
            lanes[self.mask] = self.shared.read(block, word + i, self.warp[self.mask])
            result.append(Register(lanes))
        return result

    def store_shared(self, address, offset, values):
        block, word = self._shared_words(address, offset, len(values))
        for i, value in enumerate(values):
            bits = value.lanes[self.mask].view(np.uint32)
            self.shared.write(block, word + i, self.warp[self.mask], bits)

    def send_peer(self, address, values, barrier):
        assert self.cluster > 1, "an illegal instruction outside a cluster"
        self.store_shared(address, 0, values)
        self._arrived(barrier, 4 * len(values))

    def add_shared(self, address, value):
        """One thread after the other. It orders what they did before."""
        block, word = self._shared_words(address, 0, 1)
        place = block * self.shared.words.shape[1] + word
        order = np.argsort(place, kind="stable")
        sorted_places = place[order]
        rank = np.empty(len(place), np.uint32)
        rank[order] = np.arange(len(place)) - np.searchsorted(sorted_places, sorted_places)
        before = np.zeros(self.count, np.uint32)
        before[self.mask] = self.shared.words[block, word] + np.uint32(value) * rank
        np.add.at(self.shared.words, (block, word), np.uint32(value))
        self.shared.barrier()
        return Register(before)

    # ---- mbarriers: a word of bytes that are missing, a word 2 · phases that are over + whether the next one
    # has been announced

    def _arrived(self, barrier, nbytes):
        block, word = self._shared_words(barrier, 0, 2)
        np.subtract.at(self.shared.words, (block, word), np.uint32(nbytes))
        self._turn(block, word)

    def _turn(self, block, word):
        """A phase that was announced and misses no byte is over."""
        words = self.shared.words
        block, word = np.unique(np.stack([block, word]), axis=1)
        over = (words[block, word] == 0) & (words[block, word + 1] % 2 == 1)
        words[block[over], word[over] + 1] += np.uint32(1)

    def barrier_init(self, barrier):
        block, word = self._shared_words(barrier, 0, 2)
        self.shared.words[block, word] = self.shared.words[block, word + 1] = 0

    def barrier_fence(self):
        pass

    def barrier_expect(self, barrier, nbytes):
        block, word = self._shared_words(barrier, 0, 2)
        assert (self.shared.words[block, word + 1] % 2 == 0).all(), "announced before the last phase is over"
        np.add.at(self.shared.words, (block, word), nbytes.lanes[self.mask])
        np.add.at(self.shared.words, (block, word + 1), np.uint32(1))
        self._turn(block, word)

    def barrier_wait(self, barrier, parity):
        block, word = self._shared_words(barrier, 0, 2)
        phases = self.shared.words[block, word + 1] // 2
        assert (phases % 2 != parity.lanes[self.mask]).all(), "a phase that does not end, or the one after it"
        self.shared.barrier()

    def bulk_copy(self, target, source, nbytes, barrier):
        self.barrier_expect(barrier, self.constant(nbytes))
        self.bulk_copy_kept(target, source, self.constant(nbytes), barrier)

    def peer_address(self, address, block):
        return Register(address.lanes + ((block.lanes + np.uint32(1)) << np.uint32(PEER)))

    def _barrier(self, unit):
        whole = self.mask.reshape(-1, unit)
        assert (whole.all(1) | ~whole.any(1)).all(), "a barrier that some threads miss"
        self.shared.barrier()

    def block_sync(self):
        self._barrier(self.threads)

    def warp_sync(self):
        whole = self.mask.reshape(-1, 32)
        assert (whole.all(1) | ~whole.any(1)).all(), "a barrier that some lanes miss"

    def cluster_arrive(self, order="release"):
        pass

    def cluster_wait(self):
        self._barrier(self.threads)  # blocks that have left do not count

    def shuffle(self, value, lane):
        values = value.lanes.reshape(-1, 32)
        lane = lane.lanes.reshape(-1, 32) if isinstance(lane, Register) else np.full((1, 1), lane)
        lane = np.broadcast_to(lane, values.shape).astype(np.int64)
        return Register(np.take_along_axis(values, lane, 1).reshape(-1))

    # ---- wgmma: done at once

    def wgmma(self, acc, a, descriptor, of="f16"):
        """Shared memory is read where a warpgroup takes part: by all of its warps."""
        leaders = np.flatnonzero(self.mask.reshape(-1, 128).all(1))
        assert (self.mask.reshape(-1, 128).any(1).sum()) == len(leaders), (
            "a warpgroup of which some are missing"
        )
        columns = 2 * len(acc)
        where = descriptor.lanes.reshape(-1, 128)[leaders]
        assert (where == where[:, :1]).all(), "the warps of a warpgroup have different operands"
        start, k_stride, n_stride = (
            ((where[:, :1] >> np.uint64(shift) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
            for shift in (0, 16, 32)
        )
        # words of a column's 16 slots: two core matrices, 4 words of each
        column, word = np.divmod(np.arange(columns * 8), 8)
        at = start + column // 8 * n_stride + column % 8 * 16 + word // 4 * k_stride + word % 4 * 4
        words = np.empty(at.shape, np.uint32)
        for warp in range(4):
            thread = leaders[:, None] * 128 + 32 * warp
            words[:] = self.shared.read(self.block[thread], at // 4, self.warp[thread])
        view = np.float16 if of == "f16" else np.uint16
        values = words.reshape(len(leaders), columns, 8).view(view)
        if of == "bf16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        right = np.zeros((self.count // 128, 16, columns))
        right[leaders] = values.astype(np.float64).transpose(0, 2, 1)
        with np.errstate(all="ignore"):
            product = arithmetic.operand_a(a, of) @ np.repeat(right, 4, axis=0)
        return arithmetic.accumulated(acc, product)

    def wgmma_fence(self):
        pass

    def wgmma_commit(self):
        pass

    def wgmma_wait(self, groups):
        pass


def run(program, updated, read, *, modules, blocks, warps, cluster=1, out_types, scratch_types=()):
    """`ops.mosaic.launch.launch` in numpy, with `modules` bound to the emulator meanwhile."""
    arrays = [np.array(x) for x in (*updated, *read)]
    arrays += [np.empty(out.shape, out.dtype) for out in out_types]
    for array in arrays[len(arrays) - len(out_types) :]:
        array.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN, where it is a float
    words = [a.view(np.uint16) if a.dtype.itemsize == 2 else a for a in arrays]
    launch = Launch(blocks, warps, cluster, words, [scratch.shape[0] for scratch in scratch_types])
    with pytest.MonkeyPatch.context() as patch:
        launch.install(patch, modules)
        launch.run(program)
    return arrays[: len(updated)], arrays[len(arrays) - len(out_types) :]


def emulated(modules):
    """Stands in for `ops.mosaic.launch.launch`, outside of `jax.jit`."""

    def launch(program, updated, read, *, name, **options):
        return jax.tree.map(jnp.asarray, run(program, updated, read, modules=modules, **options))

    return launch
