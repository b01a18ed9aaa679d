"""The explorer's web server: its page, and answers as JSON

Python's http.server with the protections of a server on one's own machine: only known names in the Host and Origin
headers (other pages cannot reach it, also not by DNS rebinding), a content security policy without other hosts, limits
of uploads, and no files written.
"""
from __future__ import annotations

import ipaddress
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, Callable, Dict, Sequence, Tuple
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from timm_gated_cli._explorer import Explorer

__all__ = ['ExploreServer', 'MAX_BYTES']

PAGE = Path(__file__).with_name('explore_page')
TYPES = {
    '.html': 'text/html; charset=utf-8', '.css': 'text/css; charset=utf-8', '.js': 'text/javascript; charset=utf-8',
    '.svg': 'image/svg+xml'}
MAX_BYTES = 20_000_000  # of an upload
MAX_REQUESTS = 8  # answered or waiting at a time; each may hold an upload

Reply = Tuple[str, bytes]  # content type and content


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: Status of the response.
        reason: Reason in words, shown on the page.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ExploreServer(ThreadingHTTPServer):
    """Server of the explorer.

    Args:
        address: Host and port to bind to; port 0 for a free one.
        explorer: Explorer that answers.
        allow_hosts: Names, other than localhost and IP addresses, under which the server may be reached.
        embed_in: Origins of pages that may show the explorer in a frame.
    """

    def __init__(
            self,
            address: Tuple[str, int],
            explorer: Explorer,
            allow_hosts: Sequence[str] = (),
            embed_in: Sequence[str] = (),
    ) -> None:
        self.explorer = explorer
        self.allow_hosts = {name.lower() for name in allow_hosts}
        self.frames = ' '.join(embed_in) or "'none'"
        self.free = BoundedSemaphore(MAX_REQUESTS)
        self.files = {
            f'/{path.relative_to(PAGE).as_posix()}': (TYPES[path.suffix], path.read_bytes())
            for path in PAGE.rglob('*.*')}
        self.files['/'] = self.files['/index.html']
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client has gone
            super().handle_error(request, client_address)

    def is_known(self, host: str) -> bool:
        """Whether a host is an IP address, localhost or allowed. A name that DNS can rebind is none of these."""
        name = urlsplit(f'//{host}').hostname or ''
        try:
            return name in self.allow_hosts or name == 'localhost' or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    server_version, sys_version = 'timm-gated', ''
    timeout = 60  # seconds for a client to send or receive something

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, reply: Callable[[], Reply]) -> None:
        """Send a reply, or why there is none."""
        status = HTTPStatus.OK
        try:
            self._check_sender()
            kind, content = reply()
        except Refused as error:
            status, (kind, content) = error.status, _as_json({'error': str(error)})
        except ValueError as error:
            status, (kind, content) = HTTPStatus.BAD_REQUEST, _as_json({'error': str(error)})
        self.send_response(status)
        for name, value in (
                ('Content-Type', kind), ('Content-Length', str(len(content))), ('Cache-Control', 'no-store'),
                ('Content-Security-Policy', (
                    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
                    f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {self.server.frames}")),
                ('X-Content-Type-Options', 'nosniff'), ('Referrer-Policy', 'no-referrer'),
                ('Cross-Origin-Resource-Policy', 'same-origin')):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _check_sender(self) -> None:
        """Refuse requests of other sites."""
        host, origin = self.headers.get('Host', ''), self.headers.get('Origin')
        if not self.server.is_known(host):
            raise Refused(
                HTTPStatus.FORBIDDEN, f"the host '{host}' is not known here. Open the address that the explorer "
                f'printed, or start it with --allow-host and this name.')
        if origin is not None:
            sender = urlsplit(origin)
            if sender.netloc != host and sender.hostname not in self.server.allow_hosts:
                raise Refused(HTTPStatus.FORBIDDEN, f"requests of another site, '{origin}', are refused.")

    def _get(self) -> Reply:
        url = urlsplit(self.path)
        if url.path in self.server.files:
            return self.server.files[url.path]
        explorer = self.server.explorer
        if url.path == '/api/model':
            return _as_json(explorer.run(explorer.describe))
        if url.path == '/api/thumbnail':
            return 'image/png', explorer.run(explorer.thumbnail, _image_index(url.query))
        raise Refused(HTTPStatus.NOT_FOUND, f'there is no page {url.path}.')

    def _post(self) -> Reply:
        url, explorer = urlsplit(self.path), self.server.explorer
        if url.path not in ('/api/explore', '/api/speed'):
            raise Refused(HTTPStatus.NOT_FOUND, f'there is no page {url.path}.')
        if not self.server.free.acquire(blocking=False):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, 'too many images at a time. Try again in a moment.')
        try:
            index = _image_index(url.query) if url.query else None
            content = self._body() if index is None else b''

            def work() -> Dict[str, Any]:
                image = explorer.upload(content) if index is None else explorer.data_image(index)
                return explorer.explore(image, index) if url.path == '/api/explore' else explorer.speed(image)
            return _as_json(explorer.run(work))
        finally:
            self.server.free.release()

    def _body(self) -> bytes:
        """Read the upload."""
        length = self.headers.get('Content-Length', '')
        if not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, 'the request has no image.')
        if int(length) > MAX_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f'this file has {int(length) / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are allowed.')
        return self.rfile.read(int(length))


def _image_index(query: str) -> int:
    text = parse_qs(query).get('image', [''])[0]
    if not text.isdecimal():
        raise ValueError(f"image must be a number, got '{text}'.")
    return int(text)


def _as_json(answer: Any) -> Reply:
    return 'application/json', json.dumps(answer, allow_nan=False).encode()
