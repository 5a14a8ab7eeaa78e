"""The commands for messages: publish, consume, tail, peek.

The one rule: a message is acked after its line was written and, if stdout is a pipe, read. A
publish is reported as confirmed after the server has stored it.
"""

import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from itertools import chain
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Unpack
from urllib.parse import quote

import typer

from mqks.commands import complete
from mqks.commands.complete import Queue
from mqks.commands.connection import ServerOptions, checked, connected, limited
from mqks.commands.existing import check_queue
from mqks.commands.inspect import message_object
from mqks.commands.options import (
    AddMask,
    After,
    AsJson,
    Create,
    Events,
    Names,
    Replace,
    Rows,
    Scheduled,
    SelectionOptions,
    Soonest,
    Told,
    Url,
    note,
    note_stars,
    progress,
    tell,
)
from mqks.errors import BadData, TimedOut
from mqks.inspection.text import data_as_text, printable
from mqks.limits import PREFETCH
from mqks.protocol.lines import LineSplitter

if TYPE_CHECKING:
    from mqks.client.blocking import BlockingClient, BlockingConsumer, BlockingTail
    from mqks.client.messages import Message
    from mqks.client.requests import Terms

CHUNK_BYTES = 1 << 18
STUCK_S = 1.0
"""How long to wait for a write after a signal."""
LAST_NUMBER = 10**18

Count = Annotated[
    int | None,
    typer.Option("--count", "-n", min=1, metavar="N", help="End after this number of messages."),
]
Quiet = Annotated[float | None, "SECONDS", "End after this time without a message."]


def publish(
    server: ServerOptions,
    event: Annotated[str, "EVENT", "The event; each queue bound to it gets a copy."],
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="The data, or - for one message per line of stdin."),
    ] = None,
    file: Annotated[str | None, "PATH", "Publish the bytes of this file as one message."] = None,
    confirm: Annotated[
        bool,
        "--confirm/--no-confirm",
        "Wait for the confirm, or only until the message is sent.",
    ] = True,
    id: Annotated[str | None, "ID", "The message id."] = None,
    id_prefix: Annotated[str | None, "PREFIX", "With -: ids are PREFIX-1, PREFIX-2 …"] = None,
    once: Annotated[bool, "Drop the message if the server already received this id."] = False,
    mandatory: Annotated[
        bool | None,
        "--mandatory/--no-mandatory",
        r"Fail if no queue is bound to the event, or drop the message. \[default: fail, unless "
        r"--no-confirm]",
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="Only this queue gets the message.",
            autocompletion=complete.queues,
        ),
    ] = None,
    delay: Annotated[float | None, "SECONDS", "Deliver it after this time."] = None,
    at: Annotated[
        str | None,
        "TIME",
        "Deliver it at this time: 2030-01-31T09:00, or seconds since 1970.",
    ] = None,
    ttl: Annotated[float | None, "SECONDS", "Its time to live in a queue."] = None,
    meta: Annotated[Names, "KEY=VALUE", "An attribute. Repeatable."] = None,
    priority: Annotated[int | None, "N", "Its priority, from -128 to 127."] = None,
    key: Annotated[str | None, "KEY", "Its key."] = None,
    keep_result: Annotated[
        float | None, "SECONDS", "Keep what becomes of it until so long after its end."
    ] = None,
    batch: Annotated[str | None, "NAME", "The batch that it joins."] = None,
    unique: Annotated[
        str | None,
        "KEY[,until=acked][,for=SECONDS][,on=replace]",
        "Drop it while a message of this key waits in the queue, or replace that.",
    ] = None,
) -> Told:
    """Publish one message, each line of stdin, or a file.

    With --once and --id or --id-prefix, a repeated run publishes only what is missing.
    """
    if (data is None) == (file is None):
        raise typer.BadParameter("give either DATA or --file")
    many = data == "-"
    if (id if many else id_prefix) is not None:
        raise typer.BadParameter("--id is for one message, --id-prefix for those of stdin")
    if once and not (id_prefix if many else id):
        raise typer.BadParameter(f"--once needs {'--id-prefix' if many else '--id'}")
    if mandatory is None:
        mandatory = confirm
    elif mandatory and not confirm:
        raise typer.BadParameter(
            "--mandatory needs the confirm: without it, there is no error reply"
        )
    terms: Terms = {"delay_s": delay, "at": _time(at), "ttl_s": ttl, "meta": pairs(meta or ())}
    terms |= {"to": to, "priority": priority, "key": key, "batch": batch}
    terms |= {"keep_result_s": keep_result}
    if unique is not None:
        from mqks.client.requests import Unique  # here, so that --help need not load it

        terms["unique"] = Unique.parse(unique)
    content = Path(file).read_bytes() if file is not None else data or ""
    with server.connected() as client:
        if to is not None:
            check_queue(client, to)
        if many:
            count = _publish_lines(client, event, confirm, id_prefix, once, mandatory, terms)
            line = f"{count} {'confirmed' if confirm else 'sent'}"
            return {"messages": count, "confirmed": confirm}, line
        given = client.publish(
            event, content, confirm=confirm, id=id, once=once, mandatory=mandatory, **terms
        )
        told = {"id": given, "confirmed": confirm}
        if given.duplicate_of is not None:
            line = f"{printable(given)} is a duplicate of {printable(given.duplicate_of)}"
            return told | {"duplicate_of": given.duplicate_of}, line
        if given.replaced is not None:
            line = f"{printable(given)} replaced {printable(given.replaced)}"
            return told | {"replaced": given.replaced}, line
        return told, printable(given)


def _time(text: str | None) -> "datetime | float | None":
    """A time; the default zone is that of this machine."""
    if text is None:
        return None
    with suppress(ValueError):
        return float(text)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"--at {text!r} is not a time, as in 2030-01-31T09:00, or seconds since 1970"
        ) from None


def pairs(texts: Iterable[str]) -> dict[str, str]:
    pairs = dict[str, str]()
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals) or key in pairs:
            raise typer.BadParameter(f"--meta {text!r} must be KEY=VALUE, each key once")
        pairs[key] = value
    return pairs


def _publish_lines(
    client: "BlockingClient",
    event: str,
    confirm: bool,
    id_prefix: str | None,
    once: bool,
    mandatory: bool,
    terms: "Terms",
) -> int:
    """Publish the lines of stdin; returns their number. Raises BadData and RequestFailed."""
    from mqks.client.errors import PublishFailed, RequestFailed
    from mqks.client.options import Options
    from mqks.client.requests import publish_flags

    around = f"{id_prefix or 24 * '-'}-{LAST_NUMBER} publish --confirm --once --mandatory {event} "
    line_bytes_max = Options().line_bytes_max - len(os.fsencode(around)) - len(publish_flags(terms))
    with _progress_of_stdin() as advance:
        lines = Lines(_stdin(advance), line_bytes_max)
        try:
            if confirm:
                batches = ([(event, line) for line in batch] for batch in lines)
                client.publish_batches(
                    batches, id_prefix=id_prefix, once=once, mandatory=mandatory, **terms
                )
            else:
                every = chain.from_iterable(lines)
                for number, line in enumerate(every, 1):
                    message_id = id_prefix and f"{id_prefix}-{number}"
                    client.publish(event, line, id=message_id, once=once, **terms)
        except PublishFailed as failure:
            raise RequestFailed(
                f"the server refused line {failure.failed[0].number + 1}, "
                f"{failure.confirmed} others are confirmed; error {failure.error_id}",
                failure.error_id,
                failure.reason,
            ) from None
    if lines.fault:
        raise BadData(f"line {lines.count + 1} {lines.fault}; the lines before it are published")
    return lines.count


class Lines:
    """The lines of a stream in batches, as they arrive, up to a line that cannot be sent.

    The last line may lack its newline. `count` is the number of lines so far, `fault` the reason
    why the next one cannot be sent.
    """

    def __init__(self, chunks: Iterable[bytes], line_bytes_max: int) -> None:
        self.count = 0
        self.fault = ""
        self._chunks = chunks
        self._splitter = LineSplitter(line_bytes_max)

    def __iter__(self) -> Iterator[list[bytes]]:
        for chunk in self._chunks:
            yield from self._feed(chunk)
            if self.fault:
                return
        if self._splitter.tail_bytes:
            yield from self._feed(b"\n")

    def _feed(self, chunk: bytes) -> Iterator[list[bytes]]:
        lines = self._splitter.feed(chunk)
        if self._splitter.too_long is not None:
            self.fault = f"is longer than {self._splitter.line_bytes_max} bytes"
        if self._splitter.has_tab or b"\r" in chunk:
            for at, line in enumerate(lines):
                if b"\t" in line or line.endswith(b"\r"):
                    self.fault = "has a tab, which JSON writes as \\t"
                    if b"\t" not in line:
                        self.fault = "ends with a carriage return"
                    lines = lines[:at]
                    break
        self.count += len(lines)
        if lines:
            yield lines


def _stdin(advance: Callable[[int], object]) -> Iterator[bytes]:
    while chunk := os.read(sys.stdin.fileno(), CHUNK_BYTES):
        yield chunk
        advance(len(chunk))


def _progress_of_stdin() -> AbstractContextManager[Callable[[int], object]]:
    """A bar where stdin is a file, of which the size is known."""
    about = os.fstat(sys.stdin.fileno())
    if not stat.S_ISREG(about.st_mode):
        return nullcontext(lambda more: None)
    return progress("publishing", about.st_size - sys.stdin.tell())


def consume(
    queue: Queue,
    events: Events = None,
    url: Url = None,
    add: Annotated[Names, "EVENT", "The same, as an option. Repeatable."] = None,
    add_mask: AddMask = None,
    replace: Replace = False,
    create: Create = False,
    manual_ack: Annotated[
        bool,
        "--manual-ack/--auto-ack",
        "Ack messages after they are printed, or when the server sends them.",
    ] = True,
    count: Count = None,
    timeout: Quiet = None,
    delete_queue_when_unused: Annotated[
        float | None, "SECONDS", "Delete the queue after this time without a consumer."
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="The most unacked messages; 0: as many as the server allows. "
            f"[default: {PREFETCH}]",
        ),
    ] = None,
    ack_timeout: Annotated[
        float | None, "SECONDS", "Ack timeout of this consumer, instead of that of the queue."
    ] = None,
    meta: Annotated[bool, "With --json, print attributes, and why dead letters died."] = False,
    client_name: Annotated[
        str | None,
        "NAME",
        r"The name shown in mqks inspect connections. \[default: mqks-consume and the user]",
    ] = None,
    out: Annotated[str | None, "DIR", "Write the data of each message into a file there."] = None,
    as_json: AsJson = False,
) -> None:
    """Print and ack the messages of a queue, one per line, until Ctrl-C.

    The data is printed unchanged; on a terminal, control characters are escaped. With --json, a
    line has id, event, retry and data, or data_base64 if the data is not UTF-8. --meta adds meta,
    priority, key and dead_letter. With --out, the name of the file is printed: the place of the
    message and its id.
    """
    if out is not None and as_json:
        raise typer.BadParameter("--out and --json exclude each other")
    if count is not None and not manual_ack:
        raise typer.BadParameter(
            "--count with --auto-ack would lose messages that the server has already sent"
        )
    if prefetch and not manual_ack:
        raise typer.BadParameter("--prefetch limits unacked messages, and --auto-ack has none")
    if meta and not as_json:
        raise typer.BadParameter("--meta needs --json: otherwise only the data is printed")
    if count is not None:  # What it does not print is not delivered to it.
        prefetch = min(PREFETCH if prefetch is None else prefetch or count, count)
    from mqks.client.options import named  # here, so that --help need not load it
    from mqks.client.session import LEAVES_S  # here, as above

    _check_quiet(timeout)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    rule = False if delete_queue_when_unused is None else delete_queue_when_unused
    plain, numbers = _shown if sys.stdout.isatty() else _raw, count_from(1)

    def form(message: "Message") -> bytes:
        if out is not None:
            return _saved(Path(out), next(numbers), message)
        return _json(message, meta=meta) if as_json else plain(message.data)

    with connected(url, named(limited(), client_name)) as client:
        if not create:
            check_queue(client, queue, "; --create creates it")
        with client.consume(
            queue,
            [*(events or ()), *(add or ())],
            masks=add_mask or (),
            replace=replace,
            create=create,
            auto_ack=not manual_ack,
            delete_when_unused=rule,
            prefetch=prefetch,
            ack_timeout_s=ack_timeout,
            meta=meta,
        ) as consumer:
            note_stars(events, add)
            output = _Output(consumer)

            def ack(batch: list["Message"], left: int | None) -> None:
                if left == 0:
                    consumer.pause(LEAVES_S)
                elif left is not None and left < (prefetch or 0):
                    consumer.set_prefetch(left)
                consumer.ack(batch)

            output.run(form, count, timeout, ack if manual_ack else None)


def _check_quiet(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise typer.BadParameter("a timeout is a number of seconds above 0")


def tail(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUEUE|EVENT", help="A queue, or events and masks such as order.* or **."
        ),
    ] = None,
    queue: Annotated[str | None, "QUEUE", "Show the messages that are added to this queue."] = None,
    event: Annotated[Names, "EVENT", "Only this event or mask. Repeatable."] = None,
    url: Url = None,
    count: Count = None,
    timeout: Quiet = None,
    as_json: AsJson = False,
) -> None:
    """Show messages as they are published, without consuming them, until Ctrl-C.

    A name is a queue if it exists, otherwise an event or a mask. If messages arrive faster than
    they are read, some are not shown, and their number is printed. With --json, a line has id,
    event, meta and data, or dropped.
    """
    _check_quiet(timeout)
    if not (names or queue or event):
        raise typer.BadParameter("name a queue, an event or a mask; ** matches all events")
    with connected(url, limited()) as client:
        if queue is None and names and _is_queue(client, names[0]):
            queue, *names = names
        elif queue is None and names and "*" not in names[0]:
            note(f"found no queue {names[0]}: showing the event {names[0]}")
        with client.tail(*(names or ()), *(event or ()), queue=queue) as shown:
            output = _Output(shown)

            def dropped(more: int) -> None:
                if as_json:
                    output.write(json.dumps({"dropped": more}).encode() + b"\n")
                else:
                    note(f"{more} messages dropped: they arrived faster than they were read")

            shown.on_dropped = dropped
            output.run(_json_of_tail if as_json else _line_of_tail, count, timeout)


def _is_queue(client: "BlockingClient", name: str) -> bool:
    from mqks.client.errors import RequestFailed  # here, so that --help need not load it

    with suppress(RequestFailed):
        return "*" not in name and bool(client.request("range", checked(name)))
    return False


def _json_of_tail(message: "Message") -> bytes:
    told: dict[str, Any] = {"id": message.id, "event": message.event, "meta": message.meta}
    return json.dumps(told | data_as_text(message.data)).encode() + b"\n"


def _line_of_tail(message: "Message") -> bytes:
    """Event and data, with control characters escaped for a terminal."""
    if not sys.stdout.isatty():
        return os.fsencode(message.event) + b" " + message.data + b"\n"
    return f"{printable(message.event)}  {printable(os.fsdecode(message.data))}\n".encode()


class _Output:
    """Stdout, which may end at any time: its reader closes it, or a signal arrives.

    Both stop the consumer. Written messages are still acked, unless a write is blocked. A pipe is
    reduced to one page: its reader gets few messages in advance, and when the pipe can be written
    again, the reader has read everything.
    """

    def __init__(self, consumer: "BlockingConsumer | BlockingTail") -> None:
        self._consumer = consumer
        self._is_writing = False
        self._signal = 0
        with suppress(OSError):  # It is not a pipe, or contains more than a page.
            fcntl.fcntl(sys.stdout.fileno(), fcntl.F_SETPIPE_SZ, resource.getpagesize())
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        threading.Thread(target=self._watch, daemon=True).start()

    def _on_signal(self, number: int, frame: object) -> None:
        again, self._signal = self._signal, number
        if again:
            self.end()
        self._consumer.stop()
        # Again and again: what is written next may be what blocks.
        signal.setitimer(signal.ITIMER_REAL, STUCK_S, STUCK_S)

    def _on_alarm(self, number: int, frame: object) -> None:
        if self._is_writing:
            self.end()

    def _watch(self) -> None:
        # A pipe without a reader is reported although no event is requested.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        poll.poll()
        self._consumer.stop()

    def run(
        self,
        form: Callable[["Message"], bytes],
        count: int | None,
        timeout_s: float | None,
        ack: Callable[[list["Message"], int | None], object] | None = None,
    ) -> None:
        """Write messages until `count` of them, or for so long none. `ack` gets those that were
        read, and how many are left. Raises TimedOut if some of `count` are missing, and what `end`
        raises."""
        left = count
        while left is None or left > 0:
            try:
                batch = next(self._consumer.batches(left, timeout_s), [])
            except TimeoutError:
                if left is None:
                    return
                raise TimedOut(
                    f"no message for {timeout_s:g} s, {left} of {count} are missing"
                ) from None
            if not batch:
                self.end()
            self.write(b"".join(map(form, batch)), is_awaited=ack is not None)
            left = None if left is None else left - len(batch)
            if ack is not None:
                ack(batch, left)

    def write(self, lines: bytes, *, is_awaited: bool = False) -> None:
        """Write lines and, if it `is_awaited`, wait until the reader of a pipe has read them.
        Raises what `end` raises."""
        try:
            self._is_writing = True
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
            if is_awaited:
                self._wait_for_reader()
            self._is_writing = False
        except BrokenPipeError:
            self.end()

    def _wait_for_reader(self) -> None:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if any(not event & select.POLLOUT for _, event in poll.poll()):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def end(self) -> NoReturn:
        """Raises BrokenPipeError, or SystemExit after a signal."""
        signal.setitimer(signal.ITIMER_REAL, 0)  # Nothing more is written; Python may be slow.
        # Otherwise Python would try to write the rest again at exit, and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if self._signal:
            sys.exit(128 + self._signal)
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _raw(data: bytes) -> bytes:
    return data + b"\n"


def _shown(data: bytes) -> bytes:
    return printable(os.fsdecode(data)).encode() + b"\n"


def _saved(directory: Path, number: int, message: "Message") -> bytes:
    """Write the data of a message into a new file, and tell its name. Raises OSError."""
    name = quote(message.id, safe="", errors="surrogateescape")[:200]
    while True:
        path = directory / f"{number:06}-{name}"
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(message.data)
            file.flush()
            os.fsync(file.fileno())
            return os.fsencode(path) + b"\n"
        number += 1


def _json(message: "Message", *, meta: bool) -> bytes:
    told: dict[str, Any] = {"id": message.id, "event": message.event, "retry": message.retry}
    told |= data_as_text(message.data)
    if meta:
        from mqks.inspection.source import dead_letter_row  # here, so that --help need not load it

        dead = message.dead_letter
        told |= {"meta": message.meta, "dead_letter": dead and dead_letter_row(dead)}
        told["letter"] = dead and dead._asdict()  # Its name up to 0.2, with seconds since 1970.
        told |= {"priority": message.priority, "key": message.key, "unique": message.unique}
    return json.dumps(told).encode() + b"\n"


def peek(
    server: ServerOptions,
    queue: Queue,
    limit: Rows = 20,
    after: After = 0,
    scheduled: Scheduled = False,
    soonest: Soonest = False,
    as_json: AsJson = False,
    **selection: Unpack[SelectionOptions],
) -> None:
    """Print the first messages of a queue, including unacked ones, without consuming them.

    The format is that of consume; with --json, that of inspect messages --data. Continue with
    --after and the last number.
    """
    from mqks.inspection.live import Live  # here, so that --help need not load them
    from mqks.inspection.source import WantedRows

    form = _shown if sys.stdout.isatty() else _raw
    with Live(server.url, limited(server.timeout_s)) as source:
        for row in source.messages(queue, WantedRows(after, limit, scheduled, selection, soonest)):
            if as_json:
                tell(message_object(row, data=True), as_json)
            else:
                sys.stdout.buffer.write(form(row["data"]))
