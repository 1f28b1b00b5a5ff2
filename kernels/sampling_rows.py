"""What a draw is told: the layout of rows and edits in memory, and sizes of the work areas.

A *row* says how the token of one row of logits is chosen; an *edit* is what bias, bans and
penalties do to one id of it. ``atlas.sampling_table`` writes both.
"""

from __future__ import annotations

ROW_WORDS = 20
ROW_BYTES = 4 * ROW_WORDS
(
    LOGITS_ROW,  # row of the arena, and of the tokens
    KIND,
    TEMPERATURE,
    TOP_K,  # 0 = off
    TOP_P,  # 1 = off
    MIN_P,  # 0 = off
    SEED_LOW,
    SEED_HIGH,
    SAMPLE_INDEX,
    POSITION,
    FIRST_EDIT,
    NUM_EDITS,
    NUM_BANS,  # the first edits are the banned ids, ascending
    FED_ROW,  # row of the step whose token the host had not seen and the penalties count, or −1
    REPETITION,
    PRESENCE,
    FREQUENCY,
) = range(17)
"""Words of a row, int32 or float32."""

NONE, GREEDY, DRAW, SCORE = 0, 1, 2, 3
"""Kinds: nobody's row; the greatest adjusted logit; a random number decides; nothing is chosen, but
what was is scored, with the ``TOP_K`` best."""

EDIT_BYTES = 16
"""An edit: id, bias (float32), occurrences in the output, ``IN_PROMPT`` | ``BANNED``."""
IN_PROMPT, BANNED = 1, 2

LANES = 256
"""As in ``atlas.ops.elementary``: chains of a tree sum, elements in a block of a prefix sum."""
EXTENT_LEN = 4096
PART_LEN = 16384
"""Logits that a thread block looks at: for the extent, and for bins and candidates."""
LANE_BLOCKS = LANES // 32
BINS = 1024
PART_COUNT_BYTES = 2 * BINS
"""A part's logits by bin, as uint16."""
SHORT_LEN = 4096
"""Candidates that a row has room for; beyond, a row takes one of the long lists in turn."""
MAX_SCORES = 20
SCORE_WORDS = 2 * MAX_SCORES + 2
"""A score: log-probability (float32), 0, the best ids, their log-probabilities."""
MAX_VOCABULARY = 1 << 20


def num_parts(vocab: int, part_len: int) -> int:
    """Thread blocks for a row, which may begin up to 3 logits behind a multiple of 16 bytes."""
    return -(-(vocab + 3) // part_len)


def aligned(num_bytes: int) -> int:
    """The next multiple of 256."""
    return -(-num_bytes // 256) * 256
