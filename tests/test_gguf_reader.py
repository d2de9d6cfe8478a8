"""GGUF files: what well-formed ones hold, and how malformed ones are refused."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidGGUF, JaxserveError, UnsupportedTensorType
from jaxserve.gguf import header
from jaxserve.gguf.reader import open_gguf
from tests import models
from tests.crafted import (
    array,
    gguf_bytes,
    key_value,
    read_gguf,
    string,
    tensor_info,
    write_gguf,
    write_split_set,
)

TINY = Path(__file__).parent / "data" / "tiny"
U32, F32, STRING, ARRAY = 4, 6, 8, 9  # value types
Q4_K = 12
TIME_LIMIT_S, MEMORY_LIMIT_BYTES = 1.0, 200 * 2**20


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


# -- well-formed files


@pytest.mark.parametrize("path", sorted(TINY.glob("*.gguf")), ids=lambda path: path.stem)
def test_metadata_and_tensors_equal_what_gguf_py_reads(path):
    metadata, tensors = read_gguf(path)
    file = open_gguf(path)
    assert list(file.metadata) == list(metadata)
    for key, expected in metadata.items():
        assert np.array_equal(file.metadata[key], expected), key
    assert list(file.tensors) == list(tensors)
    for name, (raw, kind) in tensors.items():
        assert file.tensors[name].type == kind
        assert file.tensors[name].raw.shape == raw.shape
        assert np.array_equal(file.tensors[name].raw, raw), name


def test_metadata_values_are_python_scalars_strings_arrays_and_lists_of_strings(tmp_path):
    values = {
        "u8": np.uint8(200),
        "i64": np.int64(-(2**40)),
        "u64": np.uint64(2**63),
        "f64": np.float64(0.1),
        "yes": True,
        "text": "é",
        "words": ["a", ""],
        "none": [],
        "numbers": np.array([1.5, -2], np.float32),
        "flags": np.array([True, False]),
    }
    found = open_gguf(write_gguf(tmp_path / "x.gguf", values, {})).metadata
    assert {key: type(value) for key, value in found.items()} == {
        "u8": int,
        "i64": int,
        "u64": int,
        "f64": float,
        "yes": bool,
        "text": str,
        "words": list,
        "none": list,
        "numbers": np.ndarray,
        "flags": np.ndarray,
    }
    assert all(np.array_equal(found[key], values[key]) for key in values)
    assert found["numbers"].dtype == np.float32 and found["flags"].dtype == bool


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path):
    raw = b"caf\xe9 \xff\xe8\xaa"
    path = write_gguf(tmp_path / "x.gguf", {"text": raw, "texts": [raw, b"ok"]}, {})
    metadata = open_gguf(path).metadata
    assert metadata["text"].encode("utf-8", "surrogateescape") == raw
    assert [text.encode("utf-8", "surrogateescape") for text in metadata["texts"]] == [raw, b"ok"]


def test_shapes_are_in_numpy_order_and_raw_bytes_are_read_only_rows(tmp_path):
    rows = gguf.quants.quantize(
        np.arange(3 * 5 * 64, dtype=np.float32).reshape(3, 5, 64), gguf.GGMLQuantizationType.Q8_0
    )
    path = write_gguf(tmp_path / "x.gguf", {}, {"w": (rows, gguf.GGMLQuantizationType.Q8_0)})
    tensor = open_gguf(path).tensors["w"]
    assert tensor.shape == (3, 5, 64) and tensor.raw.shape == (3, 5, 68)
    assert np.array_equal(tensor.raw, rows)
    assert not tensor.raw.flags.writeable and not tensor.raw.flags.owndata


def test_tensor_without_dims_is_one_element(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [tensor_info("t", [])], struct.pack("<f", 2.5)))
    tensor = open_gguf(path).tensors["t"]
    assert tensor.shape == (1,) and tensor.raw.view(np.float32).tolist() == [2.5]


def test_versions_2_and_3_hold_the_same_model(tmp_path):
    metadata, tensors = read_gguf(TINY / "qwen2-q4_0.gguf")
    old, new = (
        open_gguf(write_gguf(tmp_path / f"{version}.gguf", metadata, tensors, version=version))
        for version in (2, 3)
    )
    assert (old.version, new.version) == (2, 3)
    assert old.fingerprint() == new.fingerprint() == open_gguf(TINY / "qwen2-q4_0.gguf").fingerprint()


def test_big_endian_is_refused_by_name(tmp_path):
    metadata = {"general.architecture": "llama"}
    path = write_gguf(tmp_path / "x.gguf", metadata, {"t": np.ones(4, np.float32)}, endianess=GGUFEndian.BIG)
    with pytest.raises(InvalidGGUF, match="version.*big-endian"):
        open_gguf(path)


def test_alignment_of_the_file_is_followed(tmp_path):
    path = tmp_path / "x.gguf"
    infos = [tensor_info("a", [3]), tensor_info("b", [1], offset=256)]
    data = struct.pack("<3f", 1, 2, 3).ljust(256, b"\0") + struct.pack("<f", 4)
    path.write_bytes(gguf_bytes([key_value("general.alignment", U32, u32(256))], infos, data, alignment=256))
    file = open_gguf(path)
    assert file.alignment == 256 and file.nbytes == 16
    assert file.tensors["a"].raw.view(np.float32).tolist() == [1, 2, 3]
    assert file.tensors["b"].raw.view(np.float32).tolist() == [4]


def test_metadata_alone_opens_without_looking_at_the_tensors(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([key_value("k", U32, u32(7))], [tensor_info("t", [2**40], kind=99)]))
    file = open_gguf(path, tensors=False)
    assert file.metadata == {"k": 7} and file.tensors == {}


def test_vocabulary_of_a_quarter_million_tokens_opens_within_a_second():
    path = models.path("gemma3.gguf")
    start = time.process_time()
    file = open_gguf(path)
    assert time.process_time() - start < TIME_LIMIT_S
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262144
    assert file.metadata["tokenizer.ggml.scores"].shape == (262144,)


def test_vocabulary_only_file_has_no_tensors():
    file = open_gguf(models.path("ggml-vocab-qwen2.gguf"))
    assert file.tensors == {} and file.nbytes == 0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 151936


# -- fingerprint


def fingerprint(folder: Path, metadata: dict | None = None, **tensors: np.ndarray) -> str:
    metadata = {"general.architecture": "llama"} | (metadata or {})
    return open_gguf(write_gguf(folder / "x.gguf", metadata, tensors)).fingerprint()


@pytest.mark.parametrize("at", [0, 2000, 4095])
def test_fingerprint_sees_any_value_of_a_small_tensor(tmp_path, at):
    weights = np.ones(4096, np.float32)
    edited = weights.copy()
    edited[at] = 2
    assert fingerprint(tmp_path, w=weights) != fingerprint(tmp_path, w=edited)


@pytest.mark.parametrize("at", [0, -1])
def test_fingerprint_sees_both_ends_of_a_large_tensor(tmp_path, at):
    weights = np.ones(2**20, np.float32)
    edited = weights.copy()
    edited[at] = 2
    assert fingerprint(tmp_path, w=weights) != fingerprint(tmp_path, w=edited)


def test_fingerprint_depends_on_shapes_and_tensor_names(tmp_path):
    weights = np.ones((4, 8), np.float32)
    assert fingerprint(tmp_path, w=weights) != fingerprint(tmp_path, w=weights.T)
    assert fingerprint(tmp_path, w=weights) != fingerprint(tmp_path, v=weights)


def test_fingerprint_depends_on_hyperparameters_and_not_on_the_model_name(tmp_path):
    one = np.ones(4, np.float32)
    plain = fingerprint(tmp_path, {"llama.rope.freq_base": 1e4, "general.name": "a"}, w=one)
    assert plain == fingerprint(tmp_path, {"llama.rope.freq_base": 1e4, "general.name": "b"}, w=one)
    assert plain != fingerprint(tmp_path, {"llama.rope.freq_base": 2e4}, w=one)
    assert plain != fingerprint(
        tmp_path, {"llama.rope.freq_base": 1e4, "llama.x": np.array([1, 2], np.int32)}, w=one
    )


# -- malformed files

ALIGNMENT = "general.alignment"
FLOATS = b"\0" * 64
MALFORMED = {
    "empty file": (b"", "magic"),
    "three bytes": (b"GGU", "magic"),
    "bad magic": (gguf_bytes(magic=b"GGML"), "magic.*GGML"),
    "nothing behind the magic": (b"GGUF", "version"),
    "version 0": (gguf_bytes(version=0), "version: 0"),
    "version 1": (gguf_bytes(version=1), "version: 1"),
    "version 99": (gguf_bytes(version=99), "version: 99"),
    "no counts": (gguf_bytes()[:12], "n_tensors"),
    "tensor count 2^60": (gguf_bytes(n_tensors=2**60), "n_tensors: 1,152,"),
    "tensor count negative": (gguf_bytes(n_tensors=2**64 - 1), "n_tensors: 18,446,"),
    "key count 2^60": (gguf_bytes(n_kv=2**60), "n_kv: 1,152,"),
    "a key more than there are": (gguf_bytes([key_value("k", U32, u32(1))], n_kv=2), "n_kv: 2"),
    "key length 2^63": (gguf_bytes([string("k", 2**63) + FLOATS]), "key 0: string length 9,223,"),
    "string length 2^63": (
        gguf_bytes([key_value("k", STRING, string("v", 2**63))]),
        "'k': string length 9,223,",
    ),
    "string a byte too long": (
        gguf_bytes([key_value("kk", STRING, string("vvvv", 5))]),
        "'kk': string length 5",
    ),
    "string in an array too long": (
        gguf_bytes([key_value("k", ARRAY, array(STRING, string("ab") + string("c", 99), 2))]),
        "'k': string length 99",
    ),
    "array of strings without their lengths": (
        gguf_bytes([key_value("k", ARRAY, array(STRING, string("a" * 20), 2))]),
        "'k': string length",
    ),
    "array length 2^62": (
        gguf_bytes([key_value("k", ARRAY, array(U32, FLOATS, 2**62))]),
        "'k': array length 4,611,",
    ),
    "array of strings 2^62": (
        gguf_bytes([key_value("k", ARRAY, array(STRING, FLOATS, 2**62))]),
        "'k': array length 4,611,",
    ),
    "array an element too long": (
        gguf_bytes([key_value("k", ARRAY, array(U32, FLOATS, 17))]),
        "'k': array length 17",
    ),
    "nested array": (
        gguf_bytes([key_value("k", ARRAY, array(ARRAY, array(U32, FLOATS, 1), 1))]),
        "'k': nested array",
    ),
    "value type 13": (gguf_bytes([key_value("k", 13, FLOATS)]), "type of 'k': value type 13"),
    "element type 13": (
        gguf_bytes([key_value("k", ARRAY, array(13, FLOATS, 1))]),
        "element type of 'k'.* 13",
    ),
    "cut scalar": (gguf_bytes([key_value("kkkk", 10, b"\0")]), "'kkkk': needs 8 bytes"),
    "empty key": (gguf_bytes([key_value("", U32, u32(1))]), "key 0: is empty"),
    "duplicate key": (gguf_bytes([key_value("k", U32, u32(1))] * 2), "'k': duplicate key"),
    "alignment 0": (gguf_bytes([key_value(ALIGNMENT, U32, u32(0))]), "general.alignment: 0"),
    "alignment 3": (gguf_bytes([key_value(ALIGNMENT, U32, u32(3))]), "general.alignment: 3"),
    "alignment -1": (
        gguf_bytes([key_value(ALIGNMENT, 5, struct.pack("<i", -1))]),
        "general.alignment: -1 of type INT32",
    ),
    "alignment a string": (
        gguf_bytes([key_value(ALIGNMENT, STRING, string("32"))]),
        "general.alignment: '32'",
    ),
    "name of 64 bytes": (gguf_bytes([], [tensor_info("n" * 64, [4])], FLOATS), "name of tensor 0.*63 bytes"),
    "duplicate tensor": (
        gguf_bytes([], [tensor_info("t", [4]), tensor_info("t", [4], offset=32)], FLOATS),
        "name of tensor 1: duplicate tensor 't'",
    ),
    "5 dims": (gguf_bytes([], [tensor_info("t", [1, 1, 1, 1, 4])], FLOATS), "'t' n_dims: 5"),
    "n_dims 2^32-1": (
        gguf_bytes([], [tensor_info("t", [4], n_dims=2**32 - 1)], FLOATS),
        "'t' n_dims: 4294967295",
    ),
    "dims past 2^64": (
        gguf_bytes([], [tensor_info("t", [2**33, 2**33])], FLOATS),
        r"'t' dims: \[8589934592, 8589934592\]",
    ),
    "dim 2^63": (gguf_bytes([], [tensor_info("t", [2**63])], FLOATS), r"'t' dims: \[9223372036854775808\]"),
    "bytes past 2^63": (gguf_bytes([], [tensor_info("t", [2**62], kind=28)], FLOATS), r"'t' dims.*F64"),
    "zero dim": (gguf_bytes([], [tensor_info("t", [4, 0])], FLOATS), r"'t' dims: \[4, 0\]"),
    "Q4_K row of 100": (
        gguf_bytes([], [tensor_info("t", [100], kind=Q4_K)], FLOATS),
        "'t' dims: rows of 100, Q4_K.*256",
    ),
    "Q4_K without dims": (
        gguf_bytes([], [tensor_info("t", [], kind=Q4_K)], FLOATS),
        "'t' dims: rows of 1, Q4_K",
    ),
    "misaligned offset": (
        gguf_bytes([], [tensor_info("a", [4]), tensor_info("b", [4], offset=16)], FLOATS),
        "'b' offset: 16, expected 32",
    ),
    "overlapping offsets": (
        gguf_bytes([], [tensor_info("a", [16]), tensor_info("b", [4], offset=32)], FLOATS * 2),
        "'b' offset: 32, expected 64",
    ),
    "gap between tensors": (
        gguf_bytes([], [tensor_info("a", [4]), tensor_info("b", [4], offset=64)], FLOATS * 2),
        "'b' offset: 64, expected 32",
    ),
    "first offset not 0": (
        gguf_bytes([], [tensor_info("a", [4], offset=32)], FLOATS),
        "'a' offset: 32, expected 0",
    ),
    "data cut short": (gguf_bytes([], [tensor_info("t", [17])], FLOATS), "'t' data.*cut short"),
    "no data at all": (gguf_bytes([], [tensor_info("t", [4])]), "'t' data.*cut short"),
    "huge tensor in a small file": (
        gguf_bytes([], [tensor_info("t", [2**40, 2**20])], FLOATS),
        "'t' data.*cut short",
    ),
    "cut tensor table": (gguf_bytes([], [tensor_info("t", [4, 4])])[:-20], "'t'"),
}


@pytest.mark.parametrize(("raw", "field"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_file_is_refused_by_field_in_little_time_and_memory(tmp_path, raw, field):
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(InvalidGGUF, match=field) as caught:
            open_gguf(path)
        elapsed, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400 + len(str(path))
    assert elapsed < TIME_LIMIT_S and peak < MEMORY_LIMIT_BYTES


@pytest.mark.parametrize("kind", [4, 5, 31, 32, 33, 36, 37, 38, 99, 2**32 - 1])
def test_unknown_and_retired_ggml_types_are_refused_by_tensor_and_number(tmp_path, kind):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [tensor_info("weights", [256], kind=kind)], FLOATS))
    with pytest.raises(UnsupportedTensorType, match=f"'weights' type: ggml type {kind} "):
        open_gguf(path)


@pytest.mark.parametrize(
    ("limit", "allowed", "payload", "field"),
    [
        ("MAX_STRINGS", 10, array(STRING, string("a") * 20, 20), "'k': 20 strings"),
        ("MAX_STRING_BYTES", 50, string("a" * 60), "'k': string length 60"),
    ],
)
def test_strings_of_a_header_have_a_limit(tmp_path, monkeypatch, limit, allowed, payload, field):
    monkeypatch.setattr(header, limit, allowed)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([key_value("k", ARRAY if limit == "MAX_STRINGS" else STRING, payload)]))
    with pytest.raises(InvalidGGUF, match=field):
        open_gguf(path)


def test_last_tensor_needs_no_padding_behind_it(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [tensor_info("t", [3])], struct.pack("<3f", 1, 2, 3)))
    assert open_gguf(path).tensors["t"].raw.view(np.float32).tolist() == [1, 2, 3]


def test_absent_file_and_directory_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        open_gguf(tmp_path)


SEED_FILE = gguf_bytes(
    [
        key_value("general.architecture", STRING, string("llama")),
        key_value("general.alignment", U32, u32(32)),
        key_value("split.count", 2, b"\1\0"),
        key_value("tokens", ARRAY, array(STRING, string("a") + string("bc"), 2)),
        key_value("scores", ARRAY, array(F32, FLOATS[:8], 2)),
    ],
    [tensor_info("a", [4, 2]), tensor_info("b", [32], kind=8, offset=32)],
    FLOATS + FLOATS,
)
EDITS = st.lists(st.tuples(st.integers(0, len(SEED_FILE) - 1), st.integers(0, 255)), max_size=6)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, length=st.one_of(st.just(len(SEED_FILE)), st.integers(0, len(SEED_FILE))))
def test_damaged_headers_raise_nothing_but_our_own_errors(tmp_path, edits, length):
    raw = bytearray(SEED_FILE)
    for at, value in edits:
        raw[at] = value
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw[:length])
    try:
        file = open_gguf(path)
    except (JaxserveError, FileNotFoundError):
        return
    assert file.nbytes <= length
    file.fingerprint()


# -- split sets

SOURCE = TINY / "qwen3-q8_0.gguf"


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_set_opens_through_any_part_and_equals_the_whole_file(tmp_path, opened):
    parts = write_split_set(SOURCE, tmp_path, 3)
    whole, file = open_gguf(SOURCE), open_gguf(parts[opened])
    assert {key for key in file.metadata if not key.startswith("split.")} == set(whole.metadata)
    assert list(file.tensors) == list(whole.tensors)
    assert all(np.array_equal(file.tensors[name].raw, whole.tensors[name].raw) for name in whole.tensors)
    assert file.nbytes == whole.nbytes and file.fingerprint() == whole.fingerprint()
    assert open_gguf(parts[opened], tensors=False).metadata.keys() == file.metadata.keys()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(tmp_path, missing):
    parts = write_split_set(SOURCE, tmp_path, 3)
    parts[missing].unlink()
    opened = parts[(missing + 1) % 3]
    with pytest.raises(FileNotFoundError, match=f"0000{missing + 1}-of-00003.gguf"):
        open_gguf(opened)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("split.count", np.uint16(4)),
        ("split.no", np.uint16(2)),
        ("split.no", "one"),
        ("split.tensors.count", np.int32(5)),
        ("split.tensors.count", None),
        ("split.count", np.array([3], np.int32)),
    ],
)
@pytest.mark.parametrize("opened", [0, 1])
def test_parts_that_disagree_are_refused_by_key(tmp_path, key, value, opened):
    parts = write_split_set(SOURCE, tmp_path, 3)
    metadata, tensors = read_gguf(parts[1])
    metadata = {k: v for k, v in (metadata | {key: value}).items() if v is not None}
    write_gguf(parts[1], metadata, tensors)
    with pytest.raises(InvalidGGUF, match=f"00002-of-00003.gguf: {key}"):
        open_gguf(parts[opened])


def test_tensor_in_two_parts_is_refused(tmp_path):
    parts = write_split_set(SOURCE, tmp_path, 2)
    (metadata, tensors), (_, other) = read_gguf(parts[1]), read_gguf(parts[0])
    name = next(iter(other))
    tensors.pop(next(iter(tensors)))
    write_gguf(parts[1], metadata, tensors | {name: other[name]})
    with pytest.raises(InvalidGGUF, match=f"duplicate tensor '{name}'"):
        open_gguf(parts[0])


def test_part_with_another_name_is_refused(tmp_path):
    part = write_split_set(SOURCE, tmp_path, 2)[0]
    with pytest.raises(InvalidGGUF, match="split.count: 2, but the name is not like"):
        open_gguf(part.rename(tmp_path / "renamed.gguf"))
