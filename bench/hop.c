/* How long a cache line takes from one processor to another: two threads, bound to processors 0 and 1, write it in turn.
 * Prints the nanoseconds of one way.
 *
 *     cc -O2 -pthread -o hop bench/hop.c && ./hop
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 200000 };

static _Alignas(64) atomic_int turn;

static void *write_in_turn(void *processor) {
    int own = *(int *)processor;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(own, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        perror("binding a thread to a processor");
        exit(1);
    }
    for (int round = 0; round < ROUNDS; round++) {
        while (atomic_load_explicit(&turn, memory_order_acquire) != own) {
        }
        atomic_store_explicit(&turn, 1 - own, memory_order_release);
    }
    return NULL;
}

int main(void) {
    int processors[] = {0, 1};
    pthread_t other;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (pthread_create(&other, NULL, write_in_turn, &processors[1]) != 0) {
        fputs("no second thread\n", stderr);
        return 1;
    }
    write_in_turn(&processors[0]);
    pthread_join(other, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double took = (end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec);
    printf("%.1f\n", took / (2.0 * ROUNDS));
    return 0;
}
