/* Times a collective over MPI and prints a line of JSON for each size.
 *
 *     mpicc -O3 -march=native -o mpi mpi.c -lm && mpirun -n 2 ./mpi all_reduce 4 65536 1048576
 *
 * Any MPI will do. Sizes and results are those of `phalanx bench`, and so is the clock. */

#define _GNU_SOURCE
#include <mpi.h>
#include <string.h>

#include "clock.h"

enum collective { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECV, BARRIER, NONE };
static const char *names[] = {"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
                              "all_to_all", "send_recv", "barrier"};

static enum collective collective;
static int rank, ranks, partner;
/* `in` and `out` are as long as the whole; where the result takes the place of the data it is in `in`. */
static float *in, *out;
static int count, share;

static void call(void) {
    MPI_Comm world = MPI_COMM_WORLD;
    switch (collective) {
    case ALL_REDUCE:
        MPI_Allreduce(MPI_IN_PLACE, in, count, MPI_FLOAT, MPI_SUM, world);
        break;
    case REDUCE:
        MPI_Reduce(rank ? in : MPI_IN_PLACE, in, count, MPI_FLOAT, MPI_SUM, 0, world);
        break;
    case BROADCAST:
        MPI_Bcast(in, count, MPI_FLOAT, 0, world);
        break;
    case ALL_GATHER:
        MPI_Allgather(in, share, MPI_FLOAT, out, share, MPI_FLOAT, world);
        break;
    case GATHER:
        MPI_Gather(in, share, MPI_FLOAT, out, share, MPI_FLOAT, 0, world);
        break;
    case SCATTER:
        MPI_Scatter(in, share, MPI_FLOAT, out, share, MPI_FLOAT, 0, world);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(in, out, share, MPI_FLOAT, MPI_SUM, world);
        break;
    case ALL_TO_ALL:
        MPI_Alltoall(in, share, MPI_FLOAT, out, share, MPI_FLOAT, world);
        break;
    case SEND_RECV:
        if (partner >= ranks)
            break;
        if (rank < partner)
            MPI_Send(in, count, MPI_FLOAT, partner, 0, world);
        MPI_Recv(out, count, MPI_FLOAT, partner, 0, world, MPI_STATUS_IGNORE);
        if (rank > partner)
            MPI_Send(in, count, MPI_FLOAT, partner, 0, world);
        break;
    default:
        MPI_Barrier(world);
    }
}

/* Element i of what a rank brings. */
static float brought(int by, int i) {
    return i % 61 + by;
}

static float sum(int i) {
    return i % 61 * ranks + ranks * (ranks - 1) / 2;
}

static long wrong(void) {
    long found = 0, all;
    for (int i = 0; i < count; i++)
        in[i] = brought(rank, i);
    memset(out, -1, count * sizeof *out);
    call();
    for (int i = 0; i < count && collective <= BROADCAST; i++)
        if (collective == BROADCAST)
            found += in[i] != brought(0, i);
        else if (collective == ALL_REDUCE || rank == 0)
            found += in[i] != sum(i);
    for (int i = 0; i < share && (collective == SCATTER || collective == REDUCE_SCATTER); i++) {
        int at = rank * share + i;
        found += out[i] != (collective == SCATTER ? brought(0, at) : sum(at));
    }
    for (int i = 0; i < count; i++)
        if (collective == ALL_GATHER || (collective == GATHER && rank == 0))
            found += out[i] != brought(i / share, i % share);
        else if (collective == ALL_TO_ALL)
            found += out[i] != brought(i / share, rank * share + i % share);
        else if (collective == SEND_RECV && partner < ranks)
            found += out[i] != brought(partner, i);
    MPI_Allreduce(&found, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

static double longest(double seconds) {
    double slowest;
    MPI_Allreduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    partner = rank ^ 1;
    while (argc > 1 && collective < NONE && strcmp(argv[1], names[collective]))
        collective++;
    for (int argument = 2; argument < argc && collective < NONE; argument++) {
        long bytes = atol(argv[argument]);
        count = bytes / sizeof(float);
        share = count / ranks;
        in = malloc(bytes);
        out = malloc(bytes);
        long elements = wrong();
        /* Sums of zeros stay zeros, however often they are summed. */
        memset(in, 0, bytes);
        double time = measure(call, longest) / (collective == SEND_RECV ? 2 : 1);
        if (rank == 0)
            tell(bytes, time, elements);
        free(in);
        free(out);
    }
    MPI_Finalize();
    return argc > 2 && collective < NONE ? 0 : 2;
}
