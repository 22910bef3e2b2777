"""A web server for tests: it serves files by name, and misbehaves on request (`Server.answers`)."""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        name = self.path.rsplit("/", 1)[-1]
        with contextlib.suppress(OSError):
            self.server.answers.get(name, whole)(self)

    @property
    def body(self) -> bytes:
        return self.server.contents[self.path.rsplit("/", 1)[-1]]

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = contents
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/data/"

    def handle_error(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(contents: Mapping[str, bytes]) -> Iterator[Server]:
    with Server(contents) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def whole(handler: Handler) -> None:
    handler.head(200, Content_Length=len(handler.body))
    handler.wfile.write(handler.body)


def dropped(handler: Handler) -> None:
    """Closes the connection after half of the body."""
    size = len(handler.body)
    handler.head(200, Content_Length=size)
    handler.wfile.write(handler.body[: size // 2])


def content(data: bytes) -> Answer:
    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(data))
        handler.wfile.write(data)

    return answer


def status(code: int, **headers: object) -> Answer:
    return lambda handler: handler.head(code, Content_Length=0, **headers)
