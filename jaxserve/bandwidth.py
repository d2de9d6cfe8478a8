"""How fast the device moves memory: what decode's speed is measured against.

Decode reads every weight once per token, so its bytes per second over this figure say what is left to gain.
"""

import functools
import time

import jax
import jax.numpy as jnp

ACCELERATOR_BYTES = 2**30  # far above any cache, half a millisecond on a fast GPU
CPU_BYTES = 2**26
REPEATS, PASSES = 3, 8


@functools.partial(jax.jit, donate_argnums=0)
def _touch(x: jax.Array) -> jax.Array:
    """Reads and writes every element in place.   x: [n] u32"""
    return x + jnp.uint32(1)


def measured_copy_bandwidth(device: jax.Device) -> float:
    """Bytes per second, read and written, of a pass over memory on `device`: the best of a few timings."""
    nbytes = CPU_BYTES if device.platform == "cpu" else _fitting(device)
    x = _touch(jax.device_put(jnp.zeros(nbytes // 4, jnp.uint32), device)).block_until_ready()  # compiles
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(PASSES):
            x = _touch(x)
        x.block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * nbytes * PASSES / best


def _fitting(device: jax.Device) -> int:
    """`ACCELERATOR_BYTES`, or a quarter of what is free beside a loaded model."""
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", 8 * ACCELERATOR_BYTES) - stats.get("bytes_in_use", 0)
    return max(CPU_BYTES, min(ACCELERATOR_BYTES, free // 4 // 4096 * 4096))
