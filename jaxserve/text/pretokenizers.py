"""How each `tokenizer.ggml.pre` cuts text into words before byte-level BPE: regexes, one after another.

Every pass cuts the pieces of the pass before it; matches and what lies between them both become pieces.
Names and regexes are those of llama.cpp's `llama-vocab.cpp`, in Oniguruma's syntax.
"""

import dataclasses
import warnings

from jaxserve.errors import UnsupportedModel

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """One row of the table below."""

    passes: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # where the file does not say


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
ROWS = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("smaug-bpe dbrx glm4 chatglm-bpe", PreTokenizer((LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", PreTokenizer((QWEN2,))),
    ("qwen35", PreTokenizer((QWEN35,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer((r"\p{N}", GPT2))),
    (
        "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert",
        PreTokenizer((GPT2,)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            )
        ),
    ),
)
PRETOKENIZERS = {name: row for names, row in ROWS for name in names.split()}


def pretokenizer(name: str | None) -> PreTokenizer:
    """The row of a `tokenizer.ggml.pre`. None or "default" warns, an unknown name is `UnsupportedModel`."""
    if name in (None, "", "default"):
        warnings.warn(
            f"tokenizer.ggml.pre is {name!r}: text is cut by an old default rule, which few models were "
            "trained with; convert the model anew for its own rule",
            stacklevel=2,
        )
        return DEFAULT
    if name not in PRETOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre={name!r} is not supported, token ids still work; "
            f"supported are {', '.join(sorted(PRETOKENIZERS))}"
        )
    return PRETOKENIZERS[name]
