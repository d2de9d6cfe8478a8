"""What one decode step has to move through memory, by layer kind. Pure.

Weights count once a step however many rows it has; of the experts, those that its rows are expected to
choose. The cache counts as far as it is filled, not as far as it could be. Activations stay on the chip: they
are left out.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from jaxserve.cli.footprint import EMBEDDING, HEAD, Footprint, block_of
from jaxserve.config import ModelConfig

F32_BYTES = 4
KV_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def step_bytes(
    tensors: Iterable[Footprint],
    config: ModelConfig,
    *,
    rows: int = 1,
    length: float = 0,
    kv_dtype: str = "float16",
    weights_nbytes: int | None = None,
) -> dict[str, float]:
    """{layer kind: bytes read and written by a step of `rows` rows, each with `length` cached tokens}.

    weights_nbytes: what the weights take on the device, where it is known; `tensors` predict it.
    """
    tensors = list(tensors)
    tied = all(tensor.name != HEAD for tensor in tensors)
    predicted = sum(tensor.device_bytes for tensor in tensors)
    scale = 1.0 if weights_nbytes is None else weights_nbytes / predicted
    moved = Counter()
    for tensor in tensors:
        kind = kind_of_tensor(tensor.name, config, tied=tied)
        moved[kind] += scale * _read(tensor, config, rows, tied=tied)
    moved += _state_bytes(config, rows, length, KV_BYTES[kv_dtype])
    logits = rows * config.vocab_size * F32_BYTES
    return dict(moved + Counter(lm_head=logits, sampling=logits))


def kind_of_tensor(name: str, config: ModelConfig, *, tied: bool) -> str:
    """The layer kind that reads a tensor of the file, as in the scopes of a trace."""
    block, part = block_of(name), name.split(".")[-2]
    if block < 0:
        return "embed" if name == EMBEDDING and not tied else "lm_head"
    layer = config.layers[min(block, len(config.layers) - 1)]  # further blocks are not on the device
    if part.startswith("ffn"):
        return "moe" if layer.experts else "mlp"
    if part.startswith("post_attention_norm") and config.delta:  # the hybrids' norm before the ffn
        return "moe" if layer.experts else "mlp"
    return "norm" if part.startswith("post_") else layer.kind


def _read(tensor: Footprint, config: ModelConfig, rows: int, *, tied: bool) -> float:
    """Bytes of a tensor that a step reads."""
    if tensor.name == EMBEDDING and not tied:
        return tensor.device_bytes / tensor.shape[0] * rows
    if "_exps." in tensor.name and config.experts:
        missed = (1 - config.experts.used / config.experts.count) ** rows
        return tensor.device_bytes * (1 - missed)
    return tensor.device_bytes


def _state_bytes(config: ModelConfig, rows: int, length: float, kv_bytes: int) -> Counter:
    """Cached keys and values read, the new ones written; recurrent state read and written back."""
    token = 2 * config.kv_heads * config.head_dim * kv_bytes
    seen = sum(
        min(length, layer.window or math.inf) + 1 for layer in config.layers if layer.kind == "attention"
    )
    moved = Counter(attention=rows * token * seen)
    if delta := config.delta:
        state = delta.value_heads * delta.value_dim * delta.key_dim
        state += np.prod([delta.conv_width - 1, delta.channels])
        moved["delta"] = 2 * F32_BYTES * rows * int(state) * config.layers_of("delta")
    return moved
