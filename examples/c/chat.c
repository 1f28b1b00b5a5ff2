/* A conversation on the terminal; answers stream.
 *
 *     chat MODEL [KEY=VALUE ...]       sampling parameters, such as temperature=0.7
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

enum { MAX_MESSAGES = 64, MAX_LINE = 4096, MAX_IDS = 8192 };

static int32_t show(void *user, atlas_event *event) {
    (void)user;
    atlas_event_info info;
    atlas_event_info_init(&info);
    if (atlas_event_get_info(event, &info) != ATLAS_OK) return 1;
    fwrite(info.text, 1, info.text_len, stdout);
    fflush(stdout);
    return 0;
}

static int32_t show_progress(void *user, uint64_t done_bytes, uint64_t total_bytes) {
    (void)user;
    fprintf(stderr, "\rloading %3d %%", total_bytes ? (int)(100 * done_bytes / total_bytes) : 100);
    if (done_bytes == total_bytes) fprintf(stderr, "\r              \r");
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [KEY=VALUE ...]\n", argv[0]);
        return 2;
    }
    atlas_sampling *sampling;
    TRY(atlas_sampling_create(&sampling));
    for (int i = 2; i < argc; ++i) {
        char *value = strchr(argv[i], '=');
        if (value == NULL) return 2;
        *value++ = '\0';
        TRY(atlas_sampling_set(sampling, argv[i], value));
    }

    atlas_load_params load;
    atlas_load_params_init(&load);
    load.progress = show_progress;
    atlas_engine *engine;
    atlas_tokenizer *tokenizer;
    TRY(atlas_engine_load(argv[1], &load, &engine));
    TRY(atlas_engine_get_tokenizer(engine, &tokenizer));

    atlas_message messages[MAX_MESSAGES];
    size_t num_messages = 0;
    static int32_t ids[MAX_IDS];
    atlas_event *answer = NULL;
    char line[MAX_LINE];
    while (num_messages + 2 <= MAX_MESSAGES && fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        messages[num_messages++] = (atlas_message){"user", strdup(line)};

        atlas_request_params params;
        atlas_request_params_init(&params);
        TRY(atlas_tokenizer_encode_chat(tokenizer, messages, num_messages, 0, ids, MAX_IDS,
                                        &params.num_tokens));
        params.tokens = ids;
        params.sampling = sampling;
        TRY(atlas_engine_generate(engine, &params, show, &answer));
        printf("\n");

        atlas_event_info info;
        atlas_event_info_init(&info);
        TRY(atlas_event_get_info(answer, &info));
        messages[num_messages++] = (atlas_message){"assistant", strdup(info.text)};
    }

    for (size_t i = 0; i < num_messages; ++i) free((char *)messages[i].content);
    if (answer != NULL) TRY(atlas_event_free(answer));
    TRY(atlas_tokenizer_free(tokenizer));
    TRY(atlas_sampling_free(sampling));
    TRY(atlas_engine_free(engine));
    return 0;
}
