"""What each tensor of a file takes on the device, and how much of it one decoded token reads. Pure."""

import dataclasses
import math
from collections.abc import Iterable

from jaxserve.config import ModelConfig
from jaxserve.gguf.reader import Tensor
from jaxserve.quant.formats import FORMATS

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Matrices in shape only: they are kept in f32, as norms and biases are.
SMALL = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """One tensor of a file."""

    name: str
    type: str  # ggml's name
    shape: tuple[int, ...]
    file_bytes: int
    form: str  # on the device: "packed" | "float32" | "float16" | "bfloat16" | "skipped"
    device_bytes: int
    read_bytes: int  # of `device_bytes`, per decoded token


def footprints(tensors: Iterable[Tensor], config: ModelConfig, mode: str) -> list[Footprint]:
    """Every tensor of a file, in its order. mode: "packed" or "float32"."""
    tensors = list(tensors)
    tied = all(tensor.name != HEAD for tensor in tensors)
    return [_footprint(tensor, config, mode, tied) for tensor in tensors]


def _footprint(tensor: Tensor, config: ModelConfig, mode: str, tied: bool) -> Footprint:
    type = tensor.type.name
    form, per_element = _form(tensor, type, config, mode)
    device_bytes = round(math.prod(tensor.shape) * per_element)
    read = device_bytes
    if tensor.name == EMBEDDING and not tied:
        read //= tensor.shape[0]  # the row of one token
    elif "_exps." in tensor.name and config.experts:
        read = read * config.experts.used // config.experts.count
    return Footprint(tensor.name, type, tensor.shape, tensor.raw.nbytes, form, device_bytes, read)


def _form(tensor: Tensor, type: str, config: ModelConfig, mode: str) -> tuple[str, float]:
    """Form on the device and bytes per element."""
    if block_of(tensor.name) >= len(config.layers):
        return "skipped", 0  # blocks that predict further tokens ahead
    if len(tensor.shape) < 2 or tensor.name.endswith(SMALL) or mode == "float32":
        return "float32", 4
    if type in FORMATS:
        return "packed", FORMATS[type].bits / 8
    form = {"F32": "float32", "BF16": "bfloat16"}.get(type, "float16")
    return form, FLOAT_BYTES.get(type, 2)


def block_of(name: str) -> int:
    """5 for "blk.5.attn_q.weight"; -1 for a tensor outside the blocks."""
    prefix, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if prefix == "blk" and number.isdigit() else -1
