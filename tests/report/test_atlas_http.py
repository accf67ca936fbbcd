"""The server of the atlas: it answers whoever knows the token, and strangers can neither read it nor wear it out."""

from __future__ import annotations

import errno
import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from socketserver import TCPServer
from typing import Any

import pytest
import torch

import regard
from regard.report import atlas_http
from regard.report.atlas import Atlas, AtlasLayer, Serving, serve


@pytest.fixture
def serving() -> Iterator[Serving]:
    x = torch.zeros(1, 3, 8)
    words = ["a", "small", "map"]
    with serve(Atlas("an example", [AtlasLayer("one", regard.observe(x, x, x), words, words)])) as running:
        yield running


def connect(serving: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", serving._server.server_port), timeout=20)


def get(serving: Serving, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", serving._server.server_port, timeout=20)
    connection.request("GET", path, headers={"Connection": "close"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def works(serving: Serving) -> bool:
    return get(serving, f"/{serving._server.token}/tile/0/0/0/0/0")[0] == 200


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_every_answer_needs_the_token(serving: Serving) -> None:
    token = serving._server.token
    assert len(token) >= 32
    assert serving.url.endswith(f"/{token}/")
    for path in ("", "atlas.js", "meta.json", "tokens/0/keys/0", "tile/0/0/0/0/0", "progress/0/0", "nothing"):
        for prefix in ("", f"{token[:-1]}/", f"{token}x/", f"{token[::-1]}/", "/", f"?token={token}"):
            status, body = get(serving, f"/{prefix}{path}")
            assert status == 403, (prefix, path)
            assert body.startswith(b"this atlas opens only at the whole address")
    assert works(serving)


def test_two_servers_have_two_tokens(serving: Serving) -> None:
    with serve(serving.atlas) as other:
        assert other._server.token != serving._server.token


def test_more_connections_than_allowed_get_no_more_threads_and_the_page_still_answers(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atlas_http, "_MAX_CONNECTIONS", 8)
    most = 0
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connect(serving))
            most = max(most, len(serving._server._waiting_since))
        assert works(serving)
        assert 1 <= max(most, len(serving._server._waiting_since)) <= 8
        until(lambda: handlers() <= 8)  # a thread that has forgotten its connection may take a moment to end


def test_a_connection_whose_request_does_not_arrive_is_closed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atlas_http, "_MAX_SECONDS", 1.0)
    with connect(serving) as idle, connect(serving) as dripping:
        dripping.sendall(b"GET / HT")
        until(lambda: handlers() == 2)
        start = time.monotonic()
        while handlers():
            with suppress(OSError):
                dripping.sendall(b"T")  # each byte is in time, but the request never ends
            assert time.monotonic() - start < 60.0
            time.sleep(0.05)
        assert idle.recv(1) == b""
    monkeypatch.undo()  # a slow machine may not send a request in a second
    assert works(serving)


def test_a_long_answer_is_not_cut(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_http, "_MAX_SECONDS", 1.0)
    plain = Atlas.tile

    def slow(self: Atlas, *given: Any, **named: Any) -> bytes:
        time.sleep(1.6)
        return plain(self, *given, **named)

    monkeypatch.setattr(Atlas, "tile", slow)
    assert works(serving)


def test_the_server_backs_off_when_descriptors_run_out(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def exhausted(self: TCPServer) -> Any:
        nonlocal tried
        tried += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with connect(serving) as idle:
        until(lambda: handlers() == 1)
        with monkeypatch.context() as patched:
            patched.setattr(TCPServer, "get_request", exhausted)
            with connect(serving):
                until(lambda: tried >= 2)
                assert idle.recv(1) == b"", "an idle connection is closed to free its descriptor"
                time.sleep(0.3)
                assert tried < 12
    assert works(serving)


def test_tiles_are_served_beyond_1024_descriptors(serving: Serving) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip("this system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    held = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.open(os.devnull, os.O_RDONLY))
        assert works(serving)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
