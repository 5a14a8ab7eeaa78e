"""Lines of any size made of the grammar's own words.

The one rule: the words of an action come from its usage in `ACTIONS`, so a new flag is among them.
"""

import re
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Final

from mqks.protocol.requests import ACTIONS

VALUES: Final = {
    b"seconds": (b"1", b"0.5", b"9" * 40),
    b"time": (b"4102444800",),
    b"microseconds": (b"1",),
    b"n": (b"1", b"9" * 19),
    b"seq": (b"1",),
    b"first": (b"1",),
    b"max": (b"2",),
    b"mask": (b"a.*", b"**", b"*.*"),
    b"key": (b"a", b"%61"),
    b"expression": (b"1+", b"[", b"-", b"'", b"not "),
}
"""By the placeholder in a usage; for any other the values are `NAMES`."""
NAMES: Final = (b"q", b"e", b"a.b", b"*")
ODD: Final = (b"--", b"---", b"--x", b"--=", b"=", b"-", b"", b"--confirm", b"--add")
_FLAG: Final = re.compile(rb"(--[a-z0-9-]+)(\[?=([^\s|\]]+(?:\|[a-z]+)*))?")
_PLACE: Final = re.compile(rb"\{(\w+)\}")


def words(action: bytes) -> list[bytes]:
    """Flags with and without values, values, and what is none of them."""
    usage = ACTIONS[action].usage.encode()
    found = list(ODD)
    for flag, value, inner in _FLAG.findall(usage):
        found.append(flag)
        if value:
            found += [flag + b"=" + each for each in _values(inner)]
    for name in _PLACE.findall(_FLAG.sub(b"", usage)):
        found += VALUES.get(name, NAMES)
    return list(dict.fromkeys(found))


def _values(shape: bytes) -> list[bytes]:
    """For `{first}[,{max}]`, `{key}={value}[&...]`, `reject|drop`."""
    if b"{" not in shape:
        return [*shape.split(b"|"), b""]
    first = _PLACE.findall(shape)[0]
    if first == b"key":
        return [b"a=1", b"a=1&b=2"]
    return [*VALUES.get(first, NAMES), b""]


def filled(head: bytes, repeated: bytes, size: int, tail: bytes = b"") -> bytes:
    """A line of about `size` bytes without its end."""
    return head + repeated * ((size - len(head) - len(tail)) // max(1, len(repeated))) + tail


MANY_NAMES: Final = b"subscribe", b"consume", b"rebind"
"""Actions whose words have no limit but the line."""
HEADS: Final = (
    *(b"", b"--confirm ", b"q ", b"--confirm q ", b"q --add ", b"q --add-mask ", b"q --all "),
    *(b"q --remove ", b"q --remove-mask ", b"q --add-mask ** --add "),
)
TAILS: Final = b"", b"x --confirm y", b" q"


def plain_lines(action: bytes, size: int) -> Iterator[bytes]:
    """For each word: it alone, over and over, as words and as one word; and all in turn."""
    every = words(action)
    for word in every:
        yield filled(b"x %s " % action, word + b" ", size, b"x --confirm y")
        yield filled(b"x %s q " % action, word + b" ", size, b"x")
        yield filled(b"x %s " % action, word or b" ", size)
    yield filled(b"x %s " % action, b" ".join(every) + b" ", size)
    yield filled(b"x %s q " % action, b" ".join(w for w in every if w[:2] != b"--") + b" ", size)


def numbered(action: bytes, size: int) -> Iterator[bytes]:
    """Words that are all different, at the places of names and values."""
    for head in (b"x %s q ", b"x %s q --add ", b"x %s q --add-mask ", b"x %s q --remove "):
        for name in (b"e%d", b"a%d.b", b"a%d.*", b"*%d.*.b", b"a.%d.**"):
            line, numbers = bytearray(head % action), count()
            while len(line) < size:
                line += name % next(numbers) + b" "
            yield bytes(line[:size].rsplit(b" ", 1)[0])


def random_line(chance: Random, size: int) -> bytes:
    """Some words of one action in a pattern that is repeated, mostly with other names each time."""
    action = chance.choice(MANY_NAMES if chance.random() < 0.5 else list(ACTIONS))
    every = words(action)
    if chance.random() < 0.8:
        every = [word for word in every if word not in ODD]
    if chance.random() < 0.5:
        every = [word for word in every if word[:2] != b"--"]
    every = every or list(NAMES)
    head = b"x %b " % action + chance.choice(HEADS)
    period = [chance.choice(every) for _ in range(chance.choice((1, 1, 2, 3, 5)))]
    if chance.random() < 0.2:
        joint = chance.choice((b"", b",", b".", b"=", b"&", b"-", b"*", b".*."))
        return filled(head, joint.join(period) + joint or b" ", size, chance.choice(TAILS))
    if chance.random() < 0.3:
        return filled(head, b" ".join(period) + b" ", size, chance.choice(TAILS))
    period = [chance.choice((1, 1, 1, 30, 100)) * word for word in period]
    line, numbers = bytearray(head), count()
    while len(line) < size:
        number = next(numbers)
        for word in period:
            if word[:2] != b"--":
                word = chance.choice((b"%d%b", b"%d.%b")) % (number, word)
            line += word + b" "
    return bytes(line[:size])
