"""GGUF metadata → configuration, rotary frequencies and the tensors an architecture needs."""

import functools
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.config import FULL, Delta, Experts, ModelConfig
from jaxserve.errors import InvalidGGUF, UnsupportedModel, UnsupportedTensorType
from jaxserve.gguf.hyperparameters import read_config, rope_frequencies
from jaxserve.gguf.reader import GGUFFile, open_gguf
from jaxserve.gguf.tensors import check_tensors
from tests import models
from tests.crafted import read_gguf, scripted_model, tiny_tokenizer_metadata, write_gguf

TINY = Path(__file__).parent / "data" / "tiny"
DIMS = {name: model["dims"] for name, model in json.loads((TINY / "tiny.json").read_text())["models"].items()}
F16 = gguf.GGMLQuantizationType.F16


def load(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """What loading reads and checks, in its order."""
    file = open_gguf(path)
    config = read_config(file)
    check_tensors(file, config)
    return config, rope_frequencies(file, config)


@functools.cache
def tiny(name: str) -> tuple[dict, dict]:
    """Metadata and tensors of a tiny model; not to be changed."""
    return read_gguf(TINY / f"{name}.gguf")


def changed(folder: Path, name: str, metadata: dict | None = None, tensors: dict | None = None) -> Path:
    """A tiny file with other metadata and tensors; None takes one away. {a} in a key is the architecture."""
    keys, found = tiny(name)
    architecture = keys["general.architecture"]
    keys = keys | {key.replace("{a}", architecture): value for key, value in (metadata or {}).items()}
    found = found | (tensors or {})
    return write_gguf(
        folder / "changed.gguf",
        {key: value for key, value in keys.items() if value is not None},
        {key: value for key, value in found.items() if value is not None},
    )


def kinds(config: ModelConfig) -> str:
    return "".join(layer.kind[0] for layer in config.layers)


# -- configurations


@pytest.mark.parametrize("name", DIMS)
def test_config_of_a_tiny_model_equals_what_it_was_made_from(name):
    dims, (config, tables) = DIMS[name], load(TINY / f"{name}.gguf")
    assert config.vocab_size == dims["vocab"] and config.embed_size == dims["hidden"]
    assert (config.heads, config.kv_heads, config.head_dim) == (dims["heads"], dims["kv"], dims["head_dim"])
    assert len(config.layers) == dims["layers"] and config.context_length == 2048
    assert config.rope_dims == dims["head_dim"] * dims.get("partial", 1)
    assert config.rope_interleaved == (config.architecture == "llama")
    assert config.norm_eps == pytest.approx(dims.get("eps", 1e-6))
    assert config.attention_scale == pytest.approx(dims["head_dim"] ** -0.5)
    assert tables["global"].shape == (config.rope_dims // 2,) and tables["global"].dtype == np.float32
    experts = Experts(dims["experts"], dims["used"], "sh_ff" in dims) if "experts" in dims else None
    assert config.experts == experts
    assert all(layer.experts == (experts is not None) for layer in config.layers)
    if "interval" in dims:
        expected = ["a" if (i + 1) % dims["interval"] == 0 else "d" for i in range(dims["layers"])]
        dim = dims["lin_dim"]
        assert kinds(config) == "".join(expected)
        assert config.delta == Delta(dims["conv"], dims["lin_k"], dims["lin_v"], dim, dim, grouped=False)
    else:
        assert kinds(config) == "a" * dims["layers"] and config.delta is None
    assert hash(config) == hash(load(TINY / f"{name}.gguf")[0])


def test_gemma3_alternates_local_and_global_layers():
    config, tables = load(TINY / "gemma3-bf16.gguf")
    assert [layer.window for layer in config.layers] == [16] * 5 + [FULL]
    assert [layer.rope for layer in config.layers] == ["local"] * 5 + ["global"]
    assert [layer.rank for layer in config.layers] == list(range(6))
    assert config.embed_scale == 8.0 and config.activation == "gelu" and config.logit_softcap == 0
    powers = np.arange(16) / 16
    np.testing.assert_allclose(tables["local"], 10000.0**-powers, rtol=1e-6)
    np.testing.assert_allclose(tables["global"], 1e6**-powers / 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("window", "pattern", "expected"),
    [(16, 2, "lglglg"), (16, 0, "llllll"), (16, 1, "gggggg"), (0, 6, "gggggg"), (None, 6, "gggggg")],
)
def test_gemma3_window_pattern(tmp_path, window, pattern, expected):
    keys = {"{a}.attention.sliding_window": window, "{a}.attention.sliding_window_pattern": pattern}
    config, tables = load(changed(tmp_path, "gemma3-bf16", keys))
    assert "".join(layer.rope[0] for layer in config.layers) == expected
    assert [layer.window for layer in config.layers] == [16 if rope == "l" else FULL for rope in expected]
    assert ("local" in tables) == ("l" in expected)


def test_gemma3_softcap_and_local_base_come_from_the_file(tmp_path):
    keys = {"{a}.final_logit_softcapping": 30.0, "{a}.rope.freq_base_swa": 500.0}
    config, tables = load(changed(tmp_path, "gemma3-bf16", keys))
    assert config.logit_softcap == 30
    np.testing.assert_allclose(tables["local"], 500.0 ** -(np.arange(16) / 16), rtol=1e-6)


def test_gemma3_of_62_layers_scales_by_embedding_over_heads(tmp_path):
    _, tensors = tiny("gemma3-bf16")
    blocks = {
        name.replace("blk.0.", f"blk.{i}."): tensor
        for name, tensor in tensors.items()
        for i in range(6, 62)
        if name.startswith("blk.0.")
    }
    config, _ = load(changed(tmp_path, "gemma3-bf16", {"{a}.block_count": 62}, blocks))
    assert config.attention_scale == pytest.approx((64 // 4) ** -0.5) and config.head_dim == 32


def test_real_models_have_the_published_configurations():
    smollm, _ = load(models.path("smollm2.gguf"))
    assert (smollm.vocab_size, smollm.embed_size, len(smollm.layers)) == (49152, 576, 30)
    assert (smollm.heads, smollm.kv_heads, smollm.head_dim, smollm.context_length) == (9, 3, 64, 8192)
    gemma, tables = load(models.path("gemma3.gguf"))
    assert (gemma.vocab_size, gemma.embed_size, len(gemma.layers)) == (262144, 640, 18)
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.context_length) == (4, 1, 256, 32768)
    assert [i for i, layer in enumerate(gemma.layers) if layer.window == FULL] == [5, 11, 17]
    assert {layer.window for layer in gemma.layers} == {FULL, 512} and set(tables) == {"global", "local"}


def test_numbers_of_any_width_are_accepted(tmp_path):
    keys = {
        "{a}.block_count": np.uint8(2),
        "{a}.context_length": np.int64(2048),
        "{a}.attention.head_count": np.uint16(4),
        "{a}.attention.layer_norm_rms_epsilon": np.float64(1e-6),
        "{a}.rope.freq_base": np.int32(10000),
    }
    config, tables = load(changed(tmp_path, "qwen2-f32", keys))
    assert config.norm_eps == 1e-6 and config.heads == 4 and len(config.layers) == 2
    np.testing.assert_allclose(tables["global"], 1e4 ** -(np.arange(8) / 8), rtol=1e-6)


def test_per_layer_arrays_are_accepted_where_layers_are_alike(tmp_path):
    keys = {
        "{a}.attention.head_count": np.array([4, 4], np.uint32),
        "{a}.attention.head_count_kv": np.array([2, 2, 7], np.int32),
        "{a}.feed_forward_length": np.array([64, 64], np.int32),
    }
    config, _ = load(changed(tmp_path, "qwen2-f32", keys))
    assert (config.heads, config.kv_heads) == (4, 2)


def test_key_value_heads_default_to_the_query_heads(tmp_path):
    path = changed(tmp_path, "qwen2-f32", {"{a}.attention.head_count_kv": None})
    assert read_config(open_gguf(path)).kv_heads == 4


def test_model_without_a_token_list_loads(tmp_path):
    path = changed(tmp_path, "qwen2-f32", {"tokenizer.ggml.tokens": None})
    assert load(path)[0].vocab_size == 384


# -- hybrids


def test_next_token_blocks_are_not_layers_whether_their_tensors_are_there_or_not(tmp_path):
    _, tensors = tiny("qwen35-mtp-bf16")
    absent = {name: None for name in tensors if name.startswith("blk.4.")}
    assert absent
    for path in (TINY / "qwen35-mtp-bf16.gguf", changed(tmp_path, "qwen35-mtp-bf16", tensors=absent)):
        config, _ = load(path)
        assert kinds(config) == "ddda"
        assert [layer.rank for layer in config.layers] == [0, 1, 2, 0]
        assert (config.layers_of("delta"), config.layers_of("attention")) == (3, 1)


def test_recurrent_mask_overrules_the_interval(tmp_path):
    config, _ = load(TINY / "qwen35-256-q4_k_m.gguf")  # its interval says 4, its mask 2
    assert kinds(config) == "da"
    keys = {"{a}.attention.recurrent_layers": None}
    assert kinds(read_config(open_gguf(changed(tmp_path, "qwen35-256-q4_k_m", keys)))) == "dd"


def test_mask_may_be_of_integers(tmp_path):
    keys = {"{a}.attention.recurrent_layers": np.array([1, 0], np.int32)}
    assert kinds(load(changed(tmp_path, "qwen35-256-q4_k_m", keys))[0]) == "da"


def test_interval_defaults_to_4(tmp_path):
    path = changed(tmp_path, "qwen35-bf16", {"{a}.full_attention_interval": None})
    assert kinds(load(path)[0]) == "dddaddda"


def test_sections_that_cover_all_pairs_change_nothing(tmp_path):
    _, plain = load(changed(tmp_path, "qwen35-bf16", {"{a}.rope.dimension_sections": None}))
    _, sections = load(TINY / "qwen35-bf16.gguf")
    assert np.array_equal(plain["global"], sections["global"])
    np.testing.assert_allclose(plain["global"], 1e7 ** -(np.arange(4) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("sections", "head_dim", "unrotated"),
    [([11, 11, 10, 0], 64, []), ([1, 2, 1, 0], 64, list(range(3, 32, 4))), ([24, 20, 20, 0], 128, [61, 62])],
)
def test_pairs_of_the_fourth_position_stream_do_not_rotate(tmp_path, sections, head_dim, unrotated):
    keys = {
        "{a}.rope.dimension_sections": np.array(sections, np.int32),
        "{a}.rope.dimension_count": head_dim,
        "{a}.attention.key_length": head_dim,
        "{a}.attention.value_length": head_dim,
    }
    file = open_gguf(changed(tmp_path, "qwen35-bf16", keys))
    table = rope_frequencies(file, read_config(file))["global"]
    assert np.flatnonzero(table == 0).tolist() == unrotated


def qwen3next(folder: Path, *, legacy: bool, metadata: dict | None = None) -> Path:
    """qwen35moe's tiny file under the names of qwen3next; values are of no matter."""
    keys, tensors = map(dict, tiny("qwen35moe-f16"))
    keys = {
        key.replace("qwen35moe.", "qwen3next."): value for key, value in keys.items() if "sections" not in key
    }
    keys |= {"general.architecture": "qwen3next"} | (metadata or {})
    for i in range(3):
        alpha, beta = (tensors.pop(f"blk.{i}.ssm_{name}.weight")[0] for name in ("alpha", "beta"))
        tensors[f"blk.{i}.ssm_ba.weight"] = (np.concatenate([beta, alpha]), F16)
        if legacy:
            qkv, z = (tensors.pop(f"blk.{i}.attn_{name}.weight")[0] for name in ("qkv", "gate"))
            tensors[f"blk.{i}.ssm_in.weight"] = (np.concatenate([qkv, z]), F16)
    return write_gguf(folder / "qwen3next.gguf", keys, tensors)


@pytest.mark.parametrize("legacy", [False, True])
def test_qwen3next_groups_its_value_heads(tmp_path, legacy):
    config, _ = load(qwen3next(tmp_path, legacy=legacy))
    assert config.delta == Delta(4, 2, 4, 32, 32, grouped=True)
    assert config.experts == Experts(4, 2, shared=True) and kinds(config) == "ddda"


def test_experts_without_a_shared_one(tmp_path):
    _, tensors = tiny("qwen35moe-f16")
    absent = {name: None for name in tensors if "shexp" in name}
    assert load(changed(tmp_path, "qwen35moe-f16", tensors=absent))[0].experts == Experts(4, 2, shared=False)


def test_llama_with_experts_is_a_mixture(tmp_path):
    dense = {f"blk.{i}.ffn_{name}.weight": None for i in range(2) for name in ("gate", "up", "down")}
    shapes = {"gate_inp": (3, 64), "gate_exps": (3, 64, 64), "up_exps": (3, 64, 64), "down_exps": (3, 64, 64)}
    experts = {
        f"blk.{i}.ffn_{name}.weight": np.zeros(shape, np.float32)
        for i in range(2)
        for name, shape in shapes.items()
    }
    keys = {"{a}.expert_count": 3, "{a}.expert_used_count": 2}
    config, _ = load(changed(tmp_path, "llama-f32", keys, dense | experts))
    assert config.experts == Experts(3, 2, shared=False) and all(layer.experts for layer in config.layers)


# -- rotary frequencies, against formulas written another way


def test_llama3_frequencies_equal_the_published_rule():
    (config, tables), rule = load(TINY / "llama-f32.gguf"), DIMS["llama-f32"]["llama3"]
    original = rule["original_max_position_embeddings"]
    for j, found in enumerate(tables["global"]):
        frequency = 500000.0 ** (-2 * j / config.rope_dims)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / rule["low_freq_factor"]:
            expected = frequency / rule["factor"]
        elif wavelength < original / rule["high_freq_factor"]:
            expected = frequency
        else:
            smooth = (original / wavelength - rule["low_freq_factor"]) / (
                rule["high_freq_factor"] - rule["low_freq_factor"]
            )
            expected = (1 - smooth) * frequency / rule["factor"] + smooth * frequency
        assert found == pytest.approx(expected, rel=1e-6), j


def test_rope_divisors_are_read_for_llama_alone(tmp_path):
    divisors = {"rope_freqs.weight": np.full(8, 2, np.float32)}
    _, tables = load(changed(tmp_path, "qwen2-f32", tensors=divisors))
    np.testing.assert_allclose(tables["global"], 1e6 ** -(np.arange(8) / 8), rtol=1e-6)


def test_yarn_frequencies_equal_the_published_rule():
    config, tables = load(TINY / "qwen3-yarn-f16.gguf")
    factor, original = DIMS["qwen3-yarn-f16"]["yarn"]
    base, dims = 1e6, 32

    def dimension(rotations):
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dims - 1)
    for j, found in enumerate(tables["global"]):
        extrapolated = base ** (-2 * j / dims)
        keep = 1 - min(1, max(0, (j - low) / (high - low)))
        assert found == pytest.approx(extrapolated / factor * (1 - keep) + extrapolated * keep, rel=1e-6), j
    assert config.rope_magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarn_attention_factor_multiplies_the_magnitude(tmp_path):
    path = changed(tmp_path, "qwen3-yarn-f16", {"{a}.rope.scaling.attn_factor": 1.5})
    assert load(path)[0].rope_magnitude == pytest.approx(1.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("keys", "divisor"),
    [
        ({"type": "linear", "factor": 4.0}, 4),
        ({"factor": 4.0}, 4),
        ({"factor": 0.0}, 1),
        ({"type": "none", "factor": 4.0}, 1),
        ({"factor": None}, 1),
    ],
)
def test_linear_scaling_divides_every_frequency(tmp_path, keys, divisor):
    metadata = {f"{{a}}.rope.scaling.{key}": value for key, value in keys.items()}
    config, tables = load(changed(tmp_path, "qwen2-f32", metadata))
    np.testing.assert_allclose(tables["global"], 1e6 ** -(np.arange(8) / 8) / divisor, rtol=1e-6)
    assert config.rope_magnitude == 1


def test_older_scale_key_is_the_fallback(tmp_path):
    _, tables = load(changed(tmp_path, "qwen2-f32", {"{a}.rope.scale_linear": 2.0}))
    assert tables["global"][0] == 0.5


def test_frequency_base_defaults_to_10000(tmp_path):
    _, tables = load(changed(tmp_path, "qwen2-f32", {"{a}.rope.freq_base": None}))
    np.testing.assert_allclose(tables["global"], 1e4 ** -(np.arange(8) / 8), rtol=1e-6)


# -- metadata that makes no sense

ROWS = [  # file, key, value, what the message says
    ("qwen2-f32", "general.architecture", None, "general.architecture: missing"),
    ("qwen2-f32", "general.architecture", 7, "general.architecture: 7, expected a string"),
    ("qwen2-f32", "{a}.block_count", None, "qwen2.block_count: missing"),
    ("qwen2-f32", "{a}.block_count", 0, "qwen2.block_count: 0, expected 1 … 512"),
    ("qwen2-f32", "{a}.block_count", 513, "qwen2.block_count: 513"),
    ("qwen2-f32", "{a}.block_count", 2.0, "qwen2.block_count: 2.0, expected an integer"),
    ("qwen2-f32", "{a}.block_count", True, "qwen2.block_count: True, expected an integer"),
    ("qwen2-f32", "{a}.block_count", "2", "qwen2.block_count: '2', expected an integer"),
    ("qwen2-f32", "{a}.context_length", None, "qwen2.context_length: missing"),
    ("qwen2-f32", "{a}.context_length", 0, "qwen2.context_length: 0"),
    ("qwen2-f32", "{a}.embedding_length", None, "qwen2.embedding_length: missing"),
    ("qwen2-f32", "{a}.embedding_length", 0, "qwen2.embedding_length: 0"),
    ("qwen2-f32", "{a}.embedding_length", -64, "qwen2.embedding_length: -64"),
    ("qwen2-f32", "{a}.embedding_length", 2**40, "qwen2.embedding_length: 1099511627776"),
    ("qwen2-f32", "{a}.embedding_length", 96, r"token_embd.weight.*\(384, 64\), expected \(vocabulary, 96\)"),
    ("qwen2-f32", "{a}.feed_forward_length", None, "qwen2.feed_forward_length: missing"),
    ("qwen2-f32", "{a}.attention.head_count", None, "qwen2.attention.head_count: missing"),
    ("qwen2-f32", "{a}.attention.head_count", 0, "qwen2.attention.head_count: 0"),
    ("qwen2-f32", "{a}.attention.head_count", 128, "qwen2.attention.head_count: 128, more than"),
    ("qwen2-f32", "{a}.attention.head_count", np.array([4], np.int32), "head_count: array of 1, expected 2"),
    ("qwen2-f32", "{a}.attention.head_count", np.array([4.0, 4.0]), "head_count: .*an array of integers"),
    ("qwen2-f32", "{a}.attention.head_count_kv", 0, "qwen2.attention.head_count_kv: 0"),
    (
        "qwen2-f32",
        "{a}.attention.head_count_kv",
        3,
        "qwen2.attention.head_count_kv: 3, expected a divisor of the 4",
    ),
    ("qwen2-f32", "{a}.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon: missing"),
    ("qwen2-f32", "{a}.attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon: 0.0, .* > 0"),
    ("qwen2-f32", "{a}.attention.layer_norm_rms_epsilon", math.nan, "layer_norm_rms_epsilon: nan"),
    ("qwen2-f32", "{a}.attention.layer_norm_rms_epsilon", math.inf, "layer_norm_rms_epsilon: inf"),
    ("qwen2-f32", "{a}.rope.freq_base", 0.0, "qwen2.rope.freq_base: 0.0"),
    ("qwen2-f32", "{a}.rope.freq_base", "10000", "qwen2.rope.freq_base: '10000', expected a number"),
    ("qwen2-f32", "{a}.rope.dimension_count", 0, "qwen2.rope.dimension_count: 0"),
    ("qwen2-f32", "{a}.rope.dimension_count", 7, "qwen2.rope.dimension_count: 7, expected an even"),
    ("qwen2-f32", "{a}.rope.dimension_count", 18, "qwen2.rope.dimension_count: 18, expected 1 … 16"),
    ("llama-f32", "{a}.rope.dimension_count", 8, "llama.rope.dimension_count: 8, .* expected 16"),
    ("qwen2-f32", "{a}.rope.scaling.factor", -1.0, "qwen2.rope.scaling.factor: -1.0"),
    ("qwen2-f32", "{a}.rope.scaling.attn_factor", 0.0, "qwen2.rope.scaling.attn_factor: 0.0"),
    ("qwen3-yarn-f16", "{a}.rope.freq_base", 1.0, "qwen3.rope.freq_base: 1.0, .* > 1"),
    ("qwen3-yarn-f16", "{a}.rope.scaling.original_context_length", 0, "original_context_length: 0"),
    ("qwen2-f32", "tokenizer.ggml.tokens", ["a", "b"], "tokenizer.ggml.tokens: 2 tokens, .* 384 rows"),
    (
        "qwen2-f32",
        "tokenizer.ggml.tokens",
        np.arange(384),
        "tokenizer.ggml.tokens: expected an array of strings",
    ),
    ("gemma3-bf16", "{a}.final_logit_softcapping", -1.0, "gemma3.final_logit_softcapping: -1.0"),
    (
        "gemma3-bf16",
        "{a}.attention.sliding_window_pattern",
        np.array([1, 0]),
        "sliding_window_pattern: .*an integer",
    ),
    ("gemma3-bf16", "{a}.rope.freq_base_swa", -1.0, "gemma3.rope.freq_base_swa: -1.0"),
    ("qwen3moe-f16", "{a}.expert_count", None, "qwen3moe.expert_count: missing"),
    ("qwen3moe-f16", "{a}.expert_count", 0, "qwen3moe.expert_count: 0"),
    ("qwen3moe-f16", "{a}.expert_count", 513, "qwen3moe.expert_count: 513"),
    ("qwen3moe-f16", "{a}.expert_used_count", None, "qwen3moe.expert_used_count: missing"),
    ("qwen3moe-f16", "{a}.expert_used_count", 0, "qwen3moe.expert_used_count: 0"),
    ("qwen3moe-f16", "{a}.expert_used_count", 7, "qwen3moe.expert_used_count: 7, expected 1 … 6"),
    (
        "qwen35moe-f16",
        "{a}.expert_feed_forward_length",
        None,
        "qwen35moe.expert_feed_forward_length: missing",
    ),
    ("qwen35-bf16", "{a}.full_attention_interval", 0, "qwen35.full_attention_interval: 0"),
    (
        "qwen35-bf16",
        "{a}.attention.recurrent_layers",
        np.ones(7, bool),
        "recurrent_layers: array of 7, expected 8",
    ),
    ("qwen35-bf16", "{a}.ssm.conv_kernel", None, "qwen35.ssm.conv_kernel: missing"),
    ("qwen35-bf16", "{a}.ssm.conv_kernel", 0, "qwen35.ssm.conv_kernel: 0"),
    ("qwen35-bf16", "{a}.ssm.state_size", None, "qwen35.ssm.state_size: missing"),
    ("qwen35-bf16", "{a}.ssm.group_count", None, "qwen35.ssm.group_count: missing"),
    ("qwen35-bf16", "{a}.ssm.group_count", 0, "qwen35.ssm.group_count: 0"),
    ("qwen35-bf16", "{a}.ssm.time_step_rank", None, "qwen35.ssm.time_step_rank: missing"),
    (
        "qwen35-bf16",
        "{a}.ssm.time_step_rank",
        5,
        "qwen35.ssm.time_step_rank: 5, expected a multiple of the 2",
    ),
    ("qwen35-bf16", "{a}.ssm.inner_size", None, "qwen35.ssm.inner_size: missing"),
    ("qwen35-bf16", "{a}.ssm.inner_size", 64, "qwen35.ssm.inner_size: 64, expected .* = 128"),
    (
        "qwen35-bf16",
        "{a}.rope.dimension_sections",
        np.zeros(4, np.int32),
        r"dimension_sections: \[0, 0, 0, 0\]",
    ),
    (
        "qwen35-bf16",
        "{a}.rope.dimension_sections",
        np.array([2, -1, 1, 0]),
        r"dimension_sections: \[2, -1, 1, 0\]",
    ),
    ("qwen35-bf16", "{a}.rope.dimension_sections", np.ones(5, np.int32), "dimension_sections: array of 5"),
    ("qwen35-mtp-bf16", "{a}.nextn_predict_layers", 5, "qwen35.nextn_predict_layers: 5, expected 0 … 4"),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "message"), ROWS, ids=[f"{row[1]}={row[2]}" for row in ROWS]
)
def test_senseless_metadata_is_refused_by_key_and_value(tmp_path, name, key, value, message):
    path = changed(tmp_path, name, {key: value})
    with pytest.raises(InvalidGGUF, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


UNSUPPORTED = [
    (
        "qwen2-f32",
        {"general.architecture": "mamba"},
        "'mamba', supported: llama, qwen2, qwen3, .*, qwen3next",
    ),
    ("qwen2-f32", {"{a}.rope.scaling.type": "longrope"}, "qwen2.rope.scaling.type: 'longrope'"),
    ("gemma3-bf16", {"{a}.rope.scaling.type": "yarn"}, "gemma3.rope.scaling.type: 'yarn'"),
    (
        "qwen2-f32",
        {"{a}.attention.head_count": np.array([4, 2], np.int32)},
        r"head_count: \[4, 2\]: layers that differ",
    ),
    (
        "qwen3-f32",
        {"{a}.attention.value_length": 16},
        "qwen3.attention.value_length: 16, but key_length is 32",
    ),
]


@pytest.mark.parametrize(("name", "metadata", "message"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, name, metadata, message):
    with pytest.raises(UnsupportedModel, match=message):
        load(changed(tmp_path, name, metadata))


def test_vocabulary_only_file_is_not_a_model(tmp_path):
    metadata, _ = tiny("qwen2-f32")
    with pytest.raises(UnsupportedModel, match="vocabulary-only"):
        load(write_gguf(tmp_path / "vocab.gguf", metadata, {}))


def test_companion_file_of_next_token_blocks_is_refused_by_that_name(tmp_path):
    _, tensors = tiny("qwen35-mtp-bf16")
    absent = {name: None for name in tensors if name.startswith("blk.") and not name.startswith("blk.4.")}
    with pytest.raises(UnsupportedModel, match="MTP-only companion"):
        load(changed(tmp_path, "qwen35-mtp-bf16", tensors=absent))


# -- tensors


def required(name: str) -> list[str]:
    """Tensors of a tiny model that nothing can replace."""
    optional = ("output.weight", "rope_freqs.weight", ".bias", "ffn_gate_shexp")
    return [tensor for tensor in tiny(name)[1] if not tensor.endswith(optional)]


MODELS_OF_EACH_KIND = (
    "llama-f32",
    "qwen2-q4_0",
    "qwen3-q8_0",
    "gemma3-q5_1",
    "qwen3moe-f16",
    "qwen35moe-fused-f16",
)


@pytest.mark.parametrize("name", MODELS_OF_EACH_KIND)
def test_any_missing_tensor_is_named(name):
    file = open_gguf(TINY / f"{name}.gguf")
    config = read_config(file)
    for tensor in required(name):
        rest = {key: value for key, value in file.tensors.items() if key != tensor}
        missing = tensor.replace("attn_qkv", "attn_q").replace("gate_up_exps", "gate_exps")
        if tensor == "blk.0.attn_qkv.weight":  # here the projection of a delta layer
            missing = tensor
        with pytest.raises(InvalidGGUF, match=f"tensor '{missing}'.*missing"):
            check_tensors(GGUFFile(file.path, 3, 32, file.metadata, rest), config)


def test_delta_decay_bias_is_required(tmp_path):
    with pytest.raises(InvalidGGUF, match="'blk.2.ssm_dt.bias': missing"):
        load(changed(tmp_path, "qwen35-bf16", tensors={"blk.2.ssm_dt.bias": None}))


@pytest.mark.parametrize("name", MODELS_OF_EACH_KIND)
def test_any_tensor_of_another_shape_is_named_with_both_shapes(name):
    file = open_gguf(TINY / f"{name}.gguf")
    config = read_config(file)
    for tensor in file.tensors.values():
        longer = type(tensor)(
            tensor.name, (*tensor.shape[:-1], tensor.shape[-1] + 32), tensor.type, tensor.raw
        )
        changed_file = GGUFFile(file.path, 3, 32, file.metadata, file.tensors | {tensor.name: longer})
        with pytest.raises(
            InvalidGGUF, match=f"'{tensor.name}': shape .*{longer.shape[-1]}.*, expected .*\\("
        ):
            check_tensors(changed_file, config)


def test_dims_of_1_at_the_front_may_be_written_or_not(tmp_path):
    gates = {f"blk.{i}.ffn_gate_inp_shexp.weight": np.ones(64, np.float32) for i in range(4)}
    load(
        changed(
            tmp_path, "qwen35moe-f16", tensors=gates | {"output_norm.weight": np.ones((1, 1, 64), np.float32)}
        )
    )


def test_vectors_may_be_f16(tmp_path):
    load(changed(tmp_path, "qwen2-f32", tensors={"output_norm.weight": np.ones(64, np.float16)}))


def test_quantised_vector_is_refused(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    norm = (gguf.quants.quantize(np.ones(64, np.float32), kind), kind)
    with pytest.raises(UnsupportedTensorType, match="'output_norm.weight': a vector of Q8_0"):
        load(changed(tmp_path, "qwen2-f32", tensors={"output_norm.weight": norm}))


@pytest.mark.parametrize("divisors", [[1] * 7 + [0], [1] * 7 + [np.nan], [1] * 7 + [-1]])
def test_senseless_rope_divisors_are_refused(tmp_path, divisors):
    path = changed(tmp_path, "llama-f32", tensors={"rope_freqs.weight": np.array(divisors, np.float32)})
    with pytest.raises(InvalidGGUF, match="'rope_freqs.weight'.*finite"):
        load(path)


def test_optional_biases_are_known(tmp_path, recwarn):
    names = {
        "attn_q": 64,
        "attn_k": 32,
        "attn_v": 32,
        "attn_output": 64,
        "ffn_gate": 64,
        "ffn_up": 64,
        "ffn_down": 64,
    }
    biases = {f"blk.0.{name}.bias": np.zeros(size, np.float32) for name, size in names.items()}
    load(changed(tmp_path, "llama-f32", tensors=biases | {"output.bias": np.zeros(384, np.float32)}))
    assert not recwarn.list


def test_unknown_tensors_warn_once_and_are_named(tmp_path):
    extra = {f"extra.{i}": np.zeros(4, np.float32) for i in range(7)}
    with pytest.warns(
        UserWarning, match=r"7 tensors .*qwen2.*: extra.0, extra.1, extra.2, extra.3, extra.4, …"
    ) as seen:
        load(changed(tmp_path, "qwen2-f32", tensors=extra))
    assert len(seen) == 1


def test_tensors_of_later_blocks_and_of_rerankers_do_not_warn(tmp_path, recwarn):
    extra = {"blk.2.anything.weight": np.zeros(4, np.float32), "cls.output.weight": np.zeros(4, np.float32)}
    load(changed(tmp_path, "qwen2-f32", tensors=extra))
    assert not recwarn.list


def test_separate_scales_are_refused_rather_than_ignored(tmp_path):
    with pytest.raises(UnsupportedModel, match="'blk.0.attn_q.scale'.*separate scale"):
        load(changed(tmp_path, "qwen2-f32", tensors={"blk.0.attn_q.scale": np.ones(1, np.float32)}))


# -- scripted models


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_scripted_model_is_a_whole_model_whose_norm_and_output_give_the_logits(tmp_path, architecture):
    logits = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
    tokenizer = tiny_tokenizer_metadata([bytes([i]) for i in range(39)] + ["</s>"], eos=[39])
    path = scripted_model(tmp_path / "x.gguf", logits, architecture=architecture, tokenizer=tokenizer)
    config, _ = load(path)
    assert config.vocab_size == 40 and config.embed_size == 64
    tensors = open_gguf(path).tensors
    embed, output = (tensors[f"{name}.weight"].raw.view(np.float32) for name in ("token_embd", "output"))
    normed = embed / np.sqrt(np.mean(embed**2, -1, keepdims=True) + config.norm_eps)
    np.testing.assert_allclose(normed @ output.T, logits, rtol=1e-5, atol=1e-6)
    adding = [
        name for name in tensors if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight"))
    ]
    assert len(adding) == 2 * len(config.layers) and not any(tensors[name].raw.any() for name in adding)
