"""What every snapshot was taken from, kept beside the host tier, so that its return can be compared by bits.

A shadow is read from the state itself when a row is stored, and never passes through what is tested.
"""

from collections import Counter

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve.host_tier import HostTier
from jaxserve.prefix_index import Checkpoint, Match, Node
from jaxserve.reuse import Kept
from jaxserve.snapshot import BLOCK_TOKENS
from tests.rows import assert_same, row

Key = tuple[str, tuple[int, ...]]  # ("block" | "recurrent" | "logits", the tokens it stands for)


class Shadows:
    """Watches an engine: every row that is copied or comes back is compared with what it was taken from."""

    def __init__(self, engine: jaxserve.Engine, monkeypatch: pytest.MonkeyPatch):
        self.compared = Counter()  # "copied", "restored", "loaded" → times
        self._runner = engine._runner
        self._of: dict[HostTier, dict[Key, object]] = {}
        self._saved: dict[Key, object] = {}
        self._loaded: set[Key] = set()
        self._at_end: dict[int, dict] = {}  # of a prompt, by the id of its `Kept`
        for name in ("store", "restore", "merge", "export", "add"):
            original, watched = getattr(HostTier, name), getattr(self, f"_{name}")

            def call(tier, *arguments, original=original, watched=watched, **named):
                return watched(original, tier, *arguments, **named)

            monkeypatch.setattr(HostTier, name, call)
        monkeypatch.setattr(engine._reuse, "established", self._watch_end(engine._reuse.established))
        monkeypatch.setattr(self._runner, "copy_row", self._watch_copy(self._runner.copy_row))

    def _row(self, slot: int, length: int) -> dict:
        return row(jax.tree.map(np.array, self._runner.state), slot, length)

    def _watch_end(self, established):
        def call(request):
            established(request)
            if request.kept is not None:
                self._at_end[id(request.kept)] = self._row(request.slot, len(request.ids))

        return call

    def _watch_copy(self, copy_row):
        def call(source, target, length):
            before = self._row(source, length)
            copy_row(source, target, length)
            assert_same(self._row(target, length), before)
            self.compared["copied"] += 1

        return call

    def _store(self, original, tier, tokens, rows, slot, *, logits):
        tokens, reads = tuple(int(token) for token in tokens), _Reads(rows)
        is_stored = original(tier, tokens, reads, slot, logits=logits)
        taken = self._row(slot, len(tokens))
        end = self._at_end[id(rows)] if isinstance(rows, Kept) else taken
        shadows = self._of.setdefault(tier, {})
        for start in reads.blocks:
            stop = min(start + BLOCK_TOKENS, len(tokens))
            block = [taken[name][:, :, start:stop].copy() for name in ("keys", "values")]
            shadows["block", tokens[:stop]] = block
        if reads.end:
            shadows["recurrent", tokens] = _recurrent(end)
            shadows["logits", tokens] = end["logits"]
        for kind in ("block", "recurrent", "logits"):
            self._loaded.discard((kind, tokens))
        return is_stored

    def _restore(self, original, tier, rows, slot, match: Match, *, keep=0):
        length, tokens = match.length, tuple(match.tokens.tolist())
        before = self._row(slot, length)
        original(tier, rows, slot, match, keep=keep)
        after, shadows = self._row(slot, length), self._of[tier]
        start = length if keep == length else keep - keep % BLOCK_TOKENS
        for name in ("keys", "values"):
            assert_same(after[name][:, :, :start], before[name][:, :, :start])
        path, keys = (), []
        for number, node in enumerate(match.nodes):
            path += tuple(node.tokens.tolist())
            begin = number * BLOCK_TOKENS
            if begin >= start:
                keys.append(("block", path))
                stop = min(len(path), length)
                found = [after[name][:, :, begin:stop] for name in ("keys", "values")]
                assert_same(found, [part[:, :, : stop - begin] for part in shadows["block", path]])
        if tier.index.recurrent_bytes:
            keys.append(("recurrent", tokens))
            assert_same(_recurrent(after), shadows["recurrent", tokens])
        if match.full_hit:
            keys.append(("logits", tokens))
            assert_same(after["logits"], shadows["logits", tokens])
        assert tuple(after["history"].tolist()) == tokens
        self.compared["restored"] += 1
        self.compared["loaded"] += bool(self._loaded.intersection(keys))

    def _merge(self, original, tier, other):
        original(tier, other)
        self._of[tier] = self._of.get(other, {}) | self._of.get(tier, {})

    def _export(self, original, tier):
        self._saved = dict(self._of.get(tier, {}))
        return original(tier)

    def _add(self, original, tier, entries):
        before = _held(tier)
        original(tier, entries)
        new = _held(tier) - before
        self._of.setdefault(tier, {}).update({key: self._saved[key] for key in new})
        self._loaded |= new


class _Reads:
    """Rows that note what is read of them."""

    def __init__(self, rows):
        self._rows, self.blocks, self.end = rows, [], False

    def read_block(self, slot, start):
        self.blocks.append(start)
        return self._rows.read_block(slot, start)

    def read_end(self, slot):
        self.end = True
        return self._rows.read_end(slot)


def _recurrent(of_row: dict) -> dict:
    return {name: of_row[name] for name in ("delta", "conv") if name in of_row}


def _held(tier: HostTier) -> set[Key]:
    """Everything a tier holds, by the tokens it stands for."""
    found = set()

    def path(node: Node | None) -> tuple[int, ...]:
        return () if node is None else path(node.parent) + tuple(node.tokens.tolist())

    for item in tier.index.items():
        if isinstance(item, Checkpoint):
            tokens = path(item.node.parent) + tuple(item.node.tokens[: item.offset].tolist())
            parts = {"recurrent": item.recurrent, "logits": item.logits}
            found |= {(kind, tokens) for kind, part in parts.items() if part is not None}
        else:
            found.add(("block", path(item)))
    return found
