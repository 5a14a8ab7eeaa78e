"""A peer that only counts and answers with bytes it built before: the ceiling of the load programs.

It speaks MQKS's lines, keeps nothing and knows every delivery beforehand, since the load programs
tell it what they will send. As its own process, `python -m benchmarks.servers.sink`, it can also be
told to go wrong, to show that the load programs notice.
"""

import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.flow import Flow, Stalled, ask
from benchmarks.messages import MARK, Messages
from benchmarks.servers.mqks import ALL_ACKED, CONFIRM, DELIVERY, Mqks

Deliveries = list[bytes]

FAULTS: dict[str, Callable[[Deliveries, int], Deliveries]] = {
    "none": lambda all, n: all,
    "drop": lambda all, n: all[:n] + all[n + 1 :],
    "twice": lambda all, n: [*all[:n], all[n], *all[n:-1]],
    "swap": lambda all, n: [*all[:n], all[n + 1], all[n], *all[n + 2 :]],
    "damage": lambda all, n: [*all[:n], all[n].replace(b"xx", b"xy", 1), *all[n + 1 :]],
}
"""What can be wrong with the n-th delivery."""


class Sink(Mqks):
    """The server of that name, for the works it can play."""

    skips = frozenset({"backlog"})

    def __init__(self, fault: str = "none") -> None:
        super().__init__("sink")
        self.fault = fault

    def missing(self) -> str | None:
        return None

    def command(self, directory: Path, port: int) -> list[str]:
        return [self.program, "-m", "benchmarks.servers.sink", self.fault]

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        told = messages.publishers.start, messages.first, messages.count, window is not None
        ask(sock, b"x publisher %d %d %d %d\n" % told)
        return super().publisher(sock, messages, window)

    def consume_line(self, consumer: bytes, queue: int, messages: Messages) -> bytes:
        told = len(messages.publishers), messages.count, messages.payload_bytes
        return b"%b consume %d %d %d" % (consumer, *told)


class Counted(Flow):
    """What comes is counted and forgotten."""

    def count(self, since: int) -> None:
        super().count(since)
        kept = min(self.filled, len(self.mark) - 1)
        self.room[:kept] = self.room[self.filled - kept : self.filled]
        self.filled = kept


class Deliverer(Counted):
    """Deliveries are let go as messages are published; the end once all acks have come."""

    total: int
    manual_ack: bool
    ended = False

    def release(self, published: int) -> bool:
        """So many messages have been published by all; False when the socket is full."""
        if self.manual_ack and self.replies == self.total:
            self.limit = len(self.requests)
        else:
            self.limit = min(published * self.width, len(self.requests))
        if not self.push():
            return False
        if published == self.total and not (self.manual_ack or self.ended):
            self.ended = True
            self.sock.shutdown(socket.SHUT_WR)  # A consumer that misses something learns it now.
        return True

    def allow(self) -> None:
        """Only `release` moves the limit."""


def publisher(sock: socket.socket, words: list[bytes]) -> Counted:
    """Confirms follow the messages: each one's, or the last one's alone."""
    first_publisher, first, count, each = map(int, words[2:])
    messages = Messages(count, first=first, publishers=range(first_publisher, first_publisher + 1))
    confirms = (messages if each else messages.last).fill(CONFIRM)
    width = messages.width(CONFIRM)
    ahead = 0 if each else 1 - count
    return Counted(sock, confirms, width=width, ahead=ahead, mark=MARK + b"\n")


def deliverer(sock: socket.socket, words: list[bytes], fault: str) -> Deliverer:
    """The deliveries of all messages, as if they had come in the order of their publishers."""
    publishers, count, payload_bytes = map(int, words[2:5])
    messages = Messages(count, payload_bytes, range(publishers))
    deliveries = messages.each(DELIVERY % words[0] + messages.payload + b"\n")
    wrong = FAULTS[fault](deliveries, len(deliveries) // 2)
    manual_ack = words[-1] == b"--manual-ack"
    end = ALL_ACKED if manual_ack else b""
    flow = Deliverer(sock, b"".join(wrong) + end, width=len(deliveries[0]), ahead=0)
    flow.total, flow.manual_ack = messages.total, manual_ack
    sock.sendall(words[0] + b" ok \n")
    return flow


def welcome(sock: socket.socket, fault: str) -> Flow | None:
    """Answers the first lines of a connection until it is known what it is for."""
    while True:
        try:
            words = ask(sock, b"").split()
        except Stalled:
            return None
        if words[1] == b"consume":
            return deliverer(sock, words, fault)
        if words[1] == b"publisher":
            sock.sendall(b"x ok \n")
            return publisher(sock, words)
        sock.sendall(b"p ok x\n" if words[1] == b"ping" else b"s ok \n")


def serve(listener: socket.socket, fault: str) -> None:
    """Plays the peer until it is ended."""
    flows: dict[int, Flow] = {}
    published = 0
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    while True:
        touched = {fd for fd, flow in flows.items() if isinstance(flow, Deliverer)}
        for fd, event in epoll.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                if flow := welcome(sock, fault):
                    flows[sock.fileno()] = flow
                    epoll.register(sock, select.EPOLLIN)
                    touched.add(sock.fileno())
                continue
            flow = flows[fd]
            before = flow.replies
            try:
                if event & ~select.EPOLLOUT:
                    flow.pull()
            except OSError:
                epoll.unregister(fd)
                flows.pop(fd).sock.close()
                touched.discard(fd)
                continue
            touched.add(fd)
            if not isinstance(flow, Deliverer):
                published += flow.replies - before
        for fd in touched:
            flow = flows[fd]
            sent = flow.release(published) if isinstance(flow, Deliverer) else flow.push()
            epoll.modify(fd, select.EPOLLIN if sent else select.EPOLLIN | select.EPOLLOUT)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print("event=listening address={}:{}".format(*listener.getsockname()), flush=True)
    serve(listener, sys.argv[1])
