"""`nc HOST PORT` as of Debian (netcat-openbsd), which is not everywhere.

The one rule: at the end of its input it closes its sending side only with `-N`, as that one does.
"""

import os
import socket
import sys
import threading

*flags, host, port = sys.argv[1:]


def send(server: socket.socket) -> None:
    while data := os.read(0, 65536):
        server.sendall(data)
    if "-N" in flags:
        server.shutdown(socket.SHUT_WR)


with socket.create_connection((host, int(port))) as server:
    threading.Thread(target=send, args=(server,), daemon=True).start()
    while data := server.recv(65536):
        os.write(1, data)
