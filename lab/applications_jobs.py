"""The jobs of lab/applications: four serverless applications by Python's own library.

usage: python3 -c SOURCE ADDRESS PORT APPLICATION NUMBER

They do what the applications do that FastIOV (section 6.6) took of SeBS, and are no code of either. In a sandbox this
program downloads an application's input from the storage server, computes, and uploads the result. lab/applications
makes the inputs by this module, and computes the same on the host. All numbers are integers: both results are equal to
the bit, whatever versions of Python compute them.
"""

import io
import operator
import socket
import sys
import time
from array import array

SIDE = 100  # of a thumbnail, pixels
EDGES = 5  # that a node of the graph has when it is made
UNSEEN = 255
LAYERS = (3072, 512, 256, 10)  # neurons of the perceptron; the first are the pixels of an image
SHIFT = 12  # of a neuron's sum, to one byte again
PATIENCE_S = 600


def picture(source, percent):
    """An input of `image`: random pixels as a portable pixmap (P6), 3.2 MB at 100 percent."""
    width, height = (max(SIDE, round(edge * (percent / 100) ** 0.5)) for edge in (1200, 900))
    return b"P6\n%d %d\n255\n" % (width, height) + source.randbytes(3 * width * height)


def thumbnail(data):
    """Scales a pixmap to 100x100: each pixel is the mean of those of the input that it covers."""
    _, size, _, pixels = data.split(b"\n", 3)
    width, height = map(int, size.split())
    columns = [x * width // SIDE for x in range(SIDE + 1)]
    result = bytearray(b"P6\n%d %d\n255\n" % (SIDE, SIDE))
    for y in range(SIDE):
        lines = range(y * height // SIDE, (y + 1) * height // SIDE)
        sums = [0] * (3 * SIDE)
        for line in lines:
            row = pixels[3 * width * line : 3 * width * (line + 1)]
            for x in range(SIDE):
                for color in range(3):
                    sums[3 * x + color] += sum(row[3 * columns[x] + color : 3 * columns[x + 1] : 3])
        for at, total in enumerate(sums):
            covered = len(lines) * (columns[at // 3 + 1] - columns[at // 3])
            result.append(total // covered)
    return bytes(result)


def text(source, percent):
    """An input of `compression`: words of which some are frequent, 9.7 MB at 100 percent."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(2, 10))) for _ in range(4096)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    size = 9_700_000 * percent // 100
    # A word with its space has at least three letters.
    return " ".join(source.choices(words, weights, k=size // 3)).encode()[:size]


def zipped(data):
    # The other jobs do without this import, which takes longer than their own.
    import zipfile

    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input", data)
    return result.getvalue()


def unzipped(data):
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("input")


def graph(source, percent):
    """An input of `scientific`: a graph of 100,000 nodes at 100 percent, in which nodes with many edges get more.

    32-bit numbers: the count of nodes, where each node's neighbours begin and the last ones end, the neighbours.
    """
    nodes = max(100, 100_000 * percent // 100)
    neighbours, ends = [[] for _ in range(nodes)], [0]
    for node in range(1, nodes):
        for other in sorted({source.choice(ends) for _ in range(EDGES)}):
            neighbours[node].append(other)
            neighbours[other].append(node)
            ends += (node, other)
    numbers = array("I", [nodes, 0])
    for found in neighbours:
        numbers.append(numbers[-1] + len(found))
    for found in neighbours:
        numbers.extend(found)
    return numbers.tobytes()


def distances(data):
    """Searches a graph breadth-first from node 0. Returns the distance of each node, a byte each."""
    numbers = array("I", data)
    nodes = numbers[0]
    begins, neighbours = numbers[1 : nodes + 2], numbers[nodes + 2 :]
    found = bytearray([UNSEEN]) * nodes
    found[0], level, distance = 0, [0], 0
    while level and distance < UNSEEN - 1:
        distance += 1
        following = []
        for node in level:
            for other in neighbours[begins[node] : begins[node + 1]]:
                if found[other] == UNSEEN:
                    found[other] = distance
                    following.append(other)
        level = following
    return bytes(found)


def perceptron(source, percent):
    """An input of `inference`: random weights, and 16 images at 100 percent, in signed bytes."""
    weights = sum(map(operator.mul, LAYERS, LAYERS[1:]))
    return source.randbytes(weights + LAYERS[0] * max(1, 16 * percent // 100))


def scores(data):
    """Classifies images by a perceptron. Returns a line for each: the class, and the scores of all."""
    numbers, at, layers, lines = array("b", data), 0, [], []
    for inputs, outputs in zip(LAYERS, LAYERS[1:]):
        rows = [at + inputs * row for row in range(outputs)]
        layers.append([numbers[row : row + inputs] for row in rows])
        at += inputs * outputs
    for begin in range(at, len(numbers), LAYERS[0]):
        values, totals = numbers[begin : begin + LAYERS[0]], []
        for layer in layers:
            totals = [sum(map(operator.mul, row, values)) for row in layer]
            values = [min(max(total, 0) >> SHIFT, 127) for total in totals]
        lines.append(" ".join(map(str, [totals.index(max(totals)), *totals])))
    return "\n".join(lines).encode()


def same(result):
    return result


# Of each application: what makes its input, the job, and what results are compared as. The bytes of an archive are
# the compressor's choice.
APPLICATIONS = {
    "image": (picture, thumbnail, same),
    "compression": (text, zipped, unzipped),
    "scientific": (graph, distances, same),
    "inference": (perceptron, scores, same),
}


def connect(address):
    """Connects to the storage server, as soon as there is a network: it comes up beside the container."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, PATIENCE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def exchange(address, method, path, body=b""):
    """Sends an HTTP request, and returns the answer's body."""
    head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(address) as stream:
        stream.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: stream.recv(1 << 18), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    length = next((int(one[15:]) for one in fields if one.startswith("Content-Length:")), -1)
    if status.split()[1:2] != ["200"] or len(body) != length:
        sys.exit(f"{method} {path}: {status!r}, {len(body)} bytes of {length}")
    return body


def main():
    host, port, application, number = sys.argv[1:]
    address = (host, int(port))
    _, compute, _ = APPLICATIONS[application]
    data = exchange(address, "GET", f"/{application}/{number}")
    exchange(address, "PUT", f"/{application}/{number}", compute(data))


if __name__ == "__main__":
    main()
