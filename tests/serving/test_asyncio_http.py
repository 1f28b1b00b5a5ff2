"""The example server: many clients at once, some of which leave; refusals; an orderly end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from tests.engine.folders import script_environment
from tests.serving.conftest import EXAMPLES

CLIENTS = 32
LEAVING = range(0, CLIENTS, 4)
TIMEOUT_S = 60
Example = Callable[[str], ModuleType]


def post(content: object) -> bytes:
    """The bytes of a POST /generate."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Send a request; the response's status, and its body with chunks joined."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    response = await reader.read()
    writer.close()
    lines, _, body = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in lines.lower():
        body, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            assert rest[int(size, 16) :][:2] == b"\r\n"
            rest = rest[int(size, 16) + 2 :]
        assert size == b"0"
    return int(lines.split()[1]), body


async def leave_early(port: int, prompt_ids: list[int]) -> None:
    """Read a stream's first line, then go away."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    params = {"max_tokens": None, "ignore_eos": True}
    writer.write(post({"prompt_ids": prompt_ids, "params": params, "stream": True}))
    await reader.readuntil(b"{")
    writer.transport.abort()


def served(
    engine: Engine,
    example: Example,
    talk: Callable[[Any, int], Awaitable[None]],
) -> Any:
    """Run ``talk(server, port)`` against the example's server; the server, ended."""

    async def serve() -> Any:
        server = example("serving/asyncio_http.py").Server(engine)
        port = await server.start(port=0)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await talk(server, port)
        finally:
            await server.stop(grace_s=TIMEOUT_S)
        return server

    try:
        return asyncio.run(serve())
    finally:
        engine.stop()


def test_32_clients_some_of_which_leave(engine: Engine, example: Example) -> None:
    prompts = [[3 + i, 4, 5 + 2 * i] for i in range(CLIENTS)]
    expected = engine.generate(prompts, SamplingParams(max_tokens=24))

    async def client(port: int, i: int) -> None:
        if i in LEAVING:
            await leave_early(port, prompts[i])
            return
        stream = bool(i % 2)
        asked = {"prompt_ids": prompts[i], "params": {"max_tokens": 24}, "stream": stream}
        status, body = await exchange(port, post(asked))
        assert status == 200
        events = [json.loads(line) for line in body.splitlines()]
        assert stream or len(events) == 1
        assert events[-1]["texts"] == [expected[i].text]
        assert events[-1]["usage"]["completion_tokens"] == expected[i].usage.completion_tokens
        assert not any("usage" in event for event in events[:-1])
        if stream:
            assert "".join(event["text"] for event in events) == expected[i].text
            ids = [token for event in events for token in event["token_ids"]]
            assert tuple(ids) == expected[i].token_ids

    async def talk(server: Any, port: int) -> None:
        await asyncio.gather(*(client(port, i) for i in range(CLIENTS)))
        while engine.has_unfinished():  # what the leaving clients left would run for long
            await asyncio.sleep(0.01)

    server = served(engine, example, talk)
    assert not server._connections


def test_leaving_cancels(engine: Engine, example: Example) -> None:
    """While the engine waits, so that the request cannot end by itself meanwhile."""

    async def talk(server: Any, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with engine.paused():
            writer.write(post({"prompt": "a", "params": {"max_tokens": None}, "stream": True}))
            while not engine.has_unfinished():
                await asyncio.sleep(0.001)
            writer.transport.abort()
            while server._connections:
                await asyncio.sleep(0.001)
        while engine.has_unfinished():
            await asyncio.sleep(0.001)

    before = engine.metrics().generated_tokens
    served(engine, example, talk)
    assert engine.metrics().generated_tokens == before


@pytest.mark.parametrize(
    ("request_bytes", "status", "named"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404, "/nothing"),
        (b"GET /generate HTTP/1.1\r\n\r\n", 404, "GET"),
        (b"nonsense\r\n\r\n", 400, "HTTP head"),
        (b"GET / HTTP/1.1\r\nx: %b\r\n\r\n" % (b"y" * 20_000), 400, "HTTP head"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411, "Content-Length"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", 411, "Content-Length"),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, "Content-Length"),
        (post(b"{"), 400, ""),
        (post(b"\xff"), 400, ""),
        (post(b"[" * 100_000), 400, ""),
        (post(b'{"prompt": "\\ud800"}'), 400, ""),
        (post([]), 400, "prompt"),
        (post({"prompt": 5}), 400, "prompt"),
        (post({"prompt": "a", "prompt_ids": [1]}), 400, "prompt"),
        (post({"prompt": "a", "stream": 1}), 400, "stream"),
        (post({"prompt": "a", "params": {"warmth": 1}}), 400, "warmth"),
        (post({"prompt": "a", "params": {"temperature": -1}}), 400, "temperature"),
        (post({"prompt_ids": [-1], "stream": True}), 400, "-1"),
        (post({"prompt_ids": []}), 400, "one or more"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    engine: Engine,
    example: Example,
    request_bytes: bytes,
    status: int,
    named: str,
) -> None:
    async def talk(server: Any, port: int) -> None:
        found, body = await exchange(port, request_bytes)
        assert found == status
        assert named in json.loads(body)["error"]

    served(engine, example, talk)


def test_a_full_queue_is_503(folder: Path, example: Example) -> None:
    async def talk(server: Any, port: int) -> None:
        asked = {"prompt": "a", "params": {"max_tokens": 4}}
        found = await asyncio.gather(*(exchange(port, post(asked)) for _ in range(12)))
        assert {status for status, _ in found} == {200, 503}

    with Engine(folder, threads=1, max_waiting=1, quiet=True) as engine:
        served(engine, example, talk)


def test_stop_finishes_what_runs(engine: Engine, example: Example) -> None:
    async def talk(server: Any, port: int) -> None:
        with engine.paused():
            asked = {"prompt": "a", "params": {"max_tokens": 16, "ignore_eos": True}}
            client = asyncio.create_task(exchange(port, post(asked)))
            while not engine.has_unfinished():
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(server.stop(grace_s=TIMEOUT_S))
            await asyncio.sleep(0.01)
            assert not stopping.done()
        await stopping
        status, body = await client
        assert (status, json.loads(body)["finish_reason"]) == (200, "length")

    served(engine, example, talk)


def test_stop_cancels_what_takes_longer(engine: Engine, example: Example) -> None:
    async def talk(server: Any, port: int) -> None:
        with engine.paused():
            client = asyncio.create_task(exchange(port, post({"prompt": "a"})))
            while not engine.has_unfinished():
                await asyncio.sleep(0.001)
            await server.stop(grace_s=0.01)
            with pytest.raises(IndexError):  # closed without a response
                await client
        while engine.has_unfinished():
            await asyncio.sleep(0.001)

    before = engine.metrics().generated_tokens
    served(engine, example, talk)
    assert engine.metrics().generated_tokens == before


def test_the_program_serves_and_ends_at_sigterm(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "serving/asyncio_http.py"), str(folder), "--port=0"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=script_environment()
    )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        body = json.dumps({"prompt": "a", "params": {"max_tokens": 3}}).encode()
        with urllib.request.urlopen(f"{address}/generate", body, timeout=TIMEOUT_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] <= 3
        with urllib.request.urlopen(f"{address}/health", timeout=TIMEOUT_S) as response:
            assert response.status == 200
        with urllib.request.urlopen(f"{address}/metrics", timeout=TIMEOUT_S) as response:
            assert b"atlas_" in response.read()
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=TIMEOUT_S) == ("", "")
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()
