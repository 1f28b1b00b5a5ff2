"""``atlas bench serve``: throughput and latencies under a load of synthetic requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from atlas.cli.options import (
    LOADING_NAMES,
    debug_option,
    given,
    load_engine,
    loading_options,
    quiet_option,
)

if TYPE_CHECKING:
    from atlas.load_test import Load, LoadReport

_ENGINE_NAMES = ("kv_tokens", "max_running", "max_waiting")
_CONCURRENCY = 8
_REQUESTS = 64
_LENGTHS = "N|uniform:LOW:HIGH|lognormal:MEDIAN:SIGMA:MAX"


@click.command("serve")
@click.argument("model", required=False)
@click.option(
    "--concurrency", type=int, help=f"Requests in flight, a closed loop ({_CONCURRENCY})."
)
@click.option("--rate", type=float, help="Open loop: requests a second, at random times.")
@click.option("--requests", type=int, help=f"Requests in all ({_REQUESTS}, or no limit).")
@click.option("--duration", type=float, help="Seconds after which no request is submitted.")
@click.option(
    "--prompt-len",
    metavar=_LENGTHS,
    default="uniform:32:256",
    show_default=True,
    help="Tokens of the prompts.",
)
@click.option(
    "--output-len",
    metavar=_LENGTHS,
    default="uniform:16:128",
    show_default=True,
    help="Tokens generated for each.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, prompts, times.")
@click.option("--kv-tokens", type=int, help="Tokens that the KV cache holds.")
@click.option("--max-running", type=int, help="Sequences that run at a time.")
@click.option("--max-waiting", type=int, help="Requests that may wait; more are refused.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@loading_options
@quiet_option
@debug_option
@click.pass_context
def serve(
    context: click.Context, /, model: str | None, as_json: bool, quiet: bool, **_: Any
) -> None:
    """Measure MODEL (default: atlas-tiny, in the package) under the load of many requests at once.

    Times are those of a client: from when a request was due, and between two pieces of its output.
    """
    from atlas.cli.bench import settings
    from atlas.load_test import LoadTest

    load = load_from(context)
    with load_engine(
        model, given(context, (*LOADING_NAMES, *_ENGINE_NAMES)), quiet=quiet
    ) as engine:
        report = LoadTest(engine, load).run()
        about = settings(engine)
    asked = {
        name: context.params[name]
        for name in ("prompt_len", "output_len", "duration", "seed", *_ENGINE_NAMES)
    }
    asked |= {
        "concurrency": load.concurrency,
        "rate": load.rate,
        "requests": load.num_requests,
    }
    if as_json:
        click.echo(json.dumps(report.as_dict() | asked | about, indent=2, ensure_ascii=False))
        return
    print_report(report)
    from atlas.cli.table import print_rows

    click.echo()
    print_rows((name, value) for name, value in (asked | about).items() if value is not None)


def load_from(context: click.Context) -> Load:
    """The load that the options describe.

    Raises
    ------
    InvalidArgumentError
    """
    from atlas.load_test import Lengths, Load

    options = context.params
    concurrency, num_requests = options["concurrency"], options["requests"]
    if concurrency is None and options["rate"] is None:
        concurrency = _CONCURRENCY
    if num_requests is None and options["duration"] is None:
        num_requests = _REQUESTS
    return Load(
        Lengths.parse(options["prompt_len"]),
        Lengths.parse(options["output_len"]),
        concurrency=concurrency,
        rate=options["rate"],
        num_requests=num_requests,
        duration_s=options["duration"],
        seed=options["seed"],
    )


def print_report(report: LoadReport) -> None:
    """Print what was measured as two tables: totals, then latencies."""
    from atlas.cli.table import print_columns, print_rows

    unfinished = f"{report.num_failed} failed, {report.num_refused} refused"
    print_rows(
        [
            ("requests", f"{report.num_finished} in {report.elapsed_s:.2f} s ({unfinished})"),
            ("prompt tokens", f"{report.prompt_tokens:,}, {report.cached_tokens:,} from the cache"),
            ("generated tokens", f"{report.completion_tokens:,}"),
            ("requests/s", f"{report.requests_per_s:.2f}"),
            ("generated tokens/s", f"{report.completion_tok_s:,.1f}"),
            ("all tokens/s", f"{report.total_tok_s:,.1f}"),
        ]
    )
    click.echo()
    rows = {
        "time to first token": report.ttft,
        "between tokens": report.inter_token,
        "whole request": report.latency,
    }
    columns = ("p50", "p90", "p99", "mean", "max")
    print_columns(
        ("milliseconds", *columns),
        ((name, [getattr(spread, key) for key in columns]) for name, spread in rows.items()),
    )
