// How long two processes take to give each other a block through shared memory, by what the reader does to the lines that it has read.
//
//     cc -O3 -o target/reread bench/reread.c && target/reread
//
// Each process copies its block into a buffer of its own, tells the other, and copies the other's block out. "read": it only reads.
// "written": it also writes a zero into each line that it has read. "of 64": it only reads, and 64 buffers take turns in place of two.
// The least of seven times, in microseconds. The first two allowed processors are used.
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

enum { LINE = 64, MOST_BUFFERS = 64, LONGEST = 128 << 10, READ = 0, WRITTEN = 1 };

struct flag {
    _Alignas(128) atomic_uint number;
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

// Line by line, so that both ways copy alike.
static void copy_out(char *to, char *from, size_t bytes, int way) {
    for (size_t at = 0; at < bytes; at += LINE) {
        memcpy(to + at, from + at, LINE);
        if (way == WRITTEN)
            from[at] = 0;
        atomic_signal_fence(memory_order_acq_rel);
    }
}

static double exchange(struct flag *flags, char *buffers, int me, size_t bytes, int way, int count, unsigned *number) {
    static _Alignas(LINE) char own[LONGEST], other[LONGEST];
    double best = 1e18;
    int calls = bytes >= 32 << 10 ? 2000 : 20000;
    for (int run = 0; run < 7; run++) {
        double start = now();
        for (int call = 0; call < calls; call++) {
            unsigned n = ++*number;
            memcpy(buffers + (size_t)(me * MOST_BUFFERS + n % count) * LONGEST, own, bytes);
            atomic_store_explicit(&flags[me].number, n, memory_order_release);
            while (atomic_load_explicit(&flags[1 - me].number, memory_order_acquire) < n)
                ;
            copy_out(other, buffers + (size_t)((1 - me) * MOST_BUFFERS + n % count) * LONGEST, bytes, way);
        }
        double time = (now() - start) / calls;
        if (time < best)
            best = time;
    }
    return best;
}

int main(void) {
    size_t all = (size_t)2 * MOST_BUFFERS * LONGEST;
    struct flag *flags = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *buffers = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cpu_set_t allowed, one;
    if (flags == MAP_FAILED || buffers == MAP_FAILED || sched_getaffinity(0, sizeof allowed, &allowed)) {
        perror("reread");
        return 1;
    }
    if (CPU_COUNT(&allowed) < 2) {
        fprintf(stderr, "reread: needs two processors\n");
        return 1;
    }
    memset(buffers, 0, all);
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    int me = child == 0, processor = -1;
    for (int left = me + 1; left > 0; left--)
        while (!CPU_ISSET(++processor, &allowed))
            ;
    CPU_ZERO(&one);
    CPU_SET(processor, &one);
    sched_setaffinity(0, sizeof one, &one);
    if (!me)
        printf("| bytes | read | written | of 64 |\n|---:|---:|---:|---:|\n");
    unsigned number = 0;
    for (size_t bytes = 1 << 10; bytes <= LONGEST; bytes *= 2) {
        double read = exchange(flags, buffers, me, bytes, READ, 2, &number);
        double written = exchange(flags, buffers, me, bytes, WRITTEN, 2, &number);
        double many = exchange(flags, buffers, me, bytes, READ, MOST_BUFFERS, &number);
        if (!me)
            printf("| %zu | %.2f | %.2f | %.2f |\n", bytes, read, written, many);
    }
    int status = 0;
    return me ? 0 : waitpid(child, &status, 0) < 0 || status != 0;
}
