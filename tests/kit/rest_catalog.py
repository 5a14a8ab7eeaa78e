"""An Iceberg REST catalog of pyiceberg's own parts: its SQL catalog behind the REST protocol.

    python -m tests.kit.rest_catalog DIRECTORY [WAREHOUSE]     prints its port

The token `good` may do everything, others nothing.

The one rule: requirements are checked and updates applied here, as by any server of the protocol.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote

from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table

TOKEN = "good"
STATUS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


class Rest(BaseHTTPRequestHandler):
    catalog: SqlCatalog

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                status, answer = 401, _error("NotAuthorizedException", "another token", 401)
            else:
                path = [unquote(part) for part in self.path.partition("?")[0].split("/")[2:]]
                status, answer = 200, self._answer(path, body)
        except tuple(STATUS) as error:
            status = STATUS[type(error)]
            answer = _error(type(error).__name__, str(error), status)
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def _answer(self, path: list[str], body: bytes) -> str:
        catalog = self.catalog
        match self.command, path:
            case "GET", ["config"]:
                return json.dumps({"defaults": {}, "overrides": {}})
            case "POST", ["namespaces"]:
                made = json.loads(body)
                catalog.create_namespace(tuple(made["namespace"]), made["properties"])
                return json.dumps(made)
            case "GET", ["namespaces", name]:
                properties = catalog.load_namespace_properties(name)
                return json.dumps({"namespace": [name], "properties": properties})
            case "POST", ["namespaces", name, "tables"]:
                absent = dict.fromkeys(("location", "partition-spec", "write-order"))
                asked = CreateTableRequest.model_validate(absent | json.loads(body))
                make = catalog._create_staged_table if asked.stage_create else catalog.create_table
                spec = asked.partition_spec or UNPARTITIONED_PARTITION_SPEC
                of = (name, asked.name), asked.table_schema
                return _told(make(*of, partition_spec=spec, properties=asked.properties))
            case "GET", ["namespaces", name, "tables", table]:
                return _told(catalog.load_table((name, table)))
            case "POST", ["namespaces", name, "tables", table]:
                commit = CommitTableRequest.model_validate_json(body)
                named = _Named((name, table))
                done = catalog.commit_table(named, commit.requirements, commit.updates)
                return done.model_dump_json(by_alias=True)
        raise ValueError(f"{self.command} {path}")

    do_GET = do_POST = _serve

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Named(Table):
    """What `commit_table` asks of the table that it gets."""

    def __init__(self, identifier: tuple[str, ...]) -> None:
        self._identifier = identifier


def _told(table: Table) -> str:
    told = {"metadata-location": table.metadata_location, "metadata": table.metadata}
    return TableResponse.model_validate(told).model_dump_json(by_alias=True)


def _error(kind: str, message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "code": code}})


if __name__ == "__main__":
    place = Path(sys.argv[1])
    warehouse = sys.argv[2] if len(sys.argv) > 2 else f"file://{place}/warehouse"
    told = {"uri": f"sqlite:///{place}/rest.db", "warehouse": warehouse}
    if url := os.environ.get("AWS_ENDPOINT_URL"):
        told |= {"s3.endpoint": url, "s3.region": os.environ["AWS_REGION"]}
    Rest.catalog = SqlCatalog("rest", **told)
    server = HTTPServer(("127.0.0.1", 0), Rest)
    print(server.server_port, flush=True)
    server.serve_forever()
