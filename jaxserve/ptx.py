"""What one GPU thread does, written with Python operators: each helper becomes one PTX instruction or a few.

Used inside `plgpu.inline_mgpu`. This is the only file that spells PTX; semantics are those of NVIDIA's PTX
ISA for sm_90. A warp is 32 threads ("lanes") in step; an f16x2 register holds two halves, the first in its
low 16 bits.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

ALL_LANES = "0xffffffff"
LOG2_E = math.log2(math.e)  # eˣ is exp2(x · LOG2_E)
MMA = "mma.sync.aligned.{shape}.row.col.f32.{of}.{of}.f32"


def _integer(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


class Register:
    """One register of one thread: i32, i64, f32 or a predicate. Integers are unsigned."""

    def __init__(self, value: ir.Value):
        self.value = value

    def _binary(self, other, integer, real=None):
        other = other if isinstance(other, Register) else constant(other, self.value.type)
        is_real = self.value.type == ir.F32Type.get()
        return Register((real if is_real else integer)(self.value, other.value))

    def _compare(self, other, predicate):
        return self._binary(other, lambda a, b: arith.cmpi(predicate, a, b))

    def __add__(self, other):
        return self._binary(other, arith.addi, arith.addf)

    def __sub__(self, other):
        return self._binary(other, arith.subi, arith.subf)

    def __mul__(self, other):
        return self._binary(other, arith.muli, arith.mulf)

    def __and__(self, other):
        return self._binary(other, arith.andi)

    def __or__(self, other):
        return self._binary(other, arith.ori)

    def __xor__(self, other):
        return self._binary(other, arith.xori)

    def __lshift__(self, other):
        return self._binary(other, arith.shli)

    def __rshift__(self, other):
        return self._binary(other, arith.shrui)

    def __floordiv__(self, other):
        return self._binary(other, arith.divui)

    def __mod__(self, other):
        return self._binary(other, arith.remui)

    def __lt__(self, other):
        return self._compare(other, arith.CmpIPredicate.ult)

    def __ge__(self, other):
        return self._compare(other, arith.CmpIPredicate.uge)

    def equals(self, other) -> "Register":
        return self._compare(other, arith.CmpIPredicate.eq)

    def as_f32(self) -> "Register":
        """The same bits, read as a float."""
        return Register(arith.bitcast(ir.F32Type.get(), self.value))

    def as_i32(self) -> "Register":
        """The same bits, read as an integer."""
        return Register(arith.bitcast(_integer(32), self.value))

    def widened(self) -> "Register":
        """An i32, zero-extended to i64: for addresses in global memory."""
        return Register(arith.extui(_integer(64), self.value))


Registers = list[Register]


# ---- values, choices, loops


def constant(x: int | float, type: ir.Type | None = None) -> Register:
    """A number; an i32 may be written as unsigned."""
    type = type or (ir.F32Type.get() if isinstance(x, float) else _integer(32))
    if type == ir.F32Type.get():
        return Register(arith.constant(type, float(x)))
    return Register(arith.constant(type, x - (1 << 32) if type == _integer(32) and x >= 1 << 31 else x))


def _register(x: Register | int) -> Register:
    return x if isinstance(x, Register) else constant(x)


def zeros(count: int) -> Registers:
    """f32 accumulators."""
    return [constant(0.0)] * count


def select(predicate: Register, a: Register, b: Register) -> Register:
    return Register(arith.select(predicate.value, a.value, b.value))


def both(a: Register, b: Register) -> Register:
    """Of two predicates."""
    return Register(arith.andi(a.value, b.value))


@contextlib.contextmanager
def when(predicate: Register) -> Iterator[None]:
    """What the `with` block emits runs only where the predicate holds."""
    with ir.InsertionPoint(scf.IfOp(predicate.value).then_block):
        yield
        scf.yield_([])


def choose(predicate: Register, yes: Callable[[], Registers], no: Registers) -> Registers:
    """What yes() emits and returns where the predicate holds, else `no`."""
    op = scf.IfOp(predicate.value, [r.value.type for r in no], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_([r.value for r in yes()])
    with ir.InsertionPoint(op.else_block):
        scf.yield_([r.value for r in no])
    return [Register(r) for r in op.results]


def loop(
    count: Register | int, carry: Registers, body: Callable[[Register, Registers], Registers]
) -> Registers:
    """for i in range(count): carry = body(i, carry), not unrolled."""
    op = scf.ForOp(constant(0).value, _register(count).value, constant(1).value, [c.value for c in carry])
    with ir.InsertionPoint(op.body):
        arguments = [Register(a) for a in op.inner_iter_args]
        scf.YieldOp([c.value for c in body(Register(op.induction_variable), arguments)])
    return [Register(r) for r in op.results]


def thread_index() -> Register:
    return Register(mgpu_utils.thread_idx())


def block_index() -> Register:
    return Register(arith.index_cast(_integer(32), gpu.block_id(gpu.Dimension.x)))


def global_address(ref: ir.Value) -> Register:
    return Register(llvm.ptrtoint(_integer(64), mgpu_utils.memref_ptr(ref)))


def shared_address(ref: ir.Value) -> Register:
    return Register(llvm.ptrtoint(_integer(32), mgpu_utils.memref_ptr(ref)))


def asm(text: str, results: str, operands: Sequence[Register], *, effects: bool = False) -> Registers:
    """Inline PTX. `results` has a letter per result: r i32, f f32, l i64; operands are numbered after them.

    Without `effects` the compiler may move, merge or drop it; without results it always has effects.
    """
    types = {"r": _integer(32), "f": ir.F32Type.get(), "l": _integer(64)}
    letters = {str(type): letter for letter, type in types.items()}
    constraints = ",".join(["=" + r for r in results] + [letters[str(o.value.type)] for o in operands])
    values = [o.value for o in operands]
    if not results:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), values, text, constraints, has_side_effects=True)
        return []
    outs = [types[r] for r in results]
    out = outs[0] if len(outs) == 1 else llvm.StructType.get_literal(outs)
    value = llvm.inline_asm(out, values, text, constraints, has_side_effects=effects)
    if len(outs) == 1:
        return [Register(value)]
    return [Register(llvm.extractvalue(type, value, [i])) for i, type in enumerate(outs)]


def pinned(bits: int) -> Register:
    """A constant that stays in a register: left alone, ptxas builds it anew before every use."""
    return asm(f"mov.b32 $0, {bits:#x};", "r", [], effects=True)[0]


# ---- memory


def _load(op: str, address: Register, offset: int, count: int, effects: bool) -> Registers:
    names = ",".join(f"${i}" for i in range(count))
    shape, target = (f".v{count}", "{" + names + "}") if count > 1 else ("", names)
    return asm(f"{op}{shape}.b32 {target}, [${count}+{offset}];", "r" * count, [address], effects=effects)


def load_global(address: Register, offset: int, count: int) -> Registers:
    """1, 2 or 4 words of memory that nobody writes meanwhile (.nc)."""
    return _load("ld.global.nc", address, offset, count, False)


def load_ahead(address: Register, offset: int, count: int) -> Registers:
    """1, 2 or 4 words, asked for here and not where they are first used, past L1. The kernel may write this
    memory elsewhere.
    """
    return _load("ld.global.L1::no_allocate", address, offset, count, True)


def load_byte_ahead(address: Register) -> Register:
    """`load_ahead` of one byte, as an i32."""
    return asm("ld.global.L1::no_allocate.u8 $0, [$1];", "r", [address], effects=True)[0]


def load_ahead_where(predicate: Register, address: Register, offset: int, count: int) -> Registers:
    """`load_ahead` where the predicate holds, elsewhere zeros and no access."""
    names = [f"${i}" for i in range(count)]
    shape, target = (f".v{count}", "{" + ",".join(names) + "}") if count > 1 else ("", names[0])
    load = f"@p ld.global.L1::no_allocate{shape}.b32 {target}, [${count}+{offset}];"
    clear = " ".join(f"@!p mov.b32 {name}, 0;" for name in names)
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {load} {clear} }}"
    flag = select(predicate, constant(1), constant(0))
    return asm(text, "r" * count, [address, flag], effects=True)


def load_shared(address: Register, offset: int, count: int) -> Registers:
    """1, 2 or 4 words. It has effects: the copy engine overwrites what it reads."""
    return _load("ld.shared", address, offset, count, True)


def add_shared(address: Register, value: int) -> Register:
    """Adds to a word atomically → what it was. Ordered with what this thread did before and does after."""
    text = "atom.acq_rel.cta.shared.add.u32 $0, [$1], $2;"
    return asm(text, "r", [address, constant(value)], effects=True)[0]


def _store(op: str, address: Register, offset: int, values: Registers) -> None:
    names = ",".join(f"${i + 1}" for i in range(len(values)))
    shape, source = (f".v{len(values)}", "{" + names + "}") if len(values) > 1 else ("", names)
    asm(f"{op}{shape}.b32 [$0+{offset}], {source};", "", [address, *values])


def store_shared(address: Register, offset: int, values: Registers) -> None:
    _store("st.shared", address, offset, values)


def store_global(address: Register, offset: int, values: Registers) -> None:
    _store("st.global", address, offset, values)


def store_global_where(predicate: Register, address: Register, offset: int, values: Registers) -> None:
    """Where the predicate holds. Unlike a store inside `when` it is no branch: nothing the value needs is
    moved behind it.
    """
    count = len(values)
    names = ",".join(f"${i + 1}" for i in range(count))
    shape, source = (f".v{count}", "{" + names + "}") if count > 1 else ("", names)
    store = f"@p st.global{shape}.b32 [$0+{offset}], {source};"
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {store} }}"
    asm(text, "", [address, *values, select(predicate, constant(1), constant(0))])


def barrier_init(barrier: Register) -> None:
    """An mbarrier that one arrival (and the bytes it announces) completes."""
    asm("mbarrier.init.shared.b64 [$0], 1;", "", [barrier])


def barrier_fence() -> None:
    """Makes initialised mbarriers visible to the copy engine."""
    asm("fence.mbarrier_init.release.cluster;", "", [])


def barrier_wait(barrier: Register, parity: Register) -> None:
    """Until the mbarrier's phase of that parity is over: its bytes have arrived and are visible."""
    text = "{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @p bra D; bra W; D: }"
    asm(text, "", [barrier, parity])


def barrier_expect(barrier: Register, nbytes: Register) -> None:
    """The barrier's one arrival, which announces the bytes of all copies of this phase."""
    asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "", [barrier, nbytes])


def bulk_copy_kept(target: Register, source: Register, nbytes: Register, barrier: Register) -> None:
    """`bulk_copy` of bytes that others will want from L2 too, announced by `barrier_expect`."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    asm(f"{copy} [$0], [$1], $2, [$3];", "", [target, source, nbytes, barrier])


def bulk_copy(target: Register, source: Register, nbytes: int, barrier: Register) -> None:
    """Starts one global → shared copy by the copy engine (a multiple of 16 bytes, 16-byte aligned).

    evict_first: a weight is read once a step and need not displace anything in L2.
    """
    policy = asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "l", [], effects=True)[0]
    asm(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {nbytes};", "", [barrier])
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    asm(f"{copy} [$0], [$1], {nbytes}, [$2], $3;", "", [target, source, barrier, policy])


# ---- across lanes


def warp_sync() -> None:
    """Every lane of the warp has come here."""
    asm(f"bar.warp.sync {ALL_LANES};", "", [])


def block_sync() -> None:
    """Every thread of the block has come here."""
    gpu.barrier()


def cluster_arrive(order: str = "release") -> None:
    """This thread's writes, those to other blocks' shared memory included, are done. order "relaxed": only
    that it has come here.
    """
    asm(f"barrier.cluster.arrive.{order}.aligned;", "", [])


def cluster_wait() -> None:
    """Every thread of the cluster has arrived; what it wrote before is visible."""
    asm("barrier.cluster.wait.acquire.aligned;", "", [])


def peer_address(address: Register, block: Register) -> Register:
    """This block's shared address in a block of the cluster, for `send_peer`."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "r", [address, block])[0]


def send_peer(address: Register, values: Registers, barrier: Register) -> None:
    """1, 2 or 4 words into the shared memory of a block that has started, counted by an mbarrier of that
    block. No fence: a release would wait for every store of this thread.
    """
    count = len(values)
    names = ",".join(f"${i + 1}" for i in range(count))
    shape, source = (f".v{count}", "{" + names + "}") if count > 1 else ("", names)
    store = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{shape}.b32"
    asm(f"{store} [$0], {source}, [${count + 1}];", "", [address, *values, barrier])


def shuffle(value: Register, lane: Register | int) -> Register:
    """`value` of another lane."""
    return asm(
        f"shfl.sync.idx.b32 $0, $1, $2, 31, {ALL_LANES};", "r", [value, _register(lane)], effects=True
    )[0]


def shuffle_xor(value: Register, distance: int) -> Register:
    """`value` of the lane whose number differs in the bits of `distance`."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, {ALL_LANES};"
    return asm(text, "r", [value], effects=True)[0]


def transpose_8x8(value: Register) -> Register:
    """An 8 × 8 matrix of halves, row g in lanes 4g … 4g+3, two columns a lane → its transpose."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", [value], effects=True)[0]


# ---- arithmetic


def fma(a: Register, b: Register, c: Register) -> Register:
    """a · b + c in f32, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", [a, b, c])[0]


def minimum(a: Register, b: Register) -> Register:
    """Of two i32."""
    return asm("min.u32 $0, $1, $2;", "r", [a, b])[0]


def maximum(a: Register, b: Register) -> Register:
    """Of two f32."""
    return asm("max.f32 $0, $1, $2;", "f", [a, b])[0]


def absolute(a: Register) -> Register:
    """Of an f32."""
    return asm("abs.f32 $0, $1;", "f", [a])[0]


def exp2(a: Register) -> Register:
    """2^a of an f32, to 2 ulp."""
    return asm("ex2.approx.ftz.f32 $0, $1;", "f", [a])[0]


def reciprocal(a: Register) -> Register:
    """1 / a of an f32, to 1 ulp; of infinity 0."""
    return asm("rcp.approx.ftz.f32 $0, $1;", "f", [a])[0]


def sigmoid(a: Register) -> Register:
    """1 / (1 + e⁻ᵃ) of an f32."""
    return reciprocal(exp2(a * -LOG2_E) + 1.0)


def reciprocal_root(a: Register) -> Register:
    """1 / √a of an f32, to 2^-22."""
    return asm("rsqrt.approx.f32 $0, $1;", "f", [a])[0]


def maximum_f16x2(a: Register, b: Register) -> Register:
    """Of two pairs of halves."""
    return asm("max.f16x2 $0, $1, $2;", "r", [a, b])[0]


def absolute_f16x2(a: Register) -> Register:
    return asm("abs.f16x2 $0, $1;", "r", [a])[0]


def multiply_f16x2(a: Register, b: Register | int) -> Register:
    return asm("mul.rn.f16x2 $0, $1, $2;", "r", [a, _register(b)])[0]


def subtract_f16x2(a: Register, b: Register | int) -> Register:
    return asm("sub.rn.f16x2 $0, $1, $2;", "r", [a, _register(b)])[0]


def fma_f16x2(a: Register, b: Register, c: Register) -> Register:
    """a · b + c, rounded once."""
    return asm("fma.rn.f16x2 $0, $1, $2, $3;", "r", [a, b, c])[0]


def minimum_u16x2(a: Register, b: int) -> Register:
    """Of pairs of unsigned 16-bit integers."""
    return asm("min.u16x2 $0, $1, $2;", "r", [a, constant(b)])[0]


def maximum_u16x2(a: Register, b: int) -> Register:
    return asm("max.u16x2 $0, $1, $2;", "r", [a, constant(b)])[0]


def splat_f16x2(pair: Register, which: int) -> Register:
    """One half of a pair, twice."""
    half = "lh"[which]
    text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {{{half}, {half}}}; }}"
    return asm(text, "r", [pair])[0]


def unpack_f16x2(word: Register) -> Registers:
    """A pair of halves → two f32."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return asm(text, "ff", [word])


def pack_f16x2(low: Register, high: Register) -> Register:
    """Two f32 → a pair of halves, to nearest even."""
    return asm("cvt.rn.f16x2.f32 $0, $1, $2;", "r", [high, low])[0]


def unpack_bf16x2(word: Register) -> Registers:
    """A pair of bfloat16 → two f32."""
    return [(word << 16).as_f32(), (word & 0xFFFF0000).as_f32()]


def pack_bf16x2(low: Register, high: Register) -> Register:
    """Two f32 → a pair of bfloat16, to nearest even."""
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", [high, low])[0]


def and_or(word: Register, mask: int, other: Register | int) -> Register:
    """(word & mask) | other in one LOP3 (0xea is that function's truth table)."""
    return asm(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xea;", "r", [word, _register(other)])[0]


def choose_bytes(a: Register, b: Register | int, selector: Register | int) -> Register:
    """prmt: nibble i of `selector` says which of the eight bytes of a (0–3) and b (4–7) becomes byte i."""
    return asm("prmt.b32 $0, $1, $2, $3;", "r", [a, _register(b), _register(selector)])[0]


def mma(c: Registers, a: Sequence[Register], b: Sequence[Register], of: str = "f16") -> Registers:
    """c + a @ b, f16 or bf16 in, f32 out: m16n8k16 (a: 4 registers, b: 2) or m16n8k8 (2, 1).

    Lane 4g+t holds: of a, row g and row g+8 in turn, columns 2t, 2t+1, then 2t+8, 2t+9; of b, these rows of
    column g; of c, columns 2t, 2t+1 of row g, then of row g+8.
    """
    if len(a) == 4:
        text = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        return asm(MMA.format(shape="m16n8k16", of=of) + " " + text, "ffff", [*a, *b, *c])
    text = "{$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
    return asm(MMA.format(shape="m16n8k8", of=of) + " " + text, "ffff", [*a, *b, *c])


def mma_tf32(c: Registers, a: Sequence[Register], b: Sequence[Register]) -> Registers:
    """c + a @ b of f32 numbers cut to tf32, f32 out: m16n8k8 (a: 4 registers, b: 2).

    Lane 4g+t holds: of a, row g and row g+8 of column t, then of column t+4; of b, rows t, t+4 of column g;
    of c, columns 2t, 2t+1 of row g, then of row g+8.
    """
    text = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    operands = [*(x.as_i32() for x in (*a, *b)), *c]
    return asm(MMA.format(shape="m16n8k8", of="tf32") + " " + text, "ffff", operands)


# ---- wgmma: the tensor core fed by a warpgroup of four warps, asynchronously


def held(values: Registers) -> Registers:
    """The same values; what computes them stays before this point, what uses them after it."""
    letters = ["f" if v.value.type == ir.F32Type.get() else "r" for v in values]
    results = ",".join("=" + letter for letter in letters) + "," + ",".join(map(str, range(len(values))))
    types = [v.value.type for v in values]
    struct = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(struct, [v.value for v in values], "", results, has_side_effects=True)
    return [Register(llvm.extractvalue(type, out, [i])) for i, type in enumerate(types)]


def wgmma_descriptor(address: Register, k_stride: int, n_stride: int) -> Register:
    """Operand B in shared memory as core matrices of 8 rows × 16 bytes, 128 contiguous bytes each.

    k_stride: bytes between the two matrices of a step; n_stride: between matrices of the next 8 columns.
    Adding bytes / 16 moves it.
    """
    return ((address & 0x3FFFF) >> 4 | k_stride // 16 << 16).widened() + (n_stride // 16 << 32)


def wgmma(acc: Registers, a: Sequence[Register], descriptor: Register, of: str = "f16") -> Registers:
    """acc + a @ b, 64 × 16 times 16 × n, f16 or bf16 in, f32 out: started, not finished.

    A warp's registers are those of `mma` for its own 16 rows: a of 4, acc of 4 for every 8 columns.
    """
    count = len(acc)
    names = lambda first, n: "{" + ",".join(f"${i}" for i in range(first, first + n)) + "}"  # noqa: E731
    text = (
        "{ .reg .pred p; setp.eq.u32 p, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{of}.{of} "
        f"{names(0, count)}, {names(2 * count, 4)}, ${2 * count + 4}, p, 1, 1, 0; }}"
    )
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"])
    struct = llvm.StructType.get_literal([ir.F32Type.get()] * count)
    operands = [r.value for r in (*acc, *a, descriptor)]
    out = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=True)
    return [Register(llvm.extractvalue(ir.F32Type.get(), out, [i])) for i in range(count)]


def wgmma_fence() -> None:
    """Registers written so far may be read by the wgmma that follow."""
    asm("wgmma.fence.sync.aligned;", "", [])


def wgmma_commit() -> None:
    """The wgmma since the last commit become one group."""
    asm("wgmma.commit_group.sync.aligned;", "", [])


def wgmma_wait(groups: int) -> None:
    """Until at most the last `groups` groups are unfinished."""
    asm(f"wgmma.wait_group.sync.aligned {groups};", "", [])
