"""A broker in doubt confirms nothing: an error of its own ends the process, at once and loudly."""

from pathlib import Path

import pytest

from mqks.errors import MqksError
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess


@patches_modules
@pytest.mark.parametrize(
    ("fault", "stops"),
    [
        ("broker.spine.queue.queue Queue publish", False),
        ("broker.spine.log.answers Answers committed", False),
        ("journal.journal Journal _written", False),
        # Whoever asks it to stop meanwhile does not cut the end short.
        ("broker.spine.queue.queue Queue publish", True),
    ],
)
def test_it_ends_the_server(db: Path, fault: str, stops: bool) -> None:
    environment = {"FAULT": fault} | ({"STOPS": ""} if stops else {})
    with ServerProcess(db, environment=environment, module="tests.kit.faulty") as server:
        with LineClient(server.address) as client:
            client.send(b"s subscribe q e\nm publish --confirm e x\n")
            with pytest.raises(EOFError):
                assert client.line() != b"m ok "
        assert server.wait() in ({MqksError.exit_code} if stops else {1, MqksError.exit_code})
        assert "a fault of our own" in server.log
        if stops:
            last = server.log.splitlines()[-1]
            assert last == "mqks: the server ended because of the internal error above"
