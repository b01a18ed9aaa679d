#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* How often a thread looks before it lets others run, and a worker without a job before it sleeps: some 50 us. Without
 * pause instructions: hypervisors take a loop of them for a reason to suspend the virtual core. */
#define LOOKS 50000

struct team {
    int size;
    pid_t process; /* that the workers belong to: a fork does not take them along */
    pthread_t *workers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_uint jobs; /* so far; odd steps do not matter, only that it changes */
    atomic_int ended;
    job_t job;
    void *argument;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint meetings;
};

void team_meet(team_t *team) {
    unsigned meeting = atomic_load_explicit(&team->meetings, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == team->size) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->meetings, meeting + 1, memory_order_release);
        return;
    }
    for (int look = 0; atomic_load_explicit(&team->meetings, memory_order_acquire) == meeting; look++)
        if (look >= LOOKS)
            sched_yield();
}

typedef struct {
    team_t *team;
    int thread;
} worker_t;

static void *work(void *started) {
    worker_t worker = *(worker_t *)started;
    team_t *team = worker.team;
    free(started);
    unsigned done = 0;
    for (;;) {
        for (int look = 0; look < LOOKS && atomic_load_explicit(&team->jobs, memory_order_acquire) == done;)
            look++;
        if (atomic_load_explicit(&team->jobs, memory_order_acquire) == done) {
            pthread_mutex_lock(&team->mutex);
            while (atomic_load_explicit(&team->jobs, memory_order_acquire) == done)
                pthread_cond_wait(&team->wake, &team->mutex);
            pthread_mutex_unlock(&team->mutex);
        }
        done = atomic_load_explicit(&team->jobs, memory_order_acquire);
        if (atomic_load_explicit(&team->ended, memory_order_acquire))
            return NULL;
        team->job(team->argument, worker.thread, team->size);
        team_meet(team);
    }
}

static void announce(team_t *team) {
    pthread_mutex_lock(&team->mutex);
    atomic_fetch_add_explicit(&team->jobs, 1, memory_order_release);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->mutex);
}

/* Workers for a team of at most so many threads, in this process. */
static void start(team_t *team, int threads) {
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    atomic_store(&team->jobs, 0);
    atomic_store(&team->arrived, 0);
    atomic_store(&team->meetings, 0);
    team->process = getpid();
    team->size = 1;
    while (team->size < threads) {
        worker_t *worker = malloc(sizeof *worker);
        if (!worker)
            return;
        *worker = (worker_t){team, team->size};
        if (pthread_create(&team->workers[team->size - 1], NULL, work, worker)) {
            free(worker);
            return;
        }
        team->size++;
    }
}

team_t *team_new(int threads) {
    team_t *team = NULL;
    if (posix_memalign((void **)&team, 64, sizeof *team))
        return NULL;
    *team = (team_t){.workers = malloc((size_t)threads * sizeof *team->workers)};
    if (!team->workers) {
        free(team);
        return NULL;
    }
    start(team, threads);
    return team;
}

void team_free(team_t *team) {
    if (!team)
        return;
    if (team->process == getpid()) {
        atomic_store_explicit(&team->ended, 1, memory_order_release);
        announce(team);
        for (int i = 0; i < team->size - 1; i++)
            pthread_join(team->workers[i], NULL);
        pthread_mutex_destroy(&team->mutex);
        pthread_cond_destroy(&team->wake);
    }
    free(team->workers);
    free(team);
}

void team_run(team_t *team, job_t job, void *argument) {
    if (team->process != getpid())
        start(team, team->size);
    team->job = job;
    team->argument = argument;
    if (team->size > 1)
        announce(team);
    job(argument, 0, team->size);
    if (team->size > 1)
        team_meet(team);
}
