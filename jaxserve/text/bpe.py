"""Byte-level BPE (`tokenizer.ggml.model` = gpt2), through the `tokenizers` library."""

from collections.abc import Collection

from jaxserve.text.vocabulary import Vocabulary


def _byte_alphabet() -> str:
    """The character that stands for each byte: itself where it prints, else the next one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    characters = {byte: chr(byte) for byte in printing} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }
    return "".join(characters[byte] for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
BYTES = {character: bytes([byte]) for byte, character in enumerate(BYTE_ALPHABET)}


def piece_bytes(text: str) -> bytes:
    """The bytes a token's text stands for. Characters outside the byte alphabet stand for themselves."""
    return b"".join(
        BYTES.get(character) or character.encode("utf-8", "surrogateescape") for character in text
    )


class ByteLevelBPE:
    """Ordinary text to ids: regex passes, bytes as characters, merges by rank."""

    def __init__(self, vocabulary: Vocabulary):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # only when text is used

        ids = {text: vocabulary.ids[text] for text in _readable(vocabulary.ids)}
        pairs = dict.fromkeys(tuple(merge.split(" ", 1)) for merge in _readable(vocabulary.merges))
        pairs = [pair for pair in pairs if len(pair) == 2 and all(pair)]
        # A symbol without a token must still take part in merges and be found afterwards: it gets an id past
        # the vocabulary. Left to itself the library forgets it, and its neighbours could merge.
        tokenless = {symbol for pair in pairs for symbol in (*pair, "".join(pair)) if symbol not in ids}
        tokenless.update(character for character in BYTE_ALPHABET if character not in ids)
        self._count, self._ids = len(vocabulary.tokens), vocabulary.ids
        self._tokenless = dict(enumerate(sorted(tokenless), self._count))
        row = vocabulary.pretokenizer
        model = models.BPE(
            vocab=ids | {text: index for index, text in self._tokenless.items()},
            merges=list(pairs),
            ignore_merges=row.ignore_merges,
        )
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(regex), "isolated") for regex in row.passes]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. A symbol without a token is spelled in bytes, a byte without one dropped."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._tokenless and max(ids, default=0) >= self._count:
            return [index for found in ids for index in self._spell(found)]
        return ids

    def _spell(self, index: int) -> list[int]:
        if index < self._count:
            return [index]
        return [self._ids[character] for character in self._tokenless[index] if character in self._ids]


def _readable(texts: Collection[str]) -> Collection[str]:
    """Those the library accepts: a text with damaged bytes is refused, and no byte-level symbol has any."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text for text in texts if text == text.encode("utf-8", "replace").decode()]
    return texts
