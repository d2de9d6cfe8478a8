"""The vocabulary of a GGUF file: token texts and kinds, and which ids begin, end and fill a text.

Rules are those of llama.cpp's `llama-vocab.cpp`: kinds of tokens are corrected by their texts, and so is the
set of ids that end a generation, because files often name one of several.
"""

import dataclasses
import enum
import warnings
from typing import Any

import numpy as np

from jaxserve.errors import InvalidGGUF, UnsupportedModel
from jaxserve.text.pretokenizers import PreTokenizer, pretokenizer

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"  # tokenizer.ggml.model

END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
).split()

# fill-in-the-middle ids: the keys that give them, else the first of the texts in the vocabulary
FILL_IDS = {
    "pre": (
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    ),
    "suf": (
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    ),
    "mid": (
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    ),
    "pad": (("fim_pad",), "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "rep": (("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "sep": (("fim_sep",), "<|file_sep|>"),
}
FILL_ENDS = ("pad", "rep", "sep")  # these end a generation too

# control tokens of gpt-oss that are part of what a reader sees
VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of SentencePiece files that do not say


class Kind(enum.IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a file says about its tokens. An id that the file does not give is None."""

    model: str  # BYTE_LEVEL | SENTENCE_PIECE
    tokens: list[str]  # invalid UTF-8 as lone surrogates ("surrogateescape")
    kinds: list[int]  # Kind of each token
    ids: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool  # SentencePiece: every stretch of ordinary text begins with a space
    strip_after: frozenset[int]  # special tokens that swallow the white space behind them
    pretokenizer: PreTokenizer | None  # BYTE_LEVEL alone
    merges: list[str]  # BYTE_LEVEL alone
    scores: np.ndarray | None  # [V] f32, SENTENCE_PIECE alone


def read_vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    """The vocabulary in GGUF metadata. No tokenizer, or one of another kind, is `UnsupportedModel`."""
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        raise UnsupportedModel(
            "the file has no tokenizer (tokenizer.ggml.model): pass token ids instead of text"
        )
    if model not in (BYTE_LEVEL, SENTENCE_PIECE):
        raise UnsupportedModel(
            f"tokenizer.ggml.model={model!r} is not supported, token ids still work; "
            f"supported are {BYTE_LEVEL} and {SENTENCE_PIECE}"
        )
    sentence_piece = model == SENTENCE_PIECE
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(tokens)]
    ids = {text: index for index, text in enumerate(tokens)}
    kinds = _kinds(metadata, len(tokens))
    given = _given_ids(metadata, len(tokens), DEFAULT_IDS if sentence_piece else {})
    end_ids = _end_ids(ids, kinds, given)
    row = None if sentence_piece else pretokenizer(metadata.get("tokenizer.ggml.pre"))
    return Vocabulary(
        model=model,
        tokens=tokens,
        kinds=kinds,
        ids=ids,
        bos_id=given["bos"],
        eos_id=given["eos"],
        unknown_id=given["unknown"],
        padding_id=given["padding"],
        end_ids=end_ids,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", sentence_piece or row.add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=sentence_piece and bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        strip_after=_strip_after(metadata, ids, kinds),
        pretokenizer=row,
        merges=[] if sentence_piece else _strings(metadata, "tokenizer.ggml.merges"),
        scores=_numbers(metadata, "tokenizer.ggml.scores", len(tokens)) if sentence_piece else None,
    )


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise InvalidGGUF(
            f"{key}: {'missing' if value is None else type(value).__name__}, expected an array of strings"
        )
    return value


def _numbers(metadata: dict[str, Any], key: str, least: int) -> np.ndarray:
    value = metadata.get(key)
    if not isinstance(value, np.ndarray):
        raise InvalidGGUF(
            f"{key}: {'missing' if value is None else type(value).__name__}, expected an array of numbers"
        )
    if len(value) < least:
        raise InvalidGGUF(f"{key}: {len(value):,} entries, expected {least:,}: one per token")
    return value[:least]


def _kinds(metadata: dict[str, Any], count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return _numbers(metadata, key, count).tolist() if key in metadata else [int(Kind.NORMAL)] * count


def _given_ids(metadata: dict[str, Any], count: int, defaults: dict[str, int]) -> dict[str, int | None]:
    """The ids that `tokenizer.ggml.NAME_token_id` keys give, else their defaults, else None."""
    fill_names = [name for names, _ in FILL_IDS.values() for name in names]
    given = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding", *fill_names):
        key = f"tokenizer.ggml.{name}_token_id"
        default = defaults.get(name)
        given[name] = default if default is not None and default < count else None
        if key not in metadata:
            continue
        if not isinstance(metadata[key], int):
            raise InvalidGGUF(f"{key}: {type(metadata[key]).__name__}, expected an integer")
        if 0 <= metadata[key] < count:
            given[name] = metadata[key]
        else:
            warnings.warn(
                f"{key}={metadata[key]} is ignored: the vocabulary has {count:,} tokens", stacklevel=2
            )
    return given


def _end_ids(ids: dict[str, int], kinds: list[int], given: dict[str, int | None]) -> frozenset[int]:
    """Every id that ends a generation. Corrects `kinds` of tokens whose text says what they are."""
    ends = {given["eos"], given["eot"], given["eom"]}
    for role, (names, texts) in FILL_IDS.items():
        found = next((given[name] for name in names if given[name] is not None), None)
        if found is None:
            found = next((ids[text] for text in texts.split() if text in ids), None)
            if found is not None:
                kinds[found] = Kind.CONTROL
        if role in FILL_ENDS:
            ends.add(found)
    for text in END_TEXTS:
        if text in ids:
            ends.add(ids[text])
            kinds[ids[text]] = Kind.CONTROL
    for text in VISIBLE_TEXTS:
        if text in ids:
            kinds[ids[text]] = Kind.USER_DEFINED
    has_call = "<|call|>" in ids or "<|calls|>" in ids
    has_close = "<|return|>" in ids or "<|flush|>" in ids
    if "<|end|>" in ids and has_call and has_close:  # it ends a part, not the answer
        ends.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = Kind.USER_DEFINED
    if "<|tool_response>" in ids and "</s>" in ids:
        ends.discard(ids["</s>"])
        kinds[ids["</s>"]] = Kind.NORMAL
    return frozenset(ends - {None})


def _strip_after(metadata: dict[str, Any], ids: dict[str, int], kinds: list[int]) -> frozenset[int]:
    """Phi-3's special tokens swallow white space; only the model's name tells."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = {
        index for index, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    }
    return frozenset(special - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")})
