"""What a step's results mean for its sequences: rows kept, tokens emitted, requests ended."""

from atlas._native.plan cimport LAST_CHUNK, LENGTH, PROMPT, SAMPLES, SNAPSHOT
from atlas._native.request_table cimport ENDED, RUNNING, request_t
from atlas._native.sequence cimport Sequence


cdef int64_t first_invalid(
        RunningSet running, Plan plan, const int32_t *tokens, const int32_t *rows_kept,
        const int32_t *finished) noexcept nogil:
    """The first entry with a result that cannot be; -1 = all are fine."""
    cdef int64_t i
    cdef int32_t kept
    cdef entry_t *entry
    for i in range(plan.num_seqs):
        entry = &plan.items[i]
        kept = entry.rows if rows_kept == NULL else rows_kept[i]
        if finished != NULL and finished[i] < 0:
            return i
        if kept != 0 and not entry.rows - entry.num_drafts <= kept <= entry.rows:
            return i
        if (kept and tokens[i] < 0 and entry.flags & SAMPLES
                and is_live(running, entry)):
            return i
    return -1


cdef bint is_live(RunningSet running, entry_t *entry) noexcept nogil:
    cdef request_t *request = &running.table.records[entry.request]
    return request.state == RUNNING and request.epoch == entry.epoch


cdef int make_space(RunningSet running, Plan plan) except -1:
    """Memory for every token that the commit may add, so that it cannot fail midway."""
    cdef int64_t i
    cdef entry_t *entry
    cdef request_t *request
    for i in range(plan.num_seqs):
        entry = &plan.items[i]
        request = &running.table.records[entry.request]
        running.table.grow_history(request, entry.start + entry.rows + 1)
        (<Sequence>request.sequence).grow_tokens(entry.start + entry.rows)
    return 0


cdef int64_t settle_entries(
        RunningSet running, Plan plan, const int32_t *tokens, const int32_t *rows_kept,
        const int32_t *finished, int64_t now_us, int32_t *todo) except -1:
    """Settle every entry; ``todo`` gets the numbers of those that ``conclude`` must see."""
    cdef int64_t i, count = 0
    cdef entry_t *entry
    for i in range(plan.num_seqs):
        entry = &plan.items[i]
        if settle(
                running, plan, entry, tokens[i], entry.rows if rows_kept == NULL else rows_kept[i],
                0 if finished == NULL else finished[i], now_us):
            todo[count] = <int32_t>i
            count += 1
    return count


cdef int settle(
        RunningSet running, Plan plan, entry_t *entry, int32_t token, int64_t kept, int32_t reason,
        int64_t now_us) except -1:
    """Advance one sequence over its kept rows; 1 when ``conclude`` has work to do."""
    cdef request_t *request = &running.table.records[entry.request]
    cdef int64_t j, accepted
    request.in_flight -= 1
    if request.state != RUNNING or request.epoch != entry.epoch:
        entry.dropped = 1
        return request.in_flight == 0
    entry.reason = reason
    if kept == 0:
        entry.dropped = 1
        request.epoch += 1
        request.planned_len = entry.start
        request.num_drafts = 0
        return reason != 0 or request.in_flight == 0
    accepted = kept - (entry.rows - entry.num_drafts)
    for j in range(accepted):
        request.history[request.num_history + j] = plan.tokens[
            entry.first_row + entry.rows - entry.num_drafts + j]
    request.num_history += accepted
    (<Sequence>request.sequence).append(&request.history[entry.start], kept)
    if entry.kind == PROMPT:
        (<Sequence>request.sequence).prompt_len = entry.start + kept
        request.logits_len = max(request.logits_len, entry.start + kept)
    if kept < entry.rows:
        request.planned_len = entry.start + kept
        (<Sequence>request.sequence).trim_blocks(running.blocks_for(request.planned_len))
        running.num_releases += 1
    if entry.flags & SAMPLES:
        request.history[request.num_history] = token
        request.num_history += 1
        entry.emitted = <int32_t>(accepted + 1)
        request.fresh_tokens += entry.emitted
        request.last_token_us = now_us
        request.num_drafts = 0
        if reason == 0 and request.num_history > request.limit_len:
            entry.reason = LENGTH
    return entry.reason != 0 or entry.flags & (LAST_CHUNK | SNAPSHOT)


cdef int conclude(RunningSet running, entry_t *entry) except -1:
    """What a settled entry means for blocks and cache."""
    cdef request_t *request = &running.table.records[entry.request]
    if request.state == ENDED:
        return running.retire(entry.request)
    if entry.reason:
        return running.end(entry.request, entry.reason)
    if entry.dropped:
        (<Sequence>request.sequence).trim_blocks(running.blocks_for(request.planned_len))
        running.num_releases += 1
        return 0
    return running.cache_blocks(request)
