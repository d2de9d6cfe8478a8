"""A tree of token blocks: which prefixes have snapshots, what they cost, what goes when room is needed.

Below a path of full blocks hang blocks of any length. A block holds an opaque payload, the attention rows at
its positions; a checkpoint, at an exact length, holds the recurrent state and the logits there. Prefixes
share the blocks they have in common, and no block is a prefix of its sibling: a block that is continued
grows.

Use is recorded so that what lies below an item is always older than the item. The oldest item that is not
pinned is therefore a leaf, and evicting it never breaks a path.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Node:
    """A block of tokens below `parent`."""

    def __init__(self, tokens: np.ndarray, parent: "Node | None", payload: Any, nbytes: int):
        self.tokens, self.parent, self.payload, self.nbytes = tokens, parent, payload, nbytes
        self.children: dict[bytes, Node] = {}
        self.checkpoints: dict[int, Checkpoint] = {}  # by the number of this block's tokens they stand after
        self.pins = 0


class Checkpoint:
    """What is kept at an exact length: after `offset` tokens of a block."""

    def __init__(self, node: Node, offset: int):
        self.node, self.offset = node, offset
        self.recurrent: Any = None
        self.logits: Any = None
        self.nbytes = 0
        self.pins = 0


class Match(NamedTuple):
    """A stored prefix of `length` tokens."""

    length: int
    full_hit: bool  # its checkpoint has the logits
    nodes: tuple[Node, ...]  # cover `length` tokens
    checkpoint: Checkpoint | None

    @property
    def tokens(self) -> np.ndarray:
        """The prefix. [length] i32"""
        return np.concatenate([node.tokens for node in self.nodes])[: self.length]


class PrefixIndex:
    """The tree, within a budget of bytes. Sizes are per item; 0 recurrent bytes: rows can be cut anywhere."""

    def __init__(
        self, budget: int, *, block_tokens: int, block_bytes: int, recurrent_bytes: int, logits_bytes: int
    ):
        self.budget, self.block_tokens = budget, block_tokens
        self.block_bytes, self.recurrent_bytes, self.logits_bytes = block_bytes, recurrent_bytes, logits_bytes
        self.root = Node(np.zeros(0, np.int32), None, None, 0)
        self.nbytes = 0
        self.evictions = 0  # items dropped to make room
        self.skipped = 0  # prefixes that did not fit
        self._pinned_bytes = 0
        self._order: OrderedDict[Node | Checkpoint, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks and checkpoints held."""
        return len(self._order)

    def match(self, prompt: Sequence[int]) -> Match | None:
        """The longest usable prefix: the whole prompt where its logits are kept, else at most all but its
        last token; with recurrent state only as long as a checkpoint."""
        prompt = np.asarray(prompt, np.int32)
        path = self._full_blocks(prompt)
        for depth in range(len(path), -1, -1):  # what a deeper block offers is longer
            start = depth * self.block_tokens
            parent = path[depth - 1] if depth else self.root
            found = self._children(parent, prompt[start : start + self.block_tokens])
            ways = [(*self._usable(child, size, start, len(prompt)), child) for child, size in found]
            full_hit, length, child = max(ways, key=lambda way: way[:2], default=(False, 0, None))
            if length:
                nodes = (*path[:depth], child)[: -(-length // self.block_tokens)]
                offset = length - (len(nodes) - 1) * self.block_tokens
                return Match(length, full_hit, nodes, nodes[-1].checkpoints.get(offset))
        return None

    def store(
        self,
        tokens: Sequence[int],
        read_block: Callable[[int], Any],
        read_recurrent: Callable[[], Any],
        read_logits: Callable[[], Any] | None,
    ) -> bool:
        """Hold a prefix and what is kept where it ends. Only what is missing is read, after room was made.

        read_block gets the first position of a block; read_logits is None where no logits were kept. False:
        it does not fit beside what is pinned; then nothing was read or dropped.
        """
        tokens = np.array(tokens, np.int32)
        if not len(tokens) or not self.budget:
            return False
        path, grown = self._walk(tokens)
        held = len(path) * self.block_tokens
        missing = range(held, len(tokens), self.block_tokens)
        offset = (len(tokens) - 1) % self.block_tokens + 1
        checkpoint = None if missing else path[-1].checkpoints.get(offset)
        wants_recurrent = self.recurrent_bytes > 0 and checkpoint is None
        wants_logits = read_logits is not None and (checkpoint is None or checkpoint.logits is None)
        needed = (len(missing) - (grown is not None)) * self.block_bytes
        needed += wants_recurrent * self.recurrent_bytes + wants_logits * self.logits_bytes
        kept = [item for item in (*path, grown, checkpoint) if item is not None]
        self._pin(kept)
        try:
            if self._pinned_bytes + needed > self.budget:
                self.skipped += 1
                return False
            self._make_room(needed)
            if grown is not None:
                grown.payload = None  # before its longer self is read
            blocks = [read_block(start) for start in missing]
            recurrent = read_recurrent() if wants_recurrent else None
            logits = read_logits() if wants_logits else None
        except BaseException:
            if grown is not None:
                self.drop(grown)
            raise
        finally:
            self._unpin(kept)
        for start, payload in zip(missing, blocks, strict=True):
            path.append(self._add(tokens[start : start + self.block_tokens], path, payload, grown))
            grown = None
        if wants_recurrent or wants_logits:
            checkpoint = self._keep(path[-1], offset, recurrent, logits)
        self._touch(path, checkpoint)
        return True

    def checkpoint(self, tokens: Sequence[int]) -> Checkpoint | None:
        """What is kept right after exactly `tokens`, if anything."""
        tokens = np.asarray(tokens, np.int32)
        path, _ = self._walk(tokens)
        if not path or len(path) * self.block_tokens < len(tokens):
            return None
        return path[-1].checkpoints.get((len(tokens) - 1) % self.block_tokens + 1)

    def forget(self, tokens: Sequence[int]) -> None:
        """Drop what is kept right after `tokens`, and the blocks that were there for it alone."""
        checkpoint = self.checkpoint(tokens)
        if checkpoint is not None:
            self.drop(checkpoint)
            self._prune(checkpoint.node)

    def pin(self, match: Match) -> None:
        """Keep a match from being evicted until `unpin`, and count it as used now."""
        self._touch(match.nodes, match.checkpoint)
        self._pin(_items(match))

    def unpin(self, match: Match) -> None:
        """Undo one `pin`."""
        self._unpin(_items(match))

    def drop(self, item: Node | Checkpoint) -> None:
        """Forget an item and all that hangs on it, pinned or not."""
        if isinstance(item, Node):
            for below in (*item.children.values(), *item.checkpoints.values()):
                self.drop(below)
        if item in self._order:
            self._remove(item)

    def items(self) -> list[Node | Checkpoint]:
        """Everything held, least recently used first."""
        return list(self._order)

    def ends(self) -> Iterator[Match]:
        """Every stored prefix that no other one stands for, least recently used first."""
        for item in self.items():
            if isinstance(item, Checkpoint):
                node, offset, checkpoint = item.node, item.offset, item
            elif item.children or self.recurrent_bytes or len(item.tokens) in item.checkpoints:
                continue
            else:
                node, offset, checkpoint = item, len(item.tokens), None
            nodes = _path(node)
            full_hit = checkpoint is not None and checkpoint.logits is not None
            yield Match((len(nodes) - 1) * self.block_tokens + offset, full_hit, nodes, checkpoint)

    # -- looking

    def _full_blocks(self, tokens: np.ndarray) -> list[Node]:
        """The nodes of full blocks that begin `tokens`."""
        node, path, size = self.root, [], self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            node = node.children.get(tokens[start : start + size].tobytes())
            if node is None:
                break
            path.append(node)
        return path

    def _children(self, node: Node, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """Children that begin as `tokens` does, and for how long: all at once, a root may have many."""
        if not node.children or not len(tokens):
            return []
        table = np.full((len(node.children), self.block_tokens), -1, np.int32)
        for line, child in zip(table, node.children.values(), strict=True):
            line[: len(child.tokens)] = child.tokens
        differ = table[:, : len(tokens)] != tokens
        sizes = np.where(differ.any(axis=1), differ.argmax(axis=1), len(tokens))
        return [
            (child, size) for child, size in zip(node.children.values(), sizes.tolist(), strict=True) if size
        ]

    def _usable(self, node: Node, size: int, start: int, length: int) -> tuple[bool, int]:
        """(full hit, usable tokens) of `length` tokens that share `size` tokens of the node at `start`."""
        end = node.checkpoints.get(size)
        if start + size == length and end is not None and end.logits is not None:
            return True, length
        most = min(size, length - 1 - start)
        if self.recurrent_bytes:
            most = max((offset for offset in node.checkpoints if offset <= most), default=-start)
        return False, start + most

    def _walk(self, tokens: np.ndarray) -> tuple[list[Node], Node | None]:
        """(the nodes that cover the tokens as far as they go, the block that the next tokens continue)."""
        path = self._full_blocks(tokens)
        wanted = tokens[len(path) * self.block_tokens :][: self.block_tokens]
        found = self._children(path[-1] if path else self.root, wanted)
        covering = [child for child, size in found if size == len(wanted)]
        if covering:
            return [*path, max(covering, key=lambda child: len(wanted) in child.checkpoints)], None
        return path, next((child for child, size in found if size == len(child.tokens)), None)

    # -- changing

    def _add(self, tokens: np.ndarray, path: list[Node], payload: Any, grown: Node | None) -> Node:
        parent = path[-1] if path else self.root
        if grown is None:
            grown = Node(tokens, parent, payload, self.block_bytes)
            self._order[grown] = None
            self.nbytes += grown.nbytes
        else:
            del parent.children[grown.tokens.tobytes()]
            grown.tokens, grown.payload = tokens, payload
        parent.children[tokens.tobytes()] = grown
        return grown

    def _keep(self, node: Node, offset: int, recurrent: Any, logits: Any) -> Checkpoint:
        checkpoint = node.checkpoints.setdefault(offset, Checkpoint(node, offset))
        self._order[checkpoint] = None
        for name, payload, size in (
            ("recurrent", recurrent, self.recurrent_bytes),
            ("logits", logits, self.logits_bytes),
        ):
            if payload is not None:
                setattr(checkpoint, name, payload)
                checkpoint.nbytes += size
                self.nbytes += size
                self._pinned_bytes += size if checkpoint.pins else 0
        return checkpoint

    def _touch(self, nodes: Sequence[Node], checkpoint: Checkpoint | None) -> None:
        for item in (checkpoint, *reversed(nodes)):
            if item in self._order:
                self._order.move_to_end(item)

    def _make_room(self, needed: int) -> None:
        while self.nbytes + needed > self.budget:
            item = next(item for item in self._order if not item.pins)
            self._remove(item)
            self.evictions += 1
            self.evictions += self._prune(item.node if isinstance(item, Checkpoint) else item.parent)

    def _prune(self, node: Node) -> int:
        """Remove blocks from `node` up that no checkpoint at or below them makes useful. Returns how many."""
        count = 0
        while (
            self.recurrent_bytes
            and node in self._order
            and not (node.children or node.checkpoints or node.pins)
        ):
            self._remove(node)
            count, node = count + 1, node.parent
        return count

    def _remove(self, item: Node | Checkpoint) -> None:
        del self._order[item]
        self.nbytes -= item.nbytes
        self._pinned_bytes -= item.nbytes if item.pins else 0
        if isinstance(item, Checkpoint):
            del item.node.checkpoints[item.offset]
        else:
            del item.parent.children[item.tokens.tobytes()]

    def _pin(self, items: Sequence[Node | Checkpoint]) -> None:
        for item in items:
            if not item.pins and item in self._order:
                self._pinned_bytes += item.nbytes
            item.pins += 1

    def _unpin(self, items: Sequence[Node | Checkpoint]) -> None:
        for item in items:
            item.pins -= 1
            if not item.pins and item in self._order:
                self._pinned_bytes -= item.nbytes


def _items(match: Match) -> list[Node | Checkpoint]:
    return [*match.nodes, *([match.checkpoint] if match.checkpoint else [])]


def _path(node: Node) -> tuple[Node, ...]:
    """The nodes from below the root to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return tuple(reversed(path))
