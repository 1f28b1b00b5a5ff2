"""``atlas bench``: load time, speed and memory of a model on this machine."""

from __future__ import annotations

import json
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any

import click

from atlas.cli.bench_serve import serve
from atlas.cli.options import (
    LOADING_NAMES,
    debug_option,
    given,
    load_engine,
    loading_options,
    quiet_option,
)

if TYPE_CHECKING:
    from atlas.engine import Engine

_MEASURED = {
    "prefill_tok_s": "prompt tokens per second, first token included",
    "decode_tok_s": "tokens per second after the first",
    "first_token_ms": "milliseconds from request to first token",
    "load_s": "seconds to open the model",
    "peak_rss_mb": "peak resident memory in 10^6 bytes, mapped file pages included",
}


class _Bench(click.Command):
    """``bench MODEL``, and ``bench serve MODEL`` as a form of its own.

    A group would take every model's name for an unknown subcommand.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == [serve.name]:
            return serve.make_context(f"{info_name} {serve.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=_Bench, epilog="atlas bench serve MODEL: load of many requests; see its own --help."
)
@click.argument("model", required=False)
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--gen-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@loading_options
@quiet_option
@debug_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    model: str | None,
    prompt_tokens: int,
    gen_tokens: int,
    repeats: int,
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> None:
    """Measure MODEL (default: atlas-tiny, in the package).

    Medians over the repeats, after one warm-up run.
    """
    with load_engine(model, given(context, LOADING_NAMES), quiet=quiet) as engine:
        results: dict[str, Any] = measure(engine, prompt_tokens, gen_tokens, repeats)
        results |= settings(engine)
    results |= {"prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, "repeats": repeats}
    if as_json:
        click.echo(json.dumps(results, indent=2, ensure_ascii=False))
        return
    from atlas.cli.table import print_rows

    print_rows((name, _with_unit(name, value)) for name, value in results.items())


def _with_unit(name: str, value: Any) -> str:
    return f"{value:.1f} {_MEASURED[name]}" if name in _MEASURED else str(value)


def measure(engine: Engine, prompt_tokens: int, gen_tokens: int, repeats: int) -> dict[str, float]:
    """Medians over ``repeats`` greedy requests, as a user's would run.

    Each has a random prompt of its own, of which the prefix cache holds nothing.

    Raises
    ------
    InvalidArgumentError
        Prompt and output together exceed ``max_seq_len``.
    """
    import numpy as np

    from atlas.errors import InvalidArgumentError

    if prompt_tokens + gen_tokens > engine.max_seq_len:
        raise InvalidArgumentError(
            f"{prompt_tokens} prompt and {gen_tokens} generated tokens; "
            f"allowed: together up to max_seq_len {engine.max_seq_len}"
        )
    vocab_size = engine.model.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab_size, (repeats + 1, prompt_tokens))
    runs = [_run(engine, prompt, gen_tokens) for prompt in prompts.tolist()][1:]
    first_token_s = statistics.median(first for first, _ in runs)
    decode_s = statistics.median(rest for _, rest in runs)
    return {
        "prefill_tok_s": prompt_tokens / first_token_s,
        "decode_tok_s": (gen_tokens - 1) / decode_s,
        "first_token_ms": 1e3 * first_token_s,
        "load_s": engine.load_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def _run(engine: Engine, prompt: list[int], gen_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from it to the last."""
    from atlas.sampling import SamplingParams

    params = SamplingParams(max_tokens=gen_tokens, ignore_eos=True)
    started = time.perf_counter()
    first = 0.0
    for _ in engine.stream(prompt, params):
        first = first or time.perf_counter()
    return first - started, time.perf_counter() - first


def settings(engine: Engine) -> dict[str, Any]:
    """What the numbers depend on."""
    from atlas import __version__

    about = engine.describe()
    return {
        "file": engine.path,
        "model": about["model"],
        "weights": about["weights"],
        "memory": about["memory"],
        "device": about["device"],
        "threads": engine.options.threads,
        "max_seq_len": engine.max_seq_len,
        "dtype": engine.options.dtype,
        "kv_dtype": engine.options.kv_dtype,
        "quantize": engine.options.quantize,
        "atlas": __version__,
    }
