"""The atlas: attention maps of any length in a browser, to pan and zoom like a street map."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from regard.errors import ArgumentError, DtypeError
from regard.report.atlas_http import HOST, Server
from regard.report.atlas_maps import Atlas, AtlasLayer

__all__ = ["Atlas", "AtlasLayer", "Serving", "check_port", "serve"]


class Serving:
    """An atlas that is being served, until `close()` or the end of its `with` block."""

    def __init__(self, atlas: Atlas, server: Server) -> None:
        self.atlas, self._server = atlas, server
        self.url = server.url
        self._redirect: Path | None = None
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"Serving({self.atlas.title!r} at {self.url})"

    def open_browser(self) -> None:
        """Open the atlas in a browser, by a file that only this user can read.

        The address itself would be among the arguments of the browser's process, which every user can see.
        """
        handle, name = tempfile.mkstemp(prefix="regard-atlas-", suffix=".html")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={self.url}">\n')
        self._redirect = Path(name)
        webbrowser.open(self._redirect.as_uri())

    def wait(self) -> None:
        """Block until Ctrl-C, or until another thread calls `close`."""
        with suppress(KeyboardInterrupt):
            self._thread.join()
        self.close()

    def close(self) -> None:
        """Stop serving and computing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.atlas.close()
        if self._redirect is not None:
            self._redirect.unlink(missing_ok=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve(atlas: Atlas, port: int = 0, open_browser: bool = False) -> Serving:
    """Serve an atlas on this machine alone, at an address with a random token in it; port 0 picks a free port.

    Requests without the token are refused, so other users of this machine cannot read the atlas.

    >>> import torch, regard
    >>> x = torch.zeros(1, 3, 8)
    >>> words = ["a", "small", "map"]
    >>> with serve(Atlas("an example", [AtlasLayer("layer 0", regard.observe(x, x, x), words, words)])) as serving:
    ...     serving.url.startswith("http://127.0.0.1:")
    True
    """
    if not isinstance(atlas, Atlas):
        raise DtypeError(
            f"serve: atlas must be an Atlas. Got {type(atlas).__name__}; make one with Atlas(title, layers)."
        )
    _check_port_number(port)
    with _port_errors(port):
        serving = Serving(atlas, Server(atlas, port))
    if open_browser:
        serving.open_browser()
    return serving


def check_port(port: int) -> None:
    """Raise the error that `serve` would raise if the port is not available; call it before long work.

    >>> check_port(0)
    """
    _check_port_number(port)
    with _port_errors(port), socket.socket() as probe:
        if Server.allow_reuse_address:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))


def _check_port_number(port: int) -> None:
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16:
        raise ArgumentError(f"serve: port must be a whole number from 0 to 65535, or 0 for a free one. Got {port!r}.")


@contextmanager
def _port_errors(port: int) -> Iterator[None]:
    """Turn an OSError into an error that says why the port is not available."""
    try:
        yield
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
        raise ArgumentError(f"serve: port {port} on {HOST} {why}. Choose another, or port=0 for a free one.") from None
