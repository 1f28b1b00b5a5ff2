/* A child of a process that runs Atlas: every call fails and says so; the parent goes on. */
#include <atlas.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static void show(const char *what, atlas_status status) {
    printf("%s %s %s\n", what, atlas_status_name(status),
           status == ATLAS_OK ? "" : atlas_error_message());
    fflush(stdout);
}

int main(int argc, char **argv) {
    atlas_engine *engine = NULL;
    atlas_sequence *sequence = NULL;
    const int32_t prompt[] = {3, 4, 5};
    if (argc < 2) return 2;
    show("load", atlas_engine_load(argv[1], NULL, &engine));
    show("create", atlas_sequence_create(engine, 0, &sequence));
    const pid_t child = fork();
    if (child == 0) {
        size_t length;
        show("child prefill", atlas_sequence_prefill(sequence, prompt, 3, 0, NULL));
        show("child free", atlas_sequence_free(sequence));
        show("child engine", atlas_engine_free(engine));
        show("child load", atlas_engine_load(argv[1], NULL, &engine));
        show("child init", atlas_runtime_init(NULL, NULL, 0));
        show("child describe", atlas_runtime_describe(NULL, 0, &length));
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    printf("child %d\n", status);
    show("parent prefill", atlas_sequence_prefill(sequence, prompt, 3, 0, NULL));
    show("parent free", atlas_engine_free(engine));
    return 0;
}
