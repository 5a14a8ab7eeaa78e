"""A password that waits to be verified, which takes too long for the event loop."""

from dataclasses import dataclass, field

from mqks.broker.connection import Connection
from mqks.protocol.requests import Request


@dataclass(slots=True, eq=False)
class Login:
    connection: Connection
    request: Request = field(repr=False)
    name: bytes
    password: bytes = field(repr=False)
