"""HTTP/1.1 on httptools and uvloop: the server, client, relay and SSE scanner that all processes share."""
