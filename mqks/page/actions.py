"""What people do on the page. Each action asks first, and reports afterwards how many messages it
was.

The one rule: an action is requests of the protocol, sent with the permissions of the user.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.errors import InvalidRequest, RequestFailed
from mqks.client.requests import Policy
from mqks.inspection.text import printable
from mqks.page.tables import queue_link, schedule_link, setting
from mqks.protocol.requests import POLICY

Form = Mapping[str, str]
BINDINGS: Final = 1000
"""Looked at to say whether anybody gets a message."""


@dataclass(frozen=True, slots=True)
class Action:
    key: str
    button: str
    question: Callable[[Form], str]
    do: Callable[[AsyncClient, Form], Awaitable[str]]
    """Returns what was done, for people."""
    back: Callable[[Form], str]
    """Where to go afterwards."""
    check: Callable[[Form], object] = lambda form: None
    """Raises InvalidRequest for fields that are wrong, before it asks."""


def _messages(count: int, verb: str) -> str:
    return f"{count:,} {'message' if count == 1 else 'messages'} {verb}."


def _queue(form: Form) -> str:
    return printable(form["queue"])


def _one_or_all(form: Form, what: str) -> str:
    if form.get("id"):
        return f"message {printable(form['id'])}"
    where = ", ".join(f"{key} {value or '(none)'}" for key, value in _pairs(form, "where").items())
    return f"all {what} messages" + (f" with {printable(where)}" if where else "")


def _pairs(form: Form, key: str) -> dict[str, str]:
    text = form.get(key, "")
    return dict(parse_qsl(text, keep_blank_values=True, errors="surrogateescape"))


def _to_queue(form: Form) -> str:
    return queue_link(form["queue"])


def _number(form: Form, key: str) -> float | None:
    value = form.get(key, "").strip()
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise InvalidRequest(f"{key}: {value!r} is not a number") from None


def _terms(form: Form) -> dict[str, Any]:
    requests.name(form["event"])
    terms: dict[str, Any] = {}
    for key in ("delay_s", "ttl_s", "priority"):
        if (value := _number(form, key)) is not None:
            terms[key] = value
    if (priority := terms.get("priority")) is not None:
        if priority != int(priority):
            raise InvalidRequest(f"priority: {priority} is not a whole number")
        terms["priority"] = int(priority)
    if key := form.get("key", ""):
        terms["key"] = key
    if meta := _pairs(form, "meta"):
        terms["meta"] = meta
    requests.flags("publish", terms)
    return terms


async def _publish(client: AsyncClient, form: Form) -> str:
    terms = _terms(form)
    data = form.get("data", "").replace("\r\n", "\n")  # Browsers send line ends as CR LF.
    mandatory = "mandatory" in form
    given = await client.publish(form["event"], data, confirm=True, mandatory=mandatory, **terms)
    nobody = ""
    with suppress(RequestFailed):  # Who may publish need not see the bindings.
        bound = await client.stats("bindings", form["event"], f"--limit={BINDINGS}")
        if len(bound) < BINDINGS and not any(each["exists"] for each in bound):
            nobody = " No queue is bound to the event: nobody gets the message."
    return f"Published as {printable(given)}.{nobody}"


async def _purge(client: AsyncClient, form: Form) -> str:
    choice = _choice(form) or {"scheduled": "scheduled" in form}
    return _messages(await client.purge(form["queue"], **choice), "purged")


async def _delete(client: AsyncClient, form: Form) -> str:
    await client.delete_queue(form["queue"], if_exists=True)
    return f"Queue {_queue(form)} deleted."


async def _move(client: AsyncClient, form: Form) -> str:
    count = await client.move(form["queue"], form["to"], **_choice(form))
    return _messages(count, f"moved to {printable(form['to'])}")


async def _redrive(client: AsyncClient, form: Form) -> str:
    return _messages(await client.redrive(form["queue"], **_choice(form)), "redriven")


def _choice(form: Form) -> dict[str, Any]:
    if form.get("id"):
        return {"id": form["id"]}
    return {"where": where} if (where := _pairs(form, "where")) else {}


async def _promote(client: AsyncClient, form: Form) -> str:
    return _messages(await client.promote(form["queue"], form.get("id") or None), "promoted")


async def _cancel(client: AsyncClient, form: Form) -> str:
    return _messages(await client.cancel(form["queue"], form.get("id") or None), "cancelled")


async def _set_policy(client: AsyncClient, form: Form) -> str:
    await client.set_queue(form["queue"], **_policy(form))
    return f"Policy of {_queue(form)} changed."


def _policy(form: Form) -> Policy:
    given = {each.name: _trimmed(form.get(each.name, "")) or None for each in POLICY}
    return requests.policy(given)


def _trimmed(value: str) -> str:
    """People write a space behind a comma."""
    return ",".join(map(str.strip, value.split(",")))


def policy_values(policy: Mapping[str, Any]) -> dict[str, str]:
    """The form's values: what `set_queue` has set, empty where the server's default counts."""
    return {
        each.name: setting(told["value"])
        if (told := policy.get(each.name)) and told["from"] == "set_queue"
        else ""
        for each in POLICY
    }


async def _close(client: AsyncClient, form: Form) -> str:
    number = form["connection"]
    count = await client.request("close_connection", "--confirm", number)
    return f"Connection {printable(number)} closed." if count != "0" else "It was closed already."


def _schedule(form: Form) -> str:
    return f"schedule {printable(form['schedule'])}"


def _to_schedule(form: Form) -> str:
    return schedule_link(form["schedule"])


async def _pause(client: AsyncClient, form: Form) -> str:
    await client.pause_schedule(form["schedule"])
    return "Paused."


async def _resume(client: AsyncClient, form: Form) -> str:
    await client.resume_schedule(form["schedule"])
    return "Resumed."


async def _run(client: AsyncClient, form: Form) -> str:
    await client.run_schedule(form["schedule"])
    return "Published."


async def _unschedule(client: AsyncClient, form: Form) -> str:
    await client.unschedule(form["schedule"])
    return f"Removed the {_schedule(form)}."


ACTIONS: Final = {
    each.key: each
    for each in (
        Action(
            "publish",
            "Publish",
            lambda form: f"Publish a message with the event {printable(form['event'])}?",
            _publish,
            lambda form: form.get("back") or "/publish",
            _terms,
        ),
        Action(
            "purge",
            "Purge",
            lambda form: (
                f"Delete {_one_or_all(form, 'ready')} of {_queue(form)}"
                f"{', and every scheduled one' if 'scheduled' in form else ''}?"
            ),
            _purge,
            _to_queue,
        ),
        Action(
            "delete",
            "Delete queue",
            lambda form: f"Delete the queue {_queue(form)} with all its messages and bindings?",
            _delete,
            lambda form: "/queues",
        ),
        Action(
            "policy",
            "Change policy",
            lambda form: f"Change the policy of {_queue(form)}?",
            _set_policy,
            _to_queue,
            lambda form: requests.set_queue(form["queue"], _policy(form)),
        ),
        Action(
            "move",
            "Move",
            lambda form: (
                f"Move {_one_or_all(form, 'ready')} of {_queue(form)} to {printable(form['to'])}?"
            ),
            _move,
            _to_queue,
        ),
        Action(
            "redrive",
            "Retry",
            lambda form: (
                f"Move {_one_or_all(form, 'dead')} of {_queue(form)} back to where they died?"
            ),
            _redrive,
            _to_queue,
        ),
        Action(
            "promote",
            "Deliver now",
            lambda form: f"Make {_one_or_all(form, 'scheduled')} of {_queue(form)} ready now?",
            _promote,
            _to_queue,
        ),
        Action(
            "cancel",
            "Cancel",
            lambda form: f"Delete {_one_or_all(form, 'scheduled')} of {_queue(form)}?",
            _cancel,
            _to_queue,
        ),
        Action(
            "close",
            "Close connection",
            lambda form: (
                f"Close connection {printable(form['connection'])}? Its unacked messages "
                "return to their queues."
            ),
            _close,
            lambda form: "/connections",
        ),
        Action(
            "pause", "Pause", lambda form: f"Pause the {_schedule(form)}?", _pause, _to_schedule
        ),
        Action(
            "resume", "Resume", lambda form: f"Resume the {_schedule(form)}?", _resume, _to_schedule
        ),
        Action(
            "run",
            "Run now",
            lambda form: f"Publish the message of the {_schedule(form)} now?",
            _run,
            _to_schedule,
        ),
        Action(
            "unschedule",
            "Remove schedule",
            lambda form: f"Remove the {_schedule(form)}? What it has published stays.",
            _unschedule,
            lambda form: "/schedules",
        ),
    )
}
