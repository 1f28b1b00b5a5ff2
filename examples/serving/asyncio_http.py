"""An HTTP server for one engine, on asyncio alone.

    python examples/serving/asyncio_http.py [MODEL] [--host HOST] [--port PORT]
    curl -N localhost:8000/generate -d '{"prompt": "This module provides", "stream": true}'

`POST /generate` takes {"prompt": text, or "prompt_ids": [...], "params": {...}, "stream": bool};
params are fields of `atlas.SamplingParams`. A stream is one JSON object a line. `GET /health` and
`GET /metrics` tell how it is. A client that goes away cancels its request. SIGTERM and SIGINT end
the server after the requests under way. Every response closes its connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import atlas
from atlas.errors import ClosedError, QueueFullError
from atlas.event import Event
from atlas.metrics import OPENMETRICS_CONTENT_TYPE

MAX_HEAD = 16 << 10  # bytes
MAX_BODY = 1 << 20
LINES = ("application/x-ndjson", "Transfer-Encoding: chunked")


class HttpError(Exception):
    """A response other than 200: its status and message."""


class Server:
    """Answers HTTP requests with an engine, which stays the caller's."""

    def __init__(self, engine: atlas.Engine) -> None:
        self.engine = engine
        self._connections: set[Any] = set()  # tasks

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> int:
        """Listen; returns the port (0 asks for a free one)."""
        self._listener = await asyncio.start_server(self._accept, host, port, limit=MAX_HEAD)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float = 30.0) -> None:
        """Accept nothing more, finish the requests under way, cancel those that take longer."""
        self._listener.close()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            async with asyncio.timeout(10.0):  # seconds for a request to arrive
                method, path, body = await read_request(reader)
            if (method, path) == ("POST", "/generate"):
                await self._while_connected(reader, self._generate(writer, *parse(body)))
            elif (method, path) == ("GET", "/health"):
                health = self.engine.health()
                respond(writer, 200 if health.state == "ok" else 503, asdict(health))
            elif (method, path) == ("GET", "/metrics"):
                respond(writer, 200, self.engine.openmetrics(), OPENMETRICS_CONTENT_TYPE)
            else:
                raise HttpError(404, f"{method} {path}")
        except HttpError as error:
            respond(writer, error.args[0], {"error": error.args[1]})
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone, or never said what it wants
        finally:
            self._connections.discard(task)
            writer.close()

    async def _while_connected(self, reader: asyncio.StreamReader, work: Any) -> None:
        """Do the work, as far as the client stays for it."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(end_of(reader))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working  # raises what went wrong with it

    async def _generate(
        self, writer: asyncio.StreamWriter, prompt: Any, params: atlas.SamplingParams, stream: bool
    ) -> None:
        begun = False
        try:
            # Leaving the generator, also by cancellation, cancels the request.
            async with contextlib.aclosing(self.engine.agenerate(prompt, params)) as events:
                async for event in events:
                    if not stream and event.is_last:
                        respond(writer, 500 if event.error else 200, as_json(event))
                    elif stream:
                        if not begun:  # not before: a refusal has another status
                            writer.write(head(200, *LINES))
                            begun = True
                        data = json.dumps(as_json(event)).encode() + b"\n"
                        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                        await writer.drain()  # a slow reader slows only its own stream
        except (QueueFullError, ClosedError) as error:
            raise HttpError(503, str(error)) from None
        except atlas.AtlasError as error:
            raise HttpError(400, str(error)) from None
        if begun:
            writer.write(b"0\r\n\r\n")


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """A request's method, path and body."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = text.rstrip().split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value for name, _, value in (f.partition(":") for f in fields)}
        length = int(headers.get("content-length", "0"))
    except (asyncio.LimitOverrunError, ValueError):
        raise HttpError(400, f"no HTTP head of up to {MAX_HEAD} B") from None
    if "transfer-encoding" in headers or not 0 <= length <= MAX_BODY:
        raise HttpError(411, f"send a Content-Length of up to {MAX_BODY}")
    return method, target.partition("?")[0], await reader.readexactly(length)


async def end_of(reader: asyncio.StreamReader) -> None:
    """Return once the client has closed its side."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


def parse(body: bytes) -> tuple[Any, atlas.SamplingParams, bool]:
    """Prompt, parameters and whether to stream, from the body of POST /generate."""
    try:
        match json.loads(body):
            case {"prompt": str(prompt), **rest} | {"prompt_ids": [*prompt], **rest}:
                params, stream = rest.pop("params", {}), rest.pop("stream", False)
                if not rest and isinstance(params, dict) and isinstance(stream, bool):
                    return prompt, atlas.SamplingParams(**params), stream
        raise ValueError("allowed: prompt or prompt_ids, params (an object), stream (a bool)")
    except (ValueError, TypeError, RecursionError) as error:
        raise HttpError(400, str(error)) from None


def as_json(event: Event) -> dict[str, Any]:
    """What an event brings; the last one holds the usage and all samples."""
    found = {name: getattr(event, name) for name in ("index", "text", "token_ids", "finish_reason")}
    if event.error is not None:
        found["error"] = str(event.error)
    if event.completion is not None:
        found["usage"] = asdict(event.completion.usage)
        found["texts"] = [sample.text for sample in event.completion.samples]
    return found


def head(status: int, kind: str, *more: str) -> bytes:
    """A response's first lines."""
    fields = (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}", *more)
    return "\r\n".join((*fields, "Connection: close", "", "")).encode()


def respond(
    writer: asyncio.StreamWriter, status: int, content: Any, kind: str = "application/json"
) -> None:
    """Write a whole response: a text as it is, anything else as JSON."""
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    writer.write(head(status, kind, f"Content-Length: {len(body)}") + body)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="default: atlas-tiny, in the package")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with atlas.Engine(args.model, max_waiting=256) as engine:
        server, ended = Server(engine), asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, ended.set)
        port = await server.start(args.host, args.port)
        print(f"http://{args.host}:{port}", flush=True)
        await ended.wait()
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
