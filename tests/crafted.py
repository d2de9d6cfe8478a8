"""Small GGUF files for tests: well-formed ones through gguf-py's writer, malformed ones byte by byte, and
scripted models, whose next-token logits are a table that the test decides.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType

NORMAL, CONTROL = 1, 3  # tokenizer.ggml.token_type
NORM_EPS = 1e-6
VALUE_TYPES = {
    np.dtype(np.uint8): GGUFValueType.UINT8,
    np.dtype(np.int8): GGUFValueType.INT8,
    np.dtype(np.uint16): GGUFValueType.UINT16,
    np.dtype(np.int16): GGUFValueType.INT16,
    np.dtype(np.uint32): GGUFValueType.UINT32,
    np.dtype(np.int32): GGUFValueType.INT32,
    np.dtype(np.float32): GGUFValueType.FLOAT32,
    np.dtype(np.bool_): GGUFValueType.BOOL,
    np.dtype(np.uint64): GGUFValueType.UINT64,
    np.dtype(np.int64): GGUFValueType.INT64,
    np.dtype(np.float64): GGUFValueType.FLOAT64,
}
NUMPY_TYPES = {value_type: dtype for dtype, value_type in VALUE_TYPES.items()}

# -- well-formed files


class _Writer(gguf.GGUFWriter):
    def _pack_val(self, val, vtype, add_vtype, sub_type=None):
        if vtype is GGUFValueType.ARRAY and len(val) == 0:  # legal, but gguf-py refuses it
            return (
                (self._pack("I", vtype) if add_vtype else b"")
                + self._pack("I", sub_type)
                + self._pack("Q", 0)
            )
        return super()._pack_val(val, vtype, add_vtype, sub_type)


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]],
    *,
    version: int = 3,
    endianess: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """Write a file. Python ints become u32 (or i32, u64), floats f32; numpy values keep their type.

    A tensor is an array (f32, f16, …), or `(raw, type)` with raw: u8 [*shape[:-1], row_bytes].
    """
    writer = _Writer(None, "", endianess=endianess)
    writer.kv_data[0].clear()  # the architecture is a key like the others
    for key, value in metadata.items():
        writer.add_key_value(key, *_typed(value))
    for name, tensor in tensors.items():
        raw, kind = tensor if isinstance(tensor, tuple) else (np.ascontiguousarray(tensor), None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    path = Path(path)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        with path.open("r+b") as file:
            file.seek(4)
            file.write(struct.pack("<I", version))
    return path


def _typed(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    """Value, type and element type for gguf-py."""
    if isinstance(value, np.generic):
        return value.item(), VALUE_TYPES[value.dtype], None
    if isinstance(value, np.ndarray):
        return value.tolist(), GGUFValueType.ARRAY, VALUE_TYPES[value.dtype]
    if isinstance(value, (list, tuple)):
        return list(value), GGUFValueType.ARRAY, _typed(value[0])[1] if value else GGUFValueType.STRING
    if isinstance(value, (str, bytes)):
        return value, GGUFValueType.STRING, None
    if isinstance(value, (bool, float)):
        return value, GGUFValueType.get_type(value), None
    if value < 0:
        return value, GGUFValueType.INT32, None
    return value, GGUFValueType.UINT32 if value < 2**32 else GGUFValueType.UINT64, None


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, GGMLQuantizationType]]]:
    """Metadata and tensors of a well-formed file, read by gguf-py, in the form `write_gguf` takes."""
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        metadata[key] = field.contents()
        if field.types[-1] in NUMPY_TYPES:
            numbers = np.array(metadata[key], NUMPY_TYPES[field.types[-1]])
            metadata[key] = numbers if field.types[0] is GGUFValueType.ARRAY else numbers[()]
    return metadata, {tensor.name: (_bytes(tensor), tensor.tensor_type) for tensor in reader.tensors}


def _bytes(tensor: gguf.ReaderTensor) -> np.ndarray:
    rows = tuple(int(dim) for dim in reversed(tensor.shape[1:]))
    return np.array(tensor.data).view(np.uint8).reshape(*rows, -1)


def write_split_set(source: str | Path, folder: Path, parts: int, prefix: str = "model") -> list[Path]:
    """Cut a well-formed file into a split set: metadata in the first part, tensors dealt out in order."""
    metadata, tensors = read_gguf(source)
    names = np.array_split(np.array(list(tensors)), parts)
    paths = []
    for index, part in enumerate(names):
        keys = {
            "split.no": np.uint16(index),
            "split.count": np.uint16(parts),
            "split.tensors.count": np.int32(len(tensors)),
        }
        path = folder / f"{prefix}-{index + 1:05d}-of-{parts:05d}.gguf"
        paths.append(
            write_gguf(path, (metadata if index == 0 else {}) | keys, {name: tensors[name] for name in part})
        )
    return paths


# -- malformed files


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length` is what it claims to be."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    """One metadata entry; `payload` are the bytes behind the type."""
    return string(key) + struct.pack("<I", kind) + payload


def array(kind: int, payload: bytes, count: int) -> bytes:
    """The payload of an array entry."""
    return struct.pack("<IQ", kind, count) + payload


def tensor_info(
    name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    """One row of the tensor table; dims in the file's order, fastest first."""
    n_dims = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


def gguf_bytes(
    key_values: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_kv: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file from its pieces; counts are those of the pieces unless the test lies about them."""
    n_tensors = len(infos) if n_tensors is None else n_tensors
    n_kv = len(key_values) if n_kv is None else n_kv
    header = magic + struct.pack("<IQQ", version, n_tensors, n_kv) + b"".join(key_values) + b"".join(infos)
    return header + b"\0" * (-len(header) % alignment if infos else 0) + data


# -- tokenizers and scripted models


def tiny_tokenizer_metadata(
    pieces: Sequence[str | bytes],
    *,
    control: Sequence[int] = (),
    bos: int | None = None,
    eos: Sequence[int] = (),
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Keys of a byte-level BPE tokenizer whose token i stands for the bytes `pieces[i]`, valid UTF-8 or not.

    bos, eos (the first as eos, a second as eot, a third as eom) and `control` are control tokens, stored as
    they are. Every way to put a piece together from two others is a merge: all 256 bytes encode any text.
    """
    special = {*control, *eos, *(() if bos is None else (bos,))}
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    known = {piece for index, piece in enumerate(raw) if index not in special}
    merges = [
        f"{_byte_letters(piece[:cut])} {_byte_letters(piece[cut:])}"
        for piece in raw
        for cut in range(1, len(piece))
        if piece in known and piece[:cut] in known and piece[cut:] in known
    ]
    ids = {"bos": bos, **dict(zip(("eos", "eot", "eom"), eos, strict=False))}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            p.decode() if i in special else _byte_letters(p) for i, p in enumerate(raw)
        ],
        "tokenizer.ggml.token_type": np.array(
            [CONTROL if i in special else NORMAL for i in range(len(raw))], np.int32
        ),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": bos is not None,
        **{f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None},
        **({} if chat_template is None else {"tokenizer.chat_template": chat_template}),
    }


def _byte_letters(raw: bytes) -> str:
    """GPT-2's alphabet: printable bytes stand for themselves, the 68 others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in raw)


def scripted_model(
    path: str | Path,
    logits: np.ndarray,
    *,
    architecture: str = "llama",
    context: int = 512,
    layers: int | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model that answers token i with the logits `logits[i]`, whatever came before.   logits: [V, V]

    The embedding is one-hot and no block adds anything, so the output norm sees the last token alone.
    architecture: "llama" (1 layer) or "qwen35" (3 Gated DeltaNet layers, 1 of attention). Without `tokenizer`
    it knows ids only.
    """
    vocab = len(logits)
    width = max(32, -(-vocab // 32) * 32)
    keys, blocks = {"llama": _llama, "qwen35": _qwen35}[architecture](width, layers)
    output = np.zeros((vocab, width), np.float32)
    # the norm turns a one-hot row into 1/√(1/E + ε) at its place
    output[:, :vocab] = np.asarray(logits, np.float64).T * np.sqrt(1 / width + NORM_EPS)
    tensors = {"token_embd.weight": np.eye(vocab, width, dtype=np.float32), "output.weight": output}
    tensors["output_norm.weight"] = np.ones(width, np.float32)
    for index, block in enumerate(blocks):
        for name, shape in block.items():
            fill = np.ones if name.endswith("norm.weight") else np.zeros
            tensors[f"blk.{index}.{name}"] = fill(shape, np.float32)
    keys = {
        "block_count": len(blocks),
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": NORM_EPS,
        **keys,
    }
    every = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
    }
    return write_gguf(path, every | dict(tokenizer or {}) | dict(metadata or {}), tensors)


def _llama(width: int, layers: int | None) -> tuple[dict[str, Any], list[dict[str, tuple[int, ...]]]]:
    """Keys beyond the common ones, and the shapes of every block."""
    return {}, [{**_attention(width, q=32), "ffn_norm.weight": (width,), **_dense(width)}] * (layers or 1)


def _qwen35(width: int, layers: int | None) -> tuple[dict[str, Any], list[dict[str, tuple[int, ...]]]]:
    keys = {
        "rope.dimension_count": 8,
        "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    }
    norms = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
    attention = {**_attention(width, q=64), "attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,)}
    delta = {
        "attn_qkv.weight": (128, width),
        "attn_gate.weight": (64, width),
        "ssm_conv1d.weight": (128, 4),
        "ssm_alpha.weight": (4, width),
        "ssm_beta.weight": (4, width),
        "ssm_dt.bias": (4,),
        "ssm_a": (4,),
        "ssm_norm.weight": (16,),
        "ssm_out.weight": (width, 64),
    }
    kinds = [attention if index % 4 == 3 else delta for index in range(layers or 4)]
    return keys, [{**norms, **kind, **_dense(width)} for kind in kinds]


def _attention(width: int, q: int) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm.weight": (width,),
        "attn_q.weight": (q, width),
        "attn_k.weight": (32, width),
        "attn_v.weight": (32, width),
        "attn_output.weight": (width, 32),
    }


def _dense(width: int) -> dict[str, tuple[int, ...]]:
    return {"ffn_gate.weight": (32, width), "ffn_up.weight": (32, width), "ffn_down.weight": (width, 32)}
