"""HTTP/1.1 based on httptools and uvloop: server, client, relay and SSE parser for all processes."""
