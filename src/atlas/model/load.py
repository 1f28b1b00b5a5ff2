"""Open a model file and build a :class:`Model` on a backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Literal

from atlas.architectures.decoder import NetworkBuilder, Quantize
from atlas.architectures.translator import TranslatorBuilder
from atlas.architectures.weight_names import expected_weights, is_array, is_sensitive
from atlas.backends.backend import Backend, DeviceName, backend_named
from atlas.cache.kv import BLOCK_SIZE
from atlas.cache.recurrent import SlotCounts
from atlas.cache.state_slots import StateSlots
from atlas.config import ModelConfig
from atlas.errors import InvalidArgumentError, shown
from atlas.layers.step import SHARED_SCORES, StepShape, buffer_shapes
from atlas.layers.translation_step import translation_buffer_shapes
from atlas.model import Model
from atlas.model.circuit import DenseCircuit
from atlas.model.core import Limits, ModelCore
from atlas.model.forward import DenseForward
from atlas.model.lifecycle import DenseLifecycle
from atlas.model.load_translator import load_translator
from atlas.model.logits import DenseLogits
from atlas.model.memory import MemoryPlan
from atlas.model.records import MAX_BEAMS, metadata_rows
from atlas.model.ssm import RecurrentState
from atlas.model.streams import DenseStreams
from atlas.model.verify import DenseVerify
from atlas.ops.blocks import FORMATS
from atlas.weights.checkpoint import Checkpoint
from atlas.weights.packed_weights import PackedWeights, packed_weights

_DEFAULT_SEQ_LEN = 8192
_MAX_ROWS = 512
_LOGITS_ROWS = 64
_MAX_RUNNING = 32
_LEAST_SOURCE = 3
_MAX_PREFILLS = 16
_STATE_SNAPSHOTS = 16
_CHECKPOINTS = 8  # sequences driven by hand that may await an accept at a time
# Far more threads than CPUs only wait for each other at every barrier.
MAX_THREADS = max(64, 4 * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model.

    Attributes
    ----------
    dtype : {"auto", "float32"}
        ``auto`` keeps the file's formats; ``float32``, on the CPU, dequantises every matrix.
    kv_dtype : {"auto", "float32", "float16", "bfloat16"}
        ``auto``: bfloat16 on a GPU; on the CPU float16 beside quantised weights, else float32.
    threads : int
    max_seq_len : int, optional
        Positions of a sequence; default: the model's own, at most 8192.
    kv_tokens : int, optional
        Tokens in the KV pool; default: ``max_seq_len``.
    quantize : {"q8_0", "q4_0"}, optional
    max_step_tokens : int
        Rows of one step; longer prompt windows run in pieces.
    max_running : int
        Sequences of a decode step; sizes the metadata and the logits arena, and gives each
        sequence a slot of recurrent state.
    state_snapshots : int
        Snapshots of recurrent state, for prefixes and rewinds; 0 allowed.
    device : {"cpu", "cuda"}
    stream : object, optional
        Of another library, to run on; CUDA only.
    """

    dtype: Literal["auto", "float32"] = "auto"
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    threads: int = 1
    max_seq_len: int | None = None
    kv_tokens: int | None = None
    quantize: Quantize | None = None
    max_step_tokens: int = _MAX_ROWS
    max_running: int = _MAX_RUNNING
    state_snapshots: int = _STATE_SNAPSHOTS
    device: DeviceName = "cpu"
    stream: object = None

    def __post_init__(self) -> None:
        backend = self.backend()
        _one_of("dtype", self.dtype, backend.dtypes)
        _one_of("kv_dtype", self.kv_dtype, ("auto", *backend.kv_dtypes))
        _one_of("quantize", self.quantize, (None, "q8_0", "q4_0"))
        least = {"threads": 1, "max_seq_len": 1, "kv_tokens": 1, "max_step_tokens": 1}
        least |= {"max_running": 1, "state_snapshots": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in ("max_seq_len", "kv_tokens"):
                continue
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or value < low:
                raise InvalidArgumentError(
                    f"{name} is {shown(value)}; allowed: an integer of {low} or more"
                )
            object.__setattr__(self, name, int(value))
        if self.threads > MAX_THREADS:
            raise InvalidArgumentError(
                f"threads is {shown(self.threads)}; allowed: 1 … {MAX_THREADS}"
            )
        if self.dtype == "float32" and self.quantize is not None:
            raise InvalidArgumentError(
                f"dtype 'float32' and quantize {self.quantize!r} contradict each other"
            )

    def backend(self) -> Backend:
        """The backend of ``device``; nothing of it is taken yet."""
        return backend_named(self.device, threads=self.threads, stream=self.stream)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load decides before it reads a weight.

    Attributes
    ----------
    limits : Limits
    num_blocks : int
        Blocks of the KV pool.
    slots : SlotCounts
        Of the recurrent pools, where the model has recurrent layers.
    kv_dtype : str
    formats : dict
        Canonical weight name → its format in memory; ``b8_32`` and ``b8_16`` are the internal
        8-bit form of file formats without a kernel of their own.
    buffer_shapes : dict
    memory : MemoryPlan
    max_source_len : int
        Positions of the encoder; 0 without one.
    joins_shared : bool
        Whether a shared expert runs as one of a row's choices.
    """

    limits: Limits
    num_blocks: int
    slots: SlotCounts
    kv_dtype: str
    formats: dict[str, str]
    buffer_shapes: dict[str, tuple[int, ...]]
    memory: MemoryPlan
    max_source_len: int = 0
    joins_shared: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what its load decided."""

    model: Model
    core: ModelCore
    plan: MemoryPlan
    formats: dict[str, str]
    kv_dtype: str


def load_model(
    checkpoint: Checkpoint,
    options: LoadOptions,
    *,
    on_progress: Callable[[int], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Build a model on the device that the options name.

    Parameters
    ----------
    checkpoint : Checkpoint
        Stays open; its pages are released as weights are repacked.
    options : LoadOptions
    on_progress : callable, optional
        Called with bytes of weights just loaded.
    on_compile : callable, optional
        Called with the name of a kernel about to be compiled.

    Raises
    ------
    OutOfMemoryError
        The plan exceeds the memory that is free, and nothing was allocated; or an allocation
        failed all the same.
    CapabilityError
        The device cannot be used; why, in words.
    """
    backend = options.backend()
    plan = plan_load(checkpoint, options)
    weights = _weights(checkpoint, options, backend)
    try:
        plan.memory.require_room(backend.free_memory(), held=weights.nbytes)
        try:
            return _load(checkpoint, options, plan, backend, weights, on_progress, on_compile)
        except MemoryError as error:
            raise plan.memory.refusal(str(error) or "an allocation failed") from error
    finally:
        backend.close()


def _load(
    checkpoint: Checkpoint,
    options: LoadOptions,
    plan: LoadPlan,
    backend: Backend,
    weights: PackedWeights,
    on_progress: Callable[[int], None] | None,
    on_compile: Callable[[str], None] | None,
) -> LoadedModel:
    config, limits = checkpoint.config, plan.limits
    runtime = backend.open(config, plan, on_compile)
    try:
        pools = runtime.pools(config, plan.num_blocks, plan.kv_dtype)
        recurrent = runtime.recurrent_pools(config, plan.slots)
        build = TranslatorBuilder if config.encoder is not None else NetworkBuilder
        builder = build(
            checkpoint,
            pools,
            recurrent,
            runtime,
            weights,
            limits.max_seq_len,
            joins_shared=plan.joins_shared,
            widen=options.dtype == "float32",
            quantize=options.quantize,
            on_progress=on_progress,
        )
        if isinstance(builder, TranslatorBuilder):
            translator = load_translator(
                builder, runtime, pools, limits, plan.buffer_shapes, plan.max_source_len
            )
            return LoadedModel(*translator, plan.memory, weights.formats, plan.kv_dtype)
        buffers = runtime.buffers(plan.buffer_shapes)
        network = builder.build()
        runtime.prepare(
            network, buffers, [StepShape.prompt(limits.piece_rows), StepShape.decode(1)]
        )
        states = StateSlots(recurrent) if recurrent is not None else None
        core = ModelCore(
            config, network, runtime, pools, buffers, limits, states, network.recurrence()
        )
    except BaseException:
        runtime.close()
        raise
    model = Model(
        config=config,
        forward=DenseForward(core),
        logits=DenseLogits(core),
        lifecycle=DenseLifecycle(core),
        streams=DenseStreams(core),
        verify=DenseVerify(core),
        circuit=DenseCircuit(core),
        ssm=None if states is None else RecurrentState(core),
    )
    return LoadedModel(model, core, plan.memory, weights.formats, plan.kv_dtype)


def plan_load(checkpoint: Checkpoint, options: LoadOptions) -> LoadPlan:
    """Decide sizes and formats of a load from the file's header; allocates nothing.

    Raises
    ------
    InvalidArgumentError
        ``max_seq_len`` exceeds the model's own.
    CapabilityError
        The backend cannot run such a model, whatever the options.
    """
    config = checkpoint.config
    if options.max_seq_len is not None and options.max_seq_len > config.max_seq_len:
        raise InvalidArgumentError(
            f"max_seq_len is {options.max_seq_len}; allowed: up to the model's {config.max_seq_len}"
        )
    backend = options.backend()
    backend.require_support(config)
    max_seq_len = options.max_seq_len or min(config.max_seq_len, _DEFAULT_SEQ_LEN)
    stored = checkpoint.weight_formats()
    kv_dtype: str = options.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = backend.auto_kv_dtype(
            widened=options.dtype == "float32",
            quantized=options.quantize is not None
            or any(FORMATS[name].is_quantized for name in stored.values()),
        )
    max_source_len = 0
    if config.encoder is not None:
        max_source_len = min(config.encoder.max_source_len, options.max_seq_len or _DEFAULT_SEQ_LEN)
        if max_source_len < _LEAST_SOURCE:
            raise InvalidArgumentError(
                f"max_seq_len is {max_source_len}; allowed: {_LEAST_SOURCE} or more: a source's "
                "tag, one token and its end"
            )
    kv_tokens = options.kv_tokens or default_kv_tokens(config, max_seq_len)
    num_blocks = -(-kv_tokens // BLOCK_SIZE)
    max_rows = max(options.max_step_tokens, backend.step_rows, max_source_len)
    most = metadata_rows(options.max_running)
    limits = Limits(
        max_rows,
        min(max_rows, backend.piece_rows),
        most + _MAX_PREFILLS if config.encoder is None else max(_LOGITS_ROWS, most),
        max(_LOGITS_ROWS, most + _MAX_PREFILLS),
        max_seq_len,
    )
    slots = SlotCounts(
        running=options.max_running + _MAX_PREFILLS,
        snapshots=options.state_snapshots,
        checkpoints=min(options.max_running, _CHECKPOINTS),
    )
    shapes = expected_weights(config)
    formats = {
        name: _format_in_memory(name, format, shapes[name], config, options, backend)
        for name, format in stored.items()
    }
    joins_shared = backend.joins_shared_expert(config, formats)
    max_blocks = -(-max(max_seq_len, max_source_len) // BLOCK_SIZE)
    sizes = (config, limits.max_rows, limits.max_seqs, max_blocks, limits.logits_rows)
    if config.encoder is None:
        buffers = buffer_shapes(*sizes, joins_shared=joins_shared)
    else:
        buffers = translation_buffer_shapes(*sizes)
    weights = sum(
        _bytes_in_memory(name, formats[name], shape, backend) for name, shape in shapes.items()
    )
    if joins_shared:
        routers = sum(name.endswith("shared.router") for name in shapes)
        weights += routers * backend.matrix_bytes("bf16", SHARED_SCORES - 1, config.hidden_size)
    memory = MemoryPlan(
        weights=weights + _position_bytes(config, max_seq_len, backend),
        kv_pool=num_blocks * backend.kv_block_bytes(config, kv_dtype),
        buffers=backend.buffer_bytes(config, buffers),
        recurrent=backend.recurrent_bytes(config, slots),
    )
    return LoadPlan(
        limits,
        num_blocks,
        slots,
        kv_dtype,
        formats,
        buffers,
        memory,
        max_source_len,
        joins_shared,
    )


def default_kv_tokens(config: ModelConfig, max_seq_len: int) -> int:
    """Tokens in the KV pool: one sequence; behind an encoder, the widest search of 512 or more."""
    if config.encoder is None:
        return max_seq_len
    whole = -(-max_seq_len // BLOCK_SIZE) * BLOCK_SIZE  # beams and sources share no block
    return max(8 * whole, (MAX_BEAMS + 1) * min(whole, 512))


def _format_in_memory(
    name: str,
    stored: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    options: LoadOptions,
    backend: Backend,
) -> str:
    if is_array(name, shape):
        return "f32"
    groups = config.moe.num_experts if config.moe is not None and ".experts." in name else 1
    if options.dtype == "float32":
        stored = "f32"
    elif options.quantize is not None and not is_sensitive(name):
        stored = stored if FORMATS[stored].is_quantized else options.quantize
    return backend.matrix_format(stored, shape[1], groups)


def _bytes_in_memory(name: str, format: str, shape: tuple[int, ...], backend: Backend) -> int:
    if is_array(name, shape):
        return backend.vector_bytes(prod(shape))
    return backend.matrix_bytes(format, *shape)


def _position_bytes(config: ModelConfig, max_seq_len: int, backend: Backend) -> int:
    """Tables of sines, for rotations or to be added; and the decoder's that rotates nothing."""
    if config.encoder is not None:
        most = max(max_seq_len, config.encoder.max_source_len)
        return backend.table_bytes(most * config.hidden_size) + backend.table_bytes(4 * max_seq_len)
    tables = [table for table in (config.rope, config.rope_local) if table is not None]
    return sum(
        backend.table_bytes(max_seq_len * (table.rotary_dim or config.head_dim)) for table in tables
    )


def _weights(checkpoint: Checkpoint, options: LoadOptions, backend: Backend) -> PackedWeights:
    """Where packed weights are kept: those of a model on the CPU serve others on the same file."""
    if backend.name != "cpu":  # they lie in an arena that ends with its model
        return PackedWeights()
    altered = (options.dtype == "float32", options.quantize)
    return packed_weights((checkpoint.identity, checkpoint.config, altered, backend.name))


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InvalidArgumentError(
            f"{name} is {value!r}; allowed: {', '.join(repr(item) for item in allowed)}"
        )
