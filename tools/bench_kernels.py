#!/usr/bin/env python3
"""How fast the kernels multiply and decode packed matrices, type by type and shape by shape, and whether they
are right.

Few rows read every weight once, so their score is a kernel's bytes of packed weights per second against the
rate at which the device copies memory; decoding ("f16" in place of a number of rows) also counts the bytes
it writes. For more rows the score is floating-point operations per second. Times are the kernel's own, from
the profiler, over enough copies of the matrix that none stays in the L2 cache; the sum of the parts of a
long K and the preparation of many rows are small kernels of their own and not included. The error is
‖y − x wᵀ‖ / ‖x wᵀ‖ with the product in float32, on log-normal activations. "repeats" says that ten calls on
weights that lie in L2 gave the same bits, "alone" that a row's bits do not depend on its neighbours.

A shape is N×K, or X×N×K for a stack of experts: each of a few rows chooses one, many rows are spread evenly
over all. Prints a table and, as its last line, one JSON object. Needs a Hopper GPU.
"""

import argparse
import collections
import dataclasses
import faulthandler
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic.records import LAYOUTS, ROWS
from jaxserve.trace.profiler import newest_trace

SHAPES = ("37888x3584", "3584x18944", "17920x1536", "4096x4096", "1536x1536")
ROTATED_BYTES = 130e6  # an L2 of 60 MB is passed twice over
MAX_COPIES = 64
DISTINCT_ROWS = 1024  # of a matrix; the rest repeats them
REPEATS = 3  # passes over the copies
HANG_SECONDS = 90
HALF_SCALES = {  # byte offsets of a block's f16 numbers, if not 0 alone
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


@dataclasses.dataclass
class Case:
    """One kernel and the weights that it reads in turn."""

    type: str
    shape: tuple[int, ...]
    x: jax.Array  # [0, K]: the matrix is decoded
    copies: list[jax.Array]  # records of one matrix each, or one stack
    index: list[jax.Array]  # the experts that a few rows choose in turn; empty without a stack

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def is_few(self) -> bool:
        return 0 < self.rows <= mosaic.MAX_BATCH

    @property
    def name(self) -> str:
        n, k = self.shape[-2:]
        experts = self.shape[0] if len(self.shape) == 3 else 0
        if not self.rows:
            return f"dequantise_{self.type.lower()}_{max(1, experts) * n}x{k}_float16"
        if not self.is_few:
            return f"wide_{self.type.lower()}_{n}x{k}_t{self.rows}" + f"_experts{experts}" * bool(experts)
        return f"decode_{self.type.lower()}_{n}x{k}_" + (
            f"b1_experts{self.rows}" if self.index else f"b{self.rows}"
        )

    @property
    def nbytes(self) -> int:
        """Bytes that one call moves: packed weights, and what decoding writes."""
        if self.index:
            return self.copies[0][0].nbytes * self.rows
        return self.copies[0].nbytes + (0 if self.rows else 2 * int(np.prod(self.shape)))

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.shape[-1] * self.shape[-2]

    @property
    def turns(self) -> int:
        return len(self.index) or len(self.copies)

    def run(self, turn: int = 0, only: int | None = None) -> jax.Array:
        """`only`: a row without its neighbours, alone where there are few, else among zeros."""
        x, k = self.x, self.shape[-1]
        if not self.rows:
            return mosaic.dequantise(self.copies[turn], self.type, k, jnp.float16)
        if not self.is_few:
            x = x if only is None else jnp.where((jnp.arange(self.rows) == only)[:, None], x, 0)
            if len(self.shape) == 3:
                return mosaic.grouped_wide_matmul(x, self.group_sizes, self.copies[0], self.type, k)
            return mosaic.wide_matmul(x, self.copies[turn], self.type, k)
        rows = slice(None) if only is None else slice(only, only + 1)
        if self.index:
            return mosaic.expert_decode_matmul(x[rows], self.copies[0], self.index[turn][rows], self.type, k)
        return mosaic.decode_matmul(x[rows], self.copies[turn], self.type, k)

    @property
    def group_sizes(self) -> jax.Array:
        return jnp.bincount(self.expert_of_row, length=self.shape[0]).astype(jnp.int32)

    @property
    def expert_of_row(self) -> jax.Array:
        if self.index:
            return self.index[0]
        return jnp.arange(self.rows) * self.shape[0] // self.rows


def random_rows(type_name: str, k: int) -> np.ndarray:
    """ggml's bytes of `DISTINCT_ROWS` rows: random codes, scales of a sensible size."""
    layout, rng = LAYOUTS[type_name], np.random.default_rng(0)
    if type_name == "F16":
        return rng.standard_normal((DISTINCT_ROWS, k), np.float32).astype(np.float16).view(np.uint8)
    if type_name == "BF16":
        return np.asarray(
            jnp.asarray(rng.standard_normal((DISTINCT_ROWS, k), np.float32), jnp.bfloat16)
        ).view(np.uint8)
    blocks = rng.integers(0, 256, (DISTINCT_ROWS, k // layout.block, layout.nbytes), np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 128, blocks.shape[:-1])
        return blocks.reshape(DISTINCT_ROWS, -1)
    for start in HALF_SCALES.get(type_name, (0,)):
        scale = rng.uniform(0.5, 1, (*blocks.shape[:-1], 1)).astype(np.float16) / 32
        blocks[..., start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(DISTINCT_ROWS, -1)


def cases(
    type_name: str, shape: tuple[int, ...], rows: list[int], dtype: str
) -> tuple[list[Case], jax.Array]:
    """The kernels of one matrix, and its first rows in f32."""
    *stack, n, k = shape
    some = mosaic.pack(type_name, random_rows(type_name, k))
    dense = mosaic.unpack(type_name, some, k)
    whole = jnp.resize(some, (n // ROWS, *some.shape[1:]))
    if stack:  # expert e begins e row tiles further on
        whole = whole[(np.arange(stack[0])[:, None] + np.arange(n // ROWS)) % (n // ROWS)]
    count = 1 if stack else min(MAX_COPIES, int(ROTATED_BYTES // whole.nbytes) + 2)
    copies = [whole, *(jnp.roll(whole, jnp.int32(i), 0) for i in range(1, count))]  # one program for all
    found = []
    for r in rows:
        noise = jax.random.normal(jax.random.key(r), (r, k)) * jnp.exp(
            jax.random.normal(jax.random.key(5), (k,))
        )
        chosen = np.random.default_rng(r).permutation(stack[0]) if stack else []
        few = range(0, len(chosen) - r + 1, r) if 0 < r <= mosaic.MAX_BATCH else ()
        index = [jnp.asarray(chosen[i : i + r], jnp.int32) for i in few]
        found.append(Case(type_name, shape, noise.astype(dtype), copies, index))
    return found, dense


def check(case: Case, dense: jax.Array) -> dict:
    """Error, and whether repeated and lone calls give the same bits."""
    y, n = case.run(), case.shape[-2]
    repeats = all(bool((case.run() == y).all()) for _ in range(10))
    if not case.rows:
        some = y.reshape(-1, y.shape[-1])[: min(n, DISTINCT_ROWS)].astype(jnp.float32)
        error = jnp.linalg.norm(some - dense[: len(some)]) / jnp.linalg.norm(dense[: len(some)])
        return {"error": float(error), "repeats": repeats, "alone": True}
    exact = np.asarray(jnp.dot(case.x.astype(jnp.float32), dense.T, precision="highest"))
    first = np.asarray(case.expert_of_row) * ROWS if len(case.shape) == 3 else np.zeros(case.rows, int)
    exact = np.take_along_axis(exact, (first[:, None] + np.arange(n)) % n % DISTINCT_ROWS, 1)
    error = np.linalg.norm(np.asarray(y) - exact) / np.linalg.norm(exact)
    alone = all(bool((case.run(only=i)[0 if case.is_few else i] == y[i]).all()) for i in {0, case.rows - 1})
    return {"error": float(error), "repeats": repeats, "alone": alone}


def kernel_times(run) -> dict[str, list[float]]:
    """µs of every GPU kernel that `run` launches, by name."""
    times = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for plane in jax.profiler.ProfileData.from_file(str(newest_trace(Path(folder)))).planes:
            if "GPU" in plane.name:
                for line in plane.lines:
                    for event in line.events:
                        times[event.name].append(event.duration_ns / 1e3)
    return times


def measure(found: list[Case]) -> list[float]:
    """The median µs of every case's kernel, weights from memory."""

    def run():
        for case in found:
            for _ in range(max(REPEATS, 12 // case.turns)):
                for turn in range(case.turns):
                    y = case.run(turn)
            y.block_until_ready()

    times = kernel_times(run)
    medians = []
    for case in found:
        own = [t for name, ts in times.items() if name.split("_mosaic")[0] == case.name for t in ts]
        medians.append(float(np.median(own)) if own else float("nan"))
    return medians


HEADER = (
    f"{'type':8s}{'shape':>16s} rows {'µs':>8s} {'GB/s':>7s} {'% copy':>7s} {'TFLOP/s':>7s}  "
    f"{'error':8s} repeats alone"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(LAYOUTS), help="comma-separated ggml types")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="comma-separated NxK, or XxNxK for experts"
    )
    parser.add_argument("--rows", default="1,8", help='comma-separated numbers, or "f16": decode the matrix')
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="of x")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}", file=sys.stderr)
        return 1
    device = jax.devices()[0]
    copy = measured_copy_bandwidth(device)
    print(f"{device.device_kind}, jax {jax.__version__}, copy {copy / 1e9:.0f} GB/s, x {options.dtype}")
    print(HEADER)
    results, failures = [], []
    for type_name in options.types.split(","):
        found, figures = [], []
        for text in options.shapes.split(","):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)  # a kernel that hangs says nothing
            try:
                shape = tuple(int(v) for v in text.split("x"))
                rows = [0 if r == "f16" else int(r) for r in options.rows.split(",")]
                some, dense = cases(type_name, shape, rows, options.dtype)
                figures += [check(case, dense) for case in some]
                found += some
            except Exception as error:  # the other kernels' figures are still wanted
                failures.append(f"{type_name} {text}: {type(error).__name__}: {error}")
                print(failures[-1], file=sys.stderr)
        times = measure(found)
        faulthandler.cancel_dump_traceback_later()
        for case, figure, us in zip(found, figures, times, strict=True):
            rate = case.nbytes / us * 1e6
            shape = "x".join(map(str, case.shape))
            tflops = case.flops / us / 1e6
            row = {"type": type_name, "shape": shape, "rows": case.rows, "us": us, "gb_per_s": rate / 1e9}
            results.append({**row, "of_copy": rate / copy, "tflop_per_s": tflops, **figure})
            checks = f"{figure['error']:.1e}  {figure['repeats']!s:7s} {figure['alone']}"
            speed = f"{us:8.2f} {rate / 1e9:7.0f} {100 * rate / copy:6.1f}% {tflops:7.1f}"
            print(f"{type_name:8s}{shape:>16s} {case.rows or 'f16':>4} {speed}  {checks}", flush=True)
    wrong = [r for r in results if not (r["error"] < 1e-3 and r["repeats"] and r["alone"])]
    failures += [f"{r['type']} {r['shape']} {r['rows']} rows: wrong" for r in wrong]
    about = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "copy_gb_per_s": copy / 1e9,
        "dtype": options.dtype,
    }
    print(json.dumps({**about, "kernels": results, "failures": failures}))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
