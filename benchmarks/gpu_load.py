"""From ``Engine(folder, device="cuda")`` to the first token, for a folder in the page cache.

    python benchmarks/gpu_load.py [--shape qwen3-8b] [--folder FOLDER] [--json FILE]

A Hugging Face folder of a published shape with random bf16 weights is written (16.4 GB for
qwen3-8b; ``--folder`` keeps it and finds it again) and read once. A first engine compiles its
kernels and caches them. Then every repeat is a process of its own: import, engine, first token of a
prompt of 128 tokens. In the same run, after them: what reading the same files from the page cache
takes with the loader's threads, by ``read`` and through a mapping, and what pinned copies take.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from atlas.backends.cuda import loading  # noqa: E402
from atlas.tokenizer import load_tokenizer  # noqa: E402
from benchmarks.random_checkpoint import SHAPES  # noqa: E402
from benchmarks.random_folder import RandomFolder  # noqa: E402

DECODERS = sorted(name for name, config in SHAPES.items() if config.encoder is None)
PROMPT_LEN = 128
_PINNED_BYTES = 256 << 20
_COPIED_BYTES = 8 << 30  # by which a ceiling of the bus is measured
_SMALL_GB = 0.1  # modules and libraries may come from the disk

# Progress is reported behind every weight: what comes before the first report holds the embedding.
_FIRST_TOKEN = """
import json, sys, time
begun = time.perf_counter()
from atlas import Engine, SamplingParams
imported = time.perf_counter()
marks = []
engine = Engine(
    sys.argv[1], device=sys.argv[2], quiet=True,
    on_progress=lambda done, total: marks.append((time.perf_counter(), done)),
)
made = time.perf_counter()
size = engine.model.config.vocab_size
prompts = [[(7919 * i + k) % (size - 100) + 50 for i in range(int(sys.argv[3]))] for k in (0, 1)]
params = SamplingParams(max_tokens=1, ignore_eos=True)
tokens = [made]
for prompt in prompts:
    (sample,) = engine.generate([prompt], params)[0].samples
    assert len(sample.token_ids) == 1, sample
    tokens.append(time.perf_counter())
try:
    from_disk = dict(line.split(": ") for line in open("/proc/self/io"))["read_bytes"]
except OSError:  # not every container shows it
    from_disk = 0
(first_mark, first_bytes), (last_mark, last_bytes) = marks[0], marks[-1]
print(json.dumps({
    "begun": begun,
    "import_s": imported - begun,
    "engine_s": made - imported,
    "first_weight_s": first_mark - imported,
    "first_weight_gb": first_bytes / 1e9,
    "weights_s": last_mark - first_mark,
    "after_weights_s": made - last_mark,
    "weights_gb_s": (last_bytes - first_bytes) / max(last_mark - first_mark, 1e-9) / 1e9,
    "load_gb_s": last_bytes / (made - imported) / 1e9,
    "first_token_s": tokens[1] - made,
    "next_prompt_s": tokens[2] - tokens[1],
    "engine_to_token_s": tokens[1] - imported,
    "from_disk_gb": int(from_disk) / 1e9,
    "device": engine.describe()["device"],
}))
"""


def start(folder: Path, device: str) -> dict[str, Any]:
    """One process, from its start to its first token."""
    started = time.perf_counter()
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_TOKEN, str(folder), device, str(PROMPT_LEN)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the measured process ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    found["python_s"] = found.pop("begun") - started
    found["process_s"] = found["python_s"] + found["import_s"] + found["engine_to_token_s"]
    return found


@contextmanager
def random_folder(shape: str, path: Path | None) -> Iterator[RandomFolder]:
    """The folder, written unless it is there; without a path it goes again."""
    if path is None:
        with (
            tempfile.TemporaryDirectory(prefix="atlas-load-") as temporary,
            random_folder(shape, Path(temporary)) as folder,
        ):
            yield folder
        return
    folder = RandomFolder(path, SHAPES[shape])
    if not folder.is_complete():
        print(f"writing {folder.nbytes / 1e9:.2f} GB to {path}", flush=True)
        begin = time.perf_counter()
        folder.write()
        print(f"written in {time.perf_counter() - begin:.1f} s", flush=True)
    yield folder


def read_pieces(file: Path, threads: int, pool: ThreadPoolExecutor) -> None:
    """Read a file piece by piece, every thread into a buffer of its own."""
    with open(file, "rb", buffering=0) as opened:
        descriptor = opened.fileno()

        def read(starts: range) -> None:
            buffer = bytearray(loading.PIECE_BYTES)
            for at in starts:
                os.preadv(descriptor, [buffer], at)

        list(pool.map(read, shares(file.stat().st_size, threads)))


def copy_pieces(file: Path, threads: int, pool: ThreadPoolExecutor) -> None:
    """The same through a new mapping, as the loader does it: pages are mapped when touched."""
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    pages = np.frombuffer(mapped, np.uint8)

    def copy(starts: range) -> None:
        buffer = np.empty(loading.PIECE_BYTES, np.uint8)
        for at in starts:
            piece = pages[at : at + loading.PIECE_BYTES]
            np.copyto(buffer[: piece.size], piece)

    list(pool.map(copy, shares(pages.size, threads)))


def shares(nbytes: int, threads: int) -> list[range]:
    """Where pieces begin, by thread: neighbours in turn, as threads of a pool take them."""
    step = loading.PIECE_BYTES
    return [range(i * step, nbytes, threads * step) for i in range(threads)]


def files_gb_s(
    folder: RandomFolder,
    threads: int,
    move: Callable[[Path, int, ThreadPoolExecutor], None],
    repeats: int = 3,
) -> float:
    """GB/s of all files, one after the other; the best of some repeats."""
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            begin = time.perf_counter()
            for file in folder.files:
                move(file, threads, pool)
            times.append(time.perf_counter() - begin)
    return sum(file.stat().st_size for file in folder.files) / min(times) / 1e9


def pinned_gb_s(device: Any, piece_bytes: int, total_bytes: int = _COPIED_BYTES) -> float:
    """GB/s of copies from pinned memory, pieces in turns on two streams, as the loader has them."""
    from atlas.backends.cuda.memory import Arena, PinnedMemory

    pinned, target = PinnedMemory(device, _PINNED_BYTES), Arena(device, _PINNED_BYTES, "copies")
    streams = [device.create_stream() for _ in range(2)]
    pinned.array[:] = 1
    times = []
    for _ in range(4):  # the first warms up
        begin = time.perf_counter()
        for i, at in enumerate(range(0, total_bytes, piece_bytes)):
            at %= _PINNED_BYTES
            device.copy_in(target.address + at, pinned.address + at, piece_bytes, streams[i % 2])
        for stream in streams:
            device.synchronize(stream)
        times.append(time.perf_counter() - begin)
    for stream in streams:
        device.destroy_stream(stream)
    target.close()
    pinned.close()
    return total_bytes / min(times[1:]) / 1e9


def ceilings(folder: RandomFolder, threads: int, device: str) -> dict[str, float]:
    """What the parts of a load take by themselves."""
    begin = time.perf_counter()
    load_tokenizer(folder.path)
    found = {"tokenizer_s": time.perf_counter() - begin}
    found["read_gb_s"] = files_gb_s(folder, threads, read_pieces)
    found["mapped_gb_s"] = files_gb_s(folder, threads, copy_pieces)
    if device == "cuda":
        from atlas.backends.cuda.device import CudaDevice

        begin = time.perf_counter()
        gpu = CudaDevice()
        found["context_s"] = time.perf_counter() - begin
        found["pinned_pieces_gb_s"] = pinned_gb_s(gpu, loading.PIECE_BYTES)
        found["pinned_gb_s"] = pinned_gb_s(gpu, _PINNED_BYTES)
        gpu.close()
    return found


def table(figures: dict[str, Any]) -> Table:
    """Medians and ceilings, in seconds and GB/s; a ceiling's seconds are those of all weights."""
    median, known = figures["median"], figures["ceilings"]
    size, threads = figures["weight_bytes"] / 1e9, figures["threads"]
    first = median["first_weight_gb"]
    title = f"{figures['shape']}, {size:.2f} GB\n{median['device']}"
    found = Table("", "s", "GB/s", title=title)
    for name, key, speed in (
        ("start of Python", "python_s", None),
        ("import", "import_s", None),
        ("engine", "engine_s", "load_gb_s"),
        (f"  to the first weight ({first:.2f} GB) and it", "first_weight_s", None),
        ("  the other weights", "weights_s", "weights_gb_s"),
        ("  after the last weight", "after_weights_s", None),
        (f"first token of {PROMPT_LEN}", "first_token_s", None),
        ("engine to first token", "engine_to_token_s", None),
        ("process to first token", "process_s", None),
        ("the next prompt", "next_prompt_s", None),
    ):
        found.add_row(name, f"{median[key]:.3f}", f"{median[speed]:.2f}" if speed else "")
    found.add_section()
    for name, key in (("tokenizer alone", "tokenizer_s"), ("device's context", "context_s")):
        if key in known:
            found.add_row(name, f"{known[key]:.3f}", "")
    for name, key in (
        (f"files, read, {threads} threads", "read_gb_s"),
        (f"files, mapped and copied, {threads} threads", "mapped_gb_s"),
        (f"pinned to device, {loading.PIECE_BYTES >> 20} MiB a copy", "pinned_pieces_gb_s"),
        (f"pinned to device, {_PINNED_BYTES >> 20} MiB a copy", "pinned_gb_s"),
    ):
        if key in known:
            found.add_row(name, f"{size / known[key]:.3f}", f"{known[key]:.2f}")
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The middle of every figure; words are those of the first run."""
    return {
        key: value if isinstance(value, str) else statistics.median(run[key] for run in runs)
        for key, value in runs[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=DECODERS, default="qwen3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="write here, or find it here; it stays")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=loading._THREADS, help="of the ceilings")
    parser.add_argument("--no-first", action="store_true", help="kernels are cached already")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with random_folder(args.shape, args.folder) as folder:
        files_gb_s(folder, args.threads, read_pieces, repeats=1)  # into the page cache
        first = None if args.no_first else start(folder.path, args.device)
        if first is not None:
            print(f"first engine, kernels compiled: {first['process_s']:.1f} s", flush=True)
        runs = [start(folder.path, args.device) for _ in range(args.repeats)]
        # Afterwards: a context of this process would make the measured ones' start faster.
        figures = {
            "shape": args.shape,
            "weight_bytes": folder.nbytes,
            "files": len(folder.files),
            "threads": args.threads,
            "first": first,
            "median": medians(runs),
            "runs": runs,
            "ceilings": ceilings(folder, args.threads, args.device),
        }
    Console().print(table(figures))
    if (most := max(run["from_disk_gb"] for run in runs)) > _SMALL_GB:
        print(f"NOT from the page cache: up to {most:.2f} GB of a run came from the disk")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
