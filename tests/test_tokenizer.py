"""The tokenizer gives llama.cpp's ids and pieces, on real vocabularies and on small crafted ones."""

import base64
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidGGUF, UnsupportedModel
from jaxserve.gguf.reader import open_gguf
from jaxserve.text.bpe import BYTE_ALPHABET
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import Kind
from tests.models import path

DATA = Path(__file__).parent / "data"
NAMES = [
    "smollm2",
    "gemma3",
    "vocab-qwen2",
    "vocab-qwen35",
    "vocab-llama-bpe",
    "vocab-llama-spm",
    "vocab-gpt-2",
    "vocab-phi-3",
    "vocab-deepseek-llm",
]
TINY = json.loads((DATA / "tiny" / "tiny.json").read_text())["models"]
SPACE = "▁"


@functools.cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(path(f"{name.replace('vocab-', 'ggml-vocab-')}.gguf"))


def oracle(name: str) -> dict:
    return json.loads((DATA / "tok" / f"{name}.json").read_text())


def once(ids: list[int], bos: int | None) -> list[int]:
    """llama.cpp doubles a BOS that the text spells."""
    return ids[1:] if ids[:2] == [bos, bos] else ids


def byte_level(extra: dict[str, int] | None = None, merges: list[str] | None = None, **keys) -> dict:
    """Metadata of a byte-level vocabulary: id = byte, then `extra` tokens with their kinds."""
    extra = extra or {}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTE_ALPHABET, *extra],
        "tokenizer.ggml.token_type": np.array([Kind.NORMAL] * 256 + list(extra.values()), np.int32),
        "tokenizer.ggml.merges": merges or [],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentence_piece(words: dict[str, float], **keys) -> dict:
    """Metadata of a SentencePiece vocabulary: <unk>, <s>, </s>, the bytes, then `words` with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256, *[Kind.NORMAL] * len(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + list(words.values()), np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_llama_cpp_without_specials_with_parsed_ones_and_with_added_ones(name):
    tokenizer = load(name)
    for case in oracle(name)["strings"]:
        text, plain = case["text"], case["ids"]
        parsed = case.get("ids_parse_special", plain)
        added = case.get("ids_add_special", parsed)
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        assert tokenizer.encode(text, add_special=False, parse_special=True) == parsed, text
        assert tokenizer.encode(text) == once(added, tokenizer.bos_id), text


@pytest.mark.parametrize("name", NAMES)
def test_pieces_equal_llama_cpp(name):
    tokenizer = load(name)
    for case in oracle(name)["strings"]:
        pieces = case.get("pieces", case.get("detok", case["text"]))
        assert tokenizer.decode(case["ids"], skip_special=False) == pieces


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_damaged_text_equal_llama_cpp(name):
    tokenizer = load(name)
    for case in oracle(name)["raw"]:
        got = b"".join(tokenizer.token_bytes(index, skip_special=False) for index in case["ids"])
        # llama.cpp's whole-text form drops the space that SentencePiece adds
        assert got.removeprefix(b" ") == base64.b64decode(case["detok_b64"])


@pytest.mark.parametrize("name", NAMES)
def test_special_ids_equal_llama_cpp(name):
    tokenizer, expected = load(name), oracle(name)["specials"]
    assert tokenizer.vocab_size == oracle(name)["n_vocab"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (expected["bos"], expected["eos"])
    assert tokenizer.add_bos == expected["add_bos"]
    assert sorted(tokenizer.end_ids) == expected["eog"]


@pytest.mark.parametrize("name", [name for name, model in TINY.items() if "tok" in model])
def test_tiny_files_give_the_oracle_ids(name):
    tokenizer, expected = Tokenizer.from_gguf(DATA / "tiny" / TINY[name]["file"]), TINY[name]["tok"]
    for case in expected["texts"]:
        assert tokenizer.encode(case["text"]) == once(case["ids"], tokenizer.bos_id)
        assert tokenizer.encode(case["text"], False, False) == case["ids_plain"]
    assert sorted(tokenizer.end_ids) == expected["specials"]["eog"]
    assert tokenizer.add_bos == expected["specials"]["add_bos"]


def test_gemma4_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="gemma4"):
        Tokenizer.from_gguf(path("ggml-vocab-gemma-4.gguf"))


def test_unknown_pre_tokenizer_is_refused_by_name_and_the_known_ones_are_listed():
    with pytest.raises(UnsupportedModel, match="'martian'.*qwen2"):
        Tokenizer.from_metadata(byte_level(pre="martian"))


@pytest.mark.parametrize("keys", [{"pre": "default"}, {"pre": ""}])
def test_default_pre_tokenizer_warns(keys):
    with pytest.warns(UserWarning, match="tokenizer.ggml.pre"):
        Tokenizer.from_metadata(byte_level(**keys))


def test_missing_pre_tokenizer_warns_and_cuts_by_the_default_rule():
    metadata = byte_level({"12": Kind.NORMAL, "123": Kind.NORMAL}, ["1 2", "12 3"])
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(UserWarning, match="None"):
        tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("1234") == [257, ord("4")]  # digits in threes


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_file_without_a_tokenizer_says_that_ids_still_work(model):
    with pytest.raises(UnsupportedModel, match="token ids"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": model} if model else {})


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_missing_array_is_named(key):
    metadata = byte_level()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(InvalidGGUF, match=f"tokenizer.ggml.{key}: missing"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_short_array_is_named_with_both_lengths(key):
    metadata = sentence_piece({"a": -1.0})
    metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:7]
    with pytest.raises(InvalidGGUF, match=f"{key}: 7 entries, expected 260"):
        Tokenizer.from_metadata(metadata)


def test_special_id_out_of_range_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="bos_token_id=999"):
        tokenizer = Tokenizer.from_metadata(byte_level(bos_token_id=999, add_bos_token=True))
    assert tokenizer.bos_id is None and not tokenizer.add_bos
    assert tokenizer.encode("a") == [97]


def test_special_id_of_the_wrong_type_is_refused():
    with pytest.raises(InvalidGGUF, match="eos_token_id: str"):
        Tokenizer.from_metadata(byte_level(eos_token_id="2"))


BOS = {"<s>": Kind.CONTROL, "</s>": Kind.CONTROL}


@pytest.mark.parametrize(
    "text, add_bos, parse_special, expected",
    [
        ("hi", True, True, [256, 104, 105]),
        ("hi", False, True, [104, 105]),
        ("<s>hi", True, True, [256, 104, 105]),
        ("<s>hi", False, True, [256, 104, 105]),
        ("<s>hi", True, False, [256, *b"<s>hi"]),
        ("", True, True, [256]),
    ],
)
def test_one_bos_and_only_where_the_model_asks(text, add_bos, parse_special, expected):
    tokenizer = Tokenizer.from_metadata(byte_level(BOS, bos_token_id=256, add_bos_token=add_bos))
    assert tokenizer.encode(text, parse_special=parse_special) == expected


def test_eos_is_added_once_where_the_model_asks():
    tokenizer = Tokenizer.from_metadata(byte_level(BOS, eos_token_id=257, add_eos_token=True))
    assert tokenizer.encode("a") == tokenizer.encode("a</s>") == [97, 257]
    assert tokenizer.encode("a", add_special=False) == [97]


def test_user_defined_tokens_match_even_where_control_tokens_do_not():
    tokenizer = Tokenizer.from_metadata(byte_level({"<tool>": Kind.USER_DEFINED, "<ctl>": Kind.CONTROL}))
    assert tokenizer.encode("<tool><ctl>", parse_special=False) == [256, *b"<ctl>"]
    assert tokenizer.encode("<tool><ctl>") == [256, 257]


def test_the_longest_special_text_comes_first_in_the_whole_text():
    tokenizer = Tokenizer.from_metadata(byte_level({"ab": Kind.CONTROL, "bcd": Kind.CONTROL}))
    assert tokenizer.encode("abcd ab") == [97, 257, 32, 256]


def test_end_tokens_are_found_by_text_and_made_control_tokens():
    tokens = {"<|im_end|>": Kind.NORMAL, "<|fim_pad|>": Kind.NORMAL, "<|file_sep|>": Kind.NORMAL}
    tokenizer = Tokenizer.from_metadata(byte_level(tokens, eos_token_id=0))
    assert tokenizer.end_ids == {0, 256, 257, 258}
    assert tokenizer.special_ids == {256, 257, 258}


def test_end_of_a_harmony_part_does_not_end_the_generation():
    tokens = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), Kind.CONTROL)
    tokenizer = Tokenizer.from_metadata(byte_level(tokens))
    assert tokenizer.end_ids == {257, 258}
    assert tokenizer.decode([256]) == "<|end|>"


def test_lone_surrogates_become_the_replacement_character():
    tokenizer = Tokenizer.from_metadata(byte_level())
    assert tokenizer.encode("a\ud800b") == list("a\ufffdb".encode())


def test_text_of_another_type_is_refused():
    with pytest.raises(TypeError, match="bytes"):
        Tokenizer.from_metadata(byte_level()).encode(b"a")


def test_byte_without_a_token_is_dropped_and_keeps_its_neighbours_apart():
    metadata = byte_level({"ab": Kind.NORMAL}, ["a b"])
    metadata["tokenizer.ggml.tokens"][ord("x")] = "no longer x"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.encode("axb") == [97, 98]


def test_merged_symbol_without_a_token_is_spelled_in_bytes_and_can_merge_further():
    tokenizer = Tokenizer.from_metadata(byte_level({"abc": Kind.NORMAL}, ["a b", "ab c"]))
    assert tokenizer.encode("abc") == [256]
    assert tokenizer.encode("abd") == list(b"abd")


def test_the_first_of_two_equal_merges_counts():
    tokenizer = Tokenizer.from_metadata(
        byte_level({"ab": Kind.NORMAL, "bc": Kind.NORMAL}, ["a b", "b c", "a b"])
    )
    assert tokenizer.encode("abc") == [256, 99]


def test_token_of_damaged_bytes_is_no_obstacle():
    tokenizer = Tokenizer.from_metadata(byte_level({"\udcff": Kind.CONTROL}))
    assert tokenizer.encode("a") == [97]
    assert tokenizer.token_bytes(256, skip_special=False) == b"\xff"


def test_decode_leaves_control_tokens_out_unless_asked():
    tokenizer = Tokenizer.from_metadata(byte_level(BOS | {"[PAD]x": Kind.UNUSED, "<t>": Kind.USER_DEFINED}))
    ids = np.array([256, 97, 258, 259, 257])
    assert tokenizer.decode(ids) == "a<t>"
    assert tokenizer.decode(ids, skip_special=False) == "<s>a<t></s>"


def test_decode_replaces_bytes_that_are_no_text():
    tokenizer = Tokenizer.from_metadata(byte_level())
    assert tokenizer.decode([0xFF, 97, 0xC3]) == "\ufffda\ufffd"


@pytest.mark.parametrize("index", [-1, 256, 2**31])
def test_id_outside_the_vocabulary_is_refused(index):
    with pytest.raises(ValueError, match="outside the vocabulary of 256"):
        Tokenizer.from_metadata(byte_level()).decode([index])


def test_sentence_piece_begins_every_stretch_of_text_with_a_space():
    tokenizer = Tokenizer.from_metadata(sentence_piece({SPACE: -1.0, "a": -2.0}))
    assert tokenizer.encode("a</s>a") == [1, 259, 260, 2, 259, 260]
    assert tokenizer.decode(tokenizer.encode("a")) == " a"


def test_sentence_piece_without_space_prefix_is_exact():
    tokenizer = Tokenizer.from_metadata(sentence_piece({SPACE: -1.0, "a": -2.0}, add_space_prefix=False))
    assert tokenizer.encode(" a") == [1, 259, 260]
    assert tokenizer.decode(tokenizer.encode("é a")) == "é a"


ALPHABET = "abc" + SPACE
WORDS = st.dictionaries(
    st.text(ALPHABET, min_size=1, max_size=5), st.sampled_from([-1.0, -2.0, -3.0]), min_size=5, max_size=40
)


@settings(deadline=None)
@given(WORDS, st.text("abc d", min_size=1, max_size=60))
def test_sentence_piece_equals_merging_the_best_pair_again_and_again(words, text):
    tokenizer = Tokenizer.from_metadata(sentence_piece(words, add_space_prefix=False))
    ids = {word: 259 + index for index, word in enumerate(words)}
    symbols = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-words[a + b], left)
            for left, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in ids
        ]
        if not pairs:
            break
        _, left = min(pairs)
        symbols[left : left + 2] = [symbols[left] + symbols[left + 1]]
    expected = [i for s in symbols for i in ([ids[s]] if s in ids else [3 + byte for byte in s.encode()])]
    assert tokenizer.encode(text, add_special=False) == expected


def test_byte_alphabet_is_that_of_gpt2():
    assert len(set(BYTE_ALPHABET)) == 256
    assert [BYTE_ALPHABET[byte] for byte in b"\n !\xad\xff"] == ["Ċ", "Ġ", "!", "Ń", "ÿ"]


@settings(deadline=None)
@given(st.text())
def test_byte_level_text_comes_back_whole(text):
    tokenizer = round_trip_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@functools.cache
def round_trip_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(DATA / "tiny" / "qwen35-bf16.gguf")


def test_libraries_for_text_are_not_imported_before_they_are_needed():
    code = "import sys, jaxserve.text.stream; print({'tokenizers', 'jinja2'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_metadata_of_a_file_gives_the_same_tokenizer_as_the_file():
    file = DATA / "tiny" / "llama-f32.gguf"
    from_metadata = Tokenizer.from_metadata(open_gguf(file).metadata)
    assert from_metadata.encode("Hello <|im_start|>") == Tokenizer.from_gguf(file).encode(
        "Hello <|im_start|>"
    )
    assert from_metadata.chat_template == Tokenizer.from_gguf(file).chat_template is not None
