"""Fills a plan: whose rows run next, and how many of each."""

from atlas._native.plan cimport (
    EXHAUSTED,
    FIRST_CHUNK,
    LAST_CHUNK,
    NORMALIZE,
    POLL_CALIBRATION,
    PROMPT,
    REPLAY,
    SAMPLES,
    SNAPSHOT,
    STEP,
)
from atlas._native.sequence cimport Sequence


cdef class Planner:
    """One step's rows: decode rows of all first, then prompt chunks, then spare rows for drafts."""

    cdef Phase phase_of(self, request_t *request) noexcept nogil:
        """What the request could run next."""
        cdef int64_t known = request.num_history - request.planned_len
        if request.draining or request.planned_len >= request.limit_len:
            return NOTHING
        if request.in_flight and request.planned_epoch != request.epoch:
            return NOTHING  # rows that will be dropped are in flight
        if request.planned_len < request.prompt_len:
            return PROMPTS
        if known > 0:
            return STEPS
        if (known == 0 and request.run_ahead and request.source_row >= 0
                and request.source_step == self.step - 1):
            return STEPS
        return NOTHING

    cdef bint is_late(self, int64_t now_us) noexcept nogil:
        """Whether a sequence's last token is older than 80 % of the token deadline."""
        cdef int64_t i
        cdef request_t *request
        for i in range(self.running.num_running):
            request = &self.running.table.records[self.running.order[i]]
            if (request.last_token_us >= 0
                    and 5 * (now_us - request.last_token_us) > 4 * self.token_deadline_us):
                return True
        return False

    cdef void survey(
            self, int64_t *num_steps, int64_t *num_prompts,
            int64_t *draft_capacity) noexcept nogil:
        """Count who could run what, and find the least draft capacity (-1 = unbounded)."""
        cdef int64_t i
        cdef request_t *request
        cdef Phase phase
        num_steps[0] = num_prompts[0] = 0
        draft_capacity[0] = self.max_verify_rows - 1
        for i in range(self.running.num_running):
            request = &self.running.table.records[self.running.order[i]]
            request.draining = False
            phase = self.phase_of(request)
            num_steps[0] += phase == STEPS
            num_prompts[0] += phase == PROMPTS
            if request.draft_capacity >= 0:
                draft_capacity[0] = min(draft_capacity[0], request.draft_capacity)

    cdef int fill(self, Plan plan, bint is_idle, int64_t now_us) except -1:
        """Admit, then lay step entries, then prompt chunks."""
        cdef RunningSet running = self.running
        cdef int64_t num_steps, num_prompts, draft_capacity
        cdef int32_t record
        cdef bint late = self.token_deadline_us and self.is_late(now_us)
        cdef bint steps = True, prompts = not late
        while running.admit(now_us, not late, False):
            pass
        while running.num_running == 0 and is_idle and running.queue.num_waiting:
            record = running.queue.head(now_us, running.limits.aging_us)
            if running.admit(now_us, True, True):
                break
            plan.refused.append((running.table.records[record].handle, EXHAUSTED))
            running.end(record, EXHAUSTED)
        self.survey(&num_steps, &num_prompts, &draft_capacity)
        if self.prompts_alone and num_prompts:
            steps = False
        elif self.separate and num_steps and num_prompts and prompts:
            prompts = not self.last_was_prefill
            steps = not prompts
        self.prompts_alone = False
        if steps:
            self.lay_steps(plan, num_steps, num_prompts if prompts else 0, draft_capacity)
        if prompts and not (self.separate and plan.num_seqs):
            self.lay_prompts(plan)
        if not plan.num_seqs and not steps:
            self.lay_steps(plan, num_steps, 0, draft_capacity)
        if not plan.num_seqs and is_idle and running.num_running:
            self.lay_by_force(plan)
        return 0

    cdef int lay_steps(self, Plan plan, int64_t num_steps, int64_t num_prompts,
                       int64_t draft_capacity) except -1:
        """One row for each sequence that can step; what the budget leaves goes to more rows."""
        cdef int64_t place, before
        cdef int64_t spare = min(
            self.max_step_tokens - num_steps - (self.chunk_unit if num_prompts else 0),
            self.max_logits_rows - num_steps - min(num_prompts, self.max_prefills))
        place = 0
        while place < self.running.num_running:
            before = plan.num_rows
            if (self.phase_of(&self.running.table.records[self.running.order[place]]) == STEPS
                    and self.lay_step(plan, place, spare, draft_capacity, False)):
                spare -= plan.num_rows - before - 1
            place += 1
        plan.num_decode = plan.num_seqs
        return 0

    cdef bint lay_step(self, Plan plan, int64_t place, int64_t extra, int64_t draft_capacity,
                       bint force) except -1:
        """An entry for the request at ``place``: known tokens (a replay) or anchor and drafts."""
        cdef RunningSet running = self.running
        cdef int32_t record = running.order[place]
        cdef request_t *request = &running.table.records[record]
        cdef int64_t known = max(1, request.num_history - request.planned_len)
        cdef int64_t drafts = 0, rows, in_hand
        cdef entry_t *entry
        extra = max(0, min(extra, self.max_verify_rows - 1,
                           request.limit_len - request.planned_len - 1))
        if known > 1:
            rows = min(known, 1 + extra)
        else:
            in_hand = ((<Sequence>request.sequence)._num_blocks + running.pool._num_free
                       ) * running.limits.block_size - request.planned_len - 1
            drafts = max(0, min(extra, request.num_drafts, draft_capacity, in_hand))
            rows = 1 + drafts
        if not running.reserve(place, rows, plan.step_id, force):
            return False
        entry = self.add_entry(plan, record, STEP, rows)
        entry.num_drafts = <int32_t>drafts
        if rows < known:
            entry.flags = REPLAY
        else:
            entry.flags = SAMPLES | (REPLAY if known > 1 else 0)
            entry.num_logits = <int32_t>(1 + drafts)
            plan.num_logits += 1 + drafts
        return True

    cdef int lay_prompts(self, Plan plan) except -1:
        """Chunks by rank, as many as ``max_prefills`` and the budget allow."""
        cdef int64_t place = 0
        cdef int64_t left = self.max_prefills
        while place < self.running.num_running and left > 0:
            if (self.phase_of(&self.running.table.records[self.running.order[place]]) == PROMPTS
                    and self.lay_prompt(plan, place, False)):
                left -= 1
            place += 1
        return 0

    cdef bint lay_prompt(self, Plan plan, int64_t place, bint force) except -1:
        """The next chunk of the request at ``place``; False when none fits."""
        cdef RunningSet running = self.running
        cdef int32_t record = running.order[place]
        cdef request_t *request = &running.table.records[record]
        cdef int64_t room = self.max_step_tokens - plan.num_rows
        cdef int64_t end, num_logits
        cdef entry_t *entry
        cdef bint last, samples
        if request.all_logits:
            room = min(room, self.max_logits_rows - plan.num_logits)
        elif plan.num_logits >= self.max_logits_rows:
            return False
        end = self.chunk_end(request, room)
        if end <= request.planned_len:
            if running.limits.single_chunk and plan.num_rows:
                self.prompts_alone = True
            return False
        if not running.reserve(place, end - request.planned_len, plan.step_id, force):
            return False
        last = end == request.prompt_len
        samples = last and request.num_history == request.prompt_len
        num_logits = samples
        if request.all_logits:
            num_logits = max(0, end - max(request.planned_len, request.logits_len))
        entry = self.add_entry(plan, record, PROMPT, end - request.planned_len)
        entry.flags = POLL_CALIBRATION
        entry.flags |= LAST_CHUNK if last else NORMALIZE
        entry.flags |= SAMPLES if samples else 0
        entry.flags |= FIRST_CHUNK if entry.start == request.matched_len else 0
        if end == self.tail_split(request) or end == self.branch_split(request):
            entry.flags |= SNAPSHOT
        entry.num_logits = <int32_t>num_logits
        plan.num_logits += num_logits
        return True

    cdef int lay_by_force(self, Plan plan) except -1:
        """Nothing else can run: let one request through, at the cost of immune ones below it.

        When even the first in rank lacks room with all others preempted, the pool is held from
        outside, and the request ends.
        """
        cdef RunningSet running = self.running
        cdef int64_t place = 0
        while place < running.num_running:
            if self.force(plan, place):
                return 0
            place += 1
        if running.forget_cache() and self.force(plan, 0):
            return 0
        plan.refused.append((running.table.records[running.order[0]].handle, EXHAUSTED))
        return running.end(running.order[0], EXHAUSTED)

    cdef bint force(self, Plan plan, int64_t place) except -1:
        """Lay what the request at ``place`` runs next, whoever below it must give way."""
        cdef bint laid
        if self.phase_of(&self.running.table.records[self.running.order[place]]) == PROMPTS:
            return self.lay_prompt(plan, place, True)
        laid = self.lay_step(plan, place, 0, 0, True)
        plan.num_decode = plan.num_seqs
        return laid

    cdef entry_t *add_entry(self, Plan plan, int32_t record, int32_t kind,
                            int64_t rows) noexcept nogil:
        cdef request_t *request = &self.running.table.records[record]
        cdef entry_t *entry = &plan.items[plan.num_seqs]
        entry.handle = request.handle
        entry.request = record
        entry.epoch = request.epoch
        entry.kind = kind
        entry.start = <int32_t>request.planned_len
        entry.rows = <int32_t>rows
        entry.num_drafts = entry.num_logits = entry.flags = 0
        entry.emitted = entry.reason = entry.dropped = 0
        entry.source = entry.wave = -1
        request.planned_len += rows
        request.planned_step = plan.step_id
        request.planned_epoch = request.epoch
        request.in_flight += 1
        plan.num_seqs += 1
        plan.num_rows += rows
        return entry

    cdef int64_t tail_split(self, request_t *request) noexcept nogil:
        """Where the last chunk should start; 0 = anywhere."""
        cdef int64_t tail
        if not self.tail_unit:
            return 0
        tail = (request.prompt_len - 1) // self.tail_unit * self.tail_unit
        if tail <= request.matched_len or tail - request.matched_len < self.tail_least:
            return 0
        return tail

    cdef int64_t branch_split(self, request_t *request) noexcept nogil:
        """Where other prompts may leave this one's way, as far as is known; 0 = nowhere."""
        cdef int64_t branch
        if not self.tail_unit:
            return 0
        branch = request.branch_len // self.tail_unit * self.tail_unit
        return branch if branch > request.matched_len else 0

    cdef int64_t chunk_end(self, request_t *request, int64_t room) noexcept nogil:
        """Where a chunk of at most ``room`` rows may end; its start when it may not."""
        cdef int64_t start = request.planned_len
        cdef int64_t end, tail, branch
        if self.running.limits.single_chunk:
            return request.prompt_len if request.prompt_len - start <= room else start
        end = min(request.prompt_len, start + min(room, self.chunk_tokens))
        tail = self.tail_split(request)
        branch = self.branch_split(request)
        if start < tail < end:
            end = tail
        if start < branch < end:
            end = branch
        if end < request.prompt_len // self.chunk_unit * self.chunk_unit:
            end = end // self.chunk_unit * self.chunk_unit
        return max(start, end)

    cdef void withdraw(self, Plan plan) noexcept nogil:
        """Undo the entries of a plan that failed."""
        cdef int64_t i
        cdef request_t *request
        for i in range(plan.num_seqs):
            request = &self.running.table.records[plan.items[i].request]
            request.planned_len = plan.items[i].start
            request.in_flight -= 1
        plan.num_seqs = 0

    cdef void finish_rows(self, Plan plan) noexcept nogil:
        """Order the chunks in waves, and write each row's token or where it comes from."""
        cdef int64_t i, j, at, row = 0, logits = 0
        cdef int32_t wave = -1
        cdef entry_t moved
        cdef entry_t *entry
        cdef request_t *request
        for i in range(plan.num_decode + 1, plan.num_seqs):
            moved = plan.items[i]
            j = i
            while j > plan.num_decode and comes_before(&moved, &plan.items[j - 1]):
                plan.items[j] = plan.items[j - 1]
                j -= 1
            plan.items[j] = moved
        for i in range(plan.num_seqs):
            entry = &plan.items[i]
            request = &self.running.table.records[entry.request]
            if entry.kind == PROMPT:
                if wave < 0 or comes_before(&plan.items[i - 1], entry):
                    wave += 1
                entry.wave = wave
            entry.first_row = <int32_t>row
            entry.first_logits = <int32_t>logits
            entry.slot = request.slot
            for j in range(entry.rows):
                at = entry.start + j
                plan.sources[row] = -1
                if at < request.num_history:
                    plan.tokens[row] = request.history[at]
                elif j >= entry.rows - entry.num_drafts:
                    plan.tokens[row] = request.drafts[j - (entry.rows - entry.num_drafts)]
                else:
                    plan.tokens[row] = 0
                    plan.sources[row] = entry.source = request.source_row
                row += 1
            logits += entry.num_logits
            request.source_row = -1
            request.source_step = plan.step_id
            if entry.flags & SAMPLES and not entry.num_drafts:
                request.source_row = <int32_t>logits - 1


cdef bint comes_before(const entry_t *a, const entry_t *b) noexcept nogil:
    """Whether chunk ``a`` belongs to an earlier wave than ``b``."""
    cdef int32_t a_last = a.flags & LAST_CHUNK
    cdef int32_t b_last = b.flags & LAST_CHUNK
    return a.start < b.start or (a.start == b.start and a_last < b_last)
