/* Translate texts with beam search: all at once, then each as a request of its own.
 *
 *     translate MODEL SOURCE TARGET TEXT [TEXT ...]
 *
 * SOURCE and TARGET are codes of languages, such as eng_Latn and deu_Latn.
 */
#include <atlas.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                \
    do {                                                                         \
        atlas_status status_ = (call);                                           \
        if (status_ != ATLAS_OK) {                                               \
            fprintf(stderr, "%s: %s\n", atlas_status_name(status_), atlas_error_message()); \
            return 1;                                                            \
        }                                                                        \
    } while (0)

enum { NUM_RETURN = 2, MAX_TEXTS = 64 };

int main(int argc, char **argv) {
    const int num_texts = argc - 4;
    if (num_texts < 1 || num_texts > MAX_TEXTS) {
        fprintf(stderr, "usage: %s MODEL SOURCE TARGET TEXT [TEXT ...]\n", argv[0]);
        return 2;
    }
    const char *source = argv[2], *target = argv[3], *const *texts = (const char *const *)argv + 4;

    atlas_engine *engine;
    TRY(atlas_engine_load(argv[1], NULL, &engine));

    /* One call: every text shares the sweeps over the weights, and results come in order. */
    atlas_event *results[MAX_TEXTS] = {NULL};
    atlas_event_info info;
    TRY(atlas_translate(engine, texts, num_texts, source, target, NULL, results, num_texts));
    for (int i = 0; i < num_texts; ++i) {
        atlas_event_info_init(&info);
        TRY(atlas_event_get_info(results[i], &info));
        printf("%s\n", info.text);
        TRY(atlas_event_free(results[i]));
    }

    /* Requests: they queue, share steps with whatever else runs, and may be cancelled. */
    atlas_beam_search *beams;
    TRY(atlas_beam_search_create(&beams));
    TRY(atlas_beam_search_set_integer(beams, "num_beams", 5));
    TRY(atlas_beam_search_set_integer(beams, "num_return", NUM_RETURN));
    TRY(atlas_beam_search_set_integer(beams, "max_tokens", 64));
    TRY(atlas_beam_search_set_number(beams, "length_penalty", 1.2));
    for (int i = 0; i < num_texts; ++i) {
        atlas_request_params params;
        atlas_request_params_init(&params);
        params.text = texts[i];
        params.source_language = source;
        params.target_language = target;
        params.beam_search = beams;
        params.user = (void *)texts[i];
        atlas_request *request;
        TRY(atlas_request_submit(engine, &params, &request));
        TRY(atlas_request_free(request)); /* it goes on */
    }
    TRY(atlas_beam_search_free(beams));

    atlas_event *event = NULL;
    int unfinished = num_texts, failed = 0;
    while (unfinished > 0) {
        TRY(atlas_engine_poll(engine, -1, &event));
        atlas_event_info_init(&info);
        TRY(atlas_event_get_info(event, &info));
        if (info.finish_reason == ATLAS_FINISH_ERROR) {
            fprintf(stderr, "%s: %s\n", (const char *)info.user, info.error_message);
            failed = 1;
        } else if (info.finish_reason != ATLAS_FINISH_NONE) {
            printf("%d of \"%s\", score %.4f: %s\n", (int)info.sample + 1, (const char *)info.user,
                   info.score, info.text);
        }
        unfinished -= info.is_last;
    }
    TRY(atlas_event_free(event));
    TRY(atlas_engine_free(engine));
    return failed;
}
