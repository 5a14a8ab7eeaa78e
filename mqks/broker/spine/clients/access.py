"""Users, logins, and the permissions of connections.

The one rule: a password is verified by the server, off the event loop; the next lines of its
connection wait for the result.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mqks.audit import LOGIN, Audit
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.clients.refusals import Refusals
from mqks.errors import BadRequest, Draining, Expelled, LimitExceeded, NotAllowed
from mqks.limits import AUTH_FAILURES_MAX, LOGINS_WAITING_MAX, LOGINS_WAITING_PER_ADDRESS_MAX
from mqks.protocol.requests import Request
from mqks.users import GuestPermissions, Known, Permissions, Users


@dataclass(slots=True, eq=False)
class Login:
    """A password that waits to be verified, which takes too long for the event loop."""

    connection: Connection
    request: Request = field(repr=False)
    name: bytes
    password: bytes = field(repr=False)

    @property
    def source(self) -> bytes:
        """What counts as one address."""
        return self.connection.source


class Access:
    """`end_consumers` and `end_tails` end those that a user may not have any more."""

    def __init__(
        self,
        line_bytes_max: int,
        refusals: Refusals,
        end_consumers: Callable[[list[Consumer]], None],
        end_tails: Callable[[Connection, Permissions], None],
        audit: Audit,
    ) -> None:
        self._line_bytes_max = line_bytes_max
        self._refusals = refusals
        self._end_consumers = end_consumers
        self._end_tails = end_tails
        self._audit = audit
        self.users = Users([], b"")
        self.connected: Counter[str] = Counter()
        """Connections of each user."""
        self.logins: deque[Login] = deque()
        """Passwords that the server must verify, one after the other."""

    def log_in(self, connection: Connection, request: Request, name: bytes, secret: bytes) -> None:
        """Authenticate with a password."""
        if user := self.users.recall(name, secret):
            self.authenticate(connection, user, name)
            return
        source = connection.source
        # One address must not keep all others from logging in.
        near = sum(source == login.source != b"" for login in self.logins)
        if len(self.logins) < LOGINS_WAITING_MAX and near < LOGINS_WAITING_PER_ADDRESS_MAX:
            self.logins.append(Login(connection, request, name, secret))
            connection.awaits_login = True
        else:
            # The password is not wrong, so refuse the connection: the client may try later.
            self._refusals.limits_reached["logins_waiting_max"] += 1
            reason = f"{near or LOGINS_WAITING_MAX} passwords wait to be checked; try again"
            self._refusals.expel(connection, reason)

    def verified(self, login: Login, user: Known | None) -> None:
        """Apply the result. The connection's lines wait for its next turn, unless it is
        `expelled`."""
        connection, request = login.connection, login.request
        connection.awaits_login, connection.overrun = False, True
        try:
            self.authenticate(connection, user, login.name)
        except BadRequest as failure:
            if isinstance(failure, LimitExceeded):
                self._refusals.limits_reached[failure.limit] += 1
            self._refusals.fail(connection, request.id, request.action, failure)
        else:
            if request.confirm:
                connection.unconfirmed += 1
                self._refusals.pending.waiters.confirms.append((connection, [], [request.id]))

    def authenticate(
        self,
        connection: Connection,
        user: Known | None,
        name: bytes = b"",
        *,
        is_limited: bool = True,
    ) -> None:
        """Give a connection the permissions of a user; None means wrong credentials. `name` is the
        one that was tried, with a password. `is_limited`: it may be one too many of the user."""
        if user is None:
            self._audit.failed_login(connection, name)
            connection.auth_failures += 1
            if connection.auth_failures >= AUTH_FAILURES_MAX:
                raise Expelled(
                    f"wrong credentials, {AUTH_FAILURES_MAX} times: the connection is closed"
                )
            raise NotAllowed("wrong credentials")
        if connection.is_guest and not user.permissions.admin:
            raise Draining
        if is_limited:
            self._check_connections(connection, user)
        # A stranger may send short lines only.
        self.left(connection)
        self.connected[user.name] += 1
        connection.user, connection.rate = user.name, user.rate
        connection.splitter.line_bytes_max = self._line_bytes_max
        self.grant(connection, user.permissions)
        self._audit.note(connection, LOGIN)

    def _check_connections(self, connection: Connection, user: Known) -> None:
        """Raise if the user has as many as it may."""
        count = self.connected[user.name] - (connection.user == user.name)
        if 0 < user.connections_max <= count:
            reason = f"auth: the user {user.name} has {count} connections already (connections_max)"
            raise LimitExceeded("user_connections_max", reason)

    def left(self, connection: Connection) -> None:
        """It is of no user any more."""
        if connection.user is not None:
            self.connected[connection.user] -= 1
            self.connected += Counter()

    def grant(self, connection: Connection, permissions: Permissions) -> None:
        """Set the permissions; consumers and tails that they do not allow end."""
        connection.permissions = (
            GuestPermissions(permissions) if connection.is_guest else permissions
        )
        lost = [
            consumer
            for consumer in connection.consumers.values()
            if not permissions.may_consume(consumer.queue.name)
        ]
        if lost:
            self._end_consumers(lost)
        self._end_tails(connection, permissions)
