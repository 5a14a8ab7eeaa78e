"""Requests about the connection, and about the server."""

from mqks.broker.broker import Broker
from mqks.broker.features.evaluate import expression
from mqks.broker.requests.checks import Effect, Effects, name_of
from mqks.broker.requests.state import EvalState
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.errors import BadRequest
from mqks.protocol import replies
from mqks.protocol.requests import ACTIONS, DrainFor, Request, WantedTrace, shown


def help_(broker: Broker, connection: Connection, request: Request, name: bytes | None) -> None:
    if name is not None and name not in ACTIONS:
        raise BadRequest(f"help: there is no action {shown(name)}; 'help' lists all")
    told = b" ".join(ACTIONS) if name is None else ACTIONS[name].help.encode()
    connection.write(replies.ok(request.id, told))


def close_connection(
    broker: Broker, connection: Connection, request: Request, number: int
) -> Work[int | None]:
    yield from ()  # It has no more turns than this.
    other = broker.connections.get(number)
    if other is None or other.expelled:
        return 0
    broker.refusals.expel(other, f"closed by {name_of(connection)} (close_connection)")
    broker.expelled.append(other)
    return 1


def trace(broker: Broker, connection: Connection, request: Request, wanted: WantedTrace) -> Effects:
    if wanted.off:
        return Effect.of(0, (yield from broker.traces.end(wanted.name)))
    name = wanted.name or b""
    broker.metadata.check_names("name", [name])
    yield from broker.traces.begin(name, wanted.for_us / 1e6, connection.who)
    return Effect.of(0, True)


def set_name(broker: Broker, connection: Connection, request: Request, name: bytes) -> None:
    broker.metadata.check_names("name", [name])
    connection.name = name.decode("utf-8", "surrogateescape")


def auth(
    broker: Broker, connection: Connection, request: Request, words: tuple[bytes, ...]
) -> None:
    access = broker.access
    *names, secret = words
    if names:
        access.log_in(connection, request, names[0], secret)
    else:
        access.authenticate(connection, access.users.by_token(secret))


def reload(broker: Broker, connection: Connection, request: Request, wanted: None) -> None:
    broker.want_reload(connection, request.id)


def read_only(broker: Broker, connection: Connection, request: Request, wanted: bool) -> Effects:
    yield from ()
    return Effect.of(0, broker.set_read_only(wanted))


def drain(broker: Broker, connection: Connection, request: Request, wanted: DrainFor) -> Effects:
    yield from ()
    if wanted.off:
        connection.write(replies.ok(request.id, b'{"draining": false}'))
        return Effect.of(0, broker.drain.end())
    return Effect.of(0, broker.drain.begin(connection, request.id, wanted.timeout_s))


def ping(broker: Broker, connection: Connection, request: Request, data: bytes) -> None:
    connection.write(replies.ok(request.id, data))


def evaluate(broker: Broker, connection: Connection, request: Request, source: str) -> Work[None]:
    settings = broker.settings
    if settings.eval == "off" or (settings.eval == "loopback" and not connection.local):
        raise BadRequest(f"_eval is not allowed: the setting eval is {settings.eval}")
    steps = connection.eval_steps
    if not isinstance(steps, expression.Allowance):
        steps = connection.eval_steps = expression.Allowance()
    names = {
        "state": EvalState(broker, steps.spend),
        "request": {
            "id": request.id.decode("utf-8", "surrogateescape"),
            "action": "_eval",
            "client": connection.id,
        },
        "WORKERS": 1,
        "config": {**settings.public(), "workers": [f"{settings.host}:{settings.port}"]},
    }
    work = expression.evaluate(source, names, steps)
    place = yield from broker.evaluations.take()
    try:
        while not connection.closed:  # Stop evaluating when nobody waits for the result.
            if connection.rests & Slow.END:
                raise BadRequest("_eval: the server is stopping")
            try:
                next(work)
            except StopIteration as end:
                connection.write(replies.ok(request.id, expression.render(end.value)))
                return
            yield GOES_ON
    finally:
        broker.evaluations.leave(place)
