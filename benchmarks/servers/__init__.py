"""The servers that can be compared: one module per kind, one name per setting."""

from benchmarks.servers.base import Server
from benchmarks.servers.mqks import Mqks, MqksOnPostgres
from benchmarks.servers.nats import Nats
from benchmarks.servers.rabbitmq import Rabbitmq
from benchmarks.servers.redis import Redis
from benchmarks.servers.sink import Sink

SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        Mqks(),
        Redis("redis", "everysec"),
        Redis("redis-always", "always"),
        Nats(),
        Rabbitmq(),
        Sink(),
        MqksOnPostgres(),
    )
}
