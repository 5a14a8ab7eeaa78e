"""Who may do what, who is asked for credentials, and what those can do who have none."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqks import users_file
from mqks.commands import main
from mqks.errors import BadRequest, ConfigurationError
from mqks.limits import (
    LOGINS_WAITING_MAX,
    LOGINS_WAITING_PER_ADDRESS_MAX,
    MASKED_NAME_BYTES_MAX,
    STRANGER_ERRORS_MAX,
    STRANGER_LINE_BYTES_MAX,
    STRANGER_LINES_MAX,
)
from mqks.pipeline.reader import pattern
from mqks.protocol.masks import EventMasks, bound_matches, check_bound, name_masks
from mqks.protocol.requests import ACTIONS
from mqks.server import gate
from mqks.settings import load
from mqks.users import Permissions, User, Users, hash_password, hash_token, parse
from tests.kit.bare import BareWorld
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

ERROR = re.compile(rb"(\S+) error [0-9a-f]{24}")
SALT = b"salt"


def quick_hash(password: str) -> str:
    """Of so little cost that a test need not wait for it."""
    digest = hashlib.scrypt(password.encode(), salt=SALT, n=2, r=1, p=1, dklen=32)
    return f"scrypt:2:1:1:{SALT.hex()}:{digest.hex()}"


def user(name: str, **members: Any) -> User:
    """A user whose password is its name, and whose token that with a T."""
    return User(name, quick_hash(name), hash_token(name + "T"), **members)


ROOT = user("root", publish=["**"], consume=["**"], admin=True, eval=True)
WORKER = user("worker", publish=["job.*"], consume=["work-*"], bind=["job.**", "tick"])
NONE = user("none")
WATCHER = user("watcher", monitoring=True)
READER = user("reader", read=["work-*"])


def a_server(directory: Path, *flags: str) -> ServerProcess:
    """Which knows all of them, and asks everybody who it is."""
    users_file.write(directory / "users", [ROOT, WORKER, NONE, WATCHER, READER])
    users = ("--users", str(directory / "users"), "--auth", "always")
    return ServerProcess(directory / "mqks.db", *users, *flags)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with a_server(tmp_path_factory.mktemp("security")) as server:
        yield server


def login(client: LineClient, name: str) -> None:
    assert client.ask(b"in auth --confirm %bT" % name.encode()) == b"in ok "


def reload(server: ServerProcess) -> None:
    """SIGHUP, and wait until the log tells of it."""
    before = server.log.count("event=reloaded")
    server.hang_up()
    until(lambda: server.log.count("event=reloaded") > before)


def is_error(line: bytes) -> bool:
    return ERROR.fullmatch(line) is not None


# --------------------------------------------------------------------------------- permissions

# What a line needs: users that may send it. `mine` and `other` are consumers of root.
EVERYBODY = {"root", "worker", "none", "watcher", "reader"}
CASES: list[tuple[bytes, set[str]]] = [
    (b"publish --confirm job.1 x", {"root", "worker"}),
    (b"publish --confirm --once job.1 x", {"root", "worker"}),
    (b"publish --confirm --mandatory e-work-1 x", {"root"}),
    (b"publish --confirm job.1.2 x", {"root"}),
    (b"publish --confirm secret x", {"root"}),
    (b"publish --confirm --once secret x", {"root"}),
    (b"subscribe --confirm work-1 job.1.2 tick", {"root", "worker"}),
    (b"subscribe --confirm work-1 job.1 secret", {"root"}),
    (b"subscribe --confirm other job.1", {"root"}),
    (b"subscribe --confirm work-1\x0bx.y job.1", {"root"}),
    (b"consume --confirm work-1", {"root", "worker"}),
    (b"consume --confirm work-1 job.1 --add tick", {"root", "worker"}),
    (b"consume --confirm work-1 job.1 --add secret", {"root"}),
    (b"consume --confirm work-1 secret --manual-ack", {"root"}),
    (b"consume --confirm other", {"root"}),
    (b"rebind --confirm work-1 job.1", {"root", "worker"}),
    (b"release --confirm mine m1", {"root", "worker"}),
    (b"release --confirm theirs m1", {"root"}),
    (b"touch --confirm mine m1", {"root", "worker"}),
    (b"touch --confirm theirs m1", {"root"}),
    (b"set_prefetch --confirm mine 5", {"root", "worker"}),
    (b"set_prefetch --confirm theirs 5", {"root"}),
    (b"begin --confirm", EVERYBODY),
    (b"commit --confirm", set()),  # There is nothing to commit.
    (b"rollback --confirm", set()),
    (b"cancel --confirm work-1 --all", {"root", "worker"}),
    (b"cancel --confirm other --all", {"root"}),
    (b"cancel_job --confirm work-1 m1", {"root", "worker"}),
    (b"cancel_job --confirm other m1", {"root"}),
    (b"progress --confirm mine m1 5", {"root", "worker"}),
    (b"progress --confirm theirs m1 5", {"root"}),
    (b"result unknown", EVERYBODY),
    (b"receive work-1", {"root", "worker"}),
    (b"receive other", {"root"}),
    (b"lease --confirm work-1 e.1.1 --ack", {"root", "worker"}),
    (b"lease --confirm other e.1.1 --ack", {"root"}),
    (b"promote --confirm work-1 m1", {"root", "worker"}),
    (b"promote --confirm other m1", {"root"}),
    (b"move --confirm work-1 work-2", {"root", "worker"}),
    (b"move --confirm work-1 other", {"root"}),
    (b"move --confirm other work-1", {"root"}),
    (b"redrive --confirm work-1", {"root", "worker"}),
    (b"redrive --confirm work-1 --to=other", {"root"}),
    (b"redrive --confirm other", {"root"}),
    (b"set_queue --confirm work-1 --ttl=5", {"root", "worker"}),
    (b"set_queue --confirm --dead-letters=work-2 work-1", {"root", "worker"}),
    (b"set_queue --confirm work-1 --dead-letters=", {"root", "worker"}),
    (b"set_queue --confirm work-1 --dead-letters=other", {"root"}),
    (b"set_queue --confirm other --dead-letters=work-1", {"root"}),
    (b"pause --confirm work-1 --for=0.001", {"root", "worker"}),
    (b"pause --confirm other --for=0.001", {"root"}),
    (b"resume --confirm work-1", {"root", "worker"}),
    (b"resume --confirm other", {"root"}),
    (b"trace --confirm x --for=1", {"root"}),
    (b"rename --confirm other renamed", {"root"}),
    (b"trace --confirm --off", {"root"}),
    (b"rebind --confirm work-1 --remove secret", {"root", "worker"}),
    (b"rebind --confirm work-1 --remove-mask *.*", {"root", "worker"}),
    (b"rebind --confirm work-1 --add secret", {"root"}),
    (b"rebind --confirm work-1 --add-mask job.1.*", {"root", "worker"}),
    (b"rebind --confirm work-1 job.1 --add-mask job.1.* *.x", {"root"}),
    (b"rebind --confirm work-1 --remove-mask **", {"root", "worker"}),
    (b"subscribe --confirm work-1 --add-mask **", {"root"}),
    (b"consume --confirm work-1 --add-mask job.*.*", {"root", "worker"}),
    (b"consume --confirm work-1 --add-mask *.tick", {"root"}),
    (b"consume --confirm other --add-mask job.1.*", {"root"}),
    (b"rebind --confirm work-1 secret", {"root"}),
    (b"rebind --confirm other --remove secret", {"root"}),
    (b"ack --confirm mine m", {"root", "worker"}),
    (b"ack --confirm mine --all", {"root", "worker"}),
    (b"ack --confirm theirs m", {"root"}),
    (b"ack --confirm  theirs  m", {"root"}),
    (b"ack --confirm theirs --all", {"root"}),
    (b"ack --confirm nobody m", EVERYBODY),
    (b"reject --confirm mine m", {"root", "worker"}),
    (b"reject --confirm theirs --all", {"root"}),
    (b"delete_consumer --confirm mine", {"root", "worker"}),
    (b"delete_consumer --confirm theirs", {"root"}),
    (b"delete_queue --confirm work-1", {"root"}),
    (b"delete_queue --confirm work-1 --when-unused=5", {"root"}),
    (b"purge --confirm work-1", {"root"}),
    (b"peek work-1", {"root", "worker", "reader"}),
    (b"peek other", {"root"}),
    (b"peek --limit=1 other", {"root"}),
    (b"peek --after=1 work-1", {"root", "worker", "reader"}),
    (b"tail --confirm --queue=work-1", {"root", "worker", "reader"}),
    (b"tail --confirm --queue=other", {"root"}),
    (b"tail --confirm secret", {"root"}),
    (b"tail --confirm **", {"root"}),
    (b"publish --confirm --to=work-1 job.1 x", {"root", "worker"}),
    (b"publish --confirm --to=other job.1 x", {"root"}),
    (b"publish --confirm --to=work-1 secret x", {"root"}),
    (b"range work-1", {"root", "worker", "reader"}),
    (b"range --at=1 other", {"root"}),
    (b"range --archived=1 other", {"root"}),
    (b"read work-1 --from=1", {"root", "worker", "reader"}),
    (b"read --from=1 other", {"root"}),
    (b"trim --confirm work-1 0", {"root", "worker"}),
    (b"trim --confirm other 0", {"root"}),
    (b"schedules", {"root", "watcher"}),
    (b"unschedule --confirm there-is-none", EVERYBODY),
    (b"schedule --confirm a --every=9 publish job.1 x", {"root", "worker"}),
    (b"schedule --confirm b --every=9 publish secret x", {"root"}),
    (b"schedule --confirm b --pause", {"root"}),
    (b"open_batch --confirm ba publish job.1 x", {"root", "worker"}),
    (b"open_batch --confirm bs publish secret x", {"root"}),
    (b"open_batch --confirm ba --on-dead publish --to=other job.1 x", {"root"}),
    (b"open_batch --confirm bb --on-dead publish secret x", {"root"}),
    (b"publish --confirm --batch=bs job.1 x", {"root"}),
    (b"publish --confirm --batch=bb job.1 x", {"root"}),
    (b"batch bs", {"root"}),
    (b"batches", {"root", "watcher"}),
    (b"close_batch --confirm there-is-none", EVERYBODY),
    (b"close_batch --confirm bs", {"root"}),
    (b"stats", {"root", "watcher"}),
    (b"stats queues", {"root", "watcher"}),
    *(
        (b"stats " + what, {"root", "watcher"})
        for what in (b"consumers", b"consumers_of work-1", b"connections", b"unacked")
    ),
    (b"stats queue work-1", {"root", "watcher"}),
    (b"stats journal", {"root", "watcher"}),
    (b"stats errors", EVERYBODY),
    (b"stats --limit=1 errors", EVERYBODY),
    (b"stats bindings errors", {"root", "watcher"}),
    (b"_eval 1", {"root"}),
    (b"ping x", EVERYBODY),
    (b"set_name --confirm web-1", EVERYBODY),
    (b"close_connection --confirm 999", {"root"}),
    (b"drain --off", {"root"}),
    (b"read_only off --confirm", {"root"}),
    (b"reload", {"root"}),
    (b"help", EVERYBODY),
    (b"help publish", EVERYBODY),
    (b"auth --confirm noneT", EVERYBODY),
]


@pytest.mark.parametrize(("line", "allowed"), CASES, ids=[str(line) for line, _ in CASES])
def test_what_each_user_may_do(
    server: ServerProcess, client: LineClient, line: bytes, allowed: set[str]
) -> None:
    """The error comes under the request's id, and everything else does what it does."""
    login(client, "root")
    # Those who are refused change nothing for each other.
    for names in (sorted(EVERYBODY - allowed), *([name] for name in sorted(allowed))):
        for queue, consumer in ((b"work-1", b"mine"), (b"other", b"theirs")):
            assert client.ask(b"s subscribe --confirm %b e-%b" % (queue, queue)) == b"s ok "
            asked = b"%b consume --confirm %b --manual-ack" % (consumer, queue)
            assert client.ask(asked) == consumer + b" ok "
        for name in names:
            with LineClient(server.address) as other:
                login(other, name)
                assert is_error(other.ask(b"x " + line)) == (name not in allowed), name
        client.send(b"d delete_consumer mine\nd delete_consumer theirs\n")
        client.send(b"d delete_queue work-1\nd delete_queue --confirm other\n")
        while client.line() != b"d ok ":
            pass


def test_a_transaction_needs_the_permissions_of_its_requests(
    server: ServerProcess, client: LineClient
) -> None:
    login(client, "worker")
    client.send(b"t begin\na publish job.1 x\nb publish secret x\nt commit --confirm\n")
    assert is_error(client.line())
    assert is_error(client.line())
    client.send(b"t begin\na publish --confirm job.1 x\nt commit --confirm\n")
    assert [client.line(), client.line()] == [b"a ok ", b"t ok "]


def test_every_action_is_in_the_table() -> None:
    assert {line.split()[0] for line, _ in CASES} == ACTIONS.keys()


def errors(client: LineClient, arguments: bytes = b"") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.stats(f"errors {arguments.decode()}")
    return found


INSPECTING = [
    *(f"inspect {what}" for what in ("queues", "bindings", "consumers", "connections", "unacked")),
    *(f"inspect {what}" for what in ("queue work-9", "unacked work-9", "journal", "stats")),
    *("inspect errors", "inspect audit", "top --count 1"),
]
CHANGING = [
    *("purge work-9 --yes", "delete-queue work-9 --yes", "trim work-9 9 --yes"),
    *("consume work-9 --count 1", "rebind work-9 --add e", "set-queue work-9 --ttl 5"),
    *("move work-9 work-8", "redrive work-9", "cancel work-9 --all --yes", "publish e x"),
    *("eval 1", "promote work-9 --all", "subscribe work-9 e"),
]
READING = ["peek work-9", "inspect messages work-9"]


@pytest.mark.parametrize(
    ("name", "may"), [("watcher", INSPECTING), ("reader", READING), ("none", [])]
)
def test_who_may_only_inspect_or_read(
    server: ServerProcess,
    client: LineClient,
    capsys: pytest.CaptureFixture[str],
    name: str,
    may: list[str],
) -> None:
    login(client, "root")
    assert client.ask(b"s subscribe --confirm work-9 e9") == b"s ok "
    assert client.ask(b"m publish --confirm e9 the-data") == b"m ok "
    url = "mqks://{}T@{}:{}".format(name, *server.address)
    for command in (*INSPECTING, *READING, *CHANGING):
        # Errors of one's own are for everybody.
        code = main([*command.split(), "--json", "--url", url])
        assert (code == 0) == (command in may or command == "inspect errors"), command
    assert ("the-data" in capsys.readouterr().out) == (name == "reader")
    assert main(["inspect", "errors", "--json", "--url", url]) == 0
    assert '"id"' in capsys.readouterr().out

    login(client, "root")
    queue = client.stats("queue work-9")
    assert (queue["ready"], queue["events"], queue["masks"]) == (1, ["e9"], [])
    assert queue["policy"] == {}
    assert client.ask(b"d delete_queue --confirm work-9") == b"d ok "


def test_everybody_is_told_the_own_errors_only(tmp_path: Path) -> None:
    """Of strangers only so many are kept in a second: on a server that nobody else asks."""
    with a_server(tmp_path) as server, LineClient(server.address) as client:
        login(client, "worker")
        with LineClient(server.address) as other:
            mine = client.ask(b"r\xff publish secret x").split()[2]
            # Of a stranger, of another user, and of one that has just been another.
            theirs = [other.ask(b"r dance").split()[2]]
            login(other, "none")
            theirs.append(other.ask(b"r publish secret x").split()[2])
            assert errors(other, theirs[0]) == []
            assert errors(other, mine) == []
            assert errors(other)[-1]["id"].encode() == theirs[1]
            assert {row["user"] for row in errors(other)} == {"none"}
            login(other, "watcher")
            assert {row["id"].encode() for row in errors(other)} >= {mine, *theirs}
            login(other, "root")
            assert {row["id"].encode() for row in errors(other)} >= {mine, *theirs}
            [row] = errors(other, theirs[0])
            assert (row["user"], row["action"], row["reason"]) == (
                None,
                "dance",
                "there is no action 'dance'; 'help' lists all",
            )

        assert mine in [row["id"].encode() for row in errors(client)]
        assert {row["user"] for row in errors(client)} == {"worker"}
        assert [errors(client, each) for each in theirs] == [[], []]
        [row] = errors(client, mine)
        assert (row["request_id"], row["reason"]) == (
            "r\udcff",
            "no permission to publish 'secret'",
        )
        # The user's other connections are told, too.
        with LineClient(server.address) as again:
            login(again, "worker")
            assert errors(again, mine) == [row]
            assert errors(again, b"--after=" + mine) == errors(client, b"--after=" + mine)


def test_no_reason_names_a_queue_that_the_user_may_not_have() -> None:
    world = BareWorld(queue_messages_max=1)
    world.send("boss", b"theirs consume hidden-1 --manual-ack\ns subscribe hidden-2 job.1\n")
    world.send("boss", b"m publish job.1 x\n")
    connection = world.connection("worker")
    connection.user = "worker"
    world.broker.access.grant(connection, WORKER.permissions())
    for line in (b"ack theirs m", b"reject theirs m", b"publish job.1 x"):
        world.send("worker", b"r " + line + b"\n")
    world.send("worker", b"theirs consume work-1\n")
    world.received("worker")

    world.send("worker", b"st stats errors\n")

    told = world.received("worker")
    assert told.count(b'"reason"') == 4
    assert b"hidden" not in told


def test_an_id_of_anothers_consumer(server: ServerProcess, client: LineClient) -> None:
    """Taking it would end the other's consumer."""
    login(client, "root")
    assert client.ask(b"boss consume --confirm other --manual-ack") == b"boss ok "
    assert client.ask(b"hand consume --confirm work-2 --manual-ack") == b"hand ok "
    with LineClient(server.address) as worker:
        login(worker, "worker")
        assert is_error(worker.ask(b"boss consume --confirm work-2"))
        assert worker.ask(b"hand consume --confirm work-2") == b"hand ok "


def test_a_refused_publish_among_allowed_ones(client: LineClient) -> None:
    """In one chunk, gathered or not: each has its own outcome, and the order stays."""
    login(client, "worker")
    assert client.ask(b"c consume --confirm work-3 job.1 tick") == b"c ok "
    lines = [
        b"m1 publish job.1 a",
        b"m2 publish tick b",
        b"m3 publish job.1 c",
        b"m4 publish job.1",
    ]
    client.send(b"\n".join([*lines, b"p ping x\n"]))
    assert client.line() == b"c ok m1 event=job.1 a"
    came = [client.line() for _ in range(4)]
    assert [line for line in came if is_error(line)] == [
        line for line in came if line.startswith(b"m2 ")
    ]
    assert b"c ok m3 event=job.1 c" in came


def test_acks_of_anothers_consumer_in_one_chunk() -> None:
    world = BareWorld(users=Path("unused"))
    world.send("root", b"theirs consume other e --manual-ack\nmine consume work-1 e --manual-ack\n")
    world.send("root", b"m1 publish e x\nm2 publish e x\n")
    world.received("root")
    world.broker.access.grant(world.connection("worker"), WORKER.permissions())
    world.send(
        "worker", b"a ack mine m1\na ack theirs m1\na ack mine m2\nb ack --confirm theirs m2\n"
    )
    assert len(re.findall(rb" error ", world.received("worker"))) == 2
    world.send("root", b"e _eval state.messages_by_consumer_ids\n")
    assert world.received("root") == b'e ok {"theirs": ["m1", "m2"], "mine": []}\n'


@pytest.mark.parametrize("others", [b"", b"m0 publish --once job.1 x\n"])
def test_an_id_published_once_by_another_user(others: bytes) -> None:
    """Whoever could use up another's ids could keep its messages out, confirmed all the same. The
    line before it makes no difference: gathered or not, it is the same."""
    world = BareWorld(users=Path("unused"))
    users = Users([ROOT, WORKER], b"key")
    for name in ("root", "worker"):
        world.broker.access.authenticate(world.connection(name), users.get(name))
    world.send("root", b"c consume q job.1\n")
    world.received("root")
    world.send("worker", others + b"m1 publish --once nowhere x\nm1 publish --once job.1 x\n")
    world.send("root", b"m1 publish --confirm --once job.1 mine\nm1 publish --once job.1 mine\n")
    assert world.received("root").count(b" event=job.1 mine\n") == 1


# --------------------------------------------------------------------------------------- masks


MASKS = st.text("ab.**+(", min_size=1, max_size=10).map(str.encode)
NAMES = st.text("ab.A\n+(", max_size=12).map(str.encode)


def model(mask: bytes, name: bytes, *, across: bool) -> bool:
    """Each star takes as much as it likes, in all ways that there are."""
    if not mask:
        return not name
    if across and mask.startswith(b"**"):
        return any(model(mask.lstrip(b"*"), name[at:], across=True) for at in range(len(name) + 1))
    if mask.startswith(b"*"):
        dotless = name.partition(b".")[0]
        return any(model(mask[1:], name[at:], across=across) for at in range(len(dotless) + 1))
    return name[:1] == mask[:1] and model(mask[1:], name[1:], across=across)


@given(MASKS, NAMES)
@example(b"a", b"a\n")
def test_there_is_one_language_of_masks(mask: bytes, name: bytes) -> None:
    """Who takes a mask at all takes it for what everybody else does."""
    expected = model(mask, name, across=True)
    assert Permissions(publish=[mask.decode()]).may_publish(name) == expected
    assert name_masks([mask])(name) == expected
    found = re.search(pattern(mask.decode()), name.decode())
    assert (found is not None) == expected
    with suppress(BadRequest):
        check_bound(mask)
        assert bound_matches(mask, name) == expected
    with suppress(BadRequest):
        assert any(EventMasks([mask]).tries(name)) == (b"." in name and expected)


def test_no_mask_and_name_take_long() -> None:
    for mask in ("**a*b**", "a**a*b**a*c", "**a*a*a*a*b", "**a" * 300, "*a" * 500):
        allows = Permissions(publish=[mask]).may_publish
        began = time.thread_time()
        for _ in range(10):
            assert not allows(b"a" * MASKED_NAME_BYTES_MAX + b".")
        assert time.thread_time() - began < 5.0, mask


def test_a_long_name_needs_the_mask_of_everything() -> None:
    name = b"a" * (MASKED_NAME_BYTES_MAX + 1)
    assert not Permissions(publish=["a*", "*a**"]).may_publish(name)
    assert Permissions(publish=["b", "**"]).may_publish(name)


# ---------------------------------------------------------------------------------------- auth


@pytest.mark.parametrize("words", [b"workerT", b"worker worker", b"worker  worker "])
def test_credentials_that_are_right(client: LineClient, words: bytes) -> None:
    assert client.ask(b"a auth --confirm " + words) == b"a ok "
    assert client.ask(b"m publish --confirm job.1 x") == b"m ok "


@pytest.mark.parametrize(
    "words",
    [
        *(b"", b"workert", b"worker", b"worker workerT", b"worker worker worker"),
        *(b"nobody worker", b"--token workerT", b"\xff\xfe worker", WORKER.token.encode()),
        b"worker " + WORKER.password.encode(),
    ],
)
def test_credentials_that_are_wrong(
    server: ServerProcess, client: LineClient, words: bytes
) -> None:
    """One answer for all, which tells nothing; the log says no more than that."""
    assert is_error(client.ask(b"a auth --confirm " + words))
    assert is_error(client.ask(b"m publish --confirm job.1 x"))
    assert client.ask(b"a auth --confirm workerT") == b"a ok "
    reasons = set(re.findall(r'action=auth reason="([^"]*)"', server.log))
    assert reasons <= {
        "wrong credentials",
        "wrong credentials, 3 times: the connection is closed",
        "auth: the arguments are not a token, or a user and a password",
    }


def test_no_reply_without_confirm(client: LineClient) -> None:
    client.send(b"a auth workerT\nb auth worker worker\np ping x\n")
    assert client.line() == b"p ok x"


def test_three_failures_close_the_connection(client: LineClient) -> None:
    client.send(b"a auth x y\nb auth z\nc auth worker wrong\nd auth workerT\np ping x\n")
    assert [*map(is_error, client.rest())] == [True] * 3


def test_what_comes_behind_a_password_waits_for_it(client: LineClient) -> None:
    """However the lines are cut into chunks, and the last line is not even there yet."""
    client.send(b"a auth worker worker\r\nm1 publish --confirm job.1 x\ty\nm2 publish --conf")
    client.send(b"irm job.1 a\r\r\n\np ping \r\r\n")
    assert {client.line(), client.line(), client.line()} >= {b"m2 ok ", b"p ok \r"}


def test_what_comes_behind_a_wrong_password_is_still_a_strangers(client: LineClient) -> None:
    client.send(b"a auth worker wrong\nm publish --confirm job.1 x\np ping x\n")
    first, second, third = client.line(), client.line(), client.line()
    assert (is_error(first), is_error(second), third) == (True, True, b"p ok x")
    assert (first[:1], second[:1]) == (b"a", b"m")


def test_a_long_line_behind_the_token_in_the_same_chunk(client: LineClient) -> None:
    data = b"x" * 50_000
    client.send(b"a auth --confirm rootT\nping ping %b\n" % data)
    assert {client.line(), client.line()} == {b"a ok ", b"ping ok " + data}


def test_another_user_on_the_same_connection(client: LineClient) -> None:
    """Its rights are the new user's, and consumers that this one may not have end."""
    login(client, "root")
    assert client.ask(b"c consume --confirm other2 e") == b"c ok "
    assert client.ask(b"w consume --confirm work-4 e") == b"w ok "
    client.send(b"a auth --confirm workerT\n")
    assert client.line() == b"a ok "
    assert is_error(client.ask(b"s stats"))
    login(client, "root")
    # Consumers of tests before may still be on their way out.
    until(lambda: client.ask(b"e _eval state.queues_by_consumer_ids") == b'e ok {"w": "work-4"}')


def test_a_goodbye_behind_a_password(server: ServerProcess, client: LineClient) -> None:
    """What was sent before it is still done."""
    login(client, "root")
    assert client.ask(b"s subscribe --confirm farewell job.9") == b"s ok "
    reload(server)  # which forgets what passwords have proved right
    with LineClient(server.address) as leaving:
        leaving.send(b"a auth worker worker\nm publish job.9 x\n")
        leaving.leave()
    assert client.ask(b"c consume farewell") == b"c ok m event=job.9 x"


def test_the_secrets_are_nowhere_to_be_seen(server: ServerProcess, client: LineClient) -> None:
    login(client, "root")
    config = client.ask(b"e _eval config")
    assert b"users" in config
    for text in (server.log.encode(), config):
        for secret in (b"workerT", WORKER.token.encode(), WORKER.password.encode()):
            assert secret not in text


def test_an_unknown_user_costs_as_much_as_a_wrong_password(monkeypatch: pytest.MonkeyPatch) -> None:
    users = Users([User("alice", hash_password("right", SALT)), User("bot", "", "ab" * 32)], b"k")
    costs: list[dict[str, Any]] = []
    scrypt = hashlib.scrypt

    def noted(password: bytes, **cost: Any) -> bytes:
        costs.append({name: cost[name] for name in ("n", "r", "p", "dklen")})
        return scrypt(password, **cost)

    monkeypatch.setattr(hashlib, "scrypt", noted)
    for name in (b"alice", b"bot", b"nobody"):
        assert users.verify(name, b"wrong") is None
    assert len(costs) == 3
    assert costs == costs[:1] * 3


def test_a_password_is_hashed_once_and_remembered() -> None:
    users = Users([User("alice", hash_password("right", SALT))], b"key")
    assert users.recall(b"alice", b"right") is None
    assert users.verify(b"alice", b"right") is users.get("alice")
    assert users.recall(b"alice", b"right") is users.get("alice")
    assert users.recall(b"alice", b"wrong") is None
    assert users.recall(b"bob", b"right") is None


def test_too_many_passwords_at_once() -> None:
    """The connection is refused rather than its user."""
    world = BareWorld(users=Path("unused"), auth="always")
    for number in range(LOGINS_WAITING_MAX):
        world.connect(f"c{number}")
        world.send(f"c{number}", b"a auth alice wrong\n")
    world.send("late", b"a auth alice right\np ping x\n")
    assert world.is_closed("late")
    assert re.fullmatch(rb"- error \w+\n", world.received("late"))
    assert len(world.broker.access.logins) == LOGINS_WAITING_MAX


@pytest.mark.slow
def test_who_guesses_waits_and_nobody_else(tmp_path: Path) -> None:
    """Each wrong password beyond the third makes the next of its name wait. Another name from the
    same address gets in meanwhile, so does the right password after the pause."""
    with a_server(tmp_path) as server, ExitStack() as stack:

        def connect() -> LineClient:
            return stack.enter_context(LineClient(server.address))

        began_s = time.monotonic()
        for number in range(8):
            assert is_error(connect().ask(b"a auth root wrong-%d" % number))
        assert time.monotonic() - began_s >= 0.125 + 0.25 + 0.5 + 1, "no reply comes too early"
        for number in range(3):  # The first of them waits two seconds, each other one four.
            connect().send(b"a auth root more-%d\n" % number)
        assert connect().ask(b"a auth --confirm worker worker") == b"a ok "
        failed = server.log.count("wrong credentials")
        assert failed < 11, "all guesses were checked first"
        assert connect().ask(b"a auth --confirm rootT") == b"a ok "
        assert connect().ask(b"a auth --confirm root root") == b"a ok "
        assert server.log.count("wrong credentials") >= 10, "they were ahead of it"


def test_guesses_of_one_address_leave_room_for_others(tmp_path: Path) -> None:
    with a_server(tmp_path) as server, ExitStack() as stack:
        for number in range(4):
            with LineClient(server.address) as client:
                assert is_error(client.ask(b"a auth root wrong-%d" % number))
        for number in range(4 * LOGINS_WAITING_PER_ADDRESS_MAX):
            client = stack.enter_context(LineClient(server.address))
            client.send(b"a auth root more-%d\n" % number)
        until(lambda: "passwords wait to be checked" in server.log)
        assert f"{LOGINS_WAITING_MAX} passwords wait" not in server.log


# ------------------------------------------------------------------------------------ strangers


def test_what_a_stranger_may_do(client: LineClient) -> None:
    assert client.ask(b"p ping x") == b"p ok x"
    assert client.ask(b"h help auth") == b"h ok auth [--confirm] {token} | {user} {password}"
    assert is_error(client.ask(b"m publish job.1 x"))
    assert is_error(client.ask(b"a ack nobody m"))


def test_errors_of_a_stranger(client: LineClient) -> None:
    client.send(b"m publish --confirm job.1 x\n" * 100)
    lines = client.rest()
    assert len(lines) == STRANGER_ERRORS_MAX
    assert all(map(is_error, lines))


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_long_line_of_a_stranger(client: LineClient, end: bytes) -> None:
    client.send(b"p ping " + b"x" * STRANGER_LINE_BYTES_MAX + end)
    assert [*map(is_error, client.rest())] == [True]


def test_much_of_a_stranger(client: LineClient) -> None:
    client.send(b"p ping\n" * 1000)
    *pings, last = client.rest()
    assert pings == [b"p ok "] * STRANGER_LINES_MAX
    assert last.startswith(b"- error ")


def test_a_stranger_that_comes_byte_by_byte(client: LineClient) -> None:
    for byte in b"a auth --confirm worker worker\n":
        client.send(bytes([byte]))
    assert client.line() == b"a ok "


def test_a_silent_stranger(tmp_path: Path) -> None:
    with a_server(tmp_path, "--auth-timeout-s", "0.5") as server, ExitStack() as cleanup:

        def logged_in() -> LineClient | None:
            client = cleanup.enter_context(LineClient(server.address))
            with suppress(EOFError, OSError):  # One that the machine kept for too long is gone.
                if client.ask(b"in auth --confirm workerT") == b"in ok ":
                    return client
            return None

        known = until(logged_in)
        silent = cleanup.enter_context(LineClient(server.address))
        assert [line[:8] for line in silent.rest()] == [b"- error "]
        assert known.ask(b"p ping x") == b"p ok x"


@pytest.mark.slow
def test_a_login_that_came_while_the_server_stood_still_is_in_time(tmp_path: Path) -> None:
    with (
        a_server(tmp_path, "--auth-timeout-s", "2") as server,
        LineClient(server.address) as client,
    ):
        assert client.ask(b"p ping x") == b"p ok x"
        with server.paused():
            client.send(b"in auth --confirm workerT\n")
            time.sleep(3.5)
        assert client.line() == b"in ok "


def test_more_strangers_than_there_is_room_for(tmp_path: Path) -> None:
    """The oldest goes; those who are known stay."""
    with (
        a_server(tmp_path, "--unauthenticated-max", "2") as server,
        LineClient(server.address) as known,
    ):
        login(known, "worker")
        with (
            LineClient(server.address) as first,
            LineClient(server.address) as second,
            LineClient(server.address) as third,
        ):
            assert third.ask(b"p ping x") == b"p ok x"
            first.rest()
            assert second.ask(b"p ping x") == b"p ok x"
            assert known.ask(b"p ping x") == b"p ok x"


def test_strangers_that_broke_the_rules_and_stay(tmp_path: Path) -> None:
    """They count until they are gone, and make room like the others."""
    with a_server(tmp_path, "--unauthenticated-max", "2") as server, ExitStack() as standing:
        for _ in range(6):
            rude = standing.enter_context(LineClient(server.address))
            rude.send(b"x" * 2 * STRANGER_LINE_BYTES_MAX)
            assert rude.line().startswith(b"- error ")
        with LineClient(server.address) as polite:
            login(polite, "worker")
            assert polite.ask(b"p ping x") == b"p ok x"


def test_connections_of_one_address(tmp_path: Path) -> None:
    with served(tmp_path / "mqks.db", "--connections-per-address-max", "2") as (server, first):
        with LineClient(server.address) as second:
            assert first.ask(b"p ping x") == b"p ok x"
            assert second.ask(b"p ping x") == b"p ok x"
            with LineClient(server.address) as third:
                assert is_error(third.rest()[0])
            second.leave()
        with LineClient(server.address) as third:
            assert third.ask(b"p ping x") == b"p ok x"


def test_a_removed_user_that_does_not_take_what_it_asked_for(tmp_path: Path) -> None:
    """It is gone all the same, and what it has yet to get it does not get."""
    with (
        a_server(tmp_path) as server,
        LineClient(server.address) as root,
        LineClient(server.address) as worker,
    ):
        login(root, "root")
        assert root.ask(b"s subscribe --confirm work-1 job.1") == b"s ok "
        for _ in range(12):
            assert root.ask(b"m publish --confirm job.1 " + b"x" * 1_000_000) == b"m ok "
        login(worker, "worker")
        worker.send(b"r read work-1 --from=1\n" * 16)
        held = re.compile(rb'"user": "worker".*"blocked": true')
        until(lambda: held.search(root.ask(b"c stats connections")))
        users_file.write(tmp_path / "users", [ROOT])
        reload(server)
        until(lambda: b"worker" not in root.ask(b"c stats connections"))
        assert root.ask(b"p ping x") == b"p ok x"


def test_a_flood_of_errors_is_told_in_part(tmp_path: Path) -> None:
    """Of strangers the database keeps no more than the log."""
    sent = 0
    with a_server(tmp_path) as server:

        def flood() -> bool:
            nonlocal sent
            with ExitStack() as cleanup:
                for _ in range(40):
                    stranger = cleanup.enter_context(LineClient(server.address))
                    stranger.send(b"m publish job.1 x\n" * STRANGER_ERRORS_MAX)
                    sent += STRANGER_ERRORS_MAX
                    cleanup.callback(stranger.rest)
            return "event=errors_suppressed" in server.log

        until(flood)
        suppressed = sum(map(int, re.findall(r"event=errors_suppressed count=(\d+)", server.log)))
        told = server.log.count("event=request_failed")
        assert 100 <= told < sent
        assert told + suppressed <= sent
        assert suppressed > 0


# ------------------------------------------------------------------------------- who is asked


def test_loopback_is_not_asked_but_may_take_a_users_rights(tmp_path: Path) -> None:
    users_file.write(tmp_path / "users", [WORKER])
    with served(tmp_path / "mqks.db", "--users", str(tmp_path / "users")) as (_, client):
        assert client.ask(b"m publish --confirm secret x") == b"m ok "
        assert client.ask(b"a auth --confirm worker worker") == b"a ok "
        assert is_error(client.ask(b"m publish --confirm secret x"))


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_a_peer_that_is_gone_before_it_is_accepted(tmp_path: Path, loop: str) -> None:
    """What it sent is read, and it is no less a stranger."""
    with a_server(tmp_path, loop) as server:
        with server.paused():
            gone = LineClient(server.address)
            gone.send(b"s subscribe q e\n")
            gone.break_off()
        until(lambda: "not authenticated" in server.log)
        with LineClient(server.address) as client:
            assert client.ask(b"a auth --confirm workerT") == b"a ok "


@pytest.mark.parametrize(
    ("name", "local", "network"),
    [
        (None, False, b""),
        ("", True, b""),
        (("127.0.0.1", 1), True, bytes([127, 0, 0, 1])),
        (("192.0.2.1", 1), False, bytes([192, 0, 2, 1])),
        (("::1", 1, 0, 0), True, bytes(8)),
        (("::ffff:127.0.0.1", 1, 0, 0), True, bytes([127, 0, 0, 1])),
        (("::ffff:192.0.2.1", 1, 0, 0), False, bytes([192, 0, 2, 1])),
        (("fe80::1%eth0", 1, 0, 2), False, b"\xfe\x80" + bytes(6)),
    ],
)
def test_what_a_socket_tells_of_its_peer(name: object, local: bool, network: bytes) -> None:
    assert gate.peer(name)[1:3] == (local, network)


@pytest.mark.parametrize(
    ("settings", "local", "asked"),
    [
        ({}, True, False),
        ({"auth": "always"}, True, True),
        ({}, False, True),
        ({"insecure": True}, False, True),
        ({"insecure": True, "users": None}, False, False),
    ],
)
def test_who_must_authenticate(settings: dict[str, Any], local: bool, asked: bool) -> None:
    world = BareWorld(**{"users": Path("unused")} | settings)
    connection = world.broker.connect("peer", local=local)
    world.intake.receive(connection, b"m publish e x\n")
    assert bool(connection.outbox) == asked


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"http_host": "0.0.0.0", "http_port": "0"}, "--http-host: '0.0.0.0' is not loopback"),
        ({"tls_port": "1", "tls_cert": "c", "tls_key": "k"}, "tls_host: '0.0.0.0' is not loopback"),
        (
            {"tls_port": "1", "users": "u"},
            "--tls-port: TLS needs the settings tls_cert and tls_key",
        ),
        ({"auth": "always"}, "--auth: nobody can authenticate. Set users to a users file, too"),
    ],
)
def test_settings_that_would_be_unsafe(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        load(given, {})


def test_settings_that_are_safe() -> None:
    assert load({"host": "0.0.0.0", "users": "u"}, {}).users == Path("u")
    http = {"http_host": "0.0.0.0", "http_port": "0", "insecure": True}
    assert load(http, {}).http_host == "0.0.0.0"
    assert load({"http_host": "0.0.0.0", "page": "off"}, {}).http_port is None
    load({"tls_port": "1", "tls_host": "::1", "tls_cert": "c", "tls_key": "k"}, {})


# --------------------------------------------------------------------------------- the users file


MEMBERS = (
    *('"admin": 1', '"publish": "**"', '"publish": [1]', '"publish": [""]', '"superuser": true'),
    *('"token": "zz"', '"token": "abcd"', '"password": "secret"', '"password": "md5:2:1:1:00:00"'),
    *('"password": "scrypt:3:1:1:00:00"', '"password": "scrypt:1099511627776:8:1:00:00"'),
    *('"password": "scrypt:65536:1:1:00:00"', '"password": "scrypt:2:1048576:1:00:00"'),
    '"publish": ["%s"]' % ("a" * 2000),
)
"""Each is wrong."""


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]", "{}", '{"name": ""}', '{"name": "a b"}', '{"name": "--a"}', '{"name": 1}'),
        *('{"name": "a\\u0000"}', '{"name": "root"}'),
        *(f'{{"name": "a", {each}}}' for each in MEMBERS),
    ],
)
def test_a_bad_line_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^users:3: ") as caught:
        parse(ROOT.line() + "\n" + line, "users")
    assert "secret" not in str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("")
    path.chmod(0o644)
    users_file.write(path, [ROOT, WORKER, NONE])
    assert users_file.read(path) == [ROOT, WORKER, NONE]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_without_its_users_does_not_start(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "mqks.db", "--users", str(tmp_path / "missing"))
    assert server.wait() == 78
    assert "missing does not exist" in server.log
    assert not (tmp_path / "mqks.db").exists()
