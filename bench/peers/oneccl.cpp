/* Times oneCCL's all_reduce on one host and prints a line of JSON for each size in bytes. Intel MPI starts the ranks and
 * carries the address at which they meet. bench/peers/peers.py builds it.
 *
 *     mpiexec -n 2 ./oneccl 4 65536 1048576 */

#include <mpi.h>
#include <cstring>
#include <oneapi/ccl.hpp>

#include "clock.h"

/* The static library wants the hooks of Intel's tracing library: without one they are null. */
extern "C" {
void *__itt_string_handle_create_ptr__3_0, *__itt_task_begin_ptr__3_0, *__itt_metadata_add_ptr__3_0,
    *__itt_task_end_ptr__3_0, *__itt_thread_set_name_ptr__3_0, *__itt_event_create_ptr__3_0, *__itt_event_start_ptr__3_0,
    *__itt_event_end_ptr__3_0, *__itt_domain_create_ptr__3_0;
}

static int rank_, ranks;
static float *data;
static long count;
static ccl::communicator *group;

static void call() {
    ccl::allreduce(data, data, count, ccl::datatype::float32, ccl::reduction::sum, *group).wait();
}

static double longest(double seconds) {
    double slowest;
    MPI_Allreduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static long wrong() {
    long found = 0, all;
    for (long i = 0; i < count; i++)
        data[i] = i % 61 + rank_;
    call();
    for (long i = 0; i < count; i++)
        found += data[i] != i % 61 * ranks + ranks * (ranks - 1) / 2;
    MPI_Allreduce(&found, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    ccl::init();
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    {
        ccl::kvs::address_type address;
        ccl::shared_ptr_class<ccl::kvs> store;
        if (rank_ == 0) {
            store = ccl::create_main_kvs();
            address = store->get_address();
        }
        MPI_Bcast(address.data(), (int)address.size(), MPI_BYTE, 0, MPI_COMM_WORLD);
        if (rank_ != 0)
            store = ccl::create_kvs(address);
        auto communicator = ccl::create_communicator(ranks, rank_, store);
        group = &communicator;
        for (int argument = 1; argument < argc; argument++) {
            long bytes = atol(argv[argument]);
            count = bytes / sizeof *data;
            data = (float *)malloc(bytes);
            long elements = wrong();
            /* Sums of zeros stay zeros, however often they are summed. */
            memset(data, 0, bytes);
            double seconds = measure(call, longest);
            if (rank_ == 0)
                tell(bytes, seconds, elements);
            free(data);
        }
    }
    MPI_Finalize();
    return 0;
}
