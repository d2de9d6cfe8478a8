"""x @ W.T for 1 … 8 rows of x at the speed of memory: the decode kernel, on Mosaic GPU (Hopper).

A warp owns one chunk of 256 columns and a list of row tiles. It keeps its chunk of all activation rows in
registers and streams the records of that chunk through a ring of its own in shared memory (one bulk copy
and one mbarrier a record): nothing about x is read in the loop, nothing waits for another warp. There is one
block a multiprocessor, all in one wave. The partial results of a block's chunks meet in shared memory and are
summed in fixed order; where K has more chunks than a block has warps, XLA sums the splits.

What stands around a product in a decoder (`Around`) rides along: each would be a kernel of its own. A norm's
gain is multiplied into x as it is read, its 1/rms into the sums at the end; gate and up rows meet in the
final sums, and so does a residual.

A row has the same bits alone and among seven others, and on every call.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve import ptx
from jaxserve.ops.activation import gated
from jaxserve.ops.mosaic.launch import launch, scratch
from jaxserve.ops.norm import rms_norm
from jaxserve.ptx import both, when
from jaxserve.quant.mosaic.decode_program import MAX_BATCH, Around, Form, Refs, program
from jaxserve.quant.mosaic.plan import MULTIPROCESSORS, Plan, max_warps, plan, shares
from jaxserve.quant.mosaic.records import COLUMNS, FLOATS, LAYOUTS, ROWS

PLAIN = Around()
SCRATCH = (jnp.float32, jnp.uint32, jnp.uint32, jnp.float32)  # as Form.scratch_words


def supported(type_name: str, n: int, k: int) -> bool:
    """Whether the kernel takes an N × K matrix of this type."""
    return type_name in LAYOUTS and n > 0 and n % ROWS == 0 and k > 0 and k % LAYOUTS[type_name].block == 0


# Inner jits: layers of one shape share one lowering, and XLA fuses the sum into what follows.
@functools.partial(jax.jit, static_argnames=("type_name", "k", "eps", "activation"))
def decode_matmul(
    x: jax.Array,
    records: jax.Array,
    type_name: str,
    k: int,
    *,
    gain: jax.Array | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """x [B ≤ 8, K] f32, f16 or bf16 times the transpose of a packed matrix [N, K] → f32 [B, N].

    gain f32 [K]: `rms_norm(x, gain, eps)` is multiplied instead. activation: the matrix holds gate rows, then
    as many up rows; the result is activation(gate) · up, f32 [B, N/2]. residual, of the result's shape, is
    added to it.
    """
    if x.shape[0] > MAX_BATCH:
        raise ValueError(
            f"{x.shape[0]} rows: the decode kernel takes up to {MAX_BATCH}, more are a matrix product"
        )
    _check(x, records, type_name, k, activation)
    fuses = _sums_whole(_plan(records, activation))
    if gain is not None and not (fuses and x.dtype == jnp.float32):
        x, gain = rms_norm(x, gain, eps), None
    if fuses:
        around = Around(None if gain is None else eps, activation, residual is not None)
        return _launch(x, (records,), (type_name,), k, around, gain=gain, residual=residual)[0]
    y = gated(_launch(x, (records,), (type_name,), k).sum(0), activation)
    return y if residual is None else residual + y


@functools.partial(jax.jit, static_argnames=("type_names", "k", "eps"))
def side_by_side_decode_matmul(
    x: jax.Array,
    matrices: tuple[jax.Array, ...],
    type_names: tuple[str, ...],
    k: int,
    *,
    gain: jax.Array,
    eps: float,
) -> jax.Array:
    """`rms_norm(x, gain, eps)` times several matrices [N, K] of different types in one launch → f32 [B, ΣN].

    x: f32 [B ≤ 8, K]. For `fits_side_by_side` matrices.
    """
    for records, type_name in zip(matrices, type_names, strict=True):
        _check(x, records, type_name, k, None)
    return _launch(x, matrices, type_names, k, Around(eps=eps), gain=gain)[0]


def fits_side_by_side(k: int, type_names: Sequence[str]) -> bool:
    """Whether blocks have warps enough for all of K."""
    return all(-(-k // COLUMNS) <= max_warps(LAYOUTS[name].words * 4) for name in type_names)


@functools.partial(jax.jit, static_argnames=("type_name", "k", "activation"))
def expert_decode_matmul(
    x: jax.Array,
    records: jax.Array,
    index: jax.Array,
    type_name: str,
    k: int,
    *,
    activation: str | None = None,
) -> jax.Array:
    """Row p of x [P, K] times the transpose of matrix index[p] (i32) of a packed stack [X, N, K] →
    f32 [P, N]; `activation` as in `decode_matmul`.

    Only the chosen matrices are read. An index outside the stack means its last matrix.
    """
    if index.shape != x.shape[:1] or index.dtype != jnp.int32:
        raise ValueError(
            f"index {index.dtype}{index.shape} must be int32 and name a matrix for each of {len(x)} rows"
        )
    _check(x, records, type_name, k, activation)
    if _sums_whole(_plan(records, activation, len(x))):
        return _launch(x, (records,), (type_name,), k, Around(activation=activation), index=index)[0]
    return gated(_launch(x, (records,), (type_name,), k, index=index).sum(0), activation)


def _check(x, records, type_name, k, activation):
    n = records.shape[-3] * ROWS
    if not supported(type_name, n, k) or (activation is not None and n % (2 * ROWS)):
        raise ValueError(f"no decode kernel for a {type_name} matrix [{n}, {k}]")
    if x.shape[1] != k or records.shape[-2:] != (-(-k // COLUMNS), LAYOUTS[type_name].words):
        raise ValueError(
            f"x {x.shape} and records {records.shape} do not fit a {type_name} matrix of {k} columns"
        )
    if x.dtype.name not in FLOATS:
        raise ValueError(f"x is {x.dtype}: the decode kernel takes {', '.join(FLOATS)}")


def _plan(records, activation, matrices=1, share=MULTIPROCESSORS) -> Plan:
    unit = 1 if activation is None else 2
    return plan(*records.shape[-3:-1], records.shape[-1] * 4, matrices, unit, share)


def _sums_whole(p: Plan) -> bool:
    """Whether a block sees the whole sum of a row; else only a kernel behind this one does."""
    return p.splits == 1


def _launch(x, matrices, type_names, k: int, around=PLAIN, *, index=None, gain=None, residual=None):
    """f32 [splits, P, N]. Rows share the matrices, whose outputs stand side by side, or each
    has matrix index[p] of a stack.
    """
    forms = _forms(x, matrices, type_names, k, around, index is not None)
    blocks = [form.plan.blocks * form.rows // form.batch for form in forms]
    ends = list(itertools.accumulate(blocks))
    optional = [index, gain, residual]

    def body(x_ref, *refs):
        records, rest = refs[: len(forms)], list(refs[len(forms) :])
        operands = [None if operand is None else rest.pop(0) for operand in optional]
        block = ptx.block_index()
        for form, w_ref, count, end in zip(forms, records, blocks, ends, strict=True):
            theirs = Refs(x_ref, w_ref, *operands, *rest)
            if len(forms) == 1:
                program(form, block, theirs)
                continue
            with when(both(block >= end - count, block < end)):
                program(form, block - (end - count), theirs)

    scratch_words = map(max, zip(*(form.scratch_words for form in forms), strict=True))
    return launch(
        body,
        [],
        [x, *matrices, *(operand for operand in optional if operand is not None)],
        name=_name(forms, index is not None),
        blocks=ends[-1],
        warps=forms[0].warps,
        out_types=[jax.ShapeDtypeStruct((forms[0].plan.splits, x.shape[0], forms[0].width), jnp.float32)],
        scratch_types=list(map(scratch, scratch_words, SCRATCH)),
    )[1][0]


def _forms(x, matrices, type_names, k, around, has_index) -> list[Form]:
    rows = x.shape[0]
    batch, count = (1, rows) if has_index else (rows, 1)
    parts = [MULTIPROCESSORS]
    if len(matrices) > 1:
        parts = shares(
            [records.shape[-3] for records in matrices],
            [records.shape[-2] * records.shape[-1] * 4 for records in matrices],
        )
    plans = [
        _plan(records, around.activation, count, share)
        for records, share in zip(matrices, parts, strict=True)
    ]
    widths = [records.shape[-3] * ROWS // p.unit for records, p in zip(matrices, plans, strict=True)]
    return [
        Form(
            type_name=type_name,
            k=k,
            row_tiles=records.shape[-3],
            chunks=records.shape[-2],
            experts=records.shape[0] if has_index else 1,
            dtype=x.dtype,
            rows=rows,
            batch=batch,
            around=around,
            plan=p,
            warps=max(p.warps for p in plans),
            width=sum(widths),
            first=sum(widths[:i]),
        )
        for i, (records, type_name, p) in enumerate(zip(matrices, type_names, plans, strict=True))
    ]


def _name(forms: list[Form], has_index: bool) -> str:
    parts = "_".join(f"{form.type_name.lower()}_{form.row_tiles * ROWS}" for form in forms)
    rows = f"b1_experts{forms[0].rows}" if has_index else f"b{forms[0].rows}"
    return f"decode_{parts}x{forms[0].k}_{rows}"
