"""Lines drawn from the table of requests: every action, flag and form that its usages have.

The one rule: nothing here names an action, so that a new one is played without anybody thinking of
it; a new kind of value must be given in `VALUES`.
"""

import random
import re
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mqks.protocol.requests import Action

OPTION_CHANCE: Final = 0.3
WORDS_MAX: Final = 1000
"""Of a kind, in a line."""
_TOKEN: Final = re.compile(r"\{(\w+)\}|(\[)|(\])|( \.\.\.)|(\|)|( )|(\w[\w-]*|.)")


class Chance(Protocol):
    """Who draws: their own names, and what they have seen."""

    rng: random.Random
    consumers: list[str]
    consumer: str
    """The one that was drawn last for this line."""
    held: dict[str, list[str]]
    """What consumers were delivered."""
    queues: Sequence[str]
    messages: list[str]
    leases: list[str]
    epochs: list[str]


def _of(*values: str) -> Callable[[Chance], str]:
    return lambda chance: chance.rng.choice(values)


def _consumer(chance: Chance) -> str:
    chance.consumer = chance.rng.choice(chance.consumers)
    return chance.consumer


def _message(chance: Chance) -> str:
    held = chance.held.get(chance.consumer)
    return chance.rng.choice(held or [*chance.messages[-20:], "m1", "m2"])


QUEUES: Final = "q1", "q2", "q3", "dead", "aside"
SECONDS: Final = "0", "0.05", "0.5", "2", "30", "600", "3600", "86400", "604800", "31536000"
VALUES: Final[dict[str, Callable[[Chance], str]]] = {
    "action": _of("publish", "consume", "dance"),
    "consumer_id": _consumer,
    "cron": _of("* * * * *", "0 2 * * *", "30 1,2 * * 0", "*/7 3-5 29 2 *", "@daily", "x"),
    "dead": _of("0", "2"),
    "data": _of("", "x", "hello world", "y" * 300, "{}", "z" * 5000),
    "done": _of("0", "3"),
    "epoch": lambda chance: chance.rng.choice([*chance.epochs[-3:], "none"]),
    "event": _of("e1", "e2", "a.b", "a.b.c", "d", "user.1"),
    "expression": _of("1", "len(state.queues)", "[q for q in state.queues]", "1 +", "9 ** 99"),
    "first": _of("0.1", "1", "60"),
    "flag": _of("--once", "--ttl=60", "--priority=3", "--key=k1", "--mandatory"),
    "key": _of("k1", "k2", "k3", "k"),
    "lease": lambda chance: chance.rng.choice([*chance.leases[-5:], "e.1.1"]),
    "mask": _of("a.*", "*.b", "**", "e*", "user.**"),
    "max": _of("0.1", "10", "3600"),
    "meta": _of("queue=q1", "k=v", "reason=retries", "k=", "a%20b=%2c"),
    "microseconds": _of("0", "1790000000000000", "1790003600000000"),
    "msg_id": _message,
    "n": _of("0", "1", "2", "5", "100", "1000", "1000000"),
    "name": _of("s1", "s2", "q1", "a b", "nightly"),
    "number": _of("0", "1", "7", "30"),
    "percent": _of("0", "40", "100", "101"),
    "password": _of("secret", "wrong"),
    "queue": lambda chance: chance.rng.choice(chance.queues),
    "rate": _of("5/s", "100/m,20", "1000/h", "5"),
    "seconds": _of(*SECONDS),
    "seq": _of("0", "1", "2", "10", "1000"),
    "switch": _of("on", "off"),
    "text": _of("because", "a%20reason"),
    "time": _of("0", "1790000100", "1790100000.5", "1800000000"),
    "token": _of("token", "wrong"),
    "user": _of("u", "admin"),
    "value": _of("v", "1", ""),
    "what": _of(
        "queues",
        "queue",
        "bindings",
        "consumers",
        "connections",
        "unacked",
        "errors",
        "users",
        "limits",
        "batches",
        "results",
    ),
    "zone": _of("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC", "Mars/Olympus"),
}


class Usage:
    """What a usage allows."""

    def __init__(self, usage: str) -> None:
        self._tokens = [match.group() for match in _TOKEN.finditer(usage)]
        self._at = 0
        self._alternatives = [self._sequence()]
        while self._at < len(self._tokens):
            self._at += 1  # The bar between two forms.
            self._alternatives.append(self._sequence())

    def draw(self, chance: Chance) -> str:
        return " ".join(chance.rng.choice(self._alternatives)(chance).split())

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _sequence(self) -> Callable[[Chance], str]:
        """Words, up to a bracket that ends it, or a bar that stands alone."""
        words: list[Callable[[Chance], str]] = []
        while (token := self._peek()) not in ("", "]", "|"):
            if token == " ":
                self._at += 1
            elif token == " ...":
                self._at += 1
                words[-1] = _repeated(words[-1])
            else:
                words.append(self._word())
        return lambda chance: " ".join(word(chance) for word in words)

    def _word(self) -> Callable[[Chance], str]:
        """Alternatives without a space."""
        forms: list[Callable[[Chance], str]] = []
        prefix = ""
        while True:
            parts: list[Callable[[Chance], str]] = [_of(prefix)] if prefix else []
            before = self._at
            while (token := self._peek()) not in ("", "]", "|", " ", " ..."):
                parts.append(self._part(token))
            told = "".join(self._tokens[before : self._at])
            if not forms and "=" in told and not told.endswith(("}", "]")):
                prefix = told[: told.index("=") + 1]  # `--overflow=reject|drop`
            forms.append(_joined(parts))
            bar_stands_alone = self._tokens[self._at - 1] == " "
            if self._peek() != "|" or bar_stands_alone:
                break
            self._at += 1
        return lambda chance: chance.rng.choice(forms)(chance)

    def _part(self, token: str) -> Callable[[Chance], str]:
        self._at += 1
        if token == "[":
            inner = self._sequence()
            self._at += 1
            return lambda chance: inner(chance) if chance.rng.random() < OPTION_CHANCE else ""
        if token[0] == "{" and len(token) > 1:
            return VALUES[token[1:-1]]
        return _of(token)


def _joined(parts: list[Callable[[Chance], str]]) -> Callable[[Chance], str]:
    return lambda chance: "".join(part(chance) for part in parts)


def _repeated(word: Callable[[Chance], str]) -> Callable[[Chance], str]:
    return lambda chance: " ".join(word(chance) for _ in range(chance.rng.choice((1, 1, 2, 5))))


def everything(action: "Action") -> bool:
    return True


def of_clients(action: "Action") -> bool:
    """What operators do ends what others have begun."""
    return not action.is_audited


def of_transactions(action: "Action") -> bool:
    return action.is_kept


def usages(wanted: Callable[["Action"], bool] = everything) -> dict[str, Usage]:
    """Of those actions."""
    from mqks.protocol.requests import ACTIONS

    return {action.name: Usage(action.usage) for action in ACTIONS.values() if wanted(action)}


def is_allowed(line: bytes) -> bool:
    """By the table, whatever there is of what it names."""
    from mqks.broker.spine.base.turns import finish
    from mqks.errors import BadRequest
    from mqks.protocol.requests import ACTIONS, parse_request

    try:
        request = parse_request(line)
        parsed = ACTIONS[request.action].parse(request.rest, WORDS_MAX)
        if isinstance(parsed, Generator):
            finish(parsed)
    except BadRequest:
        return False
    return True
