"""containerd-stress with Slipway's runtime, and with runc's for a tenth of the time beside it. containerd-stress pulls its
image, so the node's own image is served as a registry would serve it."""

import http.server
import json
import os
import tarfile
import threading

import machine

# The runtimes, and the part of the time that each has.
RUNTIMES = {"io.containerd.slipway.v2": 1, "io.containerd.runc.v2": 0.1}


class Registry(http.server.BaseHTTPRequestHandler):
    """Serves the blobs of an image in OCI's layout, whatever the name."""

    blobs, manifest = {}, {}

    def do_GET(self, body=True):
        what, _, name = self.path.rpartition("/")
        digest = name if name.startswith("sha256:") else self.manifest["digest"]
        data = self.blobs.get(digest)
        if self.path == "/v2/":
            data, digest = b"{}", ""
        self.send_response(200 if data is not None else 404)
        is_manifest = what.endswith("/manifests")
        self.send_header("Content-Type", self.manifest["mediaType"] if is_manifest else "application/octet-stream")
        self.send_header("Content-Length", str(len(data or b"")))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if body:
            self.wfile.write(data or b"")

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *_):
        pass


def serve():
    """Starts the registry and returns the image's name in it."""
    with tarfile.open(machine.WORK / "image.tar") as tar:
        for member in tar.getmembers():
            data = tar.extractfile(member).read()
            if member.name == "index.json":
                Registry.manifest = json.loads(data)["manifests"][0]
            elif member.name.startswith("blobs/sha256/"):
                Registry.blobs["sha256:" + member.name.rpartition("/")[2]] = data
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}/test/busybox:1"


def stress(node, image, runtime, seconds):
    """Runs containerd-stress, which waits for the containers of the end, and returns its result."""
    out = machine.run(os.environ["CHURN_STRESS"], "--address", machine.ADDRESS, "--runtime", runtime, "--image", image,
                      "--concurrent", str(node.options.workers), "--duration", f"{seconds}s", "--json",
                      timeout=seconds + 300)
    return json.loads(out.strip().splitlines()[-1])


def run(node, say):
    image, rows = serve(), []
    for runtime in RUNTIMES:
        # What the first container of a runtime makes for all that follow stays.
        stress(node, image, runtime, 1)
    node.before = node.leftovers(set())[0]
    for runtime, part in RUNTIMES.items():
        seconds = int(max(20, 60 * node.options.minutes * part))
        say(f"containerd-stress with {runtime} for {seconds} s")
        try:
            result = stress(node, image, runtime, seconds)
        except (machine.Failed, ValueError, IndexError) as failed:
            node.fail("calls", f"{runtime}: {failed}")
            continue
        rows.append((runtime, result))
        if result["failures"]:
            node.fail("calls", f"{runtime}: {result['failures']} containers failed")
    for worker in node.workers:
        worker.idle = True
    node.drain()
    print()
    for runtime, result in rows:
        print(f"{runtime:26} {result['total']:5} containers in {result['seconds']:6.1f} s,"
              f" {result['containersPerSecond']:.3f} a second, failures: {result['failures']}")
    for kind, text in node.failures:
        print(f"{kind}: {text}")
