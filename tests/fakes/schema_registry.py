"""A schema registry on a port of this machine: answers by path, as the test says."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeRegistry:
    """What the server answers, and what it was asked."""

    def __init__(self):
        self.answers = {}
        """By path without the query: a status, and a value that is sent as JSON, or bytes."""
        self.asked = []
        self.accepted: list[str | None] = []
        """Paths with their query."""
        self.authorization = None
        """The header that is required; else it answers 401."""
        self.failures = 0
        """Requests that are answered with 503, from now on."""
        self.behind = 0
        """Requests that are answered as if it knew nothing, from now on."""
        self.silent = threading.Event()
        """While it is set, no request is answered."""
        self.url, self.encoding = "", ""

    def add(self, number, schema, kind="AVRO", references=()):
        """A schema under its id."""
        answer = {"schema": schema, "references": list(references)}
        self.answers[f"/schemas/ids/{number}"] = 200, answer if kind == "AVRO" else answer | {"schemaType": kind}

    def add_version(self, subject, version, schema, kind="AVRO", references=()):
        """A schema that others refer to."""
        answer = {"schema": schema, "schemaType": kind, "references": list(references), "id": 99}
        self.answers[f"/subjects/{subject}/versions/{version}"] = 200, answer


@contextmanager
def serving():
    """A registry that answers until the end of the block."""
    registry, ended = FakeRegistry(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            registry.asked.append(self.path)
            registry.accepted.append(self.headers["Accept-Encoding"])
            if registry.silent.is_set():
                ended.wait(30)
                return
            status, answer = registry.answers.get(
                self.path.partition("?")[0], (404, {"error_code": 40403, "message": "Schema not found"})
            )
            if registry.authorization not in (None, self.headers["Authorization"]):
                status, answer = 401, {"error_code": 401, "message": "who are you?"}
            if registry.behind > 0:
                registry.behind -= 1
                status, answer = 404, {"error_code": 40403, "message": "Schema not found"}
            if registry.failures > 0:
                registry.failures -= 1
                status, answer = 503, {"message": "starting"}
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/schemas/ids/1")
            if registry.encoding:
                self.send_header("Content-Encoding", registry.encoding)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        registry.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield registry
        finally:
            ended.set()
            server.shutdown()
            thread.join()
