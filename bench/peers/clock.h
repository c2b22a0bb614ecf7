/* The clock of `phalanx bench` (crates/phalanx-cli/src/bench/measure.rs), for peers that are called from C and C++. */

#include <math.h>
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
