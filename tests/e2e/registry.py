#!/usr/bin/env python3
"""Serves the images in a directory as a registry, at a port of 127.0.0.1 that it prints.

usage: registry.py DIRECTORY [RATE_FILE]

  DIRECTORY   blobs/DIGEST, and manifests/NAME/TAG or manifests/NAME/DIGEST (estargz.py)
  RATE_FILE   a file with the bytes a second that all answers with blobs have together, which may change;
              missing or empty: as fast as it goes

GET /sent answers with the bytes of blobs that were sent until then.
"""

import hashlib
import http.server
import pathlib
import re
import sys
import threading
import time

STEP = 64 << 10
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Sent:
    """Counts bytes, and makes senders wait for the rate."""

    def __init__(self, rate):
        self.rate, self.total, self.free_at, self.lock = rate, 0, 0.0, threading.Lock()

    def add(self, count):
        try:
            rate = float(self.rate.read_text())
        except (OSError, ValueError, AttributeError):
            rate = 0
        with self.lock:
            self.total += count
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + (count / rate if rate else 0)
            wait = self.free_at - now if rate else 0
        time.sleep(wait)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind, headers=()):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        return body if self.command == "GET" else b""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        found = re.fullmatch(r"/v2/([a-z0-9/._-]+)/(manifests|blobs)/([A-Za-z0-9:._-]+)", path)
        if path in ("/v2/", "/v2"):
            self.wfile.write(self.answer(200, b"{}", "application/json"))
        elif path == "/sent":
            self.wfile.write(self.answer(200, str(self.server.sent.total).encode(), "text/plain"))
        elif found and found[2] == "manifests":
            self.file(self.server.top / "manifests" / found[1] / found[3], self.manifest)
        elif found:
            self.file(self.server.top / "blobs" / found[3], self.blob)
        else:
            self.file(self.server.top / "none", None)

    def file(self, path, send):
        if ".." in path.parts or not path.is_file():
            self.wfile.write(self.answer(404, b'{"errors":[{"code":"NOT_FOUND"}]}', "application/json"))
            return
        send(path)

    def manifest(self, path):
        body = path.read_bytes()
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        self.wfile.write(self.answer(200, body, MANIFEST, [("Docker-Content-Digest", digest)]))

    def blob(self, path):
        body, status, headers = path.read_bytes(), 200, [("Accept-Ranges", "bytes")]
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted and (wanted[1] or wanted[2]):
            size = len(body)
            if wanted[1]:
                begin, end = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
            else:
                begin, end = max(size - int(wanted[2]), 0), size - 1
            if begin > end:
                headers.append(("Content-Range", f"bytes */{size}"))
                self.answer(416, b"", "text/plain", headers)
                return
            body, status = body[begin:end + 1], 206
            headers.append(("Content-Range", f"bytes {begin}-{end}/{size}"))
        body = self.answer(status, body, "application/octet-stream", headers)
        for at in range(0, len(body), STEP):
            step = body[at:at + STEP]
            self.server.sent.add(len(step))
            self.wfile.write(step)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        # A client that goes away.
        pass


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    server = Server(("127.0.0.1", 0), Handler)
    server.top = pathlib.Path(sys.argv[1])
    server.sent = Sent(pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else None)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
