"""A step's integers on their way in and out: kernels read and write what the host has pinned.

Between two graphs a copy of the copy engine's costs several µs of waiting on either side; a few KB
over PCIe take a kernel about 2. Pinned memory has the same address on the device.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import load_b32, load_constant_b32, load_host_b32, store_b32
from atlas_kernels.ptx_warp import block_x, thread_x
from atlas_kernels.registry import kernel

THREADS = 128
PIECE_WORDS = 3


@device
def _fed(value, chosen):
    """A token id, or what the step before chose where −2 − r stands for its logits row r."""
    source = i32(-2 - value)
    return load_b32(chosen + i64(source) * 4) if source >= 0 else value


@kernel("feed_tokens", args="ptr ptr i32", threads=THREADS)
def feed_tokens(ids, chosen, rows):
    """ids[i] = chosen[−2 − ids[i]] wherever ids[i] ≤ −2; grid (⌈rows / 128⌉).

    The host writes −2 − r for "what the step before chose for its logits row r".
    """
    launch_dependents()
    wait_prerequisites()
    i = block_x() * THREADS + thread_x()
    if i < rows:
        place = ids + i64(i) * 4
        store_b32(place, _fed(load_b32(place), chosen))


@kernel("fetch_inputs", args="ptr ptr ptr ptr i32 i32 i32", threads=THREADS)
def fetch_inputs(source, target, pieces, chosen, num_pieces, rows, columns):
    """target = source, both int32, where a step has something, and tokens fed as above.

    Grid ((num_pieces − 1) · k + ⌈last rows · columns / 128⌉), k = ⌈(rows + 1) / 128⌉: k thread
    blocks for each piece but the last, the others for that.

    - ``source``: pinned memory of the host.
    - ``pieces`` int32 [num_pieces, 3]: where an array begins, in words; its rows; its columns, more
      than one in the last piece alone. The first piece is the token ids.
    - ``rows``, ``columns``: the first rows + 1 rows of each array are copied, as far as it has so
      many, and the first columns of the last one's.

    The pinned memory is read ahead of the wait, since the host was done with it before the launch.
    Only a graph may follow (or ``copy_words`` and a graph), as other kernels read the target early.
    """
    launch_dependents()
    per_piece = quotient(rows + THREADS, THREADS)
    number = i32(min(quotient(block_x(), per_piece), num_pieces - 1))
    i = i32((block_x() - number * per_piece) * THREADS + thread_x())
    piece = pieces + i64(number) * (4 * PIECE_WORDS)
    pitch = load_constant_b32(piece + 8)
    width = i32(min(columns, pitch))
    inside = i < min(rows + 1, load_constant_b32(piece + 4)) * width
    row = quotient(i, width)
    place = i64(load_constant_b32(piece) + row * pitch + i - row * width) * 4
    value = i32(0)
    if inside:
        value = load_host_b32(source + place)
    wait_prerequisites()
    if inside:
        store_b32(target + place, _fed(value, chosen) if number == 0 else value)


@kernel("copy_words", args="ptr ptr i32", threads=THREADS)
def copy_words(source, target, count):
    """target[i] = source[i], int32; grid (⌈count / 128⌉). Either may be pinned host memory."""
    launch_dependents()
    wait_prerequisites()
    i = block_x() * THREADS + thread_x()
    if i < count:
        store_b32(target + i64(i) * 4, load_host_b32(source + i64(i) * 4))
