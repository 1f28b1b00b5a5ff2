/* Several threads submit to one engine at once, and wait for events in its descriptor; the engine runs
 * their requests together. Each prompt gets the tokens that it would get alone.
 *
 *     threads MODEL PROMPT [PROMPT ...]
 *
 * A MODEL of - is atlas-tiny, which is in the package.
 */
#include <atlas.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_REQUESTS = 64, MAX_TOKENS = 128 };

#define TRY(call)                                                                \
    do {                                                                         \
        atlas_status status_ = (call);                                           \
        if (status_ != ATLAS_OK) {                                               \
            fprintf(stderr, "%s: %s\n", atlas_status_name(status_), atlas_error_message()); \
            return 1;                                                            \
        }                                                                        \
    } while (0)

/* What a request brings; the address is its user pointer. */
typedef struct {
    atlas_engine *engine;
    const char *prompt;
    int32_t tokens[MAX_TOKENS];
    size_t num_tokens;
    int failed;
} work;

static void *submit(void *opaque) {
    work *own = opaque;
    atlas_request *request;
    atlas_request_params params;
    atlas_request_params_init(&params);
    params.text = own->prompt;
    params.user = own;
    if (atlas_request_submit(own->engine, &params, &request) != ATLAS_OK) {
        fprintf(stderr, "%s\n", atlas_error_message()); /* of this thread */
        own->failed = 1;
        return NULL;
    }
    atlas_request_free(request); /* its events come all the same */
    return NULL;
}

/* Take what has come; returns how many requests ended, or -1. */
static int take_events(atlas_engine *engine, atlas_event **event) {
    int num_ended = 0;
    for (;;) {
        atlas_event_info info;
        atlas_event_info_init(&info);
        if (atlas_engine_poll(engine, 0, event) != ATLAS_OK) return -1;
        if (*event == NULL || atlas_event_get_info(*event, &info) != ATLAS_OK) return num_ended;
        work *own = info.user;
        for (size_t i = 0; i < info.num_tokens && own->num_tokens < MAX_TOKENS; ++i)
            own->tokens[own->num_tokens++] = info.tokens[i];
        if (info.error != ATLAS_OK) {
            fprintf(stderr, "%s\n", info.error_message);
            own->failed = 1;
        }
        num_ended += info.is_last;
    }
}

int main(int argc, char **argv) {
    const int num_requests = argc - 2;
    if (num_requests < 1 || num_requests > MAX_REQUESTS) {
        fprintf(stderr, "usage: %s MODEL PROMPT [PROMPT ...]\n", argv[0]);
        return 2;
    }
    atlas_engine *engine;
    TRY(atlas_engine_load(strcmp(argv[1], "-") ? argv[1] : NULL, NULL, &engine));
    TRY(atlas_engine_start(engine));

    static work works[MAX_REQUESTS];
    static pthread_t threads[MAX_REQUESTS];
    for (int i = 0; i < num_requests; ++i) {
        works[i] = (work){.engine = engine, .prompt = argv[2 + i]};
        if (pthread_create(&threads[i], NULL, submit, &works[i]) != 0) return 1;
    }
    int num_left = num_requests;
    for (int i = 0; i < num_requests; ++i) {
        pthread_join(threads[i], NULL);
        num_left -= works[i].failed;
    }

    struct pollfd waiting = {.events = POLLIN};
    TRY(atlas_engine_get_wait_fd(engine, &waiting.fd));
    atlas_event *event = NULL;
    while (num_left > 0 && poll(&waiting, 1, -1) > 0) {
        const int num_ended = take_events(engine, &event);
        if (num_ended < 0) return 1;
        num_left -= num_ended;
    }

    int failed = 0;
    for (int i = 0; i < num_requests; ++i) {
        printf("%d:", i);
        for (size_t t = 0; t < works[i].num_tokens; ++t) printf(" %d", (int)works[i].tokens[t]);
        printf("\n");
        failed |= works[i].failed;
    }
    if (event != NULL) TRY(atlas_event_free(event));
    TRY(atlas_engine_free(engine));
    return failed;
}
