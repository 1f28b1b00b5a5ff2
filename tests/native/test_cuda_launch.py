"""The launch list against a driver function written in Python: layouts, order, failures."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from atlas._native.cuda_launch import CudaLaunchList
from atlas.errors import InvalidArgumentError, StaleHandleError

STREAM = 0x7000


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h declares it."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
MATMUL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 16)


class FakeDriver:
    """Notes what is launched; ``status`` is what it answers from launch ``fails_at`` on."""

    def __init__(self, words: int = 0, status: int = 0, fails_at: int = 0) -> None:
        self.launched: list[dict[str, Any]] = []
        self.words, self.status, self.fails_at = words, status, fails_at
        self.function = LAUNCH(self._launch)
        self.list = CudaLaunchList(ctypes.cast(self.function, ctypes.c_void_p).value or 0)

    def _launch(self, config: Any, function: int, pointers: Any, extra: Any) -> int:
        seen = config.contents
        assert extra is None
        self.launched.append(
            {
                "grid": tuple(seen.grid),
                "block": tuple(seen.block),
                "shared": seen.shared_bytes,
                "stream": seen.stream,
                "attributes": [
                    (seen.attributes[i].id, *seen.attributes[i].value[:3])
                    for i in range(seen.num_attributes)
                ],
                "function": function,
                "words": [ctypes.string_at(pointers[i], 8) for i in range(self.words)],
            }
        )
        return self.status if len(self.launched) > self.fails_at else 0


def test_a_launch_reaches_the_driver_as_its_abi_has_it() -> None:
    driver = FakeDriver(words=2)
    bits = struct.unpack("<I", struct.pack("<f", 0.5))[0]
    driver.list.append_kernel("a", 0xF00, (3, 2, 1), 128, 4096, 2, True, 50, (-5, bits))
    driver.list.append_kernel("b", 0xF08, (1, 1, 1), 32, 0, 1, False, -1, (0, 1 << 40))
    assert driver.list.run(STREAM) == (0, None)
    first, second = driver.launched
    assert first["grid"] == (3, 2, 1)
    assert first["block"] == (128, 1, 1)
    assert (first["shared"], first["stream"], first["function"]) == (4096, STREAM, 0xF00)
    assert first["attributes"] == [(6, 1, 0, 0), (4, 2, 1, 1), (14, 50, 0, 0)]
    assert struct.unpack("<i", first["words"][0][:4]) == (-5,)
    assert struct.unpack("<f", first["words"][1][:4]) == (0.5,)
    assert second["attributes"] == []
    assert struct.unpack("<q", second["words"][1]) == (1 << 40,)


def test_entries_stay_right_while_the_list_grows() -> None:
    driver = FakeDriver(words=1)
    for i in range(100):
        driver.list.append_kernel(f"k{i}", i + 1, (i + 1, 1, 1), 32, 0, 1, True, -1, (i,))
    for _ in range(2):
        driver.launched.clear()
        assert driver.list.run(STREAM) == (0, None)
        assert [seen["function"] for seen in driver.launched] == list(range(1, 101))
        assert [struct.unpack("<q", s["words"][0])[0] for s in driver.launched] == list(range(100))
        assert all(seen["attributes"] == [(6, 1, 0, 0)] for seen in driver.launched)


def test_a_failure_names_its_launch_and_ends_the_run() -> None:
    driver = FakeDriver(status=700, fails_at=1)
    for name in "abc":
        driver.list.append_kernel(name, 1, (1, 1, 1), 32, 0, 1, False, -1, ())
    assert driver.list.run(STREAM) == (700, "b")
    assert len(driver.launched) == 2


def test_products_and_calls_run_in_their_place() -> None:
    driver, order = FakeDriver(), []

    def product(*args: int) -> int:
        order.append(("product", args))
        return 13 if args[0] == 99 else 0

    def own(stream: int) -> None:
        order.append(("own", stream))

    function = MATMUL(product)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    driver.list.append_matmul(address, tuple(range(1, 16)))
    driver.list.append_call(own)
    driver.list.append_kernel("k", 1, (1, 1, 1), 32, 0, 1, False, -1, ())
    assert driver.list.run(STREAM) == (0, None)
    assert order == [("product", (*range(1, 16), STREAM)), ("own", STREAM)]
    assert len(driver.launched) == 1
    driver.list.append_matmul(address, (99, *range(14)))
    assert driver.list.run(STREAM) == (-13, "cublasLtMatmul")


def test_misuse_is_refused() -> None:
    driver = FakeDriver()
    with pytest.raises(InvalidArgumentError, match="launch_address is 0"):
        CudaLaunchList(0)
    with pytest.raises(InvalidArgumentError, match="14 arguments"):
        driver.list.append_matmul(1, tuple(range(14)))
    driver.list.append_call(lambda stream: driver.list.run(stream))
    with pytest.raises(StaleHandleError, match="already running"):
        driver.list.run(STREAM)
    assert len(driver.list) == 1


def test_a_launch_is_patched() -> None:
    driver = FakeDriver(words=2)
    driver.list.append_kernel("a", 0xF00, (3, 2, 1), 128, 0, 1, False, -1, (1, 2))
    driver.list.patch(0, 7, (-5, 1 << 40))
    assert driver.list.run(STREAM) == (0, None)
    assert driver.launched[0]["grid"] == (7, 1, 1)
    assert driver.launched[0]["words"] == [struct.pack("<q", -5), struct.pack("<q", 1 << 40)]
    with pytest.raises(InvalidArgumentError, match="a got 1 arguments; allowed: 2"):
        driver.list.patch(0, 1, (1,))
    driver.list.append_call(lambda stream: driver.list.patch(0, 1, (1, 2)))
    for launch in (-1, 1, 2):
        with pytest.raises(InvalidArgumentError, match=f"launch {launch} is no kernel"):
            driver.list.patch(launch, 1, (1, 2))
    with pytest.raises(StaleHandleError, match="running"):
        driver.list.run(STREAM)
