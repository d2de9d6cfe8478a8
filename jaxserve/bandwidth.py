"""How fast the device moves memory: what decode's speed is measured against.

Decode reads every weight once per token, so its bytes per second over the copy rate say what is left to gain.
What a restored prefix costs is measured against the rate from the host to the device.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

ACCELERATOR_BYTES = 2**30  # far above any cache, half a millisecond on a fast GPU
CPU_BYTES = 2**26
UPLOAD_BYTES = 2**28
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


def measured_upload_bandwidth(device: jax.Device) -> float | None:
    """Bytes per second from pinned host memory to `device`, the best of a few. None: that is the host."""
    if device.platform == "cpu":
        return None
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.zeros(UPLOAD_BYTES, np.uint8), pinned).block_until_ready()
    best = float("inf")
    for _ in range(PASSES):
        begin = time.perf_counter()
        jax.device_put(source, SingleDeviceSharding(device)).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return UPLOAD_BYTES / best


def _fitting(device: jax.Device) -> int:
    """`ACCELERATOR_BYTES`, or a quarter of what is free beside a loaded model."""
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", 8 * ACCELERATOR_BYTES) - stats.get("bytes_in_use", 0)
    return max(CPU_BYTES, min(ACCELERATOR_BYTES, free // 4 // 4096 * 4096))
