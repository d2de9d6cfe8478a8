"""SentencePiece as llama.cpp does it (`tokenizer.ggml.model` = llama): greedy merging by score.

Why not the `tokenizers` library: it ranks pairs, while here pairs that spell the same token have the same
score and the leftmost goes first. And to derive the pairs of 262k tokens takes seconds.
"""

import functools
import heapq
import re

from jaxserve.text.vocabulary import Vocabulary

SPACE = "▁"
CACHED_WORDS = 2**15
CACHED_CHARACTERS = 48  # longer words seldom come twice


class SentencePiece:
    """Ordinary text to ids: spaces as ▁, merges by score, bytes for the rest."""

    def __init__(self, vocabulary: Vocabulary):
        self._ids = vocabulary.ids
        self._scores = vocabulary.scores.tolist()  # reading one numpy scalar takes as long as a whole merge
        self._prefix = " " if vocabulary.add_space_prefix else ""
        unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._bytes = [self._byte(byte, unknown) for byte in range(256)]
        # No merge crosses the border between a character and ▁ unless some token spells both. Words between
        # such borders are merged, and remembered, one by one.
        crossed = set(re.findall(f"([^{SPACE}]){SPACE}", "\n".join(vocabulary.tokens)))
        self._border = re.compile(f"(?<=[^{SPACE}{''.join(map(re.escape, crossed))}])(?={SPACE})")
        self._merge_cached = functools.lru_cache(CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of one stretch of ordinary text (not empty)."""
        words = self._border.split((self._prefix + text).replace(" ", SPACE))
        merge = self._merge_cached
        return [
            i
            for word in words
            for i in (merge(word) if len(word) <= CACHED_CHARACTERS else self._merge(word))
        ]

    def _byte(self, byte: int, unknown: list[int]) -> list[int]:
        names = (f"<0x{byte:02X}>", bytes([byte]).decode("utf-8", "surrogateescape"))
        return next(([self._ids[name]] for name in names if name in self._ids), unknown)

    def _merge(self, word: str) -> tuple[int, ...]:
        """Joins the neighbours that make the token of the highest score, leftmost first, to the end."""
        ids, scores = self._ids, self._scores
        symbols = list(word)  # "" once joined to the left
        before = list(range(-1, len(symbols) - 1))
        after = list(range(1, len(symbols) + 1))
        end = len(symbols)
        heap = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right < end:
                joined = symbols[left] + symbols[right]
                index = ids.get(joined)
                if index is not None:
                    heapq.heappush(heap, (-scores[index], left, right, len(joined)))

        for left in range(end - 1):
            consider(left, left + 1)
        while heap:
            _, left, right, size = heapq.heappop(heap)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return tuple(index for symbol in symbols if symbol for index in self._symbol(symbol))

    def _symbol(self, symbol: str) -> list[int]:
        index = self._ids.get(symbol)
        return [index] if index is not None else [i for byte in symbol.encode() for i in self._bytes[byte]]
