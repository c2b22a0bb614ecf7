/* What the hardware allows for an all_reduce between two processes of one host: memory that both map, one flag each, and
 * a bare loop. Each process adds its half of both buffers and writes the sums into both; one flag says that a process
 * has come, the next that it is done.
 *
 *     gcc -O3 -march=native -o floor floor.c && ./floor 4 65536 1048576
 *
 * Prints a line of JSON for each size in bytes: the median over all calls of the slower process's time. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The same as `phalanx bench`: calls before the clock starts, and how often each size is timed. */
#define WARM_UP 3
#define BUDGET (400ul << 20)
#define FEWEST 8ul
#define MOST 1000ul

struct flag {
    _Alignas(128) atomic_ulong reached;
};

static struct flag *flags;
static unsigned long passed;

static void meet(int rank) {
    unsigned long now = ++passed;
    atomic_store_explicit(&flags[rank].reached, now, memory_order_release);
    while (atomic_load_explicit(&flags[!rank].reached, memory_order_acquire) < now) {
    }
}

static void add(float *restrict one, float *restrict other, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = one[i] + other[i];
        one[i] = sum;
        other[i] = sum;
    }
}

static void *share(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memory;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int argc, char **argv) {
    flags = share(2 * sizeof *flags);
    double *medians = share(2 * sizeof *medians);
    for (int argument = 1; argument < argc; argument++) {
        size_t bytes = strtoul(argv[argument], NULL, 10), count = bytes / sizeof(float);
        float *buffers[2] = {share(bytes), share(bytes)};
        size_t iterations = BUDGET / (bytes + BUDGET / MOST);
        iterations = iterations < FEWEST ? FEWEST : iterations > MOST ? MOST : iterations;
        atomic_store(&flags[0].reached, 0);
        atomic_store(&flags[1].reached, 0);
        passed = 0;
        pid_t child = fork();
        int rank = child == 0;
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(rank, &own);
        sched_setaffinity(0, sizeof own, &own);
        size_t start = rank ? count - count / 2 : 0, end = rank ? count : count - count / 2;
        double *times = malloc(iterations * sizeof *times);
        for (size_t i = 0; i < WARM_UP + iterations; i++) {
            double begin = now();
            meet(rank);
            add(buffers[0] + start, buffers[1] + start, end - start);
            meet(rank);
            if (i >= WARM_UP)
                times[i - WARM_UP] = now() - begin;
        }
        qsort(times, iterations, sizeof *times, ascending);
        medians[rank] = times[iterations / 2];
        if (rank)
            _exit(0);
        waitpid(child, NULL, 0);
        printf("{\"bytes\": %zu, \"time_us\": %.3f, \"wrong\": 0}\n", bytes,
               medians[0] > medians[1] ? medians[0] : medians[1]);
        fflush(stdout);
        munmap(buffers[0], bytes);
        munmap(buffers[1], bytes);
        free(times);
    }
    return 0;
}
