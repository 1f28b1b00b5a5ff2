/* A small pool of threads that run lists of compiled bodies with a barrier after each.
 *
 * A body is `int body(void **ret, void **exc, int64 thread, int64 num_threads, int64 *args)`: the
 * calling convention Numba gives a nopython function, whose result 0 means success. The caller is
 * thread 0. Between lists the workers spin for a while, because the next step usually follows at
 * once, and then sleep on a condition variable.
 */
#ifndef ATLAS_WORKER_POOL_H
#define ATLAS_WORKER_POOL_H

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define atlas_pause() _mm_pause()
#else
#define atlas_pause() __asm__ volatile("yield")
#endif

typedef int (*atlas_body)(void **, void **, int64_t, int64_t, int64_t *);

typedef struct {
    atlas_body body;
    int64_t *args;
} atlas_launch;

typedef struct {
    int32_t num_threads;
    int32_t num_started; /* workers whose thread exists */
    pid_t pid;           /* threads do not survive a fork */
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    const atlas_launch *launches;
    int64_t num_launches;
    _Alignas(64) _Atomic uint64_t epoch; /* one more for every list */
    _Atomic int stop;
    _Alignas(64) _Atomic int32_t arrived;
    _Alignas(64) _Atomic uint32_t generation;
    _Alignas(64) _Atomic int64_t failed; /* index + 1 of the first failing launch, or 0 */
    _Atomic int32_t sleeping;
} atlas_pool;

typedef struct {
    atlas_pool *pool;
    int32_t thread;
} atlas_worker;

/* Enough for the host's work between two steps; then sleep. One pause is about 10 to 40 ns. */
enum { ATLAS_SPIN_IDLE = 20000, ATLAS_SPIN_BARRIER = 2000 };

static inline void atlas_barrier(atlas_pool *pool) {
    uint32_t generation = atomic_load_explicit(&pool->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) + 1 == pool->num_threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->generation, generation + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&pool->generation, memory_order_acquire) == generation) {
        if (++spins < ATLAS_SPIN_BARRIER)
            atlas_pause();
        else
            sched_yield(); /* more threads than free cores: let the late one run */
    }
}

static inline void atlas_run_list(atlas_pool *pool, int32_t thread) {
    /* Own copies: after the last barrier the caller may already be setting the next list. */
    const atlas_launch *launches = pool->launches;
    const int64_t num_launches = pool->num_launches;
    for (int64_t i = 0; i < num_launches; ++i) {
        void *ret = NULL, *exc = NULL;
        const atlas_launch *launch = &launches[i];
        if (launch->body(&ret, &exc, thread, pool->num_threads, launch->args) != 0) {
            int64_t none = 0;
            atomic_compare_exchange_strong(&pool->failed, &none, i + 1);
        }
        if (pool->num_threads > 1) atlas_barrier(pool);
    }
}

static void *atlas_worker_main(void *opaque) {
    atlas_worker worker = *(atlas_worker *)opaque;
    free(opaque);
    atlas_pool *pool = worker.pool;
    uint64_t seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen) {
            if (++spins < ATLAS_SPIN_IDLE) {
                atlas_pause();
                continue;
            }
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleeping, 1);
            while (atomic_load(&pool->epoch) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        ++seen;
        if (atomic_load(&pool->stop)) return NULL;
        atlas_run_list(pool, worker.thread);
    }
}

static inline void atlas_pool_signal(atlas_pool *pool) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleeping) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Ends and frees the pool. In a forked child the threads are gone, so there is nothing to join. */
static void atlas_pool_destroy(atlas_pool *pool) {
    if (pool == NULL) return;
    if (pool->pid == getpid()) {
        atomic_store(&pool->stop, 1);
        atlas_pool_signal(pool);
        for (int32_t i = 0; i < pool->num_started; ++i) pthread_join(pool->threads[i], NULL);
        pthread_cond_destroy(&pool->wake);
        pthread_mutex_destroy(&pool->mutex);
    }
    free(pool->threads);
    free(pool);
}

/* NULL when a thread or memory cannot be had. */
static atlas_pool *atlas_pool_create(int32_t num_threads) {
    atlas_pool *pool = NULL;
    if (posix_memalign((void **)&pool, 64, sizeof *pool) != 0) return NULL;
    *pool = (atlas_pool){.num_threads = num_threads, .pid = getpid()};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    for (int32_t i = 1; pool->threads != NULL && i < num_threads; ++i) {
        atlas_worker *worker = malloc(sizeof *worker);
        if (worker == NULL) break;
        *worker = (atlas_worker){.pool = pool, .thread = i};
        if (pthread_create(&pool->threads[i - 1], NULL, atlas_worker_main, worker) != 0) {
            free(worker);
            break;
        }
        ++pool->num_started;
    }
    if (pool->threads == NULL || pool->num_started != num_threads - 1) {
        atlas_pool_destroy(pool);
        return NULL;
    }
    return pool;
}

/* Runs the list on all threads. Returns 0, or index + 1 of the first launch that failed. */
static int64_t atlas_pool_run(atlas_pool *pool, const atlas_launch *launches, int64_t num_launches) {
    if (num_launches == 0) return 0; /* its barriers are what keeps a list in place until all read it */
    pool->launches = launches;
    pool->num_launches = num_launches;
    atomic_store(&pool->failed, 0);
    if (pool->num_threads > 1) atlas_pool_signal(pool);
    atlas_run_list(pool, 0);
    return atomic_load(&pool->failed);
}

#endif /* ATLAS_WORKER_POOL_H */
