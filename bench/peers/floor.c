/* What the hardware allows for an all_reduce between processes of one host: memory that all map, one flag each, and a bare
 * loop. Each process adds its share of all buffers and writes the sums into all; one flag says that a process has come, the
 * next that it is done.
 *
 *     gcc -O3 -march=native -o floor floor.c -lm && ./floor 2 4 65536 1048576
 *     FLOOR_COPIES=1 ./floor 2 4 65536 1048576
 *
 * With FLOOR_COPIES each process has a buffer of its own that no other one maps, as ordinary memory is: it copies what it has into
 * memory that all map, a window at a time, and adds what the others have put there. With more than two processes each adds a part of
 * a window, and all copy the sums back. It takes turns with two windows, so that a window needs one flag.
 *
 * Prints a line of JSON for each size in bytes, which follow the number of ranks. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"

#define RANKS_MOST 64
/* Buffers that lie a power of two apart evict each other from the first-level cache of some processors (AMD Zen 3). */
#define SKEW 4160
#define BLOCK 1024
/* Of a window: two of them and the buffer's part fit in the second-level cache. */
#define WINDOW 32768

static struct {
    _Alignas(128) atomic_ulong reached;
    double seconds;
    long wrong;
} *all;
static float *buffers[RANKS_MOST];
static int rank, ranks, crowded;
static size_t start, end;
/* With copies: each process's two windows, the buffer that is its own, and how many elements it has. */
static float *windows[RANKS_MOST][2], *own;
static size_t elements;

static void meet(void) {
    static unsigned long passed;
    unsigned long now = ++passed;
    atomic_store_explicit(&all[rank].reached, now, memory_order_release);
    for (int other = 0; other < ranks; other++)
        while (atomic_load_explicit(&all[other].reached, memory_order_acquire) < now)
            if (crowded)
                sched_yield();
}

static void add(float *restrict one, float *restrict other, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = one[i] + other[i];
        one[i] = sum;
        other[i] = sum;
    }
}

static void add_into(float *restrict sum, const float *restrict other, size_t count) {
    for (size_t i = 0; i < count; i++)
        sum[i] += other[i];
}

static void call(void) {
    meet();
    if (ranks == 2)
        add(buffers[0] + start, buffers[1] + start, end - start);
    for (size_t i = start; i < end && ranks != 2; i += BLOCK) {
        float sum[BLOCK];
        size_t count = end - i < BLOCK ? end - i : BLOCK;
        memcpy(sum, buffers[0] + i, count * sizeof *sum);
        for (int other = 1; other < ranks; other++)
            add_into(sum, buffers[other] + i, count);
        for (int other = 0; other < ranks; other++)
            memcpy(buffers[other] + i, sum, count * sizeof *sum);
    }
    meet();
}

static void call_with_copies(void) {
    static int turn;
    for (size_t i = 0; i < elements; i += WINDOW / sizeof(float)) {
        size_t count = elements - i < WINDOW / sizeof(float) ? elements - i : WINDOW / sizeof(float);
        turn = !turn;
        memcpy(windows[rank][turn], own + i, count * sizeof(float));
        meet();
        if (ranks == 2) {
            add_into(own + i, windows[!rank][turn], count);
            continue;
        }
        size_t from = count * rank / ranks, part = count * (rank + 1) / ranks - from;
        for (int other = 0; other < ranks; other++)
            if (other != rank)
                add_into(own + i + from, windows[other][turn] + from, part);
        memcpy(windows[rank][turn] + from, own + i + from, part * sizeof(float));
        meet();
        for (int other = 0; other < ranks; other++) {
            size_t its = count * other / ranks, many = count * (other + 1) / ranks - its;
            if (other != rank)
                memcpy(own + i + its, windows[other][turn] + its, many * sizeof(float));
        }
    }
}

static double longest(double seconds) {
    all[rank].seconds = seconds;
    meet();
    for (int other = 0; other < ranks; other++)
        seconds = fmax(seconds, all[other].seconds);
    meet();
    return seconds;
}

static long wrong(void (*call)(void), float *buffer, size_t count) {
    for (size_t i = 0; i < count; i++)
        buffer[i] = i % 61 + rank;
    call();
    all[rank].wrong = 0;
    for (size_t i = 0; i < count; i++)
        all[rank].wrong += buffer[i] != i % 61 * ranks + ranks * (ranks - 1) / 2;
    meet();
    long found = 0;
    for (int other = 0; other < ranks; other++)
        found += all[other].wrong;
    return found;
}

static void *share(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    return memory;
}

int main(int argc, char **argv) {
    ranks = argc > 2 ? atoi(argv[1]) : 0;
    if (ranks < 1 || ranks > RANKS_MOST) {
        fprintf(stderr, "usage: floor RANKS BYTES...  (1 to %d ranks)\n", RANKS_MOST);
        return 2;
    }
    size_t most = 0;
    for (int argument = 2; argument < argc; argument++) {
        size_t bytes = strtoul(argv[argument], NULL, 10);
        most = bytes > most ? bytes : most;
    }
    all = share(ranks * sizeof *all);
    int copies = getenv("FLOOR_COPIES") != NULL;
    for (int i = 0; i < ranks; i++) {
        size_t bytes = (copies ? 2 * (WINDOW + SKEW) : most) + (size_t)ranks * SKEW;
        char *memory = share(bytes);
        madvise(memory, bytes, MADV_HUGEPAGE);
        buffers[i] = (float *)(memory + (size_t)i * SKEW);
        windows[i][0] = buffers[i];
        windows[i][1] = buffers[i] + (WINDOW + SKEW) / sizeof(float);
    }
    while (rank + 1 < ranks && fork() == 0)
        rank++;
    own = copies ? malloc(most) : buffers[rank];
    if (!own)
        die("malloc");
    void (*made)(void) = copies ? call_with_copies : call;
    crowded = bind_rank(rank, ranks);
    for (int argument = 2; argument < argc; argument++) {
        size_t bytes = strtoul(argv[argument], NULL, 10), count = bytes / sizeof(float);
        start = count * rank / ranks, end = count * (rank + 1) / ranks, elements = count;
        long bad = wrong(made, own, count);
        /* Sums of zeros stay zeros, however often they are summed. */
        memset(own, 0, bytes);
        double seconds = measure(made, longest);
        if (rank == 0)
            tell(bytes, seconds, bad);
    }
    wait(NULL); /* for the one that this process has started, if it has */
    return 0;
}
