"""All threads of a kernel in numpy, in step: stands in for `jaxserve.ptx` where there is no GPU.

A register is an array with an entry per thread, blocks in order. Barriers do nothing, since every thread has
done what the line before says: what only their absence would break belongs to the GPU tests. Reads outside
an operand are refused.
"""

import contextlib

import numpy as np

PEER = 1 << 24  # shared addresses of the n-th block of a cluster begin at (n + 1) · PEER
GAP = 256  # bytes between operands


class Register:
    def __init__(self, values):
        self.values = np.asarray(values)

    def _binary(self, other, operation):
        other = other.values if isinstance(other, Register) else self.values.dtype.type(other)
        with np.errstate(over="ignore", invalid="ignore"):
            return Register(operation(self.values, other))

    def __add__(self, other):
        return self._binary(other, np.add)

    def __sub__(self, other):
        return self._binary(other, np.subtract)

    def __mul__(self, other):
        return self._binary(other, np.multiply)

    def __and__(self, other):
        return self._binary(other, np.bitwise_and)

    def __rshift__(self, other):
        return self._binary(other, np.right_shift)

    def __floordiv__(self, other):
        return self._binary(other, np.floor_divide)

    def __mod__(self, other):
        return self._binary(other, np.mod)

    def __lt__(self, other):
        return self._binary(other, np.less)

    def __ge__(self, other):
        return self._binary(other, np.greater_equal)

    def equals(self, other):
        return self._binary(other, np.equal)

    def as_f32(self):
        return Register(self.values.view(np.float32))

    def as_i32(self):
        return Register(self.values.view(np.uint32))

    def widened(self):
        return Register(self.values.astype(np.uint64))


class Grid:
    """A launch: the functions of `jaxserve.ptx`, bound to its threads and memory."""

    def __init__(self, blocks: int, threads: int, cluster: int, arrays: list, shared_words: list[int]):
        self.threads, self.cluster = threads, cluster
        self.block = np.repeat(np.arange(blocks, dtype=np.uint32), threads)
        self.thread = np.tile(np.arange(threads, dtype=np.uint32), blocks)
        self.bases = np.cumsum([0, *(a.nbytes + GAP for a in arrays)])
        self.sizes = [a.nbytes for a in arrays]
        self.memory = np.full(self.bases[-1], 0xFF, np.uint8)
        for base, a in zip(self.bases, arrays, strict=False):
            self.memory[base : base + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        self.shared_bases = np.cumsum([0, *(4 * n for n in shared_words)])
        self.shared = np.full((blocks, self.shared_bases[-1]), 0xFF, np.uint8)
        self.mask = np.ones(blocks * threads, bool)

    def array(self, index: int, like: np.ndarray) -> np.ndarray:
        """Operand `index` as the launch left it."""
        base = self.bases[index]
        return self.memory[base : base + like.nbytes].view(like.dtype).reshape(like.shape)

    def functions(self) -> dict:
        """By the names they have in `jaxserve.ptx`; a memref is the number of its operand."""
        names = [name for name in dir(self) if name.startswith("ptx_")]
        return {name.removeprefix("ptx_"): getattr(self, name) for name in names} | {"Register": Register}

    # ---- values

    def ptx_constant(self, x):
        return Register(np.full(len(self.thread), x, np.float32 if isinstance(x, float) else np.uint32))

    def ptx_zeros(self, count):
        return [self.ptx_constant(0.0)] * count

    def ptx_select(self, predicate, a, b):
        return Register(np.where(predicate.values, a.values, b.values))

    def ptx_both(self, a, b):
        return Register(a.values & b.values)

    def ptx_thread_index(self):
        return Register(self.thread)

    def ptx_block_index(self):
        return Register(self.block)

    @contextlib.contextmanager
    def ptx_when(self, predicate):
        before, self.mask = self.mask, self.mask & predicate.values
        yield
        self.mask = before

    def ptx_loop(self, count, carry, body):
        count = count if isinstance(count, Register) else self.ptx_constant(count)
        for i in range(int(count.values[self.mask].max(initial=0))):
            goes_on = self.ptx_constant(i) < count
            with self.ptx_when(goes_on):
                after = body(self.ptx_constant(i), carry)
            carry = [self.ptx_select(goes_on, a, c) for a, c in zip(after, carry, strict=True)]
        return carry

    # ---- memory

    def ptx_global_address(self, ref):
        return Register(np.full(len(self.thread), self.bases[ref], np.uint64))

    def ptx_shared_address(self, ref):
        return Register(np.full(len(self.thread), self.shared_bases[ref], np.uint32))

    def _place(self, address, offset, nbytes, mask):
        """Byte positions [threads, nbytes], checked to lie in one operand, aligned."""
        at = address.values[mask].astype(np.int64) + offset
        operand = np.searchsorted(self.bases, at, side="right") - 1
        assert (at + nbytes <= self.bases[operand] + np.asarray(self.sizes)[operand]).all(), "out of bounds"
        assert ((at - self.bases[operand]) % min(nbytes, 16) == 0).all(), "misaligned"
        return at[:, None] + np.arange(nbytes)

    def _load(self, address, offset, nbytes, mask):
        found = np.zeros((len(mask), nbytes), np.uint8)
        found[mask] = self.memory[self._place(address, offset, nbytes, mask)]
        return found

    def ptx_load_ahead(self, address, offset, count):
        words = self._load(address, offset, 4 * count, self.mask).view(np.uint32)
        return [Register(words[:, i].copy()) for i in range(count)]

    def ptx_load_ahead_where(self, predicate, address, offset, count):
        with self.ptx_when(predicate):
            return self.ptx_load_ahead(address, offset, count)

    def ptx_load_byte_ahead(self, address):
        return Register(self._load(address, 0, 1, self.mask)[:, 0].astype(np.uint32))

    def ptx_store_global(self, address, offset, values):
        self.ptx_store_global_where(Register(self.mask), address, offset, values)

    def ptx_bulk_copy_kept(self, target, source, nbytes, barrier):
        for n in np.unique(nbytes.values[self.mask]):
            mask = self.mask & (nbytes.values == n)
            bytes_ = self.memory[self._place(source, 0, int(n), mask)]
            at = target.values[mask].astype(np.int64)[:, None] + np.arange(n)
            self.shared[self.block[mask][:, None], at] = bytes_

    def ptx_store_global_where(self, predicate, address, offset, values):
        mask = self.mask & predicate.values
        bytes_ = np.stack([v.values.view(np.uint32) for v in values], 1).view(np.uint8)
        self.memory[self._place(address, offset, 4 * len(values), mask)] = bytes_[mask]

    def ptx_load_shared(self, address, offset, count):
        at = np.where(self.mask, address.values.astype(np.int64) + offset, 0)
        assert (at % (4 * count) == 0).all(), "misaligned"
        words = self.shared[self.block[:, None], at[:, None] + np.arange(4 * count)].view(np.uint32)
        return [Register(words[:, i].copy()) for i in range(count)]

    def ptx_store_shared(self, address, offset, values):
        bytes_ = np.stack([v.values.view(np.uint32) for v in values], 1).view(np.uint8)
        at = address.values.astype(np.int64)[:, None] + offset + np.arange(bytes_.shape[1])
        self.shared[self.block[self.mask][:, None], at[self.mask]] = bytes_[self.mask]

    def ptx_peer_address(self, address, block):
        return Register(address.values + (block.values + 1) * np.uint32(PEER))

    def ptx_send_peer(self, address, values, barrier):
        (value,) = values
        assert self.cluster > 1, "an illegal instruction outside a cluster"
        assert (barrier.values // PEER == address.values // PEER)[self.mask].all()
        peer = self.block // self.cluster * self.cluster + address.values // PEER - 1
        at = (address.values % PEER).astype(np.int64)[:, None] + np.arange(4)
        assert (peer[self.mask] < self.block[self.mask] // self.cluster * self.cluster + self.cluster).all()
        bytes_ = np.ascontiguousarray(value.values).view(np.uint8).reshape(-1, 4)
        self.shared[peer[self.mask][:, None], at[self.mask]] = bytes_[self.mask]

    # ---- across threads

    def _nothing(self, *_):
        pass

    ptx_barrier_init = ptx_barrier_fence = ptx_barrier_expect = ptx_barrier_wait = _nothing
    ptx_cluster_arrive = ptx_cluster_wait = ptx_block_sync = _nothing

    def _of_lane(self, value, lane):
        return Register(value.values[np.arange(len(self.thread)) // 32 * 32 + lane])

    def ptx_shuffle(self, value, lane):
        return self._of_lane(value, lane.values if isinstance(lane, Register) else lane)

    def ptx_shuffle_xor(self, value, distance):
        return self._of_lane(value, np.arange(len(self.thread)) % 32 ^ distance)

    # ---- arithmetic

    def ptx_mma_tf32(self, c, a, b):
        """c + a @ b with the low bits of a and b cut off, summed in f64 and rounded once."""

        def dealt(registers):
            words = np.stack([r.values.reshape(-1, 8, 4) for r in registers], 1)
            return (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

        a, b, warps = dealt(a), dealt(b), len(self.thread) // 32  # [warps, registers, g, t]
        left = a.reshape(warps, 2, 2, 8, 4).transpose(0, 2, 3, 1, 4).reshape(warps, 16, 8)
        right = b.transpose(0, 1, 3, 2).reshape(warps, 8, 8)
        product = (left @ right).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        return [Register((x.values + p).astype(np.float32)) for x, p in zip(c, product, strict=True)]

    def ptx_fma(self, a, b, c):
        return Register((a.values.astype(np.float64) * b.values + c.values).astype(np.float32))

    def ptx_maximum(self, a, b):
        return Register(np.maximum(a.values, b.values))

    def ptx_absolute(self, a):
        return Register(np.abs(a.values))

    def ptx_exp2(self, a):
        with np.errstate(over="ignore"):
            return Register(np.exp2(a.values))

    def ptx_reciprocal(self, a):
        return Register(np.float32(1) / a.values)

    def ptx_reciprocal_root(self, a):
        return Register(np.float32(1) / np.sqrt(a.values))
