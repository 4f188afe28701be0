#!/usr/bin/env python3
"""Serves the images in a directory as a registry, at a port of 127.0.0.1 that it prints.

usage: registry.py DIRECTORY [RATE_FILE [DELAY]]

  DIRECTORY   blobs/DIGEST, and manifests/NAME/TAG or manifests/NAME/DIGEST (estargz.py)
  RATE_FILE   a file with the bytes a second that all answers with blobs have together, and after how many bytes in all
              no more are sent, both of which may change; missing or empty: as fast as it goes, without an end
  DELAY       the milliseconds after which a request is answered; 0

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

    def limits(self):
        try:
            rate, *most = map(float, self.rate.read_text().split())
        except (OSError, ValueError, AttributeError):
            return 0, 0
        return rate, most[0] if most else 0

    def add(self, count):
        rate, most = self.limits()
        while most and self.total >= most:
            time.sleep(0.01)
            rate, most = self.limits()
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

    def head(self, status, size, kind, headers=()):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status, body, kind, headers=()):
        self.head(status, len(body), kind, headers)
        return body if self.command == "GET" else b""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path != "/sent":
            time.sleep(self.server.delay)
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
        size, status, headers = path.stat().st_size, 200, [("Accept-Ranges", "bytes")]
        begin, end = 0, size - 1
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted and (wanted[1] or wanted[2]):
            if wanted[1]:
                begin, end = int(wanted[1]), min(int(wanted[2] or end), end)
            else:
                begin = max(size - int(wanted[2]), 0)
            if begin > end:
                headers.append(("Content-Range", f"bytes */{size}"))
                self.head(416, 0, "text/plain", headers)
                return
            status = 206
            headers.append(("Content-Range", f"bytes {begin}-{end}/{size}"))
        self.head(status, end + 1 - begin, "application/octet-stream", headers)
        if self.command == "GET":
            self.send_part(path, begin, end + 1)

    def send_part(self, path, begin, end):
        with path.open("rb") as file:
            file.seek(begin)
            while step := file.read(min(STEP, end - begin)):
                self.server.sent.add(len(step))
                self.wfile.write(step)
                begin += len(step)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        # A client that goes away.
        pass


def main():
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    server = Server(("127.0.0.1", 0), Handler)
    server.top = pathlib.Path(sys.argv[1])
    server.sent = Sent(pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    server.delay = float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else 0
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
