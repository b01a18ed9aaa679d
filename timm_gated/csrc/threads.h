/* A team of threads that runs a job together: the caller and its workers.
 *
 * Threads meet after each operation of a network, every few microseconds, so they wait for one another without
 * sleeping. Between jobs, workers sleep after a moment, and leave the cores to others. */
#ifndef TIMM_GATED_THREADS_H
#define TIMM_GATED_THREADS_H

typedef struct team team_t;

/* The job of one thread of a team. */
typedef void (*job_t)(void *argument, int thread, int threads);

/* A team of at most so many threads: fewer if the system has no more to give. NULL if there is no memory. */
team_t *team_new(int threads);
void team_free(team_t *team);

/* Run a job on all threads; returns when all are done. Not for two calls at once. */
void team_run(team_t *team, job_t job, void *argument);

/* Within a job: wait until all threads of the team are here. */
void team_meet(team_t *team);

#endif
