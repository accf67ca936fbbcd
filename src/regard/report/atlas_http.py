"""The atlas over HTTP, for whoever knows its address: the page, its numbers, and one clear line for anything else."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any, ClassVar
from urllib.parse import unquote

from regard.errors import ArgumentError, RegardError
from regard.report import page
from regard.report.atlas_maps import Atlas

__all__ = ["HOST", "Server"]

HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PARTS = ("colour", "draw", "heads", "search", "text", "tiles", "view")
_SCRIPTS = ("atlas.js", *(f"atlas.{part}.js" for part in _PARTS))
_ASSETS = {"/": "atlas.html", **{f"/{name}": name for name in ("atlas.css", *_SCRIPTS)}}
_NUMBER = "([0-9]{1,9})"
_MAX_CONNECTIONS = 64  # a thread each; a browser opens six
_MAX_SECONDS = 30.0  # for a request to arrive whole, and for an answer to be taken
_BACK_OFF_SECONDS = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_Poll = getattr(selectors, "PollSelector", selectors.SelectSelector)  # select() fails beyond 1,024 descriptors


class Server(ThreadingHTTPServer):
    """Serves one atlas to those who know its token; whoever else connects can neither read it nor wear it out."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on other systems two servers could then share a port
    request_queue_size = 64

    def __init__(self, atlas: Atlas, port: int) -> None:
        self.atlas = atlas
        self.token = secrets.token_urlsafe(24)
        assets = files("regard.report") / "assets"  # read now, since later there may be no descriptor left for it
        self.assets = {path: (assets / name).read_bytes() for path, name in _ASSETS.items()}
        # Since when each connection has been waiting for a request; infinity while it is answered.
        self._waiting_since: dict[socket.socket, float] = {}
        self._changed = threading.Condition()  # guards it
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's host name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address, which contains the token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; if the system has no room for it, drop another and wait, or the loop would spin."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._drop_longest_waiting()
                time.sleep(_BACK_OFF_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection, if need be in place of the one that has waited longest for a request."""
        with self._changed:
            if len(self._waiting_since) >= _MAX_CONNECTIONS:
                self._drop_longest_waiting()
                self._changed.wait_for(lambda: len(self._waiting_since) < _MAX_CONNECTIONS, _BACK_OFF_SECONDS)
            if len(self._waiting_since) >= _MAX_CONNECTIONS:
                return False
            self._waiting_since[request] = time.monotonic()
            return True

    def service_actions(self) -> None:
        """Drop connections whose request takes too long to arrive; the serving loop calls this often."""
        late = time.monotonic() - _MAX_SECONDS
        with self._changed:
            for connection, since in self._waiting_since.items():
                if since < late:
                    _hang_up(connection)

    def wait_for_request(self, connection: socket.socket) -> None:
        """Note that a connection waits for a request from now on."""
        self._note(connection, time.monotonic())

    def begin_answer(self, connection: socket.socket) -> None:
        """Note that a connection is answered, however long that takes."""
        self._note(connection, math.inf)

    def _note(self, connection: socket.socket, since: float) -> None:
        with self._changed:
            if connection in self._waiting_since:
                self._waiting_since[connection] = since

    def _drop_longest_waiting(self) -> None:
        with self._changed:
            waiting = {one: since for one, since in self._waiting_since.items() if since < math.inf}
            if waiting:
                _hang_up(min(waiting, key=waiting.__getitem__))

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection when its thread is done with it."""
        with self._changed:
            self._waiting_since.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close every connection."""
        super().server_close()
        with self._changed:
            for connection in self._waiting_since:
                _hang_up(connection)


def _hang_up(connection: socket.socket) -> None:
    """End a connection; its thread then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _MAX_SECONDS
    server: Server

    def do_GET(self) -> None:
        """Answer requests whose Host header names this server and whose path begins with its token."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is never read
        names = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host", "") not in names:
            self._send_line(403, f"this atlas answers to {' and '.join(sorted(names))} only")
            return
        token, slash, rest = self.path[1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send_line(403, "this atlas opens only at the whole address, token included, that its program printed")
            return
        self.server.begin_answer(self.connection)
        path = slash + rest
        if path in _ASSETS:
            content_type = f"{_CONTENT_TYPES[_ASSETS[path].rpartition('.')[2]]}; charset=utf-8"
            self._send(200, content_type, self.server.assets[path])
            return
        for pattern, handler in self.routes.items():
            if (found := re.fullmatch(pattern, path)) is not None:
                self._respond(handler, found.groups())
                return
        self._send_line(404, "not found")

    def _respond(self, handler: Callable[[_Handler, tuple[str, ...]], None], parts: tuple[str, ...]) -> None:
        try:
            handler(self, parts)
        except ArgumentError as error:
            self._send_line(404, str(error))
        except RegardError as error:
            self._send_line(409, str(error))

    def _meta(self, parts: tuple[str, ...]) -> None:
        self._send_json(self.server.atlas.meta())

    def _tokens(self, parts: tuple[str, ...]) -> None:
        layer, side, block = parts
        self._send_json(self.server.atlas.tokens(int(layer), side, int(block)))

    def _heads(self, parts: tuple[str, ...]) -> None:
        self._send_json(self.server.atlas.known_heads())

    def _search(self, parts: tuple[str, ...]) -> None:
        layer, side, wanted = parts
        self._send_json(self.server.atlas.search(int(layer), side, unquote(wanted)))

    def _report(self, parts: tuple[str, ...]) -> None:
        report = self.server.atlas.report
        if report is None:
            self._send_line(404, "this atlas has no report")
            return
        policy = f"{page.policy()}; frame-ancestors 'none'"
        self._send(200, "text/html; charset=utf-8", report().encode(), policy)

    def _progress(self, parts: tuple[str, ...]) -> None:
        self._send_json(asdict(self.server.atlas.state(*map(int, parts))))

    def _tile(self, parts: tuple[str, ...]) -> None:
        layer, head, level, row, col = map(int, parts)
        found = self.server.atlas.tile(layer, head, level, row, col, wanted=self._client_waits)
        if found:
            self._send(200, "application/octet-stream", found)
        else:
            self.close_connection = True

    routes: ClassVar[dict[str, Callable[[_Handler, tuple[str, ...]], None]]] = {
        "/meta.json": _meta,
        f"/tokens/{_NUMBER}/(queries|keys)/{_NUMBER}": _tokens,
        "/heads.json": _heads,
        "/report.html": _report,
        f"/search/{_NUMBER}/(queries|keys)/([^/?]{{1,600}})": _search,
        f"/progress/{_NUMBER}/{_NUMBER}": _progress,
        "/tile" + f"/{_NUMBER}" * 5: _tile,
    }

    def _client_waits(self) -> bool:
        """Whether the browser still waits; it closes the connection of a tile that it no longer wants."""
        with suppress(OSError, ValueError), _Poll() as poll:
            poll.register(self.connection, selectors.EVENT_READ)
            return not poll.select(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        return False

    def _send_json(self, data: Any) -> None:
        self._send(200, "application/json", json.dumps(data).encode())

    def _send_line(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes, policy: str = _POLICY) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        if status == 405:
            headers["Allow"] = "GET"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an error of http.server with one line of plain text, and close the connection."""
        self.close_connection = True
        if code == 501:  # no do_… method for it
            self._send_line(405, "this atlas is read-only: use GET")
        else:
            self._send_line(code, "malformed request")

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self.server.wait_for_request(self.connection)
        super().handle_one_request()

    def handle(self) -> None:
        """Answer until the browser closes the connection, which it may do at any time."""
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def version_string(self) -> str:
        """Name the server without a version."""
        return "regard"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log."""
