"""Beam searches in the decoder, many at once, each run to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas._native import beam_search as native
from atlas._native.beam_search import BeamSearch
from atlas.errors import AtlasError, InvalidArgumentError, KvExhausted
from atlas.interrupts import interrupts_deferred
from atlas.model.records import MAX_BEAMS, BeamHypothesis, BeamRequest
from atlas.model.source_decode import SourceDecode, commit, reserve, sweep

if TYPE_CHECKING:
    from atlas.model.core import Ints
    from atlas.model.encoded_source import EncodedSource
    from atlas.model.translator_core import Floats, TranslatorCore


class BeamDecode(SourceDecode):
    """One request's beams: a sequence each, all on one source.

    The first sweep runs start token and language tag in one sequence; from then on each beam's
    last token runs. Beams that extend the same hypothesis share its blocks, and a block is copied
    only when one of several holders is about to write it.

    Parameters
    ----------
    core : TranslatorCore
    source : EncodedSource
        Released with the beams.
    first_tokens : sequence of int
        Start token and language tag.
    search : BeamSearch
        A new one.
    """

    def __init__(
        self,
        core: TranslatorCore,
        source: EncodedSource,
        first_tokens: Sequence[int],
        search: BeamSearch,
    ) -> None:
        super().__init__(core, source, first_tokens)
        self.search = search

    def best(self, count: int) -> list[BeamHypothesis]:
        """The best of the ended hypotheses, without start token and language tag."""
        return [BeamHypothesis(tokens, score) for tokens, score in self.search.best(count)]


def candidates(core: TranslatorCore, decodes: Sequence[BeamDecode]) -> tuple[Ints, Floats]:
    """Every search's candidates in the arena's first rows: those of ``decodes``, in their order."""
    searches = [decode.search for decode in decodes]
    k = max(search.num_candidates for search in searches)
    banned, cu_banned = native.bans(searches)
    return core.top_candidates(len(cu_banned) - 1, k, banned, cu_banned)


def advance(
    decodes: Sequence[BeamDecode], ids: Ints, log_probs: Floats
) -> list[tuple[int, AtlasError]]:
    """Take the sweep's candidates; the beams that go on are reordered.

    Returns
    -------
    list of (int, AtlasError)
        Searches that cannot go on.
    """
    searches = [decode.search for decode in decodes]
    return native.step(searches, [decode.rows for decode in decodes], ids, log_probs)


def beam_search(
    core: TranslatorCore, requests: Sequence[BeamRequest]
) -> list[list[BeamHypothesis]]:
    """Run searches to their ends, as many at a time as rows and blocks allow.

    Raises
    ------
    InvalidArgumentError, PromptTooLongError
        A request is refused, before anything runs.
    KvExhausted
        The pool cannot hold a request even alone.
    """
    prepared = [_prepare(core, request) for request in requests]
    results: list[list[BeamHypothesis]] = [[] for _ in requests]
    waiting = deque(range(len(requests)))
    active: dict[int, BeamDecode] = {}
    try:
        while waiting or active:
            with interrupts_deferred():  # what is encoded is in ``active``, or was given back
                _admit(core, requests, prepared, waiting, active)
                decodes = list(active.values())
                reserve(core, decodes)
            sweep(core, decodes)
            found = candidates(core, decodes)
            with interrupts_deferred():
                commit(decodes)
                for _, error in advance(decodes, *found):
                    raise error
                for i, decode in list(active.items()):
                    if decode.search.done:
                        results[i] = decode.best(requests[i].num_return)
                        active.pop(i).release()
    finally:
        for decode in active.values():
            decode.release()
    return results


def _admit(
    core: TranslatorCore,
    requests: Sequence[BeamRequest],
    prepared: Sequence[tuple[Ints, Ints]],
    waiting: deque[int],
    active: dict[int, BeamDecode],
) -> None:
    """Encode what fits beside the active searches, each counted with all it may come to need."""
    rows = core.max_sweep_seqs - sum(decode.search.num_beams for decode in active.values())
    blocks = core.blocks.num_free - sum(
        _most_blocks(core, requests[i], prepared[i]) - decode.num_blocks
        for i, decode in active.items()
    )
    chosen: list[int] = []
    while waiting:
        i = waiting[0]
        most = _most_blocks(core, requests[i], prepared[i])
        if requests[i].num_beams > rows or most > blocks:
            break
        rows -= requests[i].num_beams
        blocks -= most
        chosen.append(waiting.popleft())
    if not chosen:
        if not active:
            i = waiting[0]
            raise KvExhausted(
                f"a search of {requests[i].num_beams} beams may need "
                f"{_most_blocks(core, requests[i], prepared[i])} KV blocks; "
                f"{core.blocks.num_free} of {core.blocks.num_total} are free"
            )
        return
    encoded = core.encode([prepared[i][0] for i in chosen])
    for i, source in zip(chosen, encoded, strict=True):
        first = prepared[i][1].tolist()
        active[i] = BeamDecode(core, source, first, _search(core, requests[i], first))


def _prepare(core: TranslatorCore, request: BeamRequest) -> tuple[Ints, Ints]:
    """What encoder and decoder read first, after checking the request."""
    if request.adapter_slot != -1:
        raise InvalidArgumentError(
            f"adapter_slot is {request.adapter_slot}; allowed: -1, this model has no adapters"
        )
    if request.num_beams > min(MAX_BEAMS, core.max_sweep_seqs):
        raise InvalidArgumentError(f"num_beams is {request.num_beams}; allowed: 1 … {MAX_BEAMS}")
    source, target = core.languages(request.src_lang_id, request.tgt_lang_id)
    core.require_length(2 + request.max_new - 1)
    return core.source_ids(request.prompt_tokens, source), core.first_tokens(target)


def _search(core: TranslatorCore, request: BeamRequest, first: Sequence[int]) -> BeamSearch:
    return BeamSearch(
        first,
        core.config.eos_token_ids,
        num_beams=request.num_beams,
        max_new=request.max_new,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        no_repeat_ngram=request.no_repeat_ngram,
    )


def most_blocks(core: TranslatorCore, source_len: int, num_beams: int, max_new: int) -> int:
    """Blocks that a request may come to hold: its source, and beams that share nothing."""
    size = core.pools.block_size
    return -(-source_len // size) + num_beams * -(-(1 + max_new) // size)


def _most_blocks(core: TranslatorCore, request: BeamRequest, prepared: tuple[Ints, Ints]) -> int:
    return most_blocks(core, len(prepared[0]), request.num_beams, request.max_new)
