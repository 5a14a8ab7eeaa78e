"""The routes of the page.

The one rule: nothing is shown before the guard has let the request in: a session, and for every
change a token that only our own forms know.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from importlib.resources import files
from itertools import islice, starmap
from time import monotonic, time
from typing import Any, Final, cast
from urllib.parse import parse_qsl, quote, urlencode

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    InvalidRequest,
    RequestFailed,
)
from mqks.client.messages import JobState, Message, PeekedMessage
from mqks.inspection.source import group_of, told_of
from mqks.inspection.text import moment, printable, time_text
from mqks.page import tables
from mqks.page.actions import ACTIONS, policy_values
from mqks.page.batches import STATES, batch_told
from mqks.page.headers import SECURITY
from mqks.page.limits import NEEDS, rows
from mqks.page.live import ERRORS_MAX, ROWS_MAX, Derived, LivePage, key_of, rows_of
from mqks.page.overview import (
    FIGURES,
    GROUPS,
    RateHistory,
    archives,
    attention,
    mark,
    numbers,
    queue_told,
)
from mqks.page.sessions import COOKIE, Opener, PageSession, Sessions, refusal
from mqks.protocol.requests import POLICY

STATIC: Final = {
    "page.css": ("text/css", ("open-props.css", "uplot.min.css", "page.css")),
    "page.js": ("text/javascript", ("page.js",)),
    "uplot.min.js": ("text/javascript", ("uplot.min.js",)),
    "icon.svg": ("image/svg+xml", ("icon.svg",)),
}
"""Of what browsers ask for, the type and the files."""
USED: Final = re.compile(r'{%-? (?:extends|from) "([^"]+)"')
"""The templates that a template needs."""
FORM_BYTES_MAX: Final = 64 * 1024
FORM_FIELDS_MAX: Final = 1000
NAMES: Final = 200
"""Names of a list on one page."""
NAMED: Final = {"events": "events", "masks": "masks", "consumers": "consumer_ids"}
"""What `stats queue` calls these lists."""
STEPS: Final = 500
"""Steps of a message on one page."""
HELD: Final = 100
"""Unacked messages of a queue on one page."""
TAILS_MAX: Final = 20
"""Live tails that are open at a time."""
TAIL_READ: Final = 1000
TAIL_ROWS: Final = 50
TAIL_S: Final = 0.25
"""A live tail takes at most so many messages, shows the last of them, and waits for so many
seconds: it stays near what is published, and costs no more of the event loop than that."""
TAIL_QUIET_S: Final = 2.0
"""Without a message it says so often that it is there."""
TAIL_BYTES: Final = 500
"""Shown of the data of a message in a live tail."""
MESSAGES: Final = 20
"""Messages of a queue on one page."""
DEAD_LETTERS_COUNTED_MAX: Final = 1000
"""Of so many dead letters the causes are counted, or of fewer with so many bytes of data."""
DEAD_LETTERS_BYTES_MAX: Final = 4 << 20
DATA_BYTES_MAX: Final = 4096
"""Shown of the data of one message."""
LAID_OUT_CHARACTERS_MAX: Final = 4 * DATA_BYTES_MAX
"""JSON that takes more with line breaks and indents is shown as it is."""
STEP_S: Final = 0.005
"""Pages are laid out one at a time, for so long in one turn of the event loop."""
LAYOUT: Final = json.JSONEncoder(indent=2, ensure_ascii=False)

QUEUE_SERIES: Final = ("In/s", "published"), ("Out/s", "acked"), ("Messages", "waiting", "all")
BROKER_SERIES: Final = (
    *(("Published", "published"), ("Delivered", "delivered"), ("Acked", "acked")),
    *(("Rejected", "rejected"), ("Dead", "dead")),
)
"""Names and colours of the lines of the charts, in the order of the points of the history; and the
scale of those with one of their own."""


Handler = Callable[[Request, PageSession], Awaitable[Response]]


class _Events(StreamingResponse):
    async def __call__(self, *ends: Any) -> None:
        """Close its generators when the reader has left: only the garbage collector would, and
        until then the page counts as open and is renewed."""
        async with aclosing(cast(AsyncGenerator[bytes], self.body_iterator)):
            await super().__call__(*ends)


def _events(events: AsyncGenerator[bytes]) -> Response:
    headers = {"X-Accel-Buffering": "no"}
    return _Events(events, media_type="text/event-stream", headers=headers)


class Page:
    """`open_stream` connects to the broker. `users` returns names and permissions; None: there are
    no users. `limits` are the values of the settings, `broker` is its name. With `may_act` the page
    offers what its users may do; otherwise it only shows."""

    def __init__(
        self,
        open_stream: Opener,
        *,
        users: Callable[[], Sequence[tables.Row]] | None,
        limits: Mapping[str, Any],
        history: RateHistory,
        may_act: bool,
        broker: str,
    ) -> None:
        self._history = history
        self._may_act = may_act
        self._sessions = Sessions(open_stream, with_users=users is not None)
        derived = {
            "limits": Derived(NEEDS, partial(rows, limits)),
            "archives": Derived(frozenset({"queues"}), archives),
            "attention": Derived(NEEDS | {"schedules"}, partial(attention, limits, history)),
        }
        if users is not None:
            derived["users"] = Derived(frozenset(), lambda sample: users())
        self._tables = {
            key: table
            for key, table in tables.TABLES.items()
            if (users or key != "users") and key != "attention"
        }
        hidden = ({"users"} - self._tables.keys()) | (set() if may_act else {"publish"})
        self._views = {
            group: [view for view in views if view[0] not in hidden]
            for group, views in tables.VIEWS.items()
        }
        self._tails = 0
        watching = partial(self._sessions.client, trusted=True)
        self.live = LivePage(watching, derived, history)
        self._environment = Environment(
            loader=PackageLoader("mqks.page"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters["plain"] = printable
        self._environment.filters["duration"] = tables.duration
        self._environment.filters["setting"] = tables.setting
        # Commands are copied, and names come from clients.
        self._environment.filters["shell"] = lambda name: shlex.quote(printable(name))
        self._environment.globals.update(
            broker=broker,
            cell=tables.cell,
            connection_link=tables.connection_link,
            batch_link=tables.batch_link,
            queue_link=tables.queue_link,
            quoted=tables.quoted,
            utc=lambda seconds: moment(int(seconds * 1e6)),
        )
        self._one_peeks = anyio.Lock()
        """What is peeked for a page may be large until it is shortened."""
        self._one_renders = anyio.Lock()
        root = files("mqks.page") / "static"
        self._static = {
            name: b"\n".join((root / each).read_bytes() for each in parts)
            for name, (_, parts) in STATIC.items()
        }
        self._version = sha256(b"".join(self._static.values())).hexdigest()[:12]
        self._environment.globals["static"] = lambda name: f"/static/{name}?{self._version}"
        self._compiled = set[str]()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep sessions and samples until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._sessions.run)
            tasks.start_soon(self.live.run)
            task_status.started()

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/", self._guarded(self._overview)),
            *(
                Route(f"/{key}", self._guarded(self._table_of(table)))
                for key, table in self._tables.items()
            ),
            Route("/queue", self._guarded(self._queue)),
            Route("/connection", self._guarded(self._connection)),
            Route("/batch", self._guarded(self._batch)),
            Route("/schedule", self._guarded(self._schedule)),
            Route("/message", self._guarded(self._traced)),
            Route("/publish", self._guarded(self._publish)),
            Route("/tail", self._guarded(self._tail)),
            Route("/tailed", self._guarded(self._tailed)),
            Route("/do/{action}", self._guarded(self._act), methods=["POST"]),
            Route("/events", self._guarded(self._events)),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{name}", self._file),
            Route("/{name:path}", self._file),
        ]

    # -- who may

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            session = self._sessions.get(request.cookies.get(COOKIE))
            is_new = session is None
            try:
                if session is None and not self._sessions.with_users:
                    session = await self._sessions.begin()
                if session is None:
                    return _secured(RedirectResponse("/login", status_code=303))
                response = _secured(await handler(request, session))
            except AuthenticationFailed:
                # The user was removed, or has another password now.
                self._sessions.end(request.cookies.get(COOKIE, ""))
                return _secured(RedirectResponse("/login", status_code=303))
            except RequestFailed as failure:
                return await self._failed(403, str(failure), session)
            except ClientError as failure:
                return await self._failed(503, str(failure), session)
            if is_new:
                _set_cookie(request, response, session.token)
            return response

        return guarded

    async def _login(self, request: Request) -> Response:
        if not self._sessions.with_users:
            return _secured(RedirectResponse("/", status_code=303))
        if request.method == "GET":
            return await self._shown("login.html", None, reason="")
        form = await _form(request)
        name, password, token = (form.get(key, "") for key in ("name", "password", "token"))
        credentials = (token,) if token else (name, password)
        if not all(credentials):
            return await self._shown("login.html", None, 400, reason="Enter a name and a password.")
        try:
            session = await self._sessions.begin(credentials)
        except ClientError as failure:
            return await self._shown("login.html", None, 403, reason=refusal(failure))
        response = _secured(RedirectResponse("/", status_code=303))
        return _set_cookie(request, response, session.token)

    async def _logout(self, request: Request) -> Response:
        token = request.cookies.get(COOKIE, "")
        session, form = self._sessions.get(token), await _form(request)
        if session is not None and session.allows(form.get("csrf", "")):
            self._sessions.end(token)
        response = _secured(RedirectResponse("/login", status_code=303))
        response.delete_cookie(COOKIE)
        return response

    # -- views

    async def _overview(self, request: Request, session: PageSession) -> Response:
        sample = await self.live.sample(session.client, {"attention"})
        return await self._shown(
            "overview.html",
            session,
            here="overview",
            groups=GROUPS,
            table=tables.ATTENTION,
            attention=tables.Ordered(tables.ATTENTION, sample["attention"])
            .part(tables.view_of(tables.ATTENTION, {}))
            .rows,
            numbers=numbers(sample),
            trends=sample["trends"],
            chart=self._chart(request, sample["totals"]["uptime_s"], None),
            totals=sample["totals"],
            journal=sample["journal"],
        )

    def _chart(self, request: Request, uptime_s: float, queue: str | None) -> dict[str, Any]:
        """What a chart shows; `points` is None for a queue without a history."""
        day = _parameter(request, "range") == "day"
        series = BROKER_SERIES if queue is None else QUEUE_SERIES
        name = None if queue is None else requests.name(queue)
        points = self._history.points(name, day=day)
        return {
            "day": day,
            "series": json.dumps(series),
            "points": None
            if points is None
            else json.dumps(
                [[round(each, 1) for each in row[: len(series) + 1]] for row in points]
            ),
            "began": moment(int((time() - uptime_s) * 1e6))
            if uptime_s < (86400 if day else 600)
            else "",
        }

    def _table_of(self, table: tables.Table) -> Handler:
        async def handler(request: Request, session: PageSession) -> Response:
            view = tables.view_of(table, request.query_params)
            after = _parameter(request, "after")
            sample = await self.live.sample(session.client, {table.key}, after)
            rows, links, named = sample[table.key], {}, table.title.lower()
            if after:
                links[f"First {named}"] = f"/{table.key}"
            if len(rows) >= ROWS_MAX:
                last = str(rows[-1][key_of(table.key)])
                links[f"Next {named}"] = f"/{table.key}?after={tables.quoted(last)}"
            return await self._shown(
                "table.html",
                session,
                here=table.key,
                table=table,
                view=view,
                shown=tables.Ordered(table, rows).part(view),
                page_rows=tables.PAGE_ROWS,
                after=after,
                links=links,
                read=len(rows),
                total=sample["totals"].get(table.key, 0),
                errors_max=ERRORS_MAX,
                rows_max=ROWS_MAX,
                is_partly=any(len(sample.get(key, ())) >= ROWS_MAX for key in NEEDS),
            )

        return handler

    async def _queue(self, request: Request, session: PageSession) -> Response:
        # Bytes that are not UTF-8 come back as they went into the link.
        name = _parameter(request, "name")
        row = await session.client.stats("queue", name, f"--limit={NAMES}")
        for key, named in NAMED.items():
            if last := _parameter(request, key):
                words = f"--limit={NAMES}", f"--after={last}"
                row[named] = (await session.client.stats("queue", name, *words))[named]
        there = f"--after={name}", f"--then={_whole_number(request, 'unacked')}"
        held = await session.client.stats("unacked", name, f"--limit={HELD}", *there)
        scheduled = "scheduled" in request.query_params
        messages, reason = list[tuple[PeekedMessage, int]](), ""
        causes, looked = list[Mapping[str, Any]](), 0
        try:
            async with self._one_peeks:
                peeked = await session.client.peek(
                    name,
                    after=_whole_number(request, "messages"),
                    limit=MESSAGES,
                    scheduled=scheduled,
                )
                messages = [
                    (each._replace(data=each.data[: DATA_BYTES_MAX + 1]), len(each.data))
                    for each in peeked
                ]
                del peeked
                if not scheduled and any(each.dead_letter for each, _ in messages):
                    causes, looked = await _causes(session.client, name)
        except RequestFailed:
            reason = "You may not read the messages of this queue."
        typed, session.typed = session.typed, {}
        if typed.get("queue") != name:
            typed = {}
        here = tables.queue_link(name) + ("&scheduled=1" if scheduled else "")
        links = partial(_links, request, here)
        return await self._shown(
            "queue.html",
            session,
            queue=row,
            told=queue_told(self._history, row),
            consumers=await _consumers(session.client, row, _parameter(request, "consumers")),
            chart=self._chart(request, (await session.client.stats())["uptime_s"], name),
            held=held,
            held_rows=map(_held, held),
            progress_after=held[0]["seq"] - 1
            if any(each["progress"] is not None for each in held)
            else None,
            links={
                "bindings": links("events", row["events"], NAMES)
                | links("masks", row["masks"], NAMES),
                "consumers": links("consumers", row["consumer_ids"], NAMES),
                "unacked": links("unacked", [each["seq"] for each in held], HELD),
                "messages": links("messages", [each.seq for each, _ in messages], MESSAGES),
            },
            figures=FIGURES,
            fields=POLICY,
            values=policy_values(row["policy"]) | typed,
            typed="retries" in typed,
            reason=reason,
            scheduled=scheduled,
            messages=[*starmap(_message, messages)],
            causes=causes,
            looked=looked,
        )

    async def _connection(self, request: Request, session: PageSession) -> Response:
        number = _whole_number(request, "number")
        words = "connections", f"--after={number - 1}", "--limit=1"
        found = await session.client.stats(*words) if number else []
        if not found or found[0]["id"] != number:
            asked = _parameter(request, "number")
            return await self._failed(404, f"There is no connection {asked}.", session)
        words = "consumers", str(number), f"--limit={NAMES}"
        last = _parameter(request, "consumers")
        consumers = await session.client.stats(*words, *([f"--after={last}"] if last else ()))
        here, ids = tables.connection_link(number), [each["id"] for each in consumers]
        return await self._shown(
            "connection.html",
            session,
            connection=found[0] | {"mark": mark(self._history, "connections", found[0])},
            columns=tables.CONNECTIONS.columns,
            consumers=consumers,
            now=time(),
            links=_links(request, here, "consumers", ids, NAMES),
        )

    async def _schedule(self, request: Request, session: PageSession) -> Response:
        name = _parameter(request, "name")
        for row in await rows_of(session.client, "schedules"):
            if row["name"] == name:
                row["mark"] = mark(self._history, "schedules", row)
                columns = tables.SCHEDULES.columns
                return await self._shown("schedule.html", session, schedule=row, columns=columns)
        return await self._failed(404, f"There is no schedule {printable(name)}.", session)

    async def _batch(self, request: Request, session: PageSession) -> Response:
        name = _parameter(request, "name")
        try:
            row = await session.client.stats("batch", name)
        except RequestFailed:
            if session.notice or session.wrong:  # It has ended by what was just done.
                return RedirectResponse("/batches", status_code=303)
            return await self._failed(404, f"There is no batch {printable(name)}.", session)
        return await self._shown(
            "batch.html", session, batch=row, states=STATES, told=batch_told(row)
        )

    async def _traced(self, request: Request, session: PageSession) -> Response:
        """What became of a message."""
        message_id, steps = _parameter(request, "id"), list[dict[str, Any]]()
        job: JobState | None = None
        if message_id:
            steps = await session.client.stats("message", message_id, f"--limit={STEPS}")
            with suppress(RequestFailed):  # It needs a permission of its own.
                job = await session.client.job(message_id).state()
        before_us = [each["time_us"] for each in (*steps[:1], *steps)]
        told = [
            {
                **each,
                "time": time_text(each["time_us"])[:23].replace("T", " "),
                "after": tables.interval((each["time_us"] - before) / 1e6),
                "told": told_of(each),
            }
            for before, each in zip(before_us, steps, strict=False)
        ]
        return await self._shown(
            "message.html",
            session,
            id=message_id,
            steps=told,
            cut=len(told) == STEPS,
            job=job if job and job.queue else None,
            result=None if job is None or job.data is None else _data(job.data),
            result_cut=0 if job is None else max(0, len(job.data or b"") - DATA_BYTES_MAX),
            traces=await session.client.stats("traces"),
        )

    async def _publish(self, request: Request, session: PageSession) -> Response:
        typed, session.typed = session.typed, {}
        keys = "event", "data", "meta", "delay_s", "ttl_s", "priority", "key", "unique"
        wanted: dict[str, Any] = {key: typed.get(key) or _parameter(request, key) for key in keys}
        wanted["mandatory"] = "mandatory" in typed or "event" not in typed
        return await self._shown("publish.html", session, here="publish", wanted=wanted)

    async def _tail(self, request: Request, session: PageSession) -> Response:
        wanted = {key: _parameter(request, key) for key in ("events", "queue")}
        named = urlencode(wanted, errors="surrogateescape")
        link = f"/tailed?{named}" if any(wanted.values()) else ""
        return await self._shown("tail.html", session, here="tail", wanted=wanted, link=link)

    async def _tailed(self, request: Request, session: PageSession) -> Response:
        if self._tails >= TAILS_MAX:
            return await self._failed(503, "Too many live tails are open.")
        events = self._tail_events(session.client, request)
        return _events(self._sessions.watched(session, events))

    async def _tail_events(self, client: AsyncClient, request: Request) -> AsyncGenerator[bytes]:
        """What comes meanwhile beyond what the broker keeps for a tail, it drops and counts."""
        names, queue = _parameter(request, "events").split(), _parameter(request, "queue") or None
        skipped = 0
        self._tails += 1
        try:
            async with client.tail(*names, queue=queue) as tail:
                yield b"retry: 2000\n\n"
                while True:
                    batch = list[Message]()
                    with suppress(TimeoutError):
                        some = cast(
                            AsyncGenerator[list[Message]], tail.batches(TAIL_READ, TAIL_QUIET_S)
                        )
                        async with aclosing(some):
                            batch = await anext(some, batch)
                    rows = [
                        (printable(each.event), each.id, _text(each.data[:TAIL_BYTES]))
                        for each in batch[-TAIL_ROWS:]
                    ]
                    skipped += len(batch) - len(rows)
                    now = moment(int(time() * 1e6))
                    told = json.dumps(
                        {"time": now, "rows": rows, "dropped": tail.dropped + skipped}
                    )
                    yield f"data: {told}\n\n".encode()
                    await anyio.sleep(TAIL_S)
        except (InvalidRequest, RequestFailed) as failure:
            yield f"event: failed\ndata: {json.dumps(f'{failure}.')}\n\n".encode()
        finally:
            self._tails -= 1

    async def _act(self, request: Request, session: PageSession) -> Response:
        """Ask, and when the answer is yes, do it."""
        form = await _form(request)
        action = ACTIONS.get(key := request.path_params["action"])
        if action is None or not self._may_act or not session.allows(form.pop("csrf", "")):
            return await self._failed(403, "This page does not allow that.", session)
        try:
            action.check(form)
            sure, typed = form.pop("sure", ""), form.pop("typed", "")
            wanted = action.to_type(form)
            if sure != "yes" or printable(typed).strip() != wanted.strip():
                session.typed = {**form}
                about: dict[str, Any] = {"key": key, "button": action.button, "form": form}
                about |= {"question": action.told(action.question, form), "wanted": wanted}
                about |= {"reason": action.reason, "facts": ""}
                if action.facts is not None:
                    about["facts"] = await action.facts(session.client, form)
                if sure:
                    session.wrong = f"That is not {wanted}."
                return await self._shown("ask.html", session, back=action.back(form), **about)
            result = await action.do(session.client, form)
            session.notice, session.typed = action.told(action.done, form, result), {}
        except KeyError as missing:
            return await self._failed(400, f"{missing.args[0]} is missing.", session)
        except (InvalidRequest, RequestFailed) as failure:
            session.wrong, session.typed = f"{failure}.", {**form}
        return RedirectResponse(action.back(form), status_code=303)

    async def _events(self, request: Request, session: PageSession) -> Response:
        if self.live.is_full:
            return await self._failed(503, "Too many pages are open.")
        known = self._tables | {"attention": tables.ATTENTION}
        table = known.get(request.query_params.get("table", ""))
        view = None if table is None else tables.view_of(table, request.query_params)
        events = self.live.watch(view)
        look: Callable[[], Awaitable[tables.Row]] | None = None
        if queue := _parameter(request, "queue"):
            after = _whole_number(request, "after") if "after" in request.query_params else None
            look = partial(self._queue_figures, session.client, queue, after)
        elif batch := _parameter(request, "batch"):
            look = partial(_batch_figures, session.client, batch)
        if look is not None:
            await look()  # Whether the user may look.
            events = _figures(look, "queue" if queue else "batch", events)
        return _events(self._sessions.watched(session, events))

    async def _queue_figures(
        self, client: AsyncClient, queue: str, after: int | None
    ) -> tables.Row:
        """Its figures, and the last point of its chart; of unacked messages behind a number, the
        progress."""
        told = queue_told(self._history, await client.stats("queue", queue, "--limit=1"))
        if after is not None:
            there = f"--after={queue}", f"--then={after}", f"--limit={HELD}"
            told["progress"] = {
                each["seq"]: (each["progress"], printable(each["progress_text"] or ""))
                for each in await client.stats("unacked", queue, *there)
                if each["progress"] is not None
            }
        return told

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._sessions.get(request.cookies.get(COOKIE))  # A browser that keeps it is there.
        if name not in STATIC:
            return await self._failed(404, "There is no such page.")
        response = _secured(Response(self._static[name], media_type=STATIC[name][0]))
        is_named = request.url.query == self._version
        cached = "private, max-age=31536000, immutable" if is_named else "no-cache"
        response.headers["Cache-Control"] = cached
        return response

    async def _shown(
        self,
        template: str,
        session: PageSession | None,
        status: int = 200,
        *,
        here: str = "",
        **values: Any,
    ) -> Response:
        notice = wrong = ""
        if session is not None and template != "failed.html":
            notice, session.notice = session.notice, ""
            wrong, session.wrong = session.wrong, ""
        texts, environment = list[str](), self._environment
        async with self._one_renders:
            if template not in self._compiled:
                await anyio.to_thread.run_sync(self._compile, template)
            pieces = environment.get_template(template).generate(
                session=session,
                notice=notice,
                wrong=wrong,
                may_act=self._may_act,
                here=here,
                views=self._views,
                **values,
            )
            began_s = monotonic()
            for piece in pieces:
                texts.append(piece)
                if monotonic() - began_s > STEP_S:
                    await checkpoint()
                    began_s = monotonic()
        text = "".join(texts).encode("utf-8", "backslashreplace")
        return _secured(HTMLResponse(text, status))

    def _compile(self, template: str) -> None:
        """In a thread: it would hold the loop."""
        assert self._environment.loader is not None
        self._environment.get_template(template)
        source = self._environment.loader.get_source(self._environment, template)[0]
        self._compiled.add(template)
        for name in {*USED.findall(source)} - self._compiled:
            self._compile(name)

    async def _failed(
        self, status: int, reason: str, session: PageSession | None = None
    ) -> Response:
        return await self._shown("failed.html", session, status, reason=reason)


async def _figures(
    look: Callable[[], Awaitable[tables.Row]], what: str, events: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """With each event the figures of what a page is about, until that is gone: who asks for it
    then would make the server count errors."""
    is_there = True
    async with aclosing(events):
        async for event in events:
            yield event
            if not is_there:
                continue
            try:
                told = json.dumps(await look())
                yield f"event: {what}\ndata: {told}\n\n".encode()
            except RequestFailed:
                is_there = False
                yield b"event: gone\ndata: 0\n\n"


async def _batch_figures(client: AsyncClient, batch: str) -> tables.Row:
    return batch_told(await client.stats("batch", batch))


def _secured(response: Response) -> Response:
    response.headers.update(SECURITY)
    return response


def _set_cookie(request: Request, response: Response, token: str) -> Response:
    with_tls = request.url.scheme == "https"
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=with_tls)
    return response


async def _form(request: Request) -> dict[str, str]:
    """Fields of a form, of a bounded size."""
    body = b""
    async for some in request.stream():
        body += some
        if len(body) > FORM_BYTES_MAX or body.count(b"&") > FORM_FIELDS_MAX:
            return {}
    return dict(parse_qsl(body.decode("ascii", "replace"), errors="surrogateescape"))


def _parameter(request: Request, key: str) -> str:
    pairs = parse_qsl(request.url.query, errors="surrogateescape")
    return next((value for name, value in pairs if name == key), "")


def _whole_number(request: Request, key: str) -> int:
    """A parameter; 0 for what is none."""
    asked = _parameter(request, key)
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 19 else 0


def _links(
    request: Request, here: str, key: str, shown: Sequence[str | int], most: int
) -> dict[str, str]:
    """Where the start of a list and what follows this part of it are, if it is elsewhere; `key` is
    what the parameter and the place on the page are called."""
    links = {}
    if _parameter(request, key):
        links[f"First {key}"] = f"{here}#{key}"
    if len(shown) == most:
        links[f"Next {key}"] = f"{here}&{key}={tables.quoted(str(shown[-1]))}#{key}"
    return links


async def _consumers(client: AsyncClient, queue: tables.Row, after: str) -> list[tables.Row]:
    """Those of a queue that are listed, in their order, with what they hold."""
    words = "consumers_of", queue["name"], f"--limit={NAMES}", *([f"--after={after}"] * bool(after))
    known = {each["id"]: each for each in await client.stats(*words)}
    nothing = {"client": None, "address": None, "unacked": None, "oldest_age_s": None}
    ids = queue["consumer_ids"]
    return [known.get(each, {**nothing, "id": each}) for each in ids]


def _held(row: tables.Row) -> Mapping[str, Any]:
    """An unacked message; one that is acked meanwhile has no time."""
    delivered_us = row["delivered_us"]
    if delivered_us is None:
        return {**row, "delivered": "", "held": ""}
    age_s = max(0.0, time() - delivered_us / 1e6)
    return {**row, "delivered": moment(delivered_us), "held": tables.duration(age_s)}


def _message(message: PeekedMessage, data_bytes: int) -> Mapping[str, Any]:
    """A message whose data are shortened, and how many there were."""
    cut = max(0, data_bytes - DATA_BYTES_MAX)
    told = {"copy_link": _copy_link(message), "data": _data(message.data), "cut": cut}
    return {**message._asdict(), **told}


async def _causes(client: AsyncClient, queue: str) -> tuple[list[Mapping[str, Any]], int]:
    """The first dead letters of a queue counted by cause, the most frequent first; and how many
    messages were looked at."""
    counts, looked, size, last = Counter[tuple[str, str, str]](), 0, 0, 0
    while looked < DEAD_LETTERS_COUNTED_MAX and size < DEAD_LETTERS_BYTES_MAX:
        some = await client.peek(queue, after=last, limit=MESSAGES)
        counts.update(group_of(each.dead_letter._asdict()) for each in some if each.dead_letter)
        looked += len(some)
        if len(some) < MESSAGES:
            break
        size, last = size + sum(len(each.data) for each in some), some[-1].seq
    keys = "queue", "reason", "why"
    found = ((count, dict(zip(keys, key, strict=True))) for key, count in counts.most_common())
    return [
        {"count": count, **where, "where": urlencode(where, errors="surrogateescape")}
        for count, where in islice(found, NAMES)
    ], looked


def _copy_link(message: PeekedMessage) -> str:
    """The form to publish a copy with; none for data that a form cannot hold."""
    if len(message.data) > DATA_BYTES_MAX or b"\r" in message.data or b"\0" in message.data:
        return ""
    try:
        text = message.text
    except UnicodeDecodeError:
        return ""
    pairs = {"event": message.event, "data": text, "meta": urlencode(message.meta)}
    pairs |= {"priority": str(message.priority or ""), "key": message.key or ""}
    return "/publish?" + urlencode(pairs, errors="surrogateescape", quote_via=quote)


def _data(data: bytes) -> str:
    """JSON laid out unless that is long, text as it is, anything else as bytes in Python's
    notation."""
    if len(data) <= DATA_BYTES_MAX:
        with suppress(ValueError, RecursionError):
            pieces, characters = list[str](), 0
            for piece in LAYOUT.iterencode(json.loads(data)):
                pieces.append(piece)
                characters += len(piece)
                if characters > LAID_OUT_CHARACTERS_MAX:
                    break
            else:
                return "".join(pieces)
    return _text(data[:DATA_BYTES_MAX])


def _text(data: bytes) -> str:
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return repr(data)
