import asyncio
import random
import socket
import struct

import orjson

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close resets the connection."""


def completion(body):
    """Return a raw completion request."""
    content = orjson.dumps({"model": "llama", "prompt": "hello", **body})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


async def leave_early(port, request, turns):
    """Send a request, and reset its connection after so many turns of the event loop."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request)
        for _ in range(turns):
            await asyncio.sleep(0)


async def test_clients_that_reset_early_leave_nothing(harness):
    """Hundreds of requests, reset at any turn of their way, leave no connection, no assignment and no queue."""
    rng = random.Random(1)
    worker = await harness.worker("aggregated")
    answer, worker.otherwise = worker.otherwise, harness.answers.hang()  # each request needs a new connection
    router = await harness.router(worker)
    pool = router.server.context.pool
    request = completion({"stream": True, "max_tokens": 3})
    for _ in range(8):
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(leave_early(router.server.port, request, rng.randrange(30)))
    await router.until(lambda: not router.server._http.handlers)
    await router.until(lambda: pool.connections == pool.idle_connections)
    worker.otherwise = answer
    assert (await router.post(max_tokens=3)).status == 200
