"""Lines and chunks, mutated: by the grammar of the protocol, and byte by byte.

The one rule: chance is `random.Random` with a seed, so that a run can be had again.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import Final, TypeVar

from mqks.broker.requests.state import EvalState
from mqks.protocol.requests import ACTIONS
from tests.fuzz.steps import CONNECTIONS, Step, Steps, lines_of, send

NAME_BYTES_MAX: Final = 1000
"""What costs too much is kept away: of longer words what is beyond is cut off."""
STARS_MAX: Final = 8
"""Of a mask; a mask of many takes long."""
ARGUMENTS_MAX: Final = 300
"""Of one request."""
NUMBERS: Final = [
    *b"""0 1 2 3 -1 +1 00 01 1_0 1e9 1e10 1e-400 nan inf -0 0.0 .5 5. 0x10 1000 1001 10000 1000000
    9223372036854775807 9223372036854775808 99999999999999999999 1e999999999""".split(),
    *(b"9" * 60, "\u0663".encode(), "\u00b2".encode(), b"", b" 1"),
]
FLAGS: Final = b"""
--confirm --once --mandatory --add --remove --remove-mask --add-mask --all --manual-ack --then
--delete-queue-when-unused --when-unused --limit --after --from --to --at --epoch --worker -- --- -
--x --retries --losses --deliveries --backoff --dead-letters --ttl --messages-max --bytes-max
--overflow --reset --single-consumer --ack-timeout --meta --delay --dead --prefetch --for
--scheduled --event --fate --concurrency --rate --cancellable --keep-result=5 --result=x --wait=5
--concurrency-per-key --rate-per-key --limit=l,concurrency=2 --limit=l,rate=5/s
--breaker=2,5
""".split()
PUBLISH_FLAGS: Final = b"""
--once --mandatory --ttl=9 --ttl=1e6 --delay=1 --at=1005 --to=q1 --meta=a=b --meta=
--escaped --priority=0 --key=k --keep-result=5 --x
""".split()
NAMES: Final = [
    *b"""q q1 q2 e e1 e2 a.b a.c.b m1 m2 m3 c1 c2 * *.b a.* ** *.*.* . .. event=x = ok error
    x,retry=1 token-of-u token-of-admin queues queue bindings consumers connections unacked errors
    journal {0} %s""".split(),
    *(b"\xff", b"\x00", b"\xc3\xa9", b"b" * 255, b"b" * 256, b"\xed\xa0\x80", b"\xe2\x80\xa8"),
    *(b"\x1f", b"\x7f", b"\x85", b"\x0b"),
]
BYTES: Final = [
    *(b"\x00", b"\t", b"\r", b"\r\r", b"\n", b"\n\n", b"\r\n", b" ", b"  ", b" " * 40, b"\xff"),
    *(b"\x80", b"\xc3", b"\xf0\x9f", b"\x1b", b"\x7f", b"--", *map(bytes, zip(b"-=,.*%\\"))),
]
EXPRESSIONS: Final = [
    *("len(state.queues)", "{name: len(q) for name, q in state.queues.items() if q}"),
    *("sorted(state.queues, key=len, reverse=True)", "state.queues_by_events['e1']"),
    *("sum(len(q) for q in state.queues.values())", "[x for x in range(9) if x % 2 if x > 3]"),
    *("max(state.queues.values(), key=len, default=0)", "config['port'] + 1", "request['id']"),
    *("{1, 2} | {2, 3}", "dict([('a', 1)])", "list(zip('ab', [1, 2, 3]))", "min([], default=7)"),
    *("enumerate('ab', start=1)", "reversed([1, 2])", "0 or '' or 'last'", "1 < 2 < 3 != 4"),
    *("-2 ** 2 + +3 - ~0", "7 // 2 % 2 << 3 | 1 ^ 3 & 2 >> 1", "'-' * 3 + '>'", "[0] * 2 + [1]"),
    *("'a,b'.split(',', 1)", "' | '.join(str(n) for n in [1, None])", "'a=b'.partition('=')"),
    *("b'\\xff'.decode('utf-8', 'replace')", "[3, 1, 2][::-1][:2]", "range(10)[2:4]"),
    *("[int('12'), int('ff', 16), float('1e3'), round(2.5, 1), abs(-3)]", "2 ** 1023 // 2 ** 9"),
    *(
        "state.queues.keys() & {'q1'}",
        "[a + b for a, (b, [c]) in [(1, (2, [3]))]]",
        "1 if [] else 2",
    ),
    *("{(1, 'a'): b'x'}", "'a'.replace('', 'bb')", "any(x > 1 for x in (1, 2)) and all([])"),
    *(f"state.{name}" for name, value in vars(EvalState).items() if isinstance(value, property)),
]
_TOKEN = re.compile(r"\w+|\W")
_LONG_WORD = re.compile(rb"[^ \n]{%d,}" % (NAME_BYTES_MAX + 1))
_MOVERS = ([b"publish"], [b"ack"], [b"consume"], [b"reject"])
_DATA_ACTIONS = (b"publish", b"ping", b"_eval")
_STARS = re.compile(rb"(?:\*[^ \n*]*){%d}" % (STARS_MAX + 1))

T = TypeVar("T")
Mutation = Callable[[Random, bytes], bytes]


class Mutator:
    """Makes lines, chunks and steps out of a corpus."""

    def __init__(self, corpus: Sequence[Steps], chance: Random) -> None:
        self.chance = chance
        self.corpus = list(corpus)
        found = chain.from_iterable(map(lines_of, self.corpus))
        self._lines = [line for line in dict.fromkeys(found) if len(line) < 4096]
        self._siblings: dict[bytes, list[list[bytes]]] = {}
        """Words of the lines of each action."""
        self._lines = self._common(self._lines)
        for line in self._lines:
            self._note(line)
        self.words = [*NAMES, *FLAGS, *NUMBERS, *ACTIONS]
        self._mutations: list[Mutation] = [
            *(_replaced_word(self.words),) * 6,
            *(_inserted_word(self.words),) * 3,
            *(_numbered,) * 2,
            *(_dropped_word, _doubled_word, _swapped_words, _flag_with_value, _spaced) * 2,
            *(_flipped, _inserted_bytes, _cut, _doubled_bytes),
            self._spliced,
            *(self._with_words_of_another,) * 20,
        ]

    @classmethod
    def of_lines(cls, lines: Sequence[bytes], chance: Random) -> "Mutator":
        return cls([tuple(send("a", line + b"\n") for line in lines)], chance)

    def _note(self, line: bytes) -> None:
        words = line.split(b" ")
        if len(words) > 2:
            self._siblings.setdefault(words[1], []).append(words)

    @staticmethod
    def _common(lines: list[bytes]) -> list[bytes]:
        """Fewer of what takes long, more of what moves messages."""
        evals = [line for line in lines if b" _eval " in line]
        movers = [line for line in lines if line.split(b" ")[1:2] in _MOVERS]
        return [line for line in lines if b" _eval " not in line] + evals[::8] + movers * 6

    def line(self) -> bytes:
        """A line without its end, mutated once or more."""
        chance = self.chance
        line = self._lines[int(chance.random() * len(self._lines))]
        mutations = self._mutations
        while True:
            line = mutations[int(chance.random() * len(mutations))](chance, line)
            if chance.random() < 0.6:
                break
        if len(line) > NAME_BYTES_MAX or line.count(b"*") > STARS_MAX:
            line = tamed(line)
        return line

    def chunk(self, lines: list[bytes]) -> bytes:
        """These lines as one chunk, seldom with something odd in it or behind it."""
        chunk = b"\n".join(lines) + b"\n"
        odd = self.chance.random()
        if odd < 0.02:
            chunk = chunk.replace(b"\n", b"\r\n")
        elif odd < 0.04:
            chunk = _inserted_bytes(self.chance, chunk)
        elif odd < 0.042:
            chunk += self.extreme()
        return chunk

    def extreme(self) -> bytes:
        """A line that is long in data or in the number of its arguments."""
        chance = self.chance
        kind = chance.randrange(5)
        if kind == 0:
            size = chance.choice([4095, 4096, 4097, 65536, 2**20 - 20, 2**20, 2**20 + 2, 2**21])
            head = chance.choice([b"m1 publish e1 ", b"m1 publish --confirm e1 ", b"p ping ", b""])
            return head + b"x" * (size - len(head)) + chance.choice([b"\n", b"\r\n", b""])
        if kind == 1:
            head = chance.choice([b"s subscribe q ", b"r rebind q ", b"c consume q --add "])
            count = chance.randrange(ARGUMENTS_MAX)
            names = (b"e%d" % chance.randrange(1000) for _ in range(count))
            return head + b" ".join(names) + b"\n"
        if kind == 2:
            return chance.choice(self._lines) + b" " * chance.randrange(100_000) + b"\n"
        if kind == 3:
            return chance.choice(self._lines) * chance.randrange(2, 100) + b"\n"
        return bytes(chance.randrange(256) for _ in range(chance.randrange(1000))) + b"\n"

    def burst(self) -> bytes:
        """One line many times, with ids of their own: a publish with flags, or any."""
        chance = self.chance
        _, _, rest = self.line().partition(b" ")
        if chance.random() < 0.7:
            flags = chance.sample(PUBLISH_FLAGS, chance.randrange(3))
            confirm = chance.choice([[b"--confirm"], []])
            rest = b" ".join([b"publish", *confirm, *flags, chance.choice(NAMES), b"x"])
        size = chance.choice([20, 300, 3000])
        first = chance.randrange(10**9)
        return b"".join(b"b%d %b\n" % (number, rest) for number in range(first, first + size))

    def steps(self) -> Steps:
        """An entry of the corpus, mutated as a whole."""
        chance = self.chance
        steps = list(chance.choice(self.corpus))
        for _ in range(chance.randrange(1, 4)):
            self._mutate(steps)
        chosen = [step for step in steps if step.verb == "settings"]
        return (*chosen[:1], *(step for step in steps[:80] if step.verb != "settings"))

    def _mutate(self, steps: list[Step]) -> None:
        chance = self.chance
        at = chance.randrange(len(steps) + 1)
        kind = chance.random()
        if kind < 0.45 and at < len(steps) and steps[at].verb == "send":
            steps[at] = send(steps[at].who, self._mutated_chunk(steps[at].data))
        elif kind < 0.55:
            steps.insert(at, send(self.who(), self.line() + b"\n"))
        elif kind < 0.6:
            who, source = self.who(), mutated_expression(chance, EXPRESSIONS)
            steps.insert(at, send(who, b"x _eval " + source.encode() + b"\n"))
        elif kind < 0.7:
            steps.insert(at, event(chance))
        elif kind < 0.8:
            other = chance.choice(self.corpus)
            start = chance.randrange(len(other))
            steps[at:at] = [step for step in other[start:] if step.verb != "settings"]
        elif kind < 0.87 and at < len(steps):
            steps[at] = steps[at]._replace(who=self.who()) if steps[at].who != "*" else steps[at]
        elif kind < 0.9:
            steps[:0] = [Step("settings", "*", settings(chance))]
        elif at < len(steps):
            steps[at : at + chance.randrange(1, 3)] = []

    def _mutated_chunk(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        at = self.chance.randrange(len(lines))
        mutation = self.chance.choice(self._mutations)
        if len(lines[at]) < 4096:
            lines[at] = tamed(mutation(self.chance, lines[at]))
        return b"\n".join(lines)

    def who(self) -> str:
        return self.chance.choice(CONNECTIONS + "abcab")

    def _with_words_of_another(self, chance: Random, line: bytes) -> bytes:
        """One word, or all from there on, of a line of the same action: mostly valid."""
        words = line.split(b" ")
        if len(words) < 3 or (siblings := self._siblings.get(words[1])) is None:
            return line
        other = siblings[int(chance.random() * len(siblings))]
        at = int(chance.random() * min(len(words), len(other)))
        words[at : None if chance.random() < 0.3 else at + 1] = other[at : at + 1]
        return b" ".join(words)

    def _spliced(self, chance: Random, line: bytes) -> bytes:
        other = self._lines[int(chance.random() * len(self._lines))]
        return line[: int(chance.random() * len(line))] + other[int(chance.random() * len(other)) :]


def tamed(line: bytes) -> bytes:
    """Without what is known to cost too much."""
    words = line.split(b" ", 3)
    if len(words) < 2 or words[1] not in _DATA_ACTIONS:
        line = _LONG_WORD.sub(lambda found: found[0][:NAME_BYTES_MAX], line)
    elif len(words) > 2:
        words[2] = words[2][:NAME_BYTES_MAX]
        line = b" ".join(words)
    return _STARS.sub(b"*", line) if line.count(b"*") > STARS_MAX else line


_SMALL: Final = """
memory_bytes=0,2000 unacked_bytes_max=1,700,3000 queue_messages_max=1,3,20 line_bytes_max=64,200
name_bytes_max=1,3 metadata_bytes_max=1,4000,20000 once_ids_max=0,1,5 errors_kept_max=0,3
consumers_per_connection_max=1,3 tails_max=0,1 tails_per_connection_max=1,2 prefetch_max=1,2,3
tail_buffer_bytes_max=1,100 bindings_per_queue_max=1,3 queues_max=1,3 unsent_bytes_max=100,2000
delivery_pause_bytes=1,50,1000 output_buffer_bytes_max=1,1000 calls_a_turn=1,2,5 small_steps=1
eval=off books=1
"""
SETTINGS: Final = {
    name: values.split(",") for name, values in (each.split("=") for each in _SMALL.split())
}
"""Small ones. Those with a `books` are as they come."""


def settings(chance: Random) -> bytes:
    """Some of the settings small, mostly few."""
    names = chance.sample(sorted(SETTINGS), chance.choice([1, 1, 2, 3, 5]))
    chosen = (f"{name}={chance.choice(SETTINGS[name])}" for name in names)
    return " ".join(chosen).encode()


def event(chance: Random) -> Step:
    kind = chance.random()
    if kind < 0.6:
        verb = chance.choice(["leave", "leave", "end", "pause", "pause", "resume", "resume"])
        return Step(verb, chance.choice(CONNECTIONS))
    if kind < 0.7:
        return Step("tick", "*", chance.choice([b"0.1", b"1", b"5", b"1e9"]))
    verbs = ["slow", "commit", "commit", "commit", "fail", "quick", "full", "room", "room"]
    return Step(chance.choice([*verbs, "restart", "work", "work", "work", "work"]))


# -- mutations of one line


def below(chance: Random, end: int) -> int:
    """As `randrange`, in a third of its time."""
    return int(chance.random() * end)


def one_of(chance: Random, some: Sequence[T]) -> T:
    return some[int(chance.random() * len(some))]


def _replaced_word(words: Sequence[bytes]) -> Mutation:
    def mutation(chance: Random, line: bytes) -> bytes:
        parts = line.split(b" ")
        parts[below(chance, len(parts))] = one_of(chance, words)
        return b" ".join(parts)

    return mutation


def _inserted_word(words: Sequence[bytes]) -> Mutation:
    def mutation(chance: Random, line: bytes) -> bytes:
        parts = line.split(b" ")
        parts.insert(1 + below(chance, len(parts)), one_of(chance, words))
        return b" ".join(parts)

    return mutation


def _numbered(chance: Random, line: bytes) -> bytes:
    """Another number in the place of one."""
    places = [*re.finditer(rb"\d+", line)]
    if not places:
        return line
    place = one_of(chance, places)
    return line[: place.start()] + one_of(chance, NUMBERS) + line[place.end() :]


def _dropped_word(chance: Random, line: bytes) -> bytes:
    parts = line.split(b" ")
    del parts[int(chance.random() * len(parts))]
    return b" ".join(parts)


def _doubled_word(chance: Random, line: bytes) -> bytes:
    parts = line.split(b" ")
    at = int(chance.random() * len(parts))
    parts.insert(at, parts[at])
    return b" ".join(parts)


def _swapped_words(chance: Random, line: bytes) -> bytes:
    parts = line.split(b" ")
    a, b = int(chance.random() * len(parts)), int(chance.random() * len(parts))
    parts[a], parts[b] = parts[b], parts[a]
    return b" ".join(parts)


def _flag_with_value(chance: Random, line: bytes) -> bytes:
    flag = one_of(chance, FLAGS)
    value = one_of(chance, NAMES if chance.random() < 0.3 else NUMBERS)
    return line + b" " + flag + b"=" + value


def _spaced(chance: Random, line: bytes) -> bytes:
    at = int(chance.random() * (len(line) + 1))
    return line[:at] + b" " * (1 << int(chance.random() * 7)) + line[at:]


def _flipped(chance: Random, line: bytes) -> bytes:
    if not line:
        return line
    at = int(chance.random() * len(line))
    return line[:at] + bytes([line[at] ^ (1 << int(chance.random() * 8))]) + line[at + 1 :]


def _inserted_bytes(chance: Random, line: bytes) -> bytes:
    at = int(chance.random() * (len(line) + 1))
    return line[:at] + BYTES[int(chance.random() * len(BYTES))] + line[at:]


def _cut(chance: Random, line: bytes) -> bytes:
    at = int(chance.random() * (len(line) + 1))
    return line[:at] + line[at + 1 + int(chance.random() * 8) :]


def _doubled_bytes(chance: Random, line: bytes) -> bytes:
    at = int(chance.random() * (len(line) + 1))
    end = at + int(chance.random() * 20)
    return line[:end] + line[at:end] * int(chance.random() * 4) + line[end:]


def mutated_expression(chance: Random, sources: Sequence[str]) -> str:
    """One expression with tokens of others."""
    tokens = _TOKEN.findall(chance.choice(sources))
    for _ in range(chance.randrange(0, 4)):
        others = _TOKEN.findall(chance.choice(sources))
        at = chance.randrange(len(tokens) + 1)
        start = chance.randrange(len(others))
        tokens[at : at + chance.randrange(0, 4)] = others[start : start + chance.randrange(1, 8)]
    source = "".join(tokens)
    if chance.random() < 0.2:
        number = chance.choice(["10 ** 9", "2 ** 1000", "-1", "1e400", "10 ** 30", "'a' * 9999"])
        source = re.sub(r"\d+", number, source, count=1)
    if chance.random() < 0.1:
        wrap = chance.choice(["[%s]", "(%s)", "{%s: 1}", "-%s", "not %s", "str(%s)", "(%s,)*9"])
        for _ in range(chance.randrange(1, 120)):
            source = wrap.replace("%s", source)
            if len(source) > 3000:
                break
    return source.replace("\n", " ").replace("\t", " ")


# -- seeds
