/* What the C library costs: start-up, and each call over the Python API's own step.
 *
 *     capi MODEL [PYTHON_STEP_US]
 *
 * MODEL should be tiny, so that the step itself is short. benchmarks/capi.py measures the same step
 * in Python and runs this program with its result.
 */
#include <atlas.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define TRY(call)                                                                \
    do {                                                                         \
        atlas_status status_ = (call);                                           \
        if (status_ != ATLAS_OK) {                                               \
            fprintf(stderr, "%s: %s\n", atlas_status_name(status_), atlas_error_message()); \
            return 1;                                                            \
        }                                                                        \
    } while (0)

enum { ROUNDS = 15, STEPS = 100 };

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

/* The quickest round: what the code costs, without what other processes took meanwhile. */
static double quickest(const double *values) {
    double least = values[0];
    for (int i = 1; i < ROUNDS; ++i)
        if (values[i] < least) least = values[i];
    return least;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [PYTHON_STEP_US]\n", argv[0]);
        return 2;
    }
    double begin = now_us();
    TRY(atlas_runtime_init(NULL, NULL, 0));
    printf("start_up_s      %8.3f\n", 1e-6 * (now_us() - begin));

    atlas_load_options *options;
    TRY(atlas_load_options_create(&options));
    TRY(atlas_load_options_set_integer(options, "threads", 1));
    atlas_load_params params;
    atlas_load_params_init(&params);
    params.options = options;
    atlas_engine *engine;
    begin = now_us();
    TRY(atlas_engine_load(argv[1], &params, &engine));
    printf("load_s          %8.3f\n", 1e-6 * (now_us() - begin));

    const int32_t prompt[] = {3, 4, 5, 6};
    double decode[ROUNDS], argmax[ROUNDS], info_call[ROUNDS], submit[ROUNDS];
    atlas_logits *logits = NULL;
    for (int round = 0; round < ROUNDS; ++round) {
        atlas_sequence *sequence;
        int32_t token;
        TRY(atlas_sequence_create(engine, 0, &sequence));
        TRY(atlas_sequence_prefill(sequence, prompt, 4, ATLAS_LOGITS_LAST, &logits));
        begin = now_us();
        for (int step = 0; step < STEPS; ++step) TRY(atlas_sequence_decode(sequence, 7, &logits));
        decode[round] = (now_us() - begin) / STEPS;
        begin = now_us();
        for (int step = 0; step < STEPS; ++step) TRY(atlas_logits_argmax(logits, 0, &token));
        argmax[round] = (now_us() - begin) / STEPS;
        size_t rows, vocab_size;
        begin = now_us();
        for (int step = 0; step < STEPS; ++step)
            TRY(atlas_logits_get_shape(logits, &rows, &vocab_size));
        info_call[round] = (now_us() - begin) / STEPS;
        TRY(atlas_sequence_free(sequence));

        atlas_request *requests[STEPS];
        atlas_request_params request;
        atlas_request_params_init(&request);
        request.tokens = prompt;
        request.num_tokens = 4;
        begin = now_us();
        for (int step = 0; step < STEPS; ++step)
            TRY(atlas_request_submit(engine, &request, &requests[step]));
        submit[round] = (now_us() - begin) / STEPS;
        size_t num_left;
        for (int step = 0; step < STEPS; ++step) {
            TRY(atlas_request_cancel(requests[step]));
            TRY(atlas_request_free(requests[step]));
        }
        TRY(atlas_engine_step(engine, &num_left));
    }
    const double step_us = quickest(decode);
    printf("decode_us       %8.2f\n", step_us);
    if (argc > 2) printf("over_python_us  %8.2f\n", step_us - atof(argv[2]));
    printf("argmax_us       %8.2f\n", quickest(argmax));
    printf("submit_us       %8.2f\n", quickest(submit));
    printf("small_call_us   %8.2f\n", quickest(info_call));
    TRY(atlas_logits_free(logits));
    TRY(atlas_load_options_free(options));
    TRY(atlas_engine_free(engine));
    return 0;
}
