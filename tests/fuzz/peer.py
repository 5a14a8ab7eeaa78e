"""A client as the broker sees its socket: what was sent, what came back, and whether they fit.

The one rule: it knows the wire only, not the broker.
"""

import re
from collections import Counter, defaultdict
from itertools import takewhile

from mqks.broker.spine.clients.connection import Connection
from mqks.protocol.requests import CONFIRM_ANYWHERE
from tests.fuzz import Finding

_REPLY = re.compile(rb"^([^ \n]+) (?:ok [^\n]*|error [0-9a-f]{24})$", re.M)
_OK = re.compile(rb"^([^ \n]+) ok ([^\n]*)$", re.M)
_ERROR = re.compile(rb"^([^ \n]+) error [0-9a-f]{24}$", re.M)
_PLAIN = re.compile(rb"\d*")
_CONFIRMS = {
    b"publish": re.compile(rb"|(?:duplicate|replaced) [^ ]+"),
    b"reject": re.compile(rb"\d*|dead [^ ]+(?: [^ ]+)?"),
    b"cancel_job": re.compile(rb"cancelled|told|held|none"),
    b"move": re.compile(rb"\d+(?: duplicate \d+)?"),
    b"redrive": re.compile(rb"\d+(?: duplicate \d+)?"),
}
"""What a confirm tells, by action, where it is no plain one. A transaction is vague, see below."""
ANSWERED_LIKE_CONFIRMS = (b"ping", b"_eval")
LIKE_RESULTS = (b"reject", b"cancel_job")
"""A result may be told in the words of their confirms."""


class Peer:
    """`keeps_books`: it also counts confirms and errors."""

    def __init__(self, connection: Connection, *, keeps_books: bool) -> None:
        self.connection = connection
        self.paused = False
        self.ended = False
        """It sends no more."""
        self.expelled = False
        self.unsent_bytes = 0
        self.lines = 0
        self._keeps_books = keeps_books
        self._tail = b""
        self._ids: set[bytes] = {b"-"}
        self._asked: Counter[bytes] = Counter()
        """Requests by id, and those among them that want a confirm."""
        self._to_confirm: Counter[bytes] = Counter()
        self._actions: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """Those that were asked for, by id."""
        self._vague: set[bytes] = set()
        self._logins: set[bytes] = set()
        self._confirmed: Counter[bytes] = Counter()
        self._failed: Counter[bytes] = Counter()
        self._replaced: Counter[bytes] = Counter()
        self._has_begun = False
        """From here on a transaction may be refused as a whole, without a reply to each request."""

    def sent(self, data: bytes) -> None:
        *lines, self._tail = (self._tail + data).split(b"\n")
        lines = [line.removesuffix(b"\r") for line in lines]
        self.lines += len(lines)
        self._ids.update([line.partition(b" ")[0] for line in lines])
        if self._keeps_books:
            for line in lines:
                self._note(line)

    def _note(self, line: bytes) -> None:
        request_id, action = (*line.split(b" ", 2)[:2], b"")[:2]
        if not request_id or b"\t" in request_id:
            request_id = b"-"
        if action == b"begin":
            self._has_begun = True
        if action == b"auth":
            self._logins.add(request_id)
        if action in ANSWERED_LIKE_CONFIRMS or self._has_begun:
            self._vague.add(request_id)
        actions = self._actions[request_id]
        actions.add(action)
        if b"result" in actions and not actions.isdisjoint(LIKE_RESULTS):
            self._vague.add(request_id)
        self._asked[request_id] += 1
        words = line.split(b" ")[2:]
        if action == b"publish":
            words = [*takewhile(lambda word: word[:2] == b"--", words)]
        elif action not in CONFIRM_ANYWHERE:
            words = words[:1]
        self._to_confirm[request_id] += action != b"" and b"--confirm" in words

    def replaced(self, consumer_id: bytes) -> None:
        """An error comes that is no answer: another connection uses the id of its consumer."""
        self._replaced[consumer_id] += 1

    def received(self, data: bytes) -> None:
        """Raise Finding for what is no reply, or nobody's."""
        ids = _REPLY.findall(data)
        if not data.endswith(b"\n") or len(ids) != data.count(b"\n"):
            odd = [line for line in data.split(b"\n") if line and not _REPLY.fullmatch(line)]
            raise Finding(f"no replies: {odd[:3]!r}")
        strangers = {*ids} - self._ids - {self._tail.partition(b" ")[0]}
        if strangers:
            raise Finding(f"replies that answer nobody: {sorted(strangers)[:3]!r}")
        if self._keeps_books:
            for request_id, told in _OK.findall(data):
                kinds = (_CONFIRMS.get(each, _PLAIN) for each in self._actions[request_id])
                self._confirmed[request_id] += any(kind.fullmatch(told) for kind in kinds)
            self._failed.update(_ERROR.findall(data))

    def settle(self) -> None:
        """Nothing is due any more. Raise Finding for an answer too few, or too many."""
        if not self._keeps_books or self.expelled or not self._logins.isdisjoint(self._failed):
            return  # What came behind a login that failed may have no answer.
        for request_id, asked in self._asked.items():
            if request_id == b"-" or request_id in self._vague:
                continue
            confirmed, failed = self._confirmed[request_id], self._failed[request_id]
            failed -= self._replaced[request_id]
            wanted = self._to_confirm[request_id]
            told = f"{request_id!r}: {asked} requests, {wanted} to be confirmed"
            if confirmed > wanted or confirmed + failed < wanted or confirmed + failed > asked:
                raise Finding(f"{told}, {confirmed} confirms and {failed} errors")
