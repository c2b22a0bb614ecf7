/* The clock of `phalanx bench` (crates/phalanx-bench/src/measure.rs), for peers that are called from C and C++, and
 * what else those share. Define _GNU_SOURCE before the first include. */

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define WARM_UP_LEAST 0.1
#define WARM_UP_MOST 1.0
#define SETTLED 0.1
#define RUN 0.02
#define TIMED 0.3
#define SAMPLES_LEAST 8
#define SAMPLES_MOST 30000
#define SAMPLE 5e-6

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

/* A processor of its own for each rank, of those that this process may use; whether there are too few, so that none is bound. */
static inline int bind_rank(int rank, int ranks) {
    cpu_set_t allowed, own;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        die("sched_getaffinity");
    if (ranks > CPU_COUNT(&allowed))
        return 1;
    int cpu = 0;
    for (int before = 0; !CPU_ISSET(cpu, &allowed) || before++ < rank;)
        cpu++;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    if (sched_setaffinity(0, sizeof own, &own))
        die("sched_setaffinity");
    return 0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double run(void (*call)(void), int calls) {
    double start = now();
    for (int i = 0; i < calls; i++)
        call();
    return now() - start;
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The median time of a call in seconds; `longest` gives the largest of all ranks' numbers, on every rank. */
static double measure(void (*call)(void), double (*longest)(double)) {
    static double times[SAMPLES_MOST];
    double total = 0, before = INFINITY, each;
    for (int calls = 1;;) {
        double elapsed = longest(run(call, calls));
        each = elapsed / calls;
        total += elapsed;
        if (total > WARM_UP_MOST || (total > WARM_UP_LEAST && fabs(each / before - 1) < SETTLED))
            break;
        before = each;
        if (elapsed < RUN)
            calls *= 2;
    }
    int calls = (int)fmax(1, ceil(SAMPLE / each));
    int samples = (int)fmin(fmax(TIMED / (each * calls), SAMPLES_LEAST), SAMPLES_MOST);
    longest(0); /* all begin together */
    for (int i = 0; i < samples; i++)
        times[i] = run(call, calls) / calls;
    qsort(times, samples, sizeof *times, ascending);
    return longest(times[samples / 2]);
}

static void tell(long bytes, double seconds, long wrong) {
    printf("{\"bytes\": %ld, \"time_us\": %.3f, \"wrong\": %ld}\n", bytes, seconds * 1e6, wrong);
    fflush(stdout);
}
