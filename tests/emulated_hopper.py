"""A Hopper GPU in numpy: every kernel written in `jaxserve.ptx` runs, in jitted programs too."""

import sys
import threading

import jax

from jaxserve import hopper, ptx
from jaxserve.models import layers
from jaxserve.ops.mosaic import chunk_attention
from jaxserve.ops.mosaic.launch import launch
from tests import emulated_launch


def install(monkeypatch) -> list[str]:
    """Returns the names of the launches, in the order in which they are traced.

    Prefill attention is Pallas code on arrays, for which there is no emulator here: it takes its plain form.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("jaxserve.")]
    kernels = [module for module in modules if _is_kernel(module)]
    names, one_at_a_time = [], threading.Lock()

    def launched(program, updated, read, *, name, out_types, **options):
        names.append(name)

        def run(updated, read):
            with one_at_a_time:
                return emulated_launch.run(
                    program, updated, read, modules=kernels, out_types=out_types, **options
                )

        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated]
        return jax.pure_callback(run, (types, list(out_types)), list(updated), list(read))

    for module in modules:
        if getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", launched)
    monkeypatch.setattr(hopper, "is_available", lambda: True)
    monkeypatch.setattr(layers, "SLICES_ARE_OFFSETS", True)  # as with the newest JAX
    monkeypatch.setattr(chunk_attention, "supported", lambda *_: False)
    return names


def _is_kernel(module) -> bool:
    return any(each is ptx or each is ptx.Register for each in (module, *vars(module).values()))
