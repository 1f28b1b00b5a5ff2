"""Saved sessions: a running request, or a sequence driven by hand, in a file and back.

The file is a saved sequence (`atlas.cache.sequence_file`) with the sections

    request     JSON: what the sampler and the text need to go on; absent for a sequence
    logits      float32 [C]: a sequence's last row, where its owner gave one

The sampler's state is its seed, its position and the tokens so far; text, penalties and stops are
rebuilt by replaying these. The last token of a request has no KV yet and is in ``request``.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from atlas.branch import require_running
from atlas.cache.sequence_file import (
    SavedSequence,
    SequenceHeader,
    SequenceLayout,
    read_sequence,
    write_sequence,
)
from atlas.driver import Driver
from atlas.errors import InvalidArgumentError
from atlas.intake import Intake
from atlas.layers.step import Array
from atlas.live_request import LiveRequest
from atlas.model import Model
from atlas.model.core import ModelCore
from atlas.model.logits_view import LogitsView
from atlas.model.sequence import SequenceState
from atlas.saved_request import describe_request, restore_request
from atlas.step_loop import StepLoop

_MAX_SECTIONS = 64 << 20  # bytes beside tokens and KV; log-probabilities are the bulk of it

PathLike = str | os.PathLike[str]
Row = LogitsView | NDArray[np.float32]


class RestoredSequence(NamedTuple):
    """A sequence driven by hand, as it was saved.

    Attributes
    ----------
    seq : SequenceState
        The caller's to free.
    logits : float32 [C] or None
        The row that was saved with it.
    """

    seq: SequenceState
    logits: NDArray[np.float32] | None


class Sessions:
    """Saves and restores the requests and sequences of one engine.

    Parameters
    ----------
    core : ModelCore
    model : Model
    driver : Driver
    loop : StepLoop
    intake : Intake
    """

    def __init__(
        self, core: ModelCore, model: Model, driver: Driver, loop: StepLoop, intake: Intake
    ) -> None:
        self._core = core
        self._model = model
        self._driver = driver
        self._loop = loop
        self._intake = intake
        self._layout: SequenceLayout | None = None

    def layout(self) -> SequenceLayout:
        """What files of this model look like; its fingerprint is computed once."""
        if self._layout is None:
            self._layout = SequenceLayout.of(self._core)
        return self._layout

    # -- requests -----------------------------------------------------------------------------

    def save_request(self, request_id: str, path: PathLike) -> None:
        """Write a running request; ``Engine.save`` documents it."""
        layout = self.layout()
        with self._driver.between_steps():
            request = self._driver.find(request_id)
            if request.params.logits_processor is not None:
                raise InvalidArgumentError(
                    f"request {request_id!r} has a logits_processor, which cannot be saved; "
                    "allowed: None"
                )
            handle = require_running(self._loop, request, "be saved")
            native = self._loop.scheduler.sequence(handle)
            matched, exact, _ = self._loop.scheduler.matched(handle)
            prompt_len = len(request.prompt_ids)
            header = SequenceHeader(
                layout.fingerprint,
                native.seq_len,
                prompt_len,
                prompt_len if exact == matched else min(exact, prompt_len),
                native.kv_valid_tokens,
            )
            parts = self._blocks(native.block_table, native.seq_len)
            sections = {"request": describe_request(request)}
            with _replacing(path) as file:
                write_sequence(file, header, native.tokens, parts, sections)

    def save_sequence(self, seq: SequenceState, path: PathLike, logits: Row | None) -> None:
        """Write a sequence driven by hand; ``Engine.save`` documents it."""
        layout = self.layout()
        sections = {}
        if logits is not None:
            row = np.asarray(logits, np.float32).reshape(-1)
            if row.size != layout.vocab_size:
                raise InvalidArgumentError(
                    f"logits hold {row.size} values; allowed: one row of {layout.vocab_size}"
                )
            sections["logits"] = row.astype("<f4").tobytes()
        with self._driver.exclusive():
            self._core.enter(seq)
            seq.native.check()
            header = SequenceHeader(
                layout.fingerprint,
                seq.seq_len,
                seq.prompt_len,
                seq.num_exact,
                seq.kv_valid_tokens,
            )
            parts = self._blocks(seq.block_table, seq.seq_len)
            with _replacing(path) as file:
                write_sequence(file, header, seq.tokens, parts, sections)

    def _blocks(self, table: NDArray[np.uint32], seq_len: int) -> Iterator[Array]:
        """Copies of blocks, layer by layer, K then V; places behind the last token are zero."""
        pools = self._core.pools
        # What another sequence left behind the last token is nobody's business.
        return pools.read(table[: -(-seq_len // pools.block_size)], seq_len % pools.block_size)

    def restore(
        self, path: PathLike, *, request_id: str | None, priority: int, user: object
    ) -> LiveRequest | RestoredSequence:
        """What a file holds, going on; ``Engine.restore`` documents it."""
        saved = self._read(path)
        if "request" in saved.sections:
            return self._restore_request(saved, request_id, priority, user)
        given = {"request_id": request_id, "priority": priority or None, "user": user}
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} is {value!r}, but the file holds a sequence, not a request"
                )
        return self._restore_sequence(saved)

    def _restore_request(
        self, saved: SavedSequence, request_id: str | None, priority: int, user: object
    ) -> LiveRequest:
        prompt_len = saved.header.prompt_len
        if not 1 <= prompt_len <= saved.header.seq_len:
            raise InvalidArgumentError(
                f"prompt_len of the saved request is {prompt_len}; "
                f"allowed: 1 … {saved.header.seq_len}"
            )
        prompt, output = np.split(saved.tokens, [prompt_len])
        request = restore_request(
            saved.sections["request"],
            prompt.tolist(),
            output.tolist(),
            lambda params: self._intake.request(
                prompt.tolist(),
                params,
                lambda event: None,
                request_id=request_id,
                priority=priority,
                user=user,
            ),
        )
        generation = request.generations[0]
        with self._driver.between_steps():
            self._driver.register(request, public=True)
            try:
                handle = self._loop.scheduler.add_spilled(
                    np.append(saved.tokens, np.int32(generation.last_token)),
                    prompt_len,
                    generation.max_tokens,
                    priority=priority,
                    run_ahead=False,
                    can_requeue=saved.header.exact_len == prompt_len,
                    now_us=time.monotonic_ns() // 1000,
                )
            except BaseException:
                self._driver.give_up(request)
                raise
            self._loop.store.put(handle, saved.parts)
            self._loop.track(request, 0, handle)
        return request

    def _restore_sequence(self, saved: SavedSequence) -> RestoredSequence:
        logits = None
        if "logits" in saved.sections:
            logits = np.frombuffer(saved.sections["logits"], "<f4").astype(np.float32)
            if logits.size != self.layout().vocab_size:
                raise InvalidArgumentError(
                    f"the saved logits hold {logits.size} values; "
                    f"allowed: {self.layout().vocab_size}"
                )
        with self._driver.exclusive():
            lifecycle = self._model.lifecycle
            seq = lifecycle.alloc_sequence()
            try:
                self._core.reserve(seq, saved.header.seq_len)
                self._core.pools.write(seq.block_table, saved.parts)
                seq.native.advance(saved.tokens)
            except BaseException:
                lifecycle.free_sequence(seq)
                raise
            seq.native.prompt_len = saved.header.prompt_len
            seq.native.kv_valid_tokens = saved.header.kv_valid_tokens
            if saved.header.exact_len < saved.header.prompt_len:
                seq.exact_len = saved.header.exact_len
        return RestoredSequence(seq, logits)

    # -- files --------------------------------------------------------------------------------

    def _read(self, path: PathLike) -> SavedSequence:
        """A file of this model, checked; the error names the file."""
        layout = self.layout()
        block_bytes = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in layout.block_parts)
        most = -(-layout.max_seq_len // layout.block_size) * block_bytes
        most += 4 * layout.max_seq_len + _MAX_SECTIONS
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise InvalidArgumentError("no regular file")
                if status.st_size > most:
                    raise InvalidArgumentError(
                        f"{status.st_size} bytes; a session of this model has up to {most}"
                    )
                saved = read_sequence(file, layout)
                if file.read(1):
                    raise InvalidArgumentError("more bytes follow the saved sequence")
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{os.fspath(path)}: {error}") from error
        unknown = sorted(saved.sections.keys() - {"request", "logits"})
        if unknown:
            raise InvalidArgumentError(
                f"{os.fspath(path)}: section {unknown[0]!r} is unknown; allowed: request, logits"
            )
        return saved


@contextmanager
def _replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path`` once all of it is written, and vanishes otherwise."""
    target = os.path.abspath(path)
    with tempfile.NamedTemporaryFile(
        dir=os.path.dirname(target), prefix=".session-", delete=False
    ) as file:
        try:
            yield cast(BinaryIO, file)
            file.flush()
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
