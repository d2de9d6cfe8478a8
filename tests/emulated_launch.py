"""A whole launch in numpy, all threads in step: stands in for `jaxserve.ptx`, so that a kernel of several
warps and blocks runs without a GPU.

A register is an array with an entry a thread. Branches mask stores, loads and what loops carry. Every access
is checked: inside an array, aligned, in shared memory ordered by a barrier where two warps meet in a word.
"""

import contextlib

import jax.numpy as jnp
import numpy as np

from tests.emulated_register import Register, install, rounded_to_bf16

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
        self.threads, self.warps, self.cluster = 32 * warps, warps, cluster
        self.count = blocks * self.threads
        thread = np.arange(self.count)
        self.block, self.thread = thread // self.threads, thread % self.threads
        self.warp = thread // 32
        self.mask = np.ones(self.count, bool)
        self.shared_starts = [4 * sum(shared_words[:i]) for i in range(len(shared_words))]
        self.shared = Shared(blocks, sum(shared_words))
        self.arrays, self.starts, at = list(arrays), [], GUARD
        for array in self.arrays:
            self.starts.append(at)
            at += -(-array.nbytes // GUARD) * GUARD + GUARD
        self.memory, self.exists = np.zeros(at, np.uint8), np.zeros(at, bool)
        for array, start in zip(self.arrays, self.starts, strict=True):
            self.memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            self.exists[start : start + array.nbytes] = True

    def run(self, program) -> None:
        program(*range(len(self.arrays)), *range(len(self.shared_starts)))
        for array, start in zip(self.arrays, self.starts, strict=True):
            array.reshape(-1).view(np.uint8)[:] = self.memory[start : start + array.nbytes]

    def install(self, monkeypatch, modules) -> None:
        """This launch in the place of `jaxserve.ptx` for these modules."""
        names = [name for name in dir(self) if not name.startswith("_") and callable(getattr(self, name))]
        functions = {name: getattr(self, name) for name in names} | {"Register": Register}
        install(monkeypatch, functions, modules)

    def _full(self, value, dtype):
        return Register(np.full(self.count, value, dtype))

    # ---- values, choices, loops

    def constant(self, x):
        return self._full(x, np.float32 if isinstance(x, float) else np.uint32)

    def zeros(self, count):
        return [self.constant(0.0)] * count

    def select(self, predicate, a, b):
        return Register(np.where(predicate.lanes, a.lanes, b.lanes))

    def both(self, a, b):
        return Register(a.lanes & b.lanes)

    @contextlib.contextmanager
    def when(self, predicate):
        before = self.mask
        self.mask = before & predicate.lanes
        yield
        self.mask = before

    def choose(self, predicate, yes, no):
        with self.when(predicate):
            taken = yes()
        return [self.select(predicate, a, b) for a, b in zip(taken, no, strict=True)]

    def loop(self, count, carry, body):
        count = count if isinstance(count, Register) else self.constant(count)
        for i in range(int(count.lanes[self.mask].max(initial=0))):
            runs = Register(count.lanes > i)
            with self.when(runs):
                after = body(self.constant(i), carry)
            carry = [self.select(runs, a, b) for a, b in zip(after, carry, strict=True)]
        return carry

    def thread_index(self):
        return Register(self.thread.astype(np.uint32))

    def block_index(self):
        return Register(self.block.astype(np.uint32))

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

    def _arrived(self, barrier, nbytes):
        """Counted by the mbarrier, a word of shared memory here."""
        block, word = self._shared_words(barrier, 0, 2)
        np.subtract.at(self.shared.words, (block, word), np.uint32(nbytes))

    def barrier_init(self, barrier):
        block, word = self._shared_words(barrier, 0, 2)
        self.shared.words[block, word] = 0

    def barrier_fence(self):
        pass

    def barrier_expect(self, barrier, nbytes):
        block, word = self._shared_words(barrier, 0, 2)
        np.add.at(self.shared.words, (block, word), nbytes.lanes[self.mask])

    def barrier_wait(self, barrier, parity):
        block, word = self._shared_words(barrier, 0, 2)
        assert (self.shared.words[block, word] == 0).all(), "bytes announced and bytes sent differ"
        self.shared.barrier()

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

    # ---- across lanes

    def _lanes(self, register):
        return register.lanes.reshape(-1, 32)

    def shuffle(self, value, lane):
        lane = lane.lanes.reshape(-1, 32) if isinstance(lane, Register) else np.full((1, 1), lane)
        lane = np.broadcast_to(lane, self._lanes(value).shape).astype(np.int64)
        return Register(np.take_along_axis(self._lanes(value), lane, 1).reshape(-1))

    def shuffle_xor(self, value, distance):
        return Register(self._lanes(value)[:, np.arange(32) ^ distance].reshape(-1))

    def transpose_8x8(self, value):
        halves = value.lanes.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return Register(np.ascontiguousarray(halves).reshape(-1).view(np.uint32))

    # ---- arithmetic

    def fma(self, a, b, c):
        with np.errstate(all="ignore"):
            return Register((a.lanes.astype(np.float64) * b.lanes + c.lanes).astype(np.float32))

    def minimum(self, a, b):
        return Register(np.minimum(a.lanes, b.lanes))

    def maximum(self, a, b):
        return Register(np.fmax(a.lanes, b.lanes))

    def absolute(self, a):
        return Register(np.abs(a.lanes))

    def exp2(self, a):
        with np.errstate(all="ignore"):
            return Register(np.exp2(a.lanes))

    def reciprocal(self, a):
        with np.errstate(all="ignore"):
            return Register(np.float32(1) / a.lanes)

    def reciprocal_root(self, a):
        with np.errstate(all="ignore"):
            return Register(np.float32(1) / np.sqrt(a.lanes))

    def unpack_f16x2(self, word):
        halves = word.lanes.view(np.float16).reshape(-1, 2).astype(np.float32)
        return [Register(halves[:, i].copy()) for i in range(2)]

    def pack_f16x2(self, low, high):
        with np.errstate(all="ignore"):
            halves = np.stack([low.lanes, high.lanes], 1).astype(np.float16)
        return Register(halves.reshape(-1).view(np.uint32))

    def unpack_bf16x2(self, word):
        return [(word << 16).as_f32(), (word & 0xFFFF0000).as_f32()]

    def pack_bf16x2(self, low, high):
        return Register(rounded_to_bf16(low.lanes, high.lanes))

    def choose_bytes(self, a, b, selector):
        source = np.stack([a.lanes, b.lanes], 1).view(np.uint8)
        picks = [selector >> 4 * i & 7 for i in range(4)]
        return Register(np.ascontiguousarray(source[:, picks]).view(np.uint32)[:, 0])

    def mma(self, c, a, b, of="f16"):
        """m16n8k16 with exact products, summed in f64 and rounded once."""
        unpack = {"f16": self.unpack_f16x2, "bf16": self.unpack_bf16x2}[of]
        warps = self.count // 32
        left, right, total = np.empty((warps, 16, 16)), np.empty((warps, 16, 8)), np.empty((warps, 16, 8))
        g, t = np.arange(32) // 4, np.arange(32) % 4
        for i, register in enumerate(a):
            for p, half in enumerate(unpack(register)):
                left[:, g + 8 * (i % 2), 8 * (i // 2) + 2 * t + p] = self._lanes(half)
        for i, register in enumerate(b):
            for p, half in enumerate(unpack(register)):
                right[:, 8 * i + 2 * t + p, g] = self._lanes(half)
        places = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
        for (row, column), register in zip(places, c, strict=True):
            total[:, row, column] = self._lanes(register)
        with np.errstate(all="ignore"):
            total = (total + left @ right).astype(np.float32)
        return [Register(total[:, row, column].reshape(-1)) for row, column in places]

    def mma_tf32(self, c, a, b):
        """c + a @ b with the low bits of a and b cut off, summed in f64 and rounded once."""

        def dealt(registers):
            words = np.stack([r.lanes.reshape(-1, 8, 4) for r in registers], 1)
            return (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

        a, b, warps = dealt(a), dealt(b), self.count // 32  # [warps, registers, g, t]
        left = a.reshape(warps, 2, 2, 8, 4).transpose(0, 2, 3, 1, 4).reshape(warps, 16, 8)
        right = b.transpose(0, 1, 3, 2).reshape(warps, 8, 8)
        product = (left @ right).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        return [Register((x.lanes + p).astype(np.float32)) for x, p in zip(c, product, strict=True)]


def emulated(monkeypatch, modules):
    """Stands in for `ops.mosaic.launch.launch`: runs the program here."""

    def launch(program, updated, read, *, blocks, warps, cluster=1, out_types, scratch_types, **_):
        arrays = [np.array(x) for x in (*updated, *read)]
        arrays += [np.full(out.shape, np.nan, out.dtype) for out in out_types]
        words = [a.view(np.uint16) if a.dtype.itemsize == 2 else a for a in arrays]
        run = Launch(blocks, warps, cluster, words, [scratch.shape[0] for scratch in scratch_types])
        run.install(monkeypatch, modules)
        run.run(program)
        after = [jnp.asarray(a) for a in arrays]
        return after[: len(updated)], after[len(arrays) - len(out_types) :]

    return launch
