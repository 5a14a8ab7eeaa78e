"""A proxy before an object store or a catalog whose next commit fails: a conditional put, or a POST
to a table.

    python -m tests.kit.store_proxy PORT-OF-THE-STORE OWN-PORT     prints its own port; 0: any

`GET /_fault=FAULT` says which, and `GET /_fault=` ends it:

    swallow        the store gets the put, and nobody the answer
    done           the store gets the put, and the answer is 503
    lost           so, and then everything is answered by 503
    500            the put, too, is answered by 503
    down           everything is, from now on
    before, after  this put is held before or after the store gets it; the fault is `held` then
    file           so is the next put of a file with messages, before the store gets it

`GET /_fault` tells the fault, and the number of commits.

The one rule: what is passed is passed unchanged.
"""

import sys
import time
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    fault = ""
    commits = 0
    store_port = 0


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        body = self._body()
        if self.path.startswith("/_fault"):
            if "=" in self.path:
                self.server.fault = self.path.partition("=")[2]
            self._answer(200, f"{self.server.fault},{self.server.commits}".encode())
            return
        to_table = self.command == "POST" and "/tables/" in self.path
        is_commit = to_table or "if-none-match" in self.headers
        self.server.commits += is_commit
        fault = self.server.fault
        if fault == "500" and is_commit:
            self.server.fault = fault = "down"
        is_file = self.command == "PUT" and ".parquet" in self.path
        if (fault == "before" and is_commit) or (fault == "file" and is_file):
            self._hold()
        if self.server.fault == "down":
            self._answer(503, b"")
            return
        to = HTTPConnection("127.0.0.1", self.server.store_port, timeout=60)
        to.request(self.command, self.path, body, dict(self.headers))
        answer = to.getresponse()
        told = answer.read()
        to.close()
        if fault == "after" and is_commit:
            self._hold()
        if fault in ("swallow", "lost") and is_commit:
            self.server.fault = "down" if fault == "lost" else ""
            self.close_connection = True
            return
        if fault == "done" and is_commit:
            self.server.fault = ""
            self._answer(503, b"")
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if answer.getheader("content-length") is None:
            self.send_header("content-length", str(len(told)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told)

    def _hold(self) -> None:
        self.server.fault = "held"
        while self.server.fault == "held":
            time.sleep(0.01)

    def handle(self) -> None:
        with suppress(ConnectionError):  # Of a client that was killed.
            super().handle()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        del self.headers["transfer-encoding"]
        self.headers["content-length"] = str(len(body))
        return body

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    store_port, own_port = map(int, sys.argv[1:])
    proxy = Proxy(("127.0.0.1", own_port), Passing)
    proxy.store_port = store_port
    print(proxy.server_port, flush=True)
    proxy.serve_forever()
