/* Load a model, encode a prompt, prefill, decode greedily, print.
 *
 *     simple MODEL PROMPT [MAX_TOKENS]
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

enum { MAX_PROMPT = 4096, MAX_ENDS = 16 };

static int is_end(int32_t token, const int32_t *ends, size_t num_ends) {
    for (size_t i = 0; i < num_ends; ++i)
        if (ends[i] == token) return 1;
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT [MAX_TOKENS]\n", argv[0]);
        return 2;
    }
    const size_t max_tokens = argc > 3 ? strtoul(argv[3], NULL, 10) : 32;

    atlas_engine *engine;
    atlas_tokenizer *tokenizer;
    atlas_detokenizer *detokenizer;
    TRY(atlas_engine_load(strcmp(argv[1], "-") ? argv[1] : NULL, NULL, &engine));
    TRY(atlas_engine_get_tokenizer(engine, &tokenizer));
    TRY(atlas_detokenizer_create(tokenizer, ATLAS_SKIP_SPECIAL | ATLAS_CONTINUES, &detokenizer));

    int32_t prompt[MAX_PROMPT], ends[MAX_ENDS];
    size_t num_prompt, num_ends;
    TRY(atlas_tokenizer_encode(tokenizer, argv[2], ATLAS_NUL_TERMINATED, ATLAS_ADD_SPECIAL, prompt,
                               MAX_PROMPT, &num_prompt));
    TRY(atlas_engine_get_end_tokens(engine, ends, MAX_ENDS, &num_ends));

    /* The handle is made by the first forward and names each later one's row. */
    atlas_sequence *sequence;
    atlas_logits *logits = NULL;
    TRY(atlas_sequence_create(engine, 0, &sequence));
    TRY(atlas_sequence_prefill(sequence, prompt, num_prompt, ATLAS_LOGITS_LAST, &logits));

    int32_t *tokens = malloc((max_tokens + 1) * sizeof *tokens);
    size_t num_tokens = 0, length;
    char text[256];
    while (tokens != NULL && num_tokens < max_tokens) {
        int32_t token;
        TRY(atlas_logits_argmax(logits, 0, &token));
        if (is_end(token, ends, num_ends)) break;
        tokens[num_tokens++] = token;
        TRY(atlas_detokenizer_push(detokenizer, token, text, sizeof text, &length));
        fwrite(text, 1, length, stdout);
        fflush(stdout);
        if (num_tokens < max_tokens) TRY(atlas_sequence_decode(sequence, token, &logits));
    }
    TRY(atlas_detokenizer_flush(detokenizer, text, sizeof text, &length));
    printf("%s\ntokens:", text);
    for (size_t i = 0; i < num_tokens; ++i) printf(" %d", (int)tokens[i]);
    printf("\n");
    free(tokens);

    /* In any order. */
    TRY(atlas_logits_free(logits));
    TRY(atlas_sequence_free(sequence));
    TRY(atlas_detokenizer_free(detokenizer));
    TRY(atlas_tokenizer_free(tokenizer));
    TRY(atlas_engine_free(engine));
    return 0;
}
