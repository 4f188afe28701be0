"""TCP echoes for tests of sockets, in guests and on the host.

echo.py serve         answers at port 7001 until it is ended
echo.py check ADDRESS sends bytes to that port there, and says "whole" when all have come back as they were
echo.py hold ADDRESS  holds a connection, and says how it ended: "end" or "reset"
"""
import os, socket, sys
if sys.argv[1] == "serve":
    server = socket.create_server(("0.0.0.0", 7001))
    print("serves", flush=True)
    while True:
        peer, _ = server.accept()
        if os.fork() == 0:
            while data := peer.recv(65536):
                peer.sendall(data)
            os._exit(0)
        peer.close()
sock = socket.create_connection((sys.argv[2], 7001))
sock.settimeout(120)
if sys.argv[1] == "hold":
    sock.sendall(b"here")
    assert sock.recv(4) == b"here"
    print("holds", flush=True)
    try:
        print("end" if sock.recv(1) == b"" else "more")
    except ConnectionResetError:
        print("reset")
    sys.exit()
for size in 1, 1000, 65536, 300000:
    data = os.urandom(size)
    sent, got = 0, b""
    while len(got) < size:
        if sent < size:
            sent += sock.send(data[sent:sent + 50000])
        got += sock.recv(65536)
    assert got == data, size
print("whole")
