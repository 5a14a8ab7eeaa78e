"""What people do on the page. Each action asks first, and reports afterwards how many messages it
was.

The one rule: an action is requests of the protocol, sent with the permissions of the user.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.errors import InvalidRequest, RequestFailed
from mqks.client.requests import PolicyKeywords
from mqks.inspection.text import printable
from mqks.page.tables import batch_link, queue_link, quoted, schedule_link, setting
from mqks.protocol.requests import POLICY

Form = Mapping[str, str]
PUBLISHES: Final[Mapping[str, bool | Literal["wait"]]] = {
    "publishes": True,
    "publishes, which wait": "wait",
}
BINDINGS: Final = 1000
"""Looked at to say whether anybody gets a message."""


@dataclass(frozen=True, slots=True)
class PageAction:
    """In its texts, what is in braces is a field of the form, or of `told`."""

    button: str
    question: str
    do: Callable[[AsyncClient, Form], Awaitable[object]]
    done: str
    """For people; `result` is what `do` has returned, a number of messages or text."""
    back: Callable[[Form], str]
    """Where to go afterwards."""
    check: Callable[[Form], object] = lambda form: None
    """Raises InvalidRequest for fields that are wrong, before it asks."""
    typed: str = ""
    """The field whose value is typed once more before all of something is destroyed."""
    reason: str = ""
    """What the field of the reason is called that is asked for with the question."""
    facts: Callable[[AsyncClient, Form], Awaitable[str]] | None = None
    """What follows the question: what there is of what would go."""
    kind: str = "ready"
    """What it does to all messages of this kind unless some are selected."""

    def told(self, text: str, form: Form, result: object = None) -> str:
        """One of its texts. Raises KeyError for a field that the form lacks."""
        if isinstance(result, int):
            result = f"{result:,} {'message' if result == 1 else 'messages'}"
        fields = {key: printable(value) for key, value in form.items()}
        fields |= {"which": _one_or_all(form, self.kind), "result": str(result)}
        fields["also"] = ", and every scheduled one" if "scheduled" in form else ""
        return text.format_map(fields)

    def to_type(self, form: Form) -> str:
        return printable(form[self.typed]) if self.typed and not form.get("id") else ""


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
    if unique := form.get("unique", ""):
        terms["unique"] = requests.Unique.parse(unique)
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
    if given.duplicate_of is not None:
        return f"Not published: {printable(given.duplicate_of)} has its key, and waits."
    if given.replaced is not None:
        return f"Published as {printable(given)}, in place of {printable(given.replaced)}."
    return f"Published as {printable(given)}.{nobody}"


def _choice(form: Form) -> dict[str, Any]:
    if form.get("id"):
        return {"id": form["id"]}
    return {"where": where} if (where := _pairs(form, "where")) else {}


def _policy(form: Form) -> PolicyKeywords:
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


CANCELLED: Final = {
    "cancelled": "Message {id} is cancelled.",
    "told": "The consumer of message {id} was told: what it does next decides.",
    "held": "A consumer holds message {id} and was not told: it is not cancellable, or does not "
    "read its replies.",
    "none": "Message {id} is not there any more.",
}
"""By the confirm of `cancel_job`."""


async def _cancel_job(client: AsyncClient, form: Form) -> str:
    reason = form.get("reason", "") or None
    told = await client.cancel_job(form["queue"], form["id"], reason=reason)
    return CANCELLED[told].format(id=printable(form["id"]))


async def _close_batch(client: AsyncClient, form: Form) -> str:
    name, discard = form["batch"], "discard" in form
    if not await client.close_batch(name, discard=discard):
        return f"There is no batch {printable(name)} any more."
    return f"The batch {printable(name)} is {'forgotten' if discard else 'closed'}."


async def _queue_facts(client: AsyncClient, form: Form) -> str:
    row = await client.stats("queue", form["queue"], "--limit=1")
    ready, unacked, scheduled, consumers = (
        f"{row[key]:,}" for key in ("ready", "unacked", "scheduled", "consumers")
    )
    return (
        f"It has {ready} ready, {unacked} unacked and {scheduled} scheduled messages, and "
        f"{consumers} {'consumer' if consumers == '1' else 'consumers'}."
    )


def _to_connection(form: Form) -> str:
    return f"/connection?number={quoted(form['connection'])}"


def _back(form: Form) -> str:
    return form.get("back") or "/message"


def _to_schedule(form: Form) -> str:
    return schedule_link(form["schedule"])


ACTIONS: Final = {
    "publish": PageAction(
        "Publish",
        "Publish a message with the event {event}?",
        _publish,
        "{result}",
        lambda form: form.get("back") or "/publish",
        _terms,
    ),
    "purge": PageAction(
        "Purge",
        "Delete {which} of {queue}{also}?",
        lambda client, form: client.purge(
            form["queue"], **_choice(form) or {"scheduled": "scheduled" in form}
        ),
        "{result} purged.",
        _to_queue,
        typed="queue",
    ),
    "delete": PageAction(
        "Delete queue",
        "Delete the queue {queue} with all its messages and bindings?",
        lambda client, form: client.delete_queue(form["queue"], if_exists=True),
        "Queue {queue} deleted.",
        lambda form: "/queues",
        typed="queue",
        facts=_queue_facts,
    ),
    "rename": PageAction(
        "Rename",
        "Rename {queue} to {to}? Messages, bindings, policy and consumers stay.",
        lambda client, form: client.rename_queue(form["queue"], form["to"]),
        "{queue} is {to} now.",
        lambda form: queue_link(form["to"]),
        lambda form: requests.name(form["to"]),
    ),
    "policy": PageAction(
        "Change policy",
        "Change the policy of {queue}?",
        lambda client, form: client.set_queue(form["queue"], **_policy(form)),
        "Policy of {queue} changed.",
        _to_queue,
        lambda form: requests.set_queue(form["queue"], _policy(form)),
    ),
    "move": PageAction(
        "Move",
        "Move {which} of {queue} to {to}?",
        lambda client, form: client.move(form["queue"], form["to"], **_choice(form)),
        "{result} moved to {to}.",
        _to_queue,
    ),
    "redrive": PageAction(
        "Retry",
        "Retry {which} of {queue}, back where they died?",
        lambda client, form: client.redrive(form["queue"], **_choice(form)),
        "{result} returned.",
        _to_queue,
        kind="dead",
    ),
    "promote": PageAction(
        "Deliver now",
        "Make {which} of {queue} ready now?",
        lambda client, form: client.promote(form["queue"], form.get("id") or None),
        "{result} promoted.",
        _to_queue,
        kind="scheduled",
    ),
    "cancel": PageAction(
        "Delete scheduled",
        "Delete {which} of {queue}?",
        lambda client, form: client.cancel(form["queue"], form.get("id") or None),
        "{result} cancelled.",
        _to_queue,
        typed="queue",
        kind="scheduled",
    ),
    "cancel_job": PageAction(
        "Cancel message",
        "Cancel message {id} of {queue}? One that waits is removed; of one that is held, the "
        "consumer is told.",
        _cancel_job,
        "{result}",
        lambda form: form.get("back") or _to_queue(form),
        lambda form: requests.flags("cancel_job", {"reason": form.get("reason") or None}),
        reason="Reason, if any",
    ),
    "close_batch": PageAction(
        "Close batch",
        "Close the batch {batch}? It ends when all of its messages are done.",
        _close_batch,
        "{result}",
        lambda form: batch_link(form["batch"]),
    ),
    "discard_batch": PageAction(
        "Forget batch",
        "Forget the batch {batch}? Its messages stay, and nothing follows it.",
        _close_batch,
        "{result}",
        lambda form: "/batches",
        typed="batch",
    ),
    "close": PageAction(
        "Close connection",
        "Close connection {connection}? Its unacked messages return to their queues.",
        _close,
        "{result}",
        lambda form: "/connections",
    ),
    "detach": PageAction(
        "End consumer",
        "End the consumer {consumer}? Its unacked messages return to their queue, and its client "
        "is told.",
        lambda client, form: client.request(
            "delete_consumer", "--confirm", form["consumer"], "--tell"
        ),
        "Consumer {consumer} ended.",
        _to_connection,
    ),
    "requeue": PageAction(
        "Give to others",
        "Move all unacked messages of the consumer {consumer} to the end of their queue? It gets "
        "none for 10 seconds, so that others do.",
        lambda client, form: client.request(
            "reject", "--confirm", form["consumer"], "--all", "--pause=10"
        ),
        "The messages of {consumer} are in their queue.",
        _to_connection,
    ),
    "pause_queue": PageAction(
        "Pause",
        "Pause {what} of {queue}? Consumers stay attached, archives wait.",
        lambda client, form: client.pause(
            form["queue"],
            for_s=_number(form, "for_s"),
            deliveries=form["what"] == "deliveries",
            publishes=PUBLISHES.get(form["what"], False),
        ),
        "{queue} is paused.",
        _to_queue,
        lambda form: requests.flags("pause", {"for_s": _number(form, "for_s")}),
    ),
    "resume_queue": PageAction(
        "Resume",
        "Resume {queue}?",
        lambda client, form: client.resume(form["queue"]),
        "{queue} is resumed.",
        _to_queue,
    ),
    "trace": PageAction(
        "Trace",
        "Note what becomes of {name} for 10 minutes?",
        lambda client, form: client.trace(form["name"]),
        "{name} is traced.",
        _back,
    ),
    "untrace": PageAction(
        "End trace",
        "End the trace of {name}?",
        lambda client, form: client.end_trace(form["name"]),
        "{name} is not traced any more.",
        _back,
    ),
    "pause": PageAction(
        "Pause",
        "Pause the schedule {schedule}?",
        lambda client, form: client.pause_schedule(form["schedule"]),
        "Paused.",
        _to_schedule,
    ),
    "resume": PageAction(
        "Resume",
        "Resume the schedule {schedule}?",
        lambda client, form: client.resume_schedule(form["schedule"]),
        "Resumed.",
        _to_schedule,
    ),
    "run": PageAction(
        "Run now",
        "Publish the message of the schedule {schedule} now?",
        lambda client, form: client.run_schedule(form["schedule"]),
        "Published.",
        _to_schedule,
    ),
    "unschedule": PageAction(
        "Remove schedule",
        "Remove the schedule {schedule}? What it has published stays.",
        lambda client, form: client.unschedule(form["schedule"]),
        "Removed the schedule {schedule}.",
        lambda form: "/schedules",
        typed="schedule",
    ),
}
