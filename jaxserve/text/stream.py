"""Tokens to text as they come: characters whole, stop strings found wherever token borders fall."""

import codecs

from jaxserve.text.tokenizer import Tokenizer


class TextStream:
    """The text of one generation. Joined deltas are `text`: the decode of the tokens, up to a stop string.

    Bytes that do not yet form a character are held back, and so is an end that may begin a stop string.
    The first stop string to be complete ends the text, the longest of several that complete together.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._searches = [_Search(text) for text in ((stop,) if isinstance(stop, str) else stop)]
        self._held = ""
        self._deltas: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All deltas so far."""
        return "".join(self._deltas)

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" for whatever comes after a stop string."""
        if self.stopped or token_id >= self._tokenizer.vocab_size:  # an embedding may have more rows
            return ""
        return self._emit(self._advance(self._decoder.decode(self._tokenizer.token_bytes(token_id))))

    def finish(self) -> str:
        """The rest: what was held back for a stop string, U+FFFD for an incomplete character."""
        if self.stopped:
            return ""
        delta = self._advance(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return self._emit(delta)

    def _advance(self, new: str) -> str:
        """The part of the text that `new` makes certain; what may begin a stop string becomes `_held`."""
        if not self._searches:
            return new
        seen = self._held + new
        for end, character in enumerate(new, len(self._held) + 1):
            completed = [len(search.text) for search in self._searches if search.step(character)]
            if completed:
                self.stopped, self._held = True, ""
                return seen[: end - max(completed)]
        certain = len(seen) - max(search.length for search in self._searches)
        self._held = seen[certain:]
        return seen[:certain]

    def _emit(self, delta: str) -> str:
        if delta:
            self._deltas.append(delta)
        return delta


class _Search:
    """Knuth-Morris-Pratt: how much of `text` the characters so far end with."""

    def __init__(self, text: str):
        if not text:
            raise ValueError('stop="": a stop string needs at least one character')
        self.text, self.length = text, 0
        self._shorter = [0] * (len(text) + 1)  # by length: the next shorter match that the same end allows
        for end in range(1, len(text)):
            self._shorter[end + 1] = self._next(self._shorter[end], text[end])

    def step(self, character: str) -> bool:
        """Whether this character completes the text."""
        self.length = self._next(self.length, character)
        return self.length == len(self.text)

    def _next(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._shorter[length]
        return length + (self.text[length] == character)
