"""JAX's interpreter of Mosaic GPU kernels, which runs them on the CPU with their threads and barriers.

It knows no layouts, no transposed operands of wgmma and no accumulators that begin with a value: those are
plain arrays here.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Accumulator:
    """What a wgmma wrote."""

    def __init__(self, shape: tuple[int, ...], dtype):
        self.value = jnp.zeros(shape, dtype)

    @classmethod
    def init(cls, value: jax.Array):
        """One that begins with a value: `run_state` adds it."""
        return value

    def __getitem__(self, _) -> jax.Array:
        return self.value


class Transposed:
    def __init__(self, ref, _):
        self.ref = ref

    def __getitem__(self, _) -> jax.Array:
        return self.ref[...].T


def wgmma(out: Accumulator, a, b) -> None:
    left, right = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
    out.value = jnp.dot(left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def run_state(body):
    def run(initial):
        body(out := Accumulator(initial.shape, initial.dtype))
        return initial + out.value

    return run


def install(monkeypatch, module) -> None:
    """For a module that knows Pallas as `pl` and `plgpu`."""
    accumulators = {"run_state": run_state, "run_scoped": lambda body, out: body(out)}
    arrays = {
        "kernel": functools.partial(plgpu.kernel, interpret=InterpretGPUParams()),
        "ACC": Accumulator,
        "wgmma": wgmma,
        "transpose_ref": Transposed,
        "layout_cast": lambda x, _: x,
        "broadcasted_iota": lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis),
    }
    every = lambda package: {name: getattr(package, name) for name in dir(package)}  # noqa: E731
    monkeypatch.setattr(module, "pl", SimpleNamespace(**(every(pl) | accumulators)))
    monkeypatch.setattr(module, "plgpu", SimpleNamespace(**(every(plgpu) | arrays)))
    # a ring's last slots are released, and nobody waits for it: the interpreter would take offence
    monkeypatch.setattr(shared_memory.Barrier, "deallocate", _deallocate)


def _deallocate(barrier) -> None:
    with barrier.cv:
        barrier.ref_count -= 1
