"""Snapshots in host memory: owns the buffers that `PrefixIndex` accounts for.

On an accelerator a snapshot lies in pinned host memory and both ways are asynchronous: storing starts copies
and returns, restoring starts copies and dispatches the programs that wait for them. On CPU the arrays that
were read are kept as they are. Rows are reached through whatever has the methods of `Rows`: the tier never
sees a state.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.config import ModelConfig
from jaxserve.prefix_index import Checkpoint, Match, Node, PrefixIndex
from jaxserve.saved import Entry
from jaxserve.snapshot import BLOCK_TOKENS, End, Recurrent, snapshot_nbytes

PIN_BYTES = 2**28  # pinned at a time when the budget is reserved
STAGED_BLOCKS = 4  # that travel to the device in one call; two such calls take device memory beside the state


class Rows(Protocol):
    """The rows of a state, by slot."""

    def read_block(self, slot: int, start: int) -> jax.Array: ...

    def read_end(self, slot: int) -> End: ...

    def write_blocks(self, slot: int, start: int, count: int, blocks: Sequence[jax.Array]) -> None: ...

    def write_end(self, slot: int, tokens: np.ndarray, end: End) -> None: ...


class HostTier:
    """Prefixes whose state can be brought back, within a budget of bytes. A budget of 0 holds nothing."""

    def __init__(self, config: ModelConfig, *, kv_dtype: str, budget: int, device: jax.Device | None = None):
        device = device or jax.devices()[0]
        names = ("block_bytes", "recurrent_bytes", "logits_bytes")
        sizes = dict(zip(names, snapshot_nbytes(config, kv_dtype), strict=True))
        self.index = PrefixIndex(budget, block_tokens=BLOCK_TOKENS, **sizes)
        self.restored_bytes = 0  # brought back since it was made
        self._here = SingleDeviceSharding(device)
        pinned = device.platform != "cpu"
        self._there = SingleDeviceSharding(device, memory_kind="pinned_host") if pinned else None
        self._no_logits = jax.device_put(np.zeros(config.vocab_size, np.float32), self._here)

    def match(self, prompt: Sequence[int]) -> Match | None:
        """The longest usable prefix of a prompt."""
        return self.index.match(prompt)

    def store(self, tokens: Sequence[int], rows: Rows, slot: int, *, logits: bool) -> bool:
        """Keep the state a slot has after exactly `tokens`; logits: the slot's kept logits are those there.

        Of a model without recurrent layers the slot may have gone further. Only blocks that no other prefix
        shares are read. False: it does not fit.
        """

        def read_block(start):
            return self._leave(rows.read_block(slot, start)) if self.index.block_bytes else None

        read_end = functools.cache(lambda: rows.read_end(slot))
        return self.index.store(
            tokens,
            read_block,
            lambda: self._leave(read_end().recurrent),
            (lambda: self._leave(read_end().logits)) if logits else None,
        )

    def restore(self, rows: Rows, slot: int, match: Match, *, keep: int = 0) -> None:
        """Put a match into a slot whose first `keep` tokens have their attention rows already.

        What travels next has left before what has arrived is written: on the device a copy waits for the
        programs before it.
        """
        is_missing = keep < match.length and self.index.block_bytes
        first, last = keep // BLOCK_TOKENS, len(match.nodes) if is_missing else 0
        staged = deque()

        def write() -> Sequence[jax.Array]:
            begin, blocks = staged.popleft()
            start = begin * BLOCK_TOKENS
            count = min(len(blocks) * BLOCK_TOKENS, match.length - start)
            rows.write_blocks(slot, start, count, blocks)
            return blocks

        self.index.pin(match)
        try:
            recurrent, logits = self._enter(self._end(match))
            for begin in range(first, last, STAGED_BLOCKS):
                if len(staged) == 2:
                    jax.block_until_ready(write())
                nodes = match.nodes[begin : begin + STAGED_BLOCKS]
                staged.append((begin, self._enter([node.payload for node in nodes])))
            while staged:
                write()
            logits = self._no_logits if logits is None else logits
            rows.write_end(slot, match.tokens, End(recurrent=recurrent, logits=logits))
            self.restored_bytes += max(0, last - first) * self.index.block_bytes
            self.restored_bytes += self.index.recurrent_bytes + match.full_hit * self.index.logits_bytes
        finally:
            self.index.unpin(match)

    def reserve(self) -> None:
        """Pin the whole budget now: later, pinning would hold up a request (0.1 s and more at a time)."""
        if self._there is not None:
            sizes = [PIN_BYTES] * (self.index.budget // PIN_BYTES) + [self.index.budget % PIN_BYTES]
            pages = [jax.device_put(np.zeros(size, np.uint8), self._there) for size in sizes]
            jax.block_until_ready(pages)  # freed on return: the allocator keeps them

    def settle(self) -> None:
        """Wait for the copies under way and forget those that failed: after a step failed on the device."""
        for item in self.index.items():
            try:
                jax.block_until_ready(_payloads(item))
            except RuntimeError:
                self.index.drop(item)

    def clear(self) -> None:
        """Forget everything; its memory is free at once."""
        for item in self.index.items():
            self.index.drop(item)

    def merge(self, other: "HostTier") -> None:
        """Take what another tier holds, as far as it fits. Buffers are shared, not copied."""
        for match in other.index.ends():
            self._take(match, lambda payload: payload)

    def export(self) -> Iterator[Entry]:
        """Everything held, as host arrays: every block after its parent, and where prefixes end."""
        self.settle()
        numbers: dict[Node, int] = {}
        for match in self.index.ends():
            for node in match.nodes:
                if node not in numbers:
                    numbers[node] = len(numbers)
                    about = {"kind": "block", "parent": numbers.get(node.parent, -1)}
                    yield Entry(about, _named({"tokens": node.tokens, "block": node.payload}))
            end = match.checkpoint
            arrays = {} if end is None else _named(end.recurrent or {}) | _named({"logits": end.logits})
            yield Entry({"kind": "end", "block": numbers[match.nodes[-1]], "length": match.length}, arrays)

    def add(self, entries: Iterable[Entry]) -> None:
        """Take exported entries, as far as they fit."""
        blocks: list[tuple[Node, ...]] = []  # every block with those before it
        for about, arrays in entries:
            if about["kind"] == "block":
                before = blocks[about["parent"]] if about["parent"] >= 0 else ()
                blocks.append((*before, Node(arrays["tokens"], None, arrays.get("block"), 0)))
            else:
                end = Checkpoint(None, 0)
                if "delta" in arrays:
                    end.recurrent = Recurrent(delta=arrays["delta"], conv=arrays["conv"])
                end.logits = arrays.get("logits")
                self._take(
                    Match(about["length"], end.logits is not None, blocks[about["block"]], end), self._leave
                )

    def stats(self) -> dict[str, int]:
        """Bytes and items held, items evicted, prefixes that did not fit, bytes brought back."""
        index = self.index
        held = {"bytes": index.nbytes, "entries": len(index)}
        counts = {"evictions": index.evictions, "skipped": index.skipped}
        return held | counts | {"restored_bytes": self.restored_bytes}

    def _end(self, match: Match) -> tuple[Recurrent | None, jax.Array | None]:
        """What is to be written at the end of a match."""
        end = match.checkpoint
        return end.recurrent if self.index.recurrent_bytes else None, end.logits if match.full_hit else None

    def _take(self, match: Match, place: Callable) -> None:
        end = match.checkpoint
        self.index.store(
            match.tokens,
            lambda start: place(match.nodes[start // BLOCK_TOKENS].payload),
            lambda: place(end.recurrent),
            (lambda: place(end.logits)) if match.full_hit else None,
        )

    def _leave(self, tree):
        """Start arrays on their way to the host."""
        return tree if self._there is None else jax.device_put(tree, self._there)

    def _enter(self, tree):
        """Start arrays on their way to the device."""
        return tree if self._there is None else jax.device_put(tree, self._here)


def _payloads(item: Node | Checkpoint):
    return item.payload if isinstance(item, Node) else (item.recurrent, item.logits)


def _named(fields: Mapping) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in fields.items() if leaf is not None}
