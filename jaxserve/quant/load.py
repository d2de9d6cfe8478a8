"""A tensor's bytes, mapped from the file, become a matrix on the device."""

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType

from jaxserve import hopper
from jaxserve.errors import UnsupportedTensorType
from jaxserve.quant import mosaic
from jaxserve.quant.formats import FORMATS
from jaxserve.quant.matrix import Matrix
from jaxserve.quant.mosaic.records import LAYOUTS
from jaxserve.quant.packed import pack
from jaxserve.quant.tiled import tile

PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# no packed form here: decoded on the host by gguf-py, float16 on the device
DECODED = ("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4")
DECODE_CHUNK_BYTES = 16 << 20  # decoded f32 on the host at a time; gguf-py needs a few times as much


def has_packed_form(type: GGMLQuantizationType) -> bool:
    """Whether matrices of this type keep their packing on the device."""
    return type.name in FORMATS


def is_supported(type: GGMLQuantizationType) -> bool:
    """Whether `load_matrix` takes this type."""
    return has_packed_form(type) or type.name in PLAIN or type.name in DECODED


def load_matrix(
    raw: np.ndarray,
    type: GGMLQuantizationType,
    *,
    name: str,
    mode: str = "packed",
    device: jax.Device | None = None,
) -> Matrix:
    """Uploads ggml's bytes `raw` u8[..., N, row bytes] once and takes them apart on the device.

    mode "packed" keeps ggml's packing where there is a packed form, F32, F16 and BF16 as they are, the rest
    as float16; "float32" decodes everything. `name` is the tensor's, for errors.
    """
    if mode not in ("packed", "float32"):
        raise ValueError(f"mode={mode!r}: expected 'packed' or 'float32'")
    if not is_supported(type):
        known = ", ".join([*PLAIN, *FORMATS, *DECODED])
        raise UnsupportedTensorType(
            f"{name} has type {type.name}, which cannot be decoded; supported: {known}"
        )
    if type.name in DECODED:
        return _decode_on_host(raw, type, np.float32 if mode == "float32" else np.float16, device)
    if mode == "packed" and _multiplies_tiles(raw, type.name):
        return _tile(jax.device_put(raw.view(np.uint8), device), type.name)
    if type.name in PLAIN:
        plain = jax.device_put(raw.view(PLAIN[type.name]), device)
        return plain.astype(jnp.float32) if mode == "float32" else plain
    bytes_ = jax.device_put(raw, device)
    (device,) = bytes_.devices()
    layout = "columns" if device.platform == "cpu" else "rows"
    return (_pack if mode == "packed" else _pack_and_dequantise)(bytes_, type.name, layout)


def _multiplies_tiles(raw: np.ndarray, type: str) -> bool:
    """Whether the device has a kernel for the matrix with these bytes u8 [..., N, row bytes]."""
    if not hopper.is_available() or type not in LAYOUTS:
        return False
    layout = LAYOUTS[type]
    blocks, rest = divmod(raw.shape[-1], layout.nbytes)
    return rest == 0 and mosaic.supported(type, raw.shape[-2], blocks * layout.block)


_tile = jax.jit(tile, static_argnums=1)
_pack = jax.jit(pack, static_argnums=(1, 2))


@partial(jax.jit, static_argnums=(1, 2))
def _pack_and_dequantise(raw, type, layout):
    return pack(raw, type, layout).dequantised(jnp.float32)


def _decode_on_host(raw, type, dtype, device):
    """gguf-py's decoder over chunks of rows.   raw: u8 [..., N, row bytes] → dtype [..., N, K]"""
    rows = raw.reshape(-1, raw.shape[-1])
    (_, k) = gguf.quant_shape_from_byte_shape(rows.shape, type)
    step = max(1, DECODE_CHUNK_BYTES // (4 * k))
    chunks = [
        jax.device_put(gguf.quants.dequantize(rows[start : start + step], type).astype(dtype), device)
        for start in range(0, len(rows), step)
    ]
    return jnp.concatenate(chunks).reshape(*raw.shape[:-1], k)
