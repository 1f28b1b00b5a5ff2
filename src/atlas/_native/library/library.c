/* The exported functions: status and message of a call, the start of the runtime, and what works
 * without it. The functions that Python implements come from the generated atlas_dispatch.h. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATLAS_DEFINE_FUNCTIONS
#include "library.h"

typedef enum { IDLE, STARTED, BROKEN } atlas_state;

/* Written under `lock`; `state` is read without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atlas_state state = IDLE;
static int owns_python;      /* it was started here, and cannot be started twice */
static int is_guest;         /* somebody else's Python, so there may be other interpreters */
static int forked;           /* this is a child of the process that started */
static int touched;          /* somebody has called something */
static atlas_text failure;   /* why it is broken */
static atlas_text report;    /* for atlas_runtime_describe */
static char *given_home;     /* arguments of the start */
static char **given_paths;
static size_t num_given_paths;

static _Thread_local char last_message[2048];

static atlas_status fail(atlas_status status, const char *message) {
    snprintf(last_message, sizeof last_message, "%s", message);
    return status;
}

static void after_fork(void) { forked = touched; }

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork);
}

/* ---- start --------------------------------------------------------------------------------- */

static int is_same(const char *home, const char *const *paths, size_t num_paths) {
    if (home == NULL && num_paths == 0) return 1; /* no wish */
    if ((home == NULL) != (given_home == NULL) || num_paths != num_given_paths) return 0;
    if (home != NULL && strcmp(home, given_home) != 0) return 0;
    for (size_t i = 0; i < num_paths; ++i)
        if (strcmp(paths[i], given_paths[i]) != 0) return 0;
    return 1;
}

static void remember(const char *home, const char *const *paths, size_t num_paths) {
    given_home = home == NULL ? NULL : strdup(home);
    given_paths = calloc(num_paths + 1, sizeof *given_paths);
    for (size_t i = 0; given_paths != NULL && i < num_paths; ++i)
        given_paths[num_given_paths++] = strdup(paths[i]);
}

/* In somebody else's Python. The GIL is taken only while it is needed. */
static int start_as_guest(const char *const *paths, size_t num_paths, atlas_text *error) {
    if (atlas_python_in_subinterpreter()) {
        atlas_text_add(error, "this is a sub-interpreter; Atlas runs in the main interpreter only");
        return 0;
    }
    atlas_text_add(&report, "Python runs in this process already\n");
    const int gil = atlas_python_acquire();
    const int attached = atlas_python_attach(NULL, paths, num_paths, &atlas_table, error, &report);
    atlas_python_give_back(gil);
    return attached;
}

static int start_own(const char *home, const char *const *paths, size_t num_paths,
                     atlas_text *error) {
    static atlas_python found; /* large */
    if (!owns_python) {
        if (!atlas_find_python(home, &found, &report)) {
            atlas_text_add(error, "no Python " ATLAS_PYTHON_VERSION " for Atlas: %s",
                           report.chars == NULL ? "out of memory" : report.chars);
            return 0;
        }
        atlas_text_add(&report, "home: %s\nlibrary: %s\n", found.home, found.libpython);
        for (int i = 0; i < found.num_sites; ++i)
            atlas_text_add(&report, "packages: %s\n", found.sites[i]);
        if (!atlas_python_start(&found, error)) {
            state = BROKEN; /* an interpreter that failed half-way is not tried again */
            return 0;
        }
        owns_python = 1;
        const int attached = atlas_python_attach(&found, paths, num_paths, &atlas_table, error, &report);
        atlas_python_release_gil();
        return attached;
    }
    const int gil = atlas_python_acquire(); /* a second try, perhaps with other folders */
    const int attached = atlas_python_attach(&found, paths, num_paths, &atlas_table, error, &report);
    atlas_python_give_back(gil);
    return attached;
}

static atlas_status start_locked(const char *home, const char *const *paths, size_t num_paths,
                                 atlas_presence presence, atlas_text *error) {
    if (state == STARTED) {
        if (is_same(home, paths, num_paths)) return ATLAS_OK;
        return fail(ATLAS_ERROR_INVALID_ARGUMENT,
                    "the runtime was started with another home or other paths; allowed: the same");
    }
    if (state == BROKEN)
        return fail(ATLAS_ERROR_RUNTIME, failure.chars == NULL ? "out of memory" : failure.chars);
    if (!owns_python) atlas_text_clear(&report);
    const int guest = presence != ATLAS_PYTHON_ABSENT && !owns_python;
    const int started = presence == ATLAS_PYTHON_UNUSABLE ? 0
                        : guest ? start_as_guest(paths, num_paths, error)
                                : start_own(home, paths, num_paths, error);
    if (!started) {
        const char *why = error->chars == NULL ? "out of memory" : error->chars;
        atlas_text_add(&report, "failed: %s\n", why);
        if (state == BROKEN) atlas_text_add(&failure, "%s", why);
        return fail(ATLAS_ERROR_RUNTIME, why);
    }
    remember(home, paths, num_paths);
    is_guest = guest;
    __atomic_store_n(&state, STARTED, __ATOMIC_RELEASE);
    return ATLAS_OK;
}

static atlas_status start(const char *home, const char *const *paths, size_t num_paths) {
    atlas_text error = {NULL, 0};
    touched = 1;
    if (forked)
        return fail(ATLAS_ERROR_STALE_HANDLE,
                    "this is a forked child of the process that started Atlas; allowed: exec first");
    if (owns_python || __atomic_load_n(&state, __ATOMIC_ACQUIRE) == STARTED) {
        pthread_mutex_lock(&lock);
        const atlas_status status = start_locked(home, paths, num_paths, ATLAS_PYTHON_ABSENT, &error);
        pthread_mutex_unlock(&lock);
        atlas_text_clear(&error);
        return status;
    }
    /* Nobody waits for the lock while holding the GIL, which the lock's holder may need. */
    static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&looking); /* short: binding is idempotent, but not atomic */
    const atlas_presence presence = atlas_python_presence(&error);
    pthread_mutex_unlock(&looking);
    const int guest = presence == ATLAS_PYTHON_GUEST;
    int gil = 0;
    void *paused = NULL;
    const int foreign = guest && atlas_python_in_subinterpreter();
    if (guest && !foreign) {
        gil = atlas_python_acquire();
        paused = atlas_python_pause();
    }
    pthread_mutex_lock(&lock);
    const atlas_status status = start_locked(home, paths, num_paths, presence, &error);
    pthread_mutex_unlock(&lock);
    if (guest && !foreign) {
        atlas_python_resume(paused);
        atlas_python_give_back(gil);
    }
    atlas_text_clear(&error);
    return status;
}

/* ---- calls --------------------------------------------------------------------------------- */

int atlas_call_begin(atlas_call *call) {
    /* Until Python says otherwise the call has failed. */
    *call = (atlas_call){ATLAS_ERROR_RUNTIME, sizeof last_message, 0, last_message};
    if (forked || __atomic_load_n(&state, __ATOMIC_ACQUIRE) != STARTED) {
        call->status = start(NULL, NULL, 0);
        if (call->status != ATLAS_OK) return 0;
        call->status = ATLAS_ERROR_RUNTIME;
    }
    if (is_guest && atlas_python_in_subinterpreter()) {
        fail(ATLAS_ERROR_RUNTIME, "this is a sub-interpreter; Atlas runs in the main interpreter only");
        return 0;
    }
    return 1;
}

atlas_status atlas_call_end(const atlas_call *call) {
    if (call->status != ATLAS_OK && call->length == 0)
        fail(call->status, "Python did not finish the call");
    return call->status;
}

/* ---- what works without Python ------------------------------------------------------------- */

const char *atlas_error_message(void) { return last_message; }

const char *atlas_version(void) { return ATLAS_VERSION; }

uint32_t atlas_abi_version(void) { return ATLAS_ABI_VERSION; }

int32_t atlas_has(const char *capability) {
    int32_t has = 0;
    return atlas_find_capability(capability, &has) == ATLAS_OK ? has : 0;
}

atlas_status atlas_runtime_init(const char *home, const char *const *paths, size_t num_paths) {
    if (home != NULL && home[0] == '\0')
        return fail(ATLAS_ERROR_INVALID_ARGUMENT, "home is empty; allowed: NULL or a folder");
    if (num_paths > 4096 || (paths == NULL && num_paths > 0))
        return fail(ATLAS_ERROR_INVALID_ARGUMENT,
                    "paths is NULL, or num_paths is more than 4096; allowed: up to 4096 folders");
    for (size_t i = 0; i < num_paths; ++i)
        if (paths[i] == NULL) return fail(ATLAS_ERROR_INVALID_ARGUMENT, "a path is NULL");
    return start(home, paths, num_paths);
}

atlas_status atlas_runtime_describe(char *buffer, size_t capacity, size_t *length) {
    if (length == NULL || (buffer == NULL && capacity > 0))
        return fail(ATLAS_ERROR_INVALID_ARGUMENT, "buffer or length is NULL");
    if (forked)
        return fail(ATLAS_ERROR_STALE_HANDLE,
                    "this is a forked child of the process that started Atlas; allowed: exec first");
    atlas_status status = ATLAS_OK;
    pthread_mutex_lock(&lock);
    const char *chars = report.chars == NULL ? "not started\n" : report.chars;
    const size_t count = strlen(chars);
    if (capacity > count)
        memcpy(buffer, chars, count + 1);
    else if (buffer != NULL)
        status = ATLAS_ERROR_BUFFER_TOO_SMALL;
    *length = count;
    pthread_mutex_unlock(&lock);
    return status == ATLAS_OK ? status : fail(status, "the buffer is too small for the description");
}
