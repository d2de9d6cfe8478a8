"""Matrices of every ggml type for tests: recorded by ggml, or random blocks decoded by gguf-py."""

from functools import cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.quant import Packed
from jaxserve.quant.formats import FORMATS
from jaxserve.quant.packed import pack

LAYOUTS = ("rows", "columns")
HALF_SCALES = {  # where a block's half-precision scales begin, if not at 0 alone
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


@cache
def oracle() -> dict[str, np.ndarray]:
    """What ggml itself packs and decodes: x, TYPE.raw, TYPE.deq, TYPE.rnd_raw, TYPE.rnd_deq."""
    return dict(np.load(Path(__file__).parent / "data" / "quants.npz"))


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def random_raw(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """ggml's bytes u8 [..., row bytes] of a matrix of `shape`: random codes, scales of a sensible size."""
    form, rng = FORMATS[name], np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // form.block, form.nbytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(120, 128, blocks.shape[:-1])
    else:
        for start in HALF_SCALES.get(name, (0,)):
            scale = rng.uniform(0.5, 1, (*blocks.shape[:-1], 1)).astype(np.float16) / form.block
            blocks[..., start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def dense(raw: np.ndarray, name: str) -> np.ndarray:
    """gguf-py's f32 values of `raw`."""
    with np.errstate(over="ignore", invalid="ignore"):  # MXFP4's largest exponents overflow to infinity
        return gguf.quants.dequantize(raw, ggml_type(name))


def packed(raw: np.ndarray, name: str, layout: str) -> Packed:
    return jax.jit(pack, static_argnums=(1, 2))(jnp.asarray(raw), name, layout)


def relative_error(y: jax.Array, x: np.ndarray, w: np.ndarray) -> float:
    """‖y − x wᵀ‖₂ / ‖x wᵀ‖₂ with the product in float64."""
    exact = np.asarray(x, np.float64) @ np.swapaxes(w.astype(np.float64), -1, -2)
    return float(np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact))
