"""Start-up and memory: process start to first token, cold and warm, and peak anonymous memory.

    python benchmarks/startup.py [--model MODEL] [--threads 2] [--prompt-tokens 512]

*Cold* compiles every kernel into an empty cache; *warm* finds them there. Peak anonymous memory
(RssAnon, which leaves out mapped files) is read by this process from outside while the other one
runs. The bar is what `import atlas` with warmed kernels takes, plus 1.3 × the bytes of the file's
tensors, plus the KV cache's blocks in use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20

# `import atlas` with warmed kernels: every module that an engine needs and every cached body.
_BASELINE = """
import json, sys, time
from atlas import Engine
from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cpu.code_cache import entry_path
compiler = BodyCompiler()
for entry in entry_path("any").parent.glob("*.o"):
    compiler.address(entry.stem)
print(json.dumps({"num_compiled": compiler.num_compiled}))
sys.stdin.read()
"""

_FIRST_TOKEN = """
import json, sys, time
from atlas import Engine, SamplingParams
engine = Engine(sys.argv[1], threads=int(sys.argv[2]), quiet=True)
loaded = time.perf_counter()
next(engine.stream("Hello"))
first, cpu_s = time.perf_counter(), time.process_time()
length = int(sys.argv[3])
if length:
    vocab_size = engine.model.config.vocab_size
    prompt = [(7919 * i) % (vocab_size - 100) + 50 for i in range(length)]
    engine.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.7, seed=1))
lifecycle = engine.model.lifecycle
blocks = -(-(length + 32) // engine.model.forward.kv_block_size)
print(json.dumps({
    "loaded": loaded, "first": first, "cpu_s": cpu_s, "kv_bytes": blocks * lifecycle.kv_block_bytes,
    "numba": "numba" in sys.modules, "about": engine.describe(),
}))
sys.stdin.read()
"""


@dataclass(frozen=True)
class Run:
    """One process: what it printed, its start, and its peaks in bytes."""

    result: dict[str, Any]
    started: float
    peak_anonymous: int
    peak_resident: int


def status_bytes(pid: int, *names: str) -> list[int]:
    """Fields of ``/proc/<pid>/status`` in bytes; 0 where the process has none yet."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return [int(fields.get(name, "0 kB").split()[0]) * 1024 for name in names]


def run(script: str, *arguments: object, cache: str) -> Run:
    """Start a process, watch its memory until it prints its result, and let it end."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"ATLAS_CACHE_DIR": cache},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    anonymous, line = 0, ""
    while not line.endswith("\n"):
        if process.poll() is not None:
            raise SystemExit(f"the measured process ended with {process.returncode}")
        anonymous = max(anonymous, *status_bytes(process.pid, "RssAnon"))
        line += process.stdout.readline()
        time.sleep(0.001)
    (resident,) = status_bytes(process.pid, "VmHWM")
    process.communicate("")
    return Run(json.loads(line), started, anonymous, resident)


def tensor_bytes(model: str) -> int:
    """Bytes of the file's tensors."""
    from atlas.weights.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return checkpoint.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        arguments = (options.model, options.threads)
        cold = run(_FIRST_TOKEN, *arguments, 0, cache=cache)
        warm = [run(_FIRST_TOKEN, *arguments, 0, cache=cache) for _ in range(options.repeats)]
        assert not any(one.result["numba"] for one in warm)
        baseline = run(_BASELINE, cache=cache)
        assert baseline.result["num_compiled"] == 0
        full = run(_FIRST_TOKEN, *arguments, options.prompt_tokens, cache=cache)
    tensors, kv_bytes = tensor_bytes(options.model), full.result["kv_bytes"]
    bar = baseline.peak_anonymous + 1.3 * tensors + kv_bytes
    figures = {
        "model": full.result["about"]["file"],
        "device": full.result["about"]["device"],
        "cold_first_token_s": cold.result["first"] - cold.started,
        "warm_first_token_s": statistics.median(r.result["first"] - r.started for r in warm),
        "warm_loaded_s": statistics.median(r.result["loaded"] - r.started for r in warm),
        "warm_cpu_s": statistics.median(r.result["cpu_s"] for r in warm),
        "baseline_anonymous_mb": baseline.peak_anonymous / MIB,
        "tensors_mb": tensors / MIB,
        "kv_in_use_mb": kv_bytes / MIB,
        "peak_anonymous_mb": full.peak_anonymous / MIB,
        "peak_anonymous_bar_mb": bar / MIB,
        "peak_resident_mb": full.peak_resident / MIB,
        "cold_peak_anonymous_mb": cold.peak_anonymous / MIB,
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    rows = (
        ("first token, empty cache", "cold_first_token_s", "60 s"),
        ("first token, warm", "warm_first_token_s", "2 s"),
        ("  of it until the engine is there", "warm_loaded_s", ""),
        ("  processor time of it", "warm_cpu_s", ""),
        ("peak anonymous memory", "peak_anonymous_mb", f"{bar / MIB:.1f} MiB"),
        ("  import atlas, warmed kernels", "baseline_anonymous_mb", ""),
        ("  tensors of the file", "tensors_mb", ""),
        ("  KV blocks in use", "kv_in_use_mb", ""),
        ("peak anonymous memory, empty cache", "cold_peak_anonymous_mb", ""),
        ("peak resident memory, mapped file included", "peak_resident_mb", ""),
    )
    table = Table("", "measured", "bar", title=f"{figures['model']}\n{figures['device']}")
    for name, key, limit in rows:
        table.add_row(name, f"{figures[key]:.2f} {'s' if key.endswith('_s') else 'MiB'}", limit)
    Console().print(table)


if __name__ == "__main__":
    main()
