"""The atlas: maps computed on demand, over HTTP for this machine alone, and one clear line for any other request."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.observation import Observation
from regard.report import atlas_maps
from regard.report.atlas import Atlas, AtlasLayer, Serving, serve
from regard.report.atlas_head import size_of
from regard.report.atlas_heads import HeadList
from regard.report.look import HeadLook, LayerLook, Look, Remark
from regard.report.page import render
from regard.report.pyramid import Pyramid

WORDS = ["<b>bold</b>", "\n", " the", "\ud800", "\u202eturned", '"quoted"', ""]


def observed(n: int, m: int | None = None, heads: int = 2, **how: Any) -> Observation:
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.randn(1, heads, size, 8, generator=generator) for size in (n, m or n))
    return regard.observe(q, k, k[..., :2], backend="chunked", **how)


def words(n: int) -> list[str]:
    return [WORDS[i % len(WORDS)] if i % 5 else str(i) for i in range(n)]


def layer(name: str, seen: Observation) -> AtlasLayer:
    _, _, n, m = size_of(seen)
    return AtlasLayer(name, seen, words(n), words(m))


@pytest.fixture(scope="module")
def short() -> Observation:
    return observed(300, 400, mask=regard.causal())


@pytest.fixture(scope="module")
def long() -> Observation:
    return observed(2100, heads=1, mask=regard.causal())


@pytest.fixture
def serving(short: Observation, long: Observation) -> Iterator[Serving]:
    with serve(Atlas("A <title> & more", [layer("short", short), layer("long", long)])) as running:
        yield running


def port_of(serving: Serving) -> int:
    return int(serving._server.server_port)


def ask(serving: Serving, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(serving), timeout=20)
    connection.request(method, f"/{serving._server.token}{path}", headers={"Connection": "close", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def request(serving: Serving, path: str) -> bytes:
    host = f"localhost:{port_of(serving)}"
    return f"GET /{serving._server.token}/{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def read(serving: Serving, path: str) -> Any:
    answer, body = ask(serving, path)
    assert answer.status == 200, body
    return json.loads(body)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_a_tile_is_the_weights_in_little_endian_floats(serving: Serving, short: Observation) -> None:
    for head in range(2):
        answer, body = ask(serving, f"/tile/0/{head}/0/1/1")
        assert answer.headers["Content-Type"] == "application/octet-stream"
        found = np.frombuffer(body, "<f4").reshape(44, 144)
        truth = short.weights(slice(256, 300), slice(256, 400))[0, head]
        torch.testing.assert_close(torch.from_numpy(found.copy()), truth)
    assert struct.unpack("<f", ask(serving, "/tile/0/0/0/0/0")[1][:4])[0] == pytest.approx(
        float(short.weights()[0, 0, 0, 0])
    )


def test_the_metadata_lists_title_and_layers(serving: Serving) -> None:
    meta = read(serving, "/meta.json")
    assert meta["title"] == "A <title> & more"
    assert meta["layers"][0] == {"name": "short", "heads": 2, "queries": 300, "keys": 400, "base": 4, "top": 1}
    assert meta["layers"][1] == {"name": "long", "heads": 1, "queries": 2100, "keys": 2100, "base": 4, "top": 4}


def test_what_is_known_of_the_heads_grows(short: Observation) -> None:
    maps = Atlas("growing", expected=1)
    maps.add(layer("short", short))
    with serve(maps) as running:
        assert read(running, "/heads.json") == {
            "report": False,
            "complete": False,
            "statistics": [],
            "layers": [],
            "remarks": [],
            "first": None,
        }
        maps.heads.add([{"entropy": 2.0}, {"entropy": float("nan")}], short.map(64, 50)[0])
        maps.complete()
        known = read(running, "/heads.json")
        assert [head["values"] for head in known["layers"][0]] == [[2.0], [None]]
        assert known["layers"][0][1]["shape"] == [32, 25]
        cells = np.frombuffer(base64.b64decode(known["layers"][0][1]["cells"]), np.uint8).reshape(32, 25)
        mean = short.map(64, 50)[0, 1].view(32, 2, 25, 2).mean((1, 3)).numpy()
        found = known["layers"][0][1]["largest"] * (cells / 255.0) ** 2
        assert np.abs(found - mean).max() <= mean.max() / 255
        assert not known["complete"]
        maps.report = lambda: render(Look("r", {}, [tiny_layer()], []), atlas="./")
        maps.heads.conclude([Remark("r", "notable", "t", "short", (1,)), Remark("p", "problem", "t", "gone", (0,))])
        known = read(running, "/heads.json")
        assert (known["complete"], known["report"], known["first"]) == (True, True, [0, 1])
        answer, body = ask(running, "/report.html")
        assert answer.status == 200
        assert b'"atlas":"./"' in body
        policy = answer.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert policy.endswith("frame-ancestors 'none'")
        assert re.search(r"script-src '(sha256-[^']+)'", policy)[1].encode() in body


def tiny_layer() -> LayerLook:
    head = HeadLook(0, {}, torch.ones(1, 1), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)))
    return LayerLook("short", ["a"], ["a"], [head])


def test_without_findings_the_head_with_the_least_entropy_comes_first() -> None:
    heads = HeadList()
    heads.add([{"entropy": 2.0}, {"entropy": 1.0}, {"entropy": float("nan")}], torch.ones(3, 2, 2))
    heads.conclude([])
    assert heads.as_json(["a"])["first"] == [0, 1]


def test_a_search_finds_tokens_and_runs_of_them(serving: Serving) -> None:
    assert read(serving, "/search/0/queries/%3Cb%3EBOLD") == [i for i in range(300) if i % 5 and i % 7 == 0]
    assert read(serving, "/search/0/keys/the%20%0A") == read(serving, "/search/0/keys/the")
    assert read(serving, "/search/0/queries/%20") == []
    assert ask(serving, "/search/0/queries/" + "x" * 601)[0].status == 404
    assert ask(serving, "/search/9/queries/x")[0].status == 404
    assert ask(serving, "/report.html")[0].status == 404


def test_tokens_come_in_blocks_and_as_they_are(serving: Serving) -> None:
    every = words(2100)
    assert read(serving, "/tokens/1/queries/0") == every[:1024]
    assert read(serving, "/tokens/1/keys/2") == every[2048:]
    assert read(serving, "/tokens/0/keys/0") == words(400)
    answer, body = ask(serving, "/tokens/1/keys/3")
    assert (answer.status, body) == (404, b"tokens: block must be from 0 to 2. Got 3.\n")


def test_the_coarse_levels_are_computed_in_the_background(serving: Serving) -> None:
    assert read(serving, "/progress/0/0") == {"progress": 1.0, "known": 300, "trouble": ""}
    until(lambda: read(serving, "/progress/1/0")["progress"] == 1.0)
    found = np.frombuffer(ask(serving, "/tile/1/0/4/0/0")[1], "<f4")
    assert found.size == 132 * 132
    assert np.isfinite(found).all()
    assert found.sum() * 256 == pytest.approx(2100, rel=0.02)  # the rows sum to 1; cells at the edges are smaller


def test_nothing_is_computed_before_it_is_requested(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = Pyramid.__init__

    def counting(self: Pyramid, seen: Observation, item: int = 0, head: int = 0) -> None:
        made.append(head)
        plain(self, seen, item, head)

    monkeypatch.setattr(Pyramid, "__init__", counting)
    read(serving, "/meta.json")
    read(serving, "/tokens/0/keys/0")
    assert made == []
    ask(serving, "/tile/0/1/0/0/0")
    ask(serving, "/tile/0/1/0/0/1")
    assert made == [1]


PAGES = ["/", "/atlas.css", "/atlas.js", "/meta.json", "/tile/0/0/0/0/0", "/progress/0/0", "/nothing"]


@pytest.mark.parametrize("path", PAGES)
def test_every_answer_forbids_what_the_page_does_not_need(serving: Serving, path: str) -> None:
    headers = ask(serving, path)[0].headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_the_page_and_all_that_it_names_are_served_and_nothing_else_is_named(serving: Serving) -> None:
    page = ask(serving, "/")[1].decode()
    assert ask(serving, "/")[0].headers["Content-Type"] == "text/html; charset=utf-8"
    named = {f"/{name}" for name in re.findall(r'(?:src|href)="([^":]+)"', page)}
    assert named == {"/atlas.css", "/atlas.js"}
    scripts = [
        f"/{file.name}" for file in (files("regard.report") / "assets").iterdir() if file.name.startswith("atlas.")
    ]
    for path in {*named, *scripts} - {"/atlas.html"}:
        answer, body = ask(serving, path)
        assert answer.status == 200, path
        assert not re.search(rb"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", body), path
        for module in re.findall(rb'from "\.(/[^"]+)"', body):
            assert ask(serving, module.decode())[0].status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
def test_a_request_under_another_name_is_refused(serving: Serving, host: str) -> None:
    port = port_of(serving)
    answer, body = ask(serving, "/meta.json", Host=host.format(port=port))
    assert answer.status == 403
    assert body.decode() == f"this atlas answers to 127.0.0.1:{port} and localhost:{port} only\n"
    assert ask(serving, "/meta.json", Host=f"localhost:{port}")[0].status == 200


def test_only_this_machine_is_listened_to(serving: Serving) -> None:
    assert serving._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])
def test_the_atlas_is_read_only(serving: Serving, method: str) -> None:
    answer, body = ask(serving, "/", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET"
    assert body in (b"this atlas is read-only: use GET\n", b"")


STRANGE = [
    "/atlas.py",
    "/../atlas.py",
    "/assets/atlas.js",
    "/atlas.js/",
    "/?x=1",
    "/tile/0/0/0/0",
    "/tile/0/0/0/0/0/",
    "/tile/0/0/0/0/-1",
    "/tile/0/0/0/0/1e3",
    "/tile/0/0/0/0/9999999999",
    "/tile/%30/0/0/0/0",
    "/tokens/0/values/0",
    "/progress/0",
]


@pytest.mark.parametrize("path", STRANGE)
def test_an_unknown_path_gets_one_line(serving: Serving, path: str) -> None:
    answer, body = ask(serving, path)
    assert (answer.status, body) == (404, b"not found\n")


@pytest.mark.parametrize("request_line", ["NONSENSE", "GET / HTTP/9.9", "GET /" + "x" * 70_000 + " HTTP/1.1"])
def test_a_malformed_request_gets_one_line(serving: Serving, request_line: str) -> None:
    port = port_of(serving)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"{request_line}\r\n\r\n".encode())
        with suppress(ConnectionResetError):  # the server closes the connection with the request unread
            assert connection.makefile("rb").read().endswith(b"malformed request\n")
    assert read(serving, "/meta.json")["side"] == 256


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/tile/2/0/0/0/0", "atlas: layer must be from 0 to 1. Got 2."),
        ("/tile/0/2/0/0/0", "atlas: head must be from 0 to 1 in layer 0. Got 2."),
        ("/tile/0/0/2/0/0", "tile: level must be a whole number from 0 to 1. Got 2."),
        ("/tile/0/0/9/0/0", "tile: level must be a whole number from 0 to 1. Got 9."),
        ("/tile/0/0/0/2/0", "tile: row must be a whole number from 0 to 1 at level 0. Got 2."),
        ("/tile/0/0/0/0/2", "tile: col must be a whole number from 0 to 1 at level 0. Got 2."),
        ("/progress/0/7", "atlas: head must be from 0 to 1 in layer 0. Got 7."),
    ],
)
def test_an_index_out_of_range_gets_one_line(serving: Serving, path: str, line: str) -> None:
    answer, body = ask(serving, path)
    assert (answer.status, body.decode()) == (404, f"{line}\n")


def test_inputs_changed_in_place_are_reported_and_the_atlas_goes_on() -> None:
    q = torch.randn(1, 1, 2100, 4)
    seen = regard.observe(q, q.clone(), q.clone(), backend="chunked")
    with serve(Atlas("changed", [layer("one", seen)])) as serving:
        q.add_(1.0)
        answer, body = ask(serving, "/tile/0/0/0/0/0")
        assert answer.status == 409
        assert b"changed in place" in body
        assert body.count(b"\n") == 1
        until(lambda: "changed in place" in ask(serving, "/progress/0/0")[1].decode())
        assert ask(serving, "/meta.json")[0].status == 200


def test_a_port_in_use_gives_one_error_with_a_remedy(short: Observation) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"^serve: port {port} on 127\.0\.0\.1 is in use\. .*port=0"):
            serve(Atlas("taken", [layer("short", short)]), port=port)


def test_bad_arguments_get_one_clear_error(short: Observation) -> None:
    with pytest.raises(ShapeError, match=r"^AtlasLayer: queries must have one string per token: 300 .* Got 2\."):
        AtlasLayer("short", short, ["a", "b"], words(400))
    with pytest.raises(DtypeError, match=r"^AtlasLayer: keys must be a list of strings, one per token\. Got list"):
        AtlasLayer("short", short, words(300), [1] * 400)  # type: ignore[list-item]
    with pytest.raises(DtypeError, match=r"^AtlasLayer: queries must be a list of strings, one per token\. Got str"):
        AtlasLayer("short", short, "a" * 300, words(400))
    with pytest.raises(DtypeError, match=r"^AtlasLayer: observation must come from regard\.observe\. Got int"):
        AtlasLayer("short", 3, [], [])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^AtlasLayer: item must be a whole number from 0 to 0\. Got 1\."):
        AtlasLayer("short", short, words(300), words(400), item=1)
    with pytest.raises(ArgumentError, match=r"^Atlas: layers must be a list of at least one AtlasLayer\. Got \[\]\."):
        Atlas("empty", [])
    with pytest.raises(DtypeError, match=r"^serve: atlas must be an Atlas\. Got str"):
        serve("atlas")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^serve: port must be a whole number from 0 to 65535"):
        serve(Atlas("short", [layer("short", short)]), port=70000)


class Slow:
    """Make tiles wait until `may` is set, and count them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self.begun, self.at_once, self.most = threading.Event(), 0, 0, 0
        plain = Pyramid.tile

        def tile(pyramid: Pyramid, level: int, row: int, col: int) -> torch.Tensor:
            self.begun += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.may.wait(20)
            self.at_once -= 1
            return plain(pyramid, level, row, col)

        monkeypatch.setattr(Pyramid, "tile", tile)


def test_a_tile_that_the_browser_gave_up_is_not_computed(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    port = port_of(serving)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    sockets = []
    for row, col in places:
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].sendall(request(serving, f"tile/0/0/0/{row}/{col}"))
        until(lambda: serving.atlas._waiting == len(sockets))
    for given_up in sockets[1:]:
        given_up.close()
    time.sleep(0.05)
    slow.may.set()
    until(lambda: serving.atlas._waiting == 0)
    assert slow.begun == 1
    assert sockets[0].recv(12) == b"HTTP/1.1 200"
    sockets[0].close()


def test_one_tile_at_a_time_is_computed_and_each_once(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    threads = [threading.Thread(target=ask, args=(serving, f"/tile/0/0/0/0/{at % 2}")) for at in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: serving.atlas._waiting == 6)
    slow.may.set()
    for thread in threads:
        thread.join()
    assert slow.most == 1
    assert slow.begun == 2


def test_the_number_of_cached_tiles_is_bounded(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_maps, "_MAX_TILES", 3)
    for row in range(4):
        for col in range(row + 1):
            ask(serving, f"/tile/1/0/0/{row}/{col}")
    assert list(serving.atlas._tiles) == [(1, 0, 0, 3, col) for col in (1, 2, 3)]


def test_the_least_recently_used_maps_are_evicted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_maps, "_MAX_MAP_BYTES", 1)
    for head, level in ((0, 0), (1, 0), (0, 1)):
        assert ask(serving, f"/tile/0/{head}/{level}/0/0")[0].status == 200
        assert list(serving.atlas._maps) == [(0, head)]


def test_tiles_take_precedence_over_the_coarse_levels(long: Observation) -> None:
    atlas = Atlas("long", [layer("long", long)])
    with atlas._exclusive():
        atlas.state(0, 0)
        time.sleep(0.1)
        assert atlas._maps[0, 0].progress == 0.0
    until(lambda: atlas.state(0, 0).progress == 1.0)
    atlas.close()


def test_nothing_is_computed_after_the_end(long: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    atlas = Atlas("long", [layer("long", long)])
    begun = threading.Event()
    plain = Pyramid._block_sums

    def slow(self: Pyramid, *block: Any) -> torch.Tensor:
        begun.set()
        time.sleep(0.05)
        return plain(self, *block)

    monkeypatch.setattr(Pyramid, "_block_sums", slow)
    atlas.state(0, 0)
    assert begun.wait(20)
    atlas.close()
    assert atlas._worker is not None
    assert not atlas._worker.is_alive()
    assert atlas.state(0, 0).progress < 1.0
    assert atlas.tile(0, 0, 0, 0, 0) == b""


def test_a_program_may_exit_while_its_atlas_is_computed() -> None:
    script = (
        "import torch, regard; from regard.report.atlas import *; n = 2100; q = torch.randn(1, 1, n, 8);"
        "words = ['x'] * n; seen = regard.observe(q, q, q);"
        "serving = serve(Atlas('ends', [AtlasLayer('one', seen, words, words)]));"
        "print(serving.atlas.state(0, 0).known)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_closing_frees_the_port_and_ends_the_threads(short: Observation) -> None:
    serving = serve(Atlas("short", [layer("short", short)]))
    port = port_of(serving)
    serving.close()
    serving.wait()  # returns at once, any number of times
    with serve(Atlas("short", [layer("short", short)]), port=port) as again:
        assert again.url.startswith(f"http://127.0.0.1:{port}/")
        assert again.url != serving.url
    assert not again._thread.is_alive()


def test_the_browser_is_opened_when_asked_for(short: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with serve(Atlas("short", [layer("short", short)]), open_browser=True) as serving:
        [address] = opened
        file = Path(urllib.request.url2pathname(address.removeprefix("file://")))
        assert f'url={serving.url}"' in file.read_text(encoding="utf-8")
        assert file.stat().st_mode & 0o077 == 0, "other users must not read the token"
    assert not file.exists()


def test_an_atlas_may_be_served_before_its_layers_are_known(short: Observation) -> None:
    growing = Atlas("growing", expected=2)
    with serve(growing) as serving:
        assert (read(serving, "/meta.json")["layers"], read(serving, "/meta.json")["expected"]) == ([], 2)
        answer, body = ask(serving, "/tile/0/0/0/0/0")
        assert (answer.status, body) == (404, b"atlas: no layer is known yet.\n")
        growing.add(layer("short", short))
        assert ask(serving, "/tile/0/0/0/0/0")[0].status == 200
        assert [one["name"] for one in read(serving, "/meta.json")["layers"]] == ["short"]
        growing.complete()
        assert read(serving, "/meta.json")["expected"] is None
    with pytest.raises(ArgumentError, match=r"^Atlas: this atlas is complete\. Create it with expected="):
        growing.add(layer("short", short))
