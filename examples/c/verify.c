/* Greedy decoding that guesses ahead: drafts come from the text so far, and one sweep over the
 * weights checks them all. The tokens are those of plain greedy decoding, bit for bit.
 *
 *     verify MODEL PROMPT [MAX_TOKENS]
 *
 * A MODEL of - is atlas-tiny, which is in the package.
 */
#include <atlas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                \
    do {                                                                         \
        atlas_status status_ = (call);                                           \
        if (status_ != ATLAS_OK) {                                               \
            fprintf(stderr, "%s: %s\n", atlas_status_name(status_), atlas_error_message()); \
            return 1;                                                            \
        }                                                                        \
    } while (0)

enum { MAX_TOKENS = 8192, MAX_DRAFTS = 4, GRAM = 2 };

/* What followed the last earlier occurrence of the last GRAM tokens. */
static size_t draft(const int32_t *history, size_t length, int32_t *drafts) {
    if (length <= GRAM) return 0;
    for (size_t start = length - GRAM; start-- > 0;) {
        if (memcmp(history + start, history + length - GRAM, GRAM * sizeof *history) != 0) continue;
        const size_t from = start + GRAM;
        const size_t count = length - from < MAX_DRAFTS ? length - from : MAX_DRAFTS;
        memcpy(drafts, history + from, count * sizeof *drafts);
        return count;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT [MAX_TOKENS]\n", argv[0]);
        return 2;
    }
    const size_t max_tokens = argc > 3 ? strtoul(argv[3], NULL, 10) : 64;

    atlas_engine *engine;
    atlas_tokenizer *tokenizer;
    atlas_sequence *sequence;
    atlas_logits *logits = NULL;
    TRY(atlas_engine_load(strcmp(argv[1], "-") ? argv[1] : NULL, NULL, &engine));
    TRY(atlas_engine_get_tokenizer(engine, &tokenizer));
    TRY(atlas_sequence_create(engine, 0, &sequence));

    static int32_t history[MAX_TOKENS];
    size_t length;
    TRY(atlas_tokenizer_encode(tokenizer, argv[2], ATLAS_NUL_TERMINATED, ATLAS_ADD_SPECIAL, history,
                               MAX_TOKENS / 2, &length));
    const size_t num_prompt = length;
    if (max_tokens > MAX_TOKENS - num_prompt - MAX_DRAFTS - 1) return 2;

    TRY(atlas_sequence_prefill(sequence, history, length, ATLAS_LOGITS_LAST, &logits));
    TRY(atlas_logits_argmax(logits, 0, &history[length]));
    ++length;
    size_t num_sweeps = 1, num_accepted = 0;
    while (length - num_prompt < max_tokens) {
        /* Row 0 is the last accepted token; row i + 1 is draft i, right while row i predicts it. */
        int32_t rows[1 + MAX_DRAFTS], best[1 + MAX_DRAFTS];
        rows[0] = history[length - 1];
        const size_t num_rows = 1 + draft(history, length, rows + 1);
        TRY(atlas_sequence_verify(sequence, rows, num_rows, best, NULL));
        size_t kept = 1;
        while (kept < num_rows && best[kept - 1] == rows[kept]) ++kept;
        TRY(atlas_sequence_accept(sequence, kept));
        memcpy(history + length, best, kept * sizeof *best); /* the last one is the bonus token */
        length += kept;
        ++num_sweeps;
        num_accepted += kept - 1;
    }
    length = num_prompt + max_tokens;

    printf("tokens:");
    for (size_t i = num_prompt; i < length; ++i) printf(" %d", (int)history[i]);
    printf("\n");
    fprintf(stderr, "%zu tokens in %zu sweeps, %zu drafts accepted\n", max_tokens, num_sweeps,
            num_accepted);

    TRY(atlas_logits_free(logits));
    TRY(atlas_sequence_free(sequence));
    TRY(atlas_tokenizer_free(tokenizer));
    TRY(atlas_engine_free(engine));
    return 0;
}
