"""The routes of the page.

The one rule: nothing is shown before the guard has let the request in: a session, and for every
change a token that only our own forms know.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from time import time
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import anyio
from anyio.abc import TaskStatus
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from mqks.client.async_client import AsyncClient
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    InvalidRequest,
    RequestFailed,
)
from mqks.client.messages import Peeked
from mqks.inspection.text import time_text
from mqks.page import tables
from mqks.page.actions import ACTIONS, POLICY_FIELDS, policy_values
from mqks.page.limits import NEEDS, rows
from mqks.page.live import RATES, ROWS_MAX, Derived, Live, rows_of
from mqks.page.overview import GROUPS, numbers
from mqks.page.sessions import COOKIE, Opener, Session, Sessions, refusal

SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
STATIC: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "uplot.min.css": "text/css",
    "uplot.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
FORM_BYTES_MAX: Final = 64 * 1024
HELD_LIMIT: Final = "--limit=100"
"""Unacked messages of a queue on its page."""
MESSAGES: Final = 20
"""Messages of a queue on one page."""
DATA_BYTES_MAX: Final = 4096
"""Shown of the data of one message."""

Handler = Callable[[Request, Session], Awaitable[Response]]


class Page:
    """`open_stream` connects to the broker. `users` returns names and permissions; None: there are
    no users. `limits` are the values of the settings. With `may_act` the page offers what its users
    may do; otherwise it only shows."""

    def __init__(
        self,
        open_stream: Opener,
        *,
        users: Callable[[], Sequence[tables.Row]] | None,
        limits: Mapping[str, Any],
        may_act: bool,
    ) -> None:
        self._may_act = may_act
        self._sessions = Sessions(open_stream, with_users=users is not None)
        derived = {"limits": Derived(NEEDS, partial(rows, limits))}
        if users is not None:
            derived["users"] = Derived(frozenset(), lambda sample: users())
        self._tables = {
            key: table for key, table in tables.TABLES.items() if users or key != "users"
        }
        self.live = Live(self._watching, derived)
        self._environment = Environment(
            loader=PackageLoader("mqks.page"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters["plain"] = tables.text
        self._environment.filters["duration"] = tables.duration
        self._environment.globals.update(
            cell=tables.cell,
            connection_link=tables.connection_link,
            queue_link=tables.queue_link,
        )
        root = files("mqks.page") / "static"
        self._static = {name: (root / name).read_bytes() for name in STATIC}

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[AsyncClient]:
        async with self._sessions.client(trusted=True) as client:
            yield client

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
            Route("/publish", self._guarded(self._publish)),
            Route("/do/{action}", self._guarded(self._act), methods=["POST"]),
            Route("/events", self._guarded(self._events)),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{name}", self._file),
        ]

    # -- who may

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if refused := self._foreign(request):
                return refused
            session = self._sessions.get(request.cookies.get(COOKIE))
            token = None
            try:
                if session is None and not self._sessions.with_users:
                    token = await self._sessions.begin()
                    session = self._sessions.get(token)
                if session is None:
                    return _secured(RedirectResponse("/login", status_code=303))
                response = _secured(await handler(request, session))
            except AuthenticationFailed:
                # The user was removed, or has another password now.
                self._sessions.end(request.cookies.get(COOKIE, ""))
                return _secured(RedirectResponse("/login", status_code=303))
            except RequestFailed as failure:
                return self._failed(403, str(failure), session)
            except ClientError as failure:
                return self._failed(503, str(failure), session)
            if token is not None:
                _set_cookie(request, response, token)
            return response

        return guarded

    def _foreign(self, request: Request) -> Response | None:
        """An answer for who asks from another site."""
        if request.method == "POST" and not _is_own(request.headers):
            return self._failed(403, "This request came from another site.")
        return None

    async def _login(self, request: Request) -> Response:
        if refused := self._foreign(request):
            return refused
        if not self._sessions.with_users:
            return _secured(RedirectResponse("/", status_code=303))
        if request.method == "GET":
            return self._shown("login.html", None, reason="")
        form = await _form(request)
        name, password, token = (form.get(key, "") for key in ("name", "password", "token"))
        credentials = (token,) if token else (name, password)
        if not all(credentials):
            return self._shown("login.html", None, 400, reason="Enter a name and a password.")
        try:
            cookie = await self._sessions.begin(credentials)
        except ClientError as failure:
            return self._shown("login.html", None, 403, reason=refusal(failure))
        response = _secured(RedirectResponse("/", status_code=303))
        return _set_cookie(request, response, cookie)

    async def _logout(self, request: Request) -> Response:
        if refused := self._foreign(request):
            return refused
        token = request.cookies.get(COOKIE, "")
        session, form = self._sessions.get(token), await _form(request)
        if session is not None and session.allows(form.get("csrf", "")):
            self._sessions.end(token)
        response = _secured(RedirectResponse("/login", status_code=303))
        response.delete_cookie(COOKIE)
        return response

    # -- views

    async def _overview(self, request: Request, session: Session) -> Response:
        sample = await self.live.sample(session.client, set())
        return self._shown(
            "overview.html",
            session,
            here="overview",
            groups=GROUPS,
            numbers=numbers(sample),
            history=json.dumps([*self.live.history]),
            rates=RATES,
            totals=sample["totals"],
            journal=sample["journal"],
        )

    def _table_of(self, table: tables.Table) -> Handler:
        async def handler(request: Request, session: Session) -> Response:
            view = tables.view_of(table, request.query_params)
            sample = await self.live.sample(session.client, {table.key})
            return self._shown(
                "table.html",
                session,
                here=table.key,
                table=table,
                view=view,
                shown=tables.shown(table, view, sample[table.key]),
                page_rows=tables.PAGE_ROWS,
                is_cut=len(sample[table.key]) >= ROWS_MAX,
            )

        return handler

    async def _queue(self, request: Request, session: Session) -> Response:
        # Bytes that are not UTF-8 come back as they went into the link.
        name = _parameter(request, "name")
        row = json.loads(await session.client.request("stats", "queue", name))
        after = request.query_params.get("after", "")
        held = json.loads(await session.client.request("stats", "unacked", name, HELD_LIMIT))
        messages, reason = [], ""
        try:
            messages = await session.client.peek(
                name,
                after=int(after) if after.isdigit() and len(after) < 19 else 0,
                limit=MESSAGES,
                scheduled="scheduled" in request.query_params,
            )
        except RequestFailed:
            reason = "You may not read the messages of this queue."
        return self._shown(
            "queue.html",
            session,
            queue=row,
            held=[*map(_held, held)],
            fields=POLICY_FIELDS,
            values=policy_values(row["policy"]),
            reason=reason,
            scheduled="scheduled" in request.query_params,
            messages=[_message(each) for each in messages],
            has_dead=any(each.letter for each in messages),
            is_full=len(messages) == MESSAGES,
            last=messages[-1].seq if messages else 0,
        )

    async def _connection(self, request: Request, session: Session) -> Response:
        asked = request.query_params.get("number", "")
        number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 19 else 0
        words = "connections", f"--after={number - 1}", "--limit=1"
        found = json.loads(await session.client.request("stats", *words)) if number else []
        if not found or found[0]["id"] != number:
            return self._failed(404, f"There is no connection {asked}.", session)
        consumers = await rows_of(session.client, "consumers") if found[0]["consumers"] else []
        return self._shown(
            "connection.html",
            session,
            connection=found[0],
            columns=tables.CONNECTIONS.columns[1:],
            consumers=[each for each in consumers if each["connection"] == number],
        )

    async def _publish(self, request: Request, session: Session) -> Response:
        wanted = {key: _parameter(request, key) for key in ("event", "data", "meta")}
        return self._shown("publish.html", session, here="publish", wanted=wanted)

    async def _act(self, request: Request, session: Session) -> Response:
        """Ask, and when the answer is yes, do it."""
        form = await _form(request)
        action = ACTIONS.get(request.path_params["action"])
        if action is None or not self._may_act or not session.allows(form.pop("csrf", "")):
            return self._failed(403, "This page does not allow that.", session)
        try:
            if form.pop("sure", "") != "yes":
                question = action.question(form)
                back = action.back(form)
                return self._shown(
                    "ask.html", session, action=action, question=question, form=form, back=back
                )
            session.notice = await action.do(session.client, form)
        except KeyError as missing:
            return self._failed(400, f"{missing.args[0]} is missing.", session)
        except InvalidRequest as failure:
            return self._failed(400, f"{failure}.", session)
        return RedirectResponse(action.back(form), status_code=303)

    async def _events(self, request: Request, session: Session) -> Response:
        if self.live.is_full:
            return self._failed(503, "Too many pages are open.")
        table = self._tables.get(request.query_params.get("table", ""))
        view = None if table is None else tables.view_of(table, request.query_params)
        return StreamingResponse(
            self.live.watch(view, partial(self._sessions.may_look, session)),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return self._failed(404, "There is no such page.")
        response = _secured(Response(self._static[name], media_type=STATIC[name]))
        response.headers["Cache-Control"] = "no-cache"
        return response

    def _shown(
        self,
        template: str,
        session: Session | None,
        status: int = 200,
        *,
        here: str = "",
        **values: Any,
    ) -> Response:
        notice = ""
        if session is not None and template != "failed.html":
            notice, session.notice = session.notice, ""
        text = self._environment.get_template(template).render(
            session=session,
            notice=notice,
            may_act=self._may_act,
            here=here,
            tables=self._tables.values(),
            **values,
        )
        return _secured(HTMLResponse(text.encode("utf-8", "backslashreplace"), status))

    def _failed(self, status: int, reason: str, session: Session | None = None) -> Response:
        return self._shown("failed.html", session, status, reason=reason)


def _secured(response: Response) -> Response:
    response.headers.update(SECURITY)
    return response


def _set_cookie(request: Request, response: Response, token: str) -> Response:
    with_tls = request.url.scheme == "https"
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=with_tls)
    return response


def _is_own(headers: Headers) -> bool:
    """Whether a form came from this page. Behind a proxy only the browser knows the host name that
    both have."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == headers.get("host")


async def _form(request: Request) -> dict[str, str]:
    """Fields of a form, of a bounded size."""
    body = b""
    async for some in request.stream():
        body += some
        if len(body) > FORM_BYTES_MAX:
            return {}
    return dict(parse_qsl(body.decode("ascii", "replace"), errors="surrogateescape"))


def _parameter(request: Request, key: str) -> str:
    pairs = parse_qsl(request.url.query, errors="surrogateescape")
    return next((value for name, value in pairs if name == key), "")


def _held(row: tables.Row) -> Mapping[str, Any]:
    """An unacked message; one that is acked meanwhile has no time."""
    delivered_us = row["delivered_us"]
    if delivered_us is None:
        return {**row, "delivered": "", "held": ""}
    age_s = max(0.0, time() - delivered_us / 1e6)
    delivered = time_text(delivered_us)[:19].replace("T", " ")
    return {**row, "delivered": delivered, "held": tables.duration(age_s)}


def _message(message: Peeked) -> Mapping[str, Any]:
    letter = message.letter
    return {
        "seq": message.seq,
        "id": message.id,
        "event": message.event,
        "time": time_text(int(message.time * 1e6))[:19].replace("T", " "),
        "due": None if message.due is None else time_text(int(message.due * 1e6))[:19],
        "retry": message.retry,
        "meta": message.meta,
        "letter": None if letter is None else letter._asdict(),
        "data": _data(message.data),
        "copy_link": _copy_link(message),
        "cut": max(0, len(message.data) - DATA_BYTES_MAX),
    }


def _copy_link(message: Peeked) -> str:
    """The form to publish a copy with; none for data that a form cannot hold."""
    if len(message.data) > DATA_BYTES_MAX:
        return ""
    pairs = {"event": message.event, "data": message.data, "meta": urlencode(message.meta)}
    return "/publish?" + urlencode(pairs, errors="surrogateescape", quote_via=quote)


def _data(data: bytes) -> str:
    """JSON laid out, text as it is, anything else as bytes in Python's notation."""
    if len(data) <= DATA_BYTES_MAX:
        try:
            return json.dumps(json.loads(data), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    some = data[:DATA_BYTES_MAX]
    try:
        return tables.text(some.decode())
    except UnicodeDecodeError:
        return repr(some)
