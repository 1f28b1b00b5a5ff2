"""``atlas info`` tells formats and memory as a load would have them, without loading."""

from __future__ import annotations

from pathlib import Path

import pytest

import atlas.model.load
from atlas.cli.table import printable
from tests.cli.outcome import Command
from tests.helpers.reference import build


def rows(output: str) -> dict[str, str]:
    """Names and values of a printed table."""
    split = [line.split("  ", 1) for line in output.splitlines()]
    return {name: value.strip() for name, value in split}


def test_shapes_formats_memory_and_ignored_options(
    atlas_command: Command, mixed_gguf: Path
) -> None:
    done = atlas_command("info", str(mixed_gguf), "--kv-dtype", "float32")
    assert (done.status, done.err) == (0, "")
    table = rows(done.out)
    assert table["file"] == f"{mixed_gguf} (gguf)"
    assert table["architecture"] == "qwen3, 0.6 M weights"
    assert table["layers"] == "1 × hidden size 256"
    assert table["attention"] == "4 query and 2 KV heads × 64"
    assert table["mlp"] == "512, silu"
    assert table["vocabulary"] == "128, head tied to the embedding"
    assert table["context"] == "64 positions, RoPE base 1e+06"
    assert table["5 × f32"] == table["2 × bf16"] == table["1 × q4_k"] == "kept as it is"
    assert table["kv cache"] == "0 MiB for 64 tokens in float32"
    assert table["not read"] == "qwen3.tail_light"


@pytest.mark.parametrize(
    ("stored", "form", "block_len"),
    [("q5_k", "b8_32", 32), ("iq4_xs", "b8_32", 32), ("q3_k", "b8_16", 16)],
)
def test_widened_formats_are_stated(
    atlas_command: Command, mixed_gguf: Path, stored: str, form: str, block_len: int
) -> None:
    table = rows(atlas_command("info", str(mixed_gguf)).out)
    assert table[f"1 × {stored}"] == (
        f"widened at load to {form}, the internal 8-bit form: the same integers, "
        f"float32 scale and minimum per {block_len} weights"
    )


def test_quantisation_and_widening_on_request_are_stated(
    atlas_command: Command, mixed_gguf: Path
) -> None:
    table = rows(atlas_command("info", str(mixed_gguf), "--quantize", "q8_0").out)
    assert table["2 × bf16"] == "quantised at load to q8_0"
    assert table["1 × q4_k"] == "kept as it is"
    table = rows(atlas_command("info", str(mixed_gguf), "--dtype", "float32").out)
    assert table["1 × q5_k"] == "widened to f32"
    assert table["5 × f32"] == "kept as it is"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3", {"windows": "2 layers of 5 tokens, 1 layers full"}),
        ("qwen3_moe", {"experts": "8, 3 a token, × 32, in 2 layers"}),
        ("llama_yarn", {"context": "512 positions, RoPE base 10,000, yarn scaling"}),
        (
            "qwen3_next",
            {
                "layers": "3 × hidden size 64: 2 gated delta, 1 attention",
                "attention": "3 query and 1 KV heads × 32, gated",
                "gated delta": "3 key heads × 16, 6 value heads × 24, convolution over 3 tokens",
                "experts": "8, 3 a token, × 32, one shared × 64, in 2 layers",
                "context": "512 positions, RoPE base 10,000 of 8 dimensions",
            },
        ),
        (
            "nemotron_h_latent",
            {
                "layers": "4 × hidden size 64: 2 mamba2, 1 moe, 1 attention",
                "mamba-2": "6 heads × 12, state 16, in groups of 2, convolution over 4 tokens",
                "experts": "5, 2 a token, × 32, one shared × 24, in a space of 24, in 1 layers",
                "context": "512 positions; attention does not rotate",
            },
        ),
        ("mamba2", {"context": "1,048,576 positions"}),
    ],
)
def test_what_only_some_architectures_have(
    atlas_command: Command, tmp_path: Path, name: str, expected: dict[str, str]
) -> None:
    build(name, tmp_path)
    table = rows(atlas_command("info", str(tmp_path)).out)
    assert expected.items() <= table.items()
    assert ("mlp" in table) == (name not in ("qwen3_moe", "nemotron_h_latent", "mamba2"))
    assert ("recurrent state" in table) == (name in ("qwen3_next", "nemotron_h_latent", "mamba2"))
    assert ("kv cache" in table) == (name != "mamba2")


def test_no_weight_is_read(
    atlas_command: Command, mixed_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("atlas.weights.checkpoint.Checkpoint.matrix", refuse)
    monkeypatch.setattr("atlas.weights.checkpoint.Checkpoint.vector", refuse)
    assert atlas_command("info", str(mixed_gguf)).status == 0


@pytest.mark.parametrize("options", [{}, {"quantize": "q4_0"}, {"dtype": "float32"}])
def test_the_plan_is_what_a_load_takes(mixed_gguf: Path, options: dict[str, str]) -> None:
    from atlas.weights.checkpoint import open_checkpoint

    load_options = atlas.model.load.LoadOptions(**options)
    with open_checkpoint(str(mixed_gguf)) as checkpoint:
        plan = atlas.model.load.plan_load(checkpoint, load_options)
        loaded = atlas.model.load.load_model(checkpoint, load_options)
    loaded.core.close()
    assert plan.memory == loaded.plan
    assert plan.formats == loaded.formats


def test_printable_keeps_text_and_escapes_the_rest() -> None:
    assert printable("8 × 7 ≤ 名前") == "8 × 7 ≤ 名前"
    assert printable("a\x1b[2J\r\n\u202eb") == r"a\x1b[2J\r\n\u202eb"
