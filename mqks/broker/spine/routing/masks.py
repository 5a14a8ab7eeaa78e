"""The bound masks, as a trie over their parts.

    logs.*.gone   root -> "logs" -> any part -> "gone": queues
    logs.**       root -> "logs": queues of all events with this prefix

A part with stars among other bytes is looked up by three of these bytes, its *gram*: it can only
match a part that contains the gram.

The one rule: a mask has at most as many nodes as parts, and a walk visits no node twice. So the
cost of binding does not depend on the number of masks, and a walk costs at most all nodes.
"""

from typing import Final

from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.queue import Queue
from mqks.limits import MASK_BYTES_MAX, STEP_MASKS, STEP_NAMES
from mqks.protocol.masks import REST, Part, fits

ANY: Final = b"*"
STAR: Final = b"*"[0]
PARTS_MAX: Final = MASK_BYTES_MAX + 2
"""An event is split into at most this many parts: more than any mask has."""
GRAM_BYTES_MAX: Final = 3
Queues = dict[Queue, None]


class Node:
    """A node after some parts. `plain` and `starred` have the next nodes by part; most nodes have
    few."""

    __slots__ = ("any", "ends", "plain", "rests", "starred")

    def __init__(self) -> None:
        self.plain: dict[bytes, Node] | None = None
        self.starred: dict[bytes, dict[bytes, tuple[Part, Node]]] | None = None
        """By gram, then by part."""
        self.any: Node | None = None
        """The next node for the part `*`."""
        self.ends: Queues | None = None
        """Queues of the mask that ends here."""
        self.rests: Queues | None = None
        """Queues of the mask that ends in `**` here."""

    @property
    def is_bare(self) -> bool:
        return not (self.plain or self.starred or self.any or self.ends or self.rests)

    def get(self, part: bytes) -> "Node | None":
        if part == ANY:
            return self.any
        if STAR in part:
            parts = self.starred.get(_gram(part)) if self.starred else None
            return parts[part][1] if parts and part in parts else None
        return self.plain.get(part) if self.plain else None

    def make(self, part: bytes) -> "Node":
        child = self.get(part)
        if child is not None:
            return child
        node = Node()
        if part == ANY:
            self.any = node
        elif STAR in part:
            self.starred = self.starred or {}
            self.starred.setdefault(_gram(part), {})[part] = part.split(b"*"), node
        else:
            self.plain = self.plain or {}
            self.plain[part] = node
        return node

    def drop(self, part: bytes) -> None:
        if part == ANY:
            self.any = None
        elif STAR in part:
            assert self.starred is not None
            gram = _gram(part)
            del self.starred[gram][part]
            if not self.starred[gram]:
                del self.starred[gram]
        else:
            assert self.plain is not None
            del self.plain[part]


class Masks:
    """`count`: how many bindings there are."""

    __slots__ = ("_root", "count")

    def __init__(self) -> None:
        self._root = Node()
        self.count = 0

    def bind(self, mask: bytes, queue: Queue) -> None:
        """Bind; nothing changes if it is bound already."""
        node = self._root
        *parts, last = mask.split(b".")
        for part in parts:
            node = node.make(part)
        if last == REST:
            queues = node.rests = {} if node.rests is None else node.rests
        else:
            node = node.make(last)
            queues = node.ends = {} if node.ends is None else node.ends
        self.count += queue not in queues
        queues[queue] = None

    def unbind(self, mask: bytes, queue: Queue) -> None:
        """Unbind; nothing changes if it is not bound."""
        parts = mask.split(b".")
        is_rest = parts[-1] == REST
        if is_rest:
            parts.pop()
        node, path = self._root, []
        for part in parts:
            path.append(node)
            following = node.get(part)
            if following is None:
                return
            node = following
        queues = node.rests if is_rest else node.ends
        if not queues or queue not in queues:
            return
        del queues[queue]
        self.count -= 1
        while path and node.is_bare:
            node = path.pop()
            node.drop(parts.pop())

    def walk(self, event: bytes) -> Work[list[Queues]]:
        """The queues of each mask that matches. No mask may be bound or unbound meanwhile."""
        parts = event.split(b".", PARTS_MAX)
        matched: list[Queues] = []
        weight, nodes = 0, [self._root]
        for part in parts:
            following: list[Node] = []
            grams: set[bytes] | None = None
            fit_weight = 1 + len(part) // 256
            for node in nodes:
                weight += 1
                if node.rests:
                    matched.append(node.rests)
                if node.any is not None:
                    following.append(node.any)
                if node.plain and (child := node.plain.get(part)) is not None:
                    following.append(child)
                if weight > STEP_MASKS:
                    weight = 0
                    yield GOES_ON
                if not node.starred:
                    continue
                if grams is None:
                    grams = yield from _grams(part)
                for gram in node.starred.keys() & grams:
                    for pieces, child in node.starred[gram].values():
                        if fits(pieces, part):
                            following.append(child)
                        weight += fit_weight
                        if weight > STEP_MASKS:
                            weight = 0
                            yield GOES_ON
            nodes = following
            if not nodes:
                break
        return matched + [node.ends for node in nodes if node.ends]


def _gram(part: bytes) -> bytes:
    """The last bytes of the longest piece of a part with stars."""
    return max(part.split(b"*"), key=len)[-GRAM_BYTES_MAX:]


def _grams(part: bytes) -> Work[set[bytes]]:
    """All grams in a part of an event; a name may have 64 KiB."""
    grams: set[bytes] = set()
    for start in range(0, len(part), STEP_NAMES):
        if start:
            yield GOES_ON
        starts = range(start, min(start + STEP_NAMES, len(part)))
        for size in range(1, GRAM_BYTES_MAX + 1):
            grams.update([part[at : at + size] for at in starts])
    return grams
