"""Saved state: what was written comes back, and a file that is not what was written is refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve import saved
from jaxserve.errors import InvalidState
from jaxserve.saved import Entry, load, save

HEADER = {"model": "abc123", "kv_dtype": "float16", "block_tokens": 256}
RNG = np.random.default_rng(0)
ENTRIES = [
    Entry({"kind": "block", "parent": -1}, {"tokens": np.arange(5, dtype=np.int32)}),
    Entry(
        {"kind": "block", "parent": 0},
        {
            "keys": RNG.normal(size=(2, 3, 4)).astype(np.float16),
            "values": RNG.normal(size=(2, 3, 4)).astype(ml_dtypes.bfloat16),
            "logits": RNG.normal(size=7).astype(np.float32),
        },
    ),
    Entry({"kind": "end", "length": 9}, {}),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "state.safetensors"
    save(path, HEADER, ENTRIES)
    return path


def test_entries_come_back_with_their_dtypes_shapes_and_bits(file):
    entries = load(file, HEADER)
    assert [entry.about for entry in entries] == [entry.about for entry in ENTRIES]
    for read, written in zip(entries, ENTRIES, strict=True):
        assert read.arrays.keys() == written.arrays.keys()
        for name, array in written.arrays.items():
            assert read.arrays[name].dtype == array.dtype and read.arrays[name].shape == array.shape
            assert read.arrays[name].tobytes() == array.tobytes()


def test_nothing_at_all_can_be_saved(tmp_path):
    save(tmp_path / "empty", HEADER, [])
    assert load(tmp_path / "empty", HEADER) == []


def test_arrays_of_a_device_and_of_any_layout_can_be_saved(tmp_path):
    arrays = {"device": jax.numpy.arange(6.0), "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T}
    save(tmp_path / "file", HEADER, [Entry({}, arrays)])
    read = load(tmp_path / "file", HEADER)[0].arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)


def test_a_flipped_bit_in_any_byte_is_refused(file):
    contents = file.read_bytes()
    for place in range(len(contents)):
        damaged = bytearray(contents)
        damaged[place] ^= 1 << (place * 5 % 8)
        file.write_bytes(damaged)
        with pytest.raises(InvalidState):
            load(file, HEADER)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.999])
def test_a_cut_file_is_refused(file, share):
    contents = file.read_bytes()
    file.write_bytes(contents[: int(share * len(contents))])
    with pytest.raises(InvalidState, match="not a saved state, or was cut short"):
        load(file, HEADER)


def test_bytes_after_the_end_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(InvalidState):
        load(file, HEADER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "model='abc123', this engine has model='other'"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype='float16', this engine has kv_dtype='bfloat16'"),
        ({"rope": 1.0}, "rope=None, this engine has rope=1.0"),
    ],
)
def test_state_of_another_engine_is_refused_by_name(file, change, reason):
    with pytest.raises(InvalidState, match=reason):
        load(file, HEADER | change)


def test_state_that_says_more_than_expected_is_refused(file):
    with pytest.raises(InvalidState, match="block_tokens=256, this engine has block_tokens=None"):
        load(file, {"model": "abc123", "kv_dtype": "float16"})


def test_another_format_version_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "VERSION", 2)
    save(tmp_path / "newer", HEADER, ENTRIES)
    monkeypatch.undo()
    with pytest.raises(InvalidState, match="format version 2, this jaxserve reads 1"):
        load(tmp_path / "newer", HEADER)


def test_other_files_are_refused(tmp_path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "weights.safetensors", metadata={"format": "np"})
    (tmp_path / "text").write_text("no state at all, only some text that is long enough")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("weights.safetensors", "text", "empty"):
        with pytest.raises(InvalidState, match="is not a saved state"):
            load(tmp_path / name, HEADER)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", HEADER)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(file):
    old = file.read_bytes()
    with pytest.raises(TypeError):
        save(file, HEADER, [Entry({"about": object()}, {})])

    def broken():
        yield ENTRIES[0]
        raise RuntimeError("device")

    with pytest.raises(RuntimeError):
        save(file, HEADER, broken())
    assert file.read_bytes() == old
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(file, monkeypatch):
    old = file.read_bytes()

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(file, HEADER, ENTRIES)
    assert file.read_bytes() == old
    assert list(file.parent.iterdir()) == [file]


def test_a_save_replaces_the_old_file(file):
    save(file, HEADER, ENTRIES[:1])
    assert len(load(file, HEADER)) == 1
    assert list(file.parent.iterdir()) == [file]


def test_the_file_is_plain_safetensors_with_its_header_in_the_metadata(file):
    with safe_open(file, framework="numpy") as contents:
        assert sorted(contents.keys()) == ["0.tokens", "1.keys", "1.logits", "1.values"]
        assert json.loads(contents.metadata()["contents"])["header"] == HEADER
