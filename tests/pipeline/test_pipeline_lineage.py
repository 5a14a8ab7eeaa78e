"""`--openlineage`: what a service is told of an archive, over HTTP or in a file."""

import json
import logging
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mqks.commands import main
from mqks.pipeline.archive import Progress
from mqks.pipeline.lineage import Lineage
from tests.pipeline.conftest import Clicks, Quiet, answering, some

BATCH = Progress("q", "x-1", 0, 10, 9, 0, 1, 2, 500, 0, 0.1, 0)
SERVER = "mqks://secret@127.0.0.1:7777"


class Service(ThreadingHTTPServer):
    """Keeps the events that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.events: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.status = 200


class Answer(Quiet):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.events.append(json.loads(body))
        self.server.keys.add(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.end_headers()


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as made, answering(made):
        yield made


def test_what_a_service_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "key")
    with Lineage(service.url, SERVER, "orders.*", "s3://bucket/events") as lineage:
        lineage.batch(BATCH)
    with (
        pytest.raises(ValueError, match="why"),
        Lineage(service.url, SERVER, "q", Path("/data/lake")),
    ):
        raise ValueError("why")
    assert [event["eventType"] for event in service.events] == [
        *("START", "RUNNING", "COMPLETE"),
        *("START", "FAIL"),
    ]
    assert len({event["run"]["runId"] for event in service.events}) == 2
    assert service.keys == {"Bearer key"}
    assert "secret" not in json.dumps(service.events)
    _, batch, end, _, failed = service.events
    assert batch["job"]["namespace"] == end["job"]["namespace"] == "mqks"
    assert batch["job"]["name"] == "archive.orders.*.events"
    [read], [written] = batch["inputs"], batch["outputs"]
    assert (read["namespace"], read["name"]) == ("mqks://127.0.0.1:7777", "q")
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 10
    assert (written["namespace"], written["name"]) == ("s3://bucket", "events")
    told = written["outputFacets"]["outputStatistics"]
    assert (told["rowCount"], told["size"], told["fileCount"]) == (9, 500, 2)
    assert failed["run"]["facets"]["errorMessage"]["message"] == "why"


def test_an_archive_goes_on_without_its_service(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.status = 500
    with (
        caplog.at_level(logging.WARNING, "mqks.pipeline"),
        Lineage(service.url, SERVER, "q", Path("lake")) as lineage,
    ):
        lineage.batch(BATCH)
        lineage.batch(BATCH)
    assert len(service.events) == 1, "the others are not sent: it would answer late, if at all"
    assert [each.name for each in caplog.records].count("mqks.pipeline") == 1
    assert f"{service.url} takes no events of lineage: " in caplog.text


@pytest.mark.usefixtures("jobs_here")
def test_an_archive_writes_its_events_to_a_file(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, events = str(clicks.lake), tmp_path / "events.json"
    clicks.publish(some(0, 3))
    told = ["pipeline", "archive", "clicks", lake, "--url", clicks.broker.url, "--once", "--json"]
    assert main([*told, "--openlineage", str(events)]) == 0
    batch = json.loads(capsys.readouterr().out)
    kept = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["eventType"] for event in kept] == ["START", "RUNNING", "COMPLETE"]
    assert kept[1]["outputs"][0]["name"] == lake
    written = kept[1]["outputs"][0]["outputFacets"]["outputStatistics"]
    assert written["rowCount"] == batch["messages"] == 3
