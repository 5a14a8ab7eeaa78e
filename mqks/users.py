"""Users: the users file, its hashes, and permissions by masks.

One JSON object per line:

    {"name": "alice", "password": "scrypt:16384:8:1:SALT:HASH", "token": "SHA-256",
     "sqs": "ACCESS KEY:SECRET",
     "publish": ["orders.**"], "consume": ["alice-*"], "read": [], "bind": ["**"],
     "monitoring": false, "admin": false, "eval": false,
     "publishes_per_s": 0, "bytes_per_s": 0, "connections_max": 0,
     "queues_max": 0, "queue_bytes_max": 0}

Only the name is required. SALT, HASH and SHA-256 are hexadecimal digits.

The one rule: neither the file nor a reply, nor the time it takes, reveals a secret. But the file
has that of `sqs`, since who checks a signature needs the key that made it: only the owner may read
the file.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from mqks.errors import BadRequest, ConfigurationError
from mqks.limits import COUNT_MAX, MASKED_NAME_BYTES_MAX, SCRYPT_MEMORY_BYTES_MAX, SEQ_MAX
from mqks.protocol.masks import covering, name_masks
from mqks.rates import UserRate

SALT_BYTES: Final = 16
TOKEN_BYTES: Final = 32
_COST: Final = (1 << 14, 8, 1)
"""n, r and p of scrypt: 16 MiB, and 30 ms or more."""
_HASH_BYTES: Final = 32


class Permissions:
    """What one user may do."""

    def __init__(
        self,
        publish: Iterable[str] = (),
        consume: Iterable[str] = (),
        bind: Iterable[str] = (),
        *,
        read: Iterable[str] = (),
        monitoring: bool = False,
        admin: bool = False,
        eval: bool = False,
    ) -> None:
        """Raises BadRequest for a mask that is too long."""
        consume = [*consume]
        self.consumes = bool(consume)
        """It may consume some queue."""
        self.may_publish: Callable[[bytes], bool] = allows(publish)
        """Takes an event."""
        self.may_consume: Callable[[bytes], bool] = allows(consume)
        """Takes a queue."""
        self.may_read: Callable[[bytes], bool] = allows([*consume, *read])
        """Takes a queue, whose messages may be read without consuming them."""
        self.may_bind: Callable[[bytes], bool] = allows(bind)
        """Takes an event."""
        self.may_bind_mask: Callable[[bytes], bool] = allows(bind, covering)
        """Takes a mask that a queue is to be bound to."""
        self.monitoring = monitoring or admin
        """Whether all `stats` may be seen."""
        self.admin = admin
        self.eval = eval


def allows(
    masks: Iterable[str],
    matching: Callable[[Iterable[bytes]], Callable[[bytes], bool]] = name_masks,
) -> Callable[[bytes], bool]:
    """Return a function that matches names with these masks. Raises BadRequest for a mask that is
    too long."""
    given = [mask.encode() for mask in masks]
    matches = matching(given)
    if any(len(mask) > 1 and not mask.strip(b"*") for mask in given):
        return lambda name: True
    return lambda name: len(name) <= MASKED_NAME_BYTES_MAX and matches(name)


class GuestPermissions(Permissions):
    """Those of `narrowed` (None: all) that operators need: nothing of them concerns messages."""

    def __init__(self, narrowed: Permissions | None) -> None:
        self.narrowed = narrowed
        may = narrowed or Permissions(admin=True, eval=True)
        super().__init__(monitoring=may.monitoring, admin=may.admin, eval=may.eval)


STRANGER: Final = Permissions()
"""Permissions of an unauthenticated client."""


LIMITS: Final = {
    **dict.fromkeys(("publishes_per_s", "bytes_per_s", "connections_max", "queues_max"), COUNT_MAX),
    "queue_bytes_max": SEQ_MAX,
}
"""Fields of a user that are limits, and the greatest value of each."""
_KINDS: Final = {
    **dict.fromkeys(("name", "password", "token", "sqs"), str),
    **dict.fromkeys(("publish", "consume", "read", "bind"), list),
    **dict.fromkeys(("monitoring", "admin", "eval"), bool),
    **dict.fromkeys(LIMITS, int),
}


_SHOWN: Final = tuple(key for key in _KINDS if key not in ("password", "token", "sqs"))


@dataclass(slots=True)
class User:
    """One line of the users file. Raises ValueError."""

    name: str
    password: str = ""
    token: str = ""
    publish: list[str] = field(default_factory=list)
    consume: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    bind: list[str] = field(default_factory=lambda: ["**"])
    monitoring: bool = False
    admin: bool = False
    eval: bool = False
    sqs: str = field(default="", repr=False)
    """The access key of SQS, a colon, and its secret."""
    publishes_per_s: int = 0
    bytes_per_s: int = 0
    connections_max: int = 0
    """Limits of all its connections together; 0: none."""
    queues_max: int = 0
    queue_bytes_max: int = 0
    """Limits of all queues that it has made; 0: none."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} has the wrong type")
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= most:
                raise ValueError(f"{name} is not a number from 0 to {most}")
        check_word("name", self.name)
        for mask in (*self.publish, *self.consume, *self.read, *self.bind):
            check_word("mask", mask)
        if self.password:
            _read_hash(self.password)
        if self.token and len(bytes.fromhex(self.token)) != hashlib.sha256().digest_size:
            raise ValueError("the token is not a SHA-256 hash in hexadecimal digits")
        if self.sqs and not all(self.sqs.partition(":")):
            raise ValueError("sqs is not an access key and a secret with a colon between them")

    def permissions(self) -> Permissions:
        """Raises BadRequest for a mask that is too long."""
        keys = [key for key in _SHOWN if key not in ("name", *LIMITS)]
        return Permissions(**{key: getattr(self, key) for key in keys})

    def line(self) -> str:
        # An earlier version knows no limits.
        told = {key: value for key, value in asdict(self).items() if value or key not in LIMITS}
        return json.dumps(told, ensure_ascii=False) + "\n"


def check_word(what: str, word: Any) -> None:
    """Check that it can be an argument of a request. Raises ValueError, without the word."""
    if not isinstance(word, str) or not word or not word.isprintable():
        raise ValueError(f"the {what} must be non-empty text without control characters")
    if " " in word or word.startswith("--"):
        raise ValueError(f"the {what} must not have a space or start with two dashes")


def parse(text: str, place: str) -> list[User]:
    """Read a users file. Raises ConfigurationError, with the place and the line."""
    users: dict[str, User] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            user = User(**_members(line))
            user.permissions()
        except (ValueError, BadRequest) as error:
            raise ConfigurationError(f"{place}:{number}: {error}") from None
        if user.name in users:
            raise ConfigurationError(f"{place}:{number}: the user {user.name} exists already")
        users[user.name] = user
    return list(users.values())


def _members(line: str) -> dict[str, Any]:
    members = json.loads(line)
    if not isinstance(members, dict):
        raise ValueError("not a JSON object")
    if "name" not in members:
        raise ValueError("the name is missing")
    if unknown := members.keys() - User.__dataclass_fields__.keys():
        raise ValueError(f"unknown key {min(unknown)!r}")
    return members


def hash_password(password: str, salt: bytes) -> str:
    return _written(_COST, salt, _scrypt(password.encode(), salt, _COST))


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


_Cost = tuple[int, int, int]


def _scrypt(password: bytes, salt: bytes, cost: _Cost) -> bytes:
    n, r, p = cost
    # OpenSSL needs a little more than 128·n·r.
    memory = SCRYPT_MEMORY_BYTES_MAX + (1 << 20)
    return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=memory, dklen=_HASH_BYTES)


def _written(cost: _Cost, salt: bytes, digest: bytes) -> str:
    return ":".join(["scrypt", *map(str, cost), salt.hex(), digest.hex()])


def _read_hash(text: str) -> tuple[_Cost, bytes, bytes]:
    """Raises ValueError."""
    try:
        scheme, *numbers, salt, digest = text.split(":")
        n, r, p = map(int, numbers)
        found = (n, r, p), bytes.fromhex(salt), bytes.fromhex(digest)
    except ValueError:
        raise ValueError("the password is not a hash written by mqks user") from None
    bounded = n > 1 and n & (n - 1) == 0 and 0 < r <= 256 and 0 < p <= 16
    # OpenSSL refuses other parameters, so every login would fail.
    bounded = bounded and n.bit_length() <= 16 * r
    if scheme != "scrypt" or not bounded or 128 * n * r * p > SCRYPT_MEMORY_BYTES_MAX:
        raise ValueError("the password has unknown or excessive parameters")
    return found


@dataclass(slots=True, frozen=True)
class Known:
    """A user of a running server."""

    name: str
    permissions: Permissions
    rate: UserRate | None = None
    connections_max: int = 0
    """0: no limit of its own."""


class Users:
    """The users of a running server. `key` is random bytes."""

    def __init__(self, users: Iterable[User], key: bytes) -> None:
        users = [*users]
        self._key = key
        self._known: dict[str, Known] = {}
        self._hashes: dict[str, tuple[_Cost, bytes, bytes]] = {}
        self._tokens: dict[bytes, Known] = {}
        self._by_access_key: dict[str, tuple[Known, str]] = {}
        self._verified: dict[str, bytes] = {}
        """Correct passwords, blinded: the next login of the user is immediate."""
        self.given = {user.name: user for user in users}
        """By name."""
        self.shown: list[dict[str, Any]] = []
        """Names and permissions, for people."""
        self.signing: list[User] = []
        """Those who sign requests of SQS, without their other secrets."""
        for user in users:
            is_slowed = user.publishes_per_s or user.bytes_per_s
            rate = UserRate(user.publishes_per_s, user.bytes_per_s) if is_slowed else None
            known = Known(user.name, user.permissions(), rate, user.connections_max)
            self._known[user.name] = known
            self.shown.append({key: getattr(user, key) for key in _SHOWN})
            if user.password:
                self._hashes[user.name] = _read_hash(user.password)
            if user.token:
                self._tokens[self._blind(bytes.fromhex(user.token))] = known
            if user.sqs:
                access_key, _, secret = user.sqs.partition(":")
                self._by_access_key[access_key] = known, secret
                self.signing.append(replace(user, password="", token=""))

    def __len__(self) -> int:
        return len(self._known)

    def differing(self, others: "Users") -> list[str]:
        """The names of users that only one of both has, or who are not the same in both."""
        names = self.given.keys() | others.given.keys()
        return sorted(name for name in names if self.given.get(name) != others.given.get(name))

    def get(self, name: str) -> Known | None:
        return self._known.get(name)

    def by_token(self, token: bytes) -> Known | None:
        """The user of this token. It is fast: 32 random bytes need no slow hash."""
        return self._tokens.get(self._blind(hashlib.sha256(token).digest()))

    def by_access_key(self, access_key: str) -> tuple[Known, str] | None:
        """The user who signs with this key, and the secret."""
        return self._by_access_key.get(access_key)

    def recall(self, name: bytes, password: bytes) -> Known | None:
        """The user, if this password has been verified before."""
        user = name.decode("utf-8", "replace")
        mac = self._blind(name + b" " + password)
        if hmac.compare_digest(self._verified.get(user, b""), mac):
            return self._known.get(user)
        return None

    def verify(self, name: bytes, password: bytes) -> Known | None:
        """The user, if the password is correct. It takes at least 30 ms, also for unknown users:
        call it in a thread."""
        user = name.decode("utf-8", "replace")
        cost, salt, digest = self._hashes.get(user, (_COST, bytes(SALT_BYTES), b""))
        if not hmac.compare_digest(digest, _scrypt(password, salt, cost)):
            return None
        self._verified[user] = self._blind(name + b" " + password)
        return self._known[user]

    def _blind(self, secret: bytes) -> bytes:
        """The key is secret, so the duration of a comparison reveals nothing."""
        return hmac.digest(self._key, secret, "sha256")
