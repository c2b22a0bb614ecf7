/* A stand-in for libnccl.so.2 that executes on the host, between processes of one machine: see README.md. It is no GPU.
 *
 * Everything is made of messages. Each pair of ranks has a box for one piece of a message in memory that the processes share; rank 0 makes
 * that memory, and its identity is where the others find it. A launch becomes a list of sends and receives, which advance together, and of
 * reductions that follow. It runs as a host function on the stream that it was launched on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int ncclResult_t;
typedef struct comm *ncclComm_t;
typedef struct stream *cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, least, most; const char *net; int share, traffic; } ncclConfig_t;
enum { SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5,
       REMOTE_ERROR = 6, IN_PROGRESS = 7 };

int standin_current_device(void);
int standin_first_device(void);
int standin_has(const void *pointer, size_t bytes, int device);
void *standin_elements(const void *pointer, size_t bytes, int device);
int cuLaunchHostFunc(cudaStream_t stream, void (*run)(void *), void *data);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuDevicePrimaryCtxRetain(void **context, int device);

#define MOST_RANKS 8
#define PIECE 65536

struct box { atomic_int full; int bytes; char data[PIECE]; };
struct shared {
    atomic_int arrived[MOST_RANKS], finalized[MOST_RANKS], device[MOST_RANKS], pid[MOST_RANKS], aborted[MOST_RANKS];
    /* Of what remains when this one is shrunk: where the memory is that its first rank has made, and whether that is written. */
    char child[MOST_RANKS][64];
    atomic_int has_child[MOST_RANKS];
    struct box box[MOST_RANKS][MOST_RANKS]; /* from, to */
};
#define MOST_OPS 8
#define FIRST_OP 5
struct comm {
    struct { int used; double factor; } ops[MOST_OPS];
    int rank, ranks, device, launches, slow, blocking, shrunk, revoked;
    struct shared *shared;
    ncclComm_t child; /* What a shrink that failed has made. As in the real one, an abort writes there. */
    atomic_int state, aborted, pending;
};
enum kind { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
struct call { enum kind kind; const char *from; char *to; size_t count; int type, op, peer; ncclComm_t comm; cudaStream_t stream; int scales; double factor; };
struct message { char *data; size_t bytes, done; int peer, sends; struct message *next; };
struct reduction { char *parts, *to; size_t count; int type, op, ranks; struct reduction *next; };
struct scaling { const char *from; char *to; size_t count; int type; double factor; struct scaling *next; };
struct launch {
    ncclComm_t comm;
    cudaStream_t stream;
    struct message *messages;
    struct reduction *reductions;
    struct scaling *scalings;
    int never, fails;
};

/* Never freed, and never written again: another thread may read it. */
static _Atomic(const char *) last_error = "";
static atomic_int launch_threads, inits, shrinks, revokes;
static __thread int group_depth, call_count;
static __thread struct call calls[256];

static ncclResult_t fail(ncclResult_t code, const char *text) {
    const char *copy = strdup(text);
    if (copy) atomic_store(&last_error, copy);
    return code;
}
static void nap(long microseconds) { usleep(microseconds); }
static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
/* Is there a fault of this kind on this rank, now? */
static int faulty(const char *kind, int rank, int launch) {
    const char *fault = getenv("STANDIN_NCCL_FAULT");
    char wanted[64];
    snprintf(wanted, sizeof wanted, "%s:%d:%d", kind, rank, launch);
    return fault && !strcmp(fault, wanted);
}

/* For tests: how many threads launches have started in this process. */
int standin_launch_threads(void) { return atomic_load(&launch_threads); }
/* For tests: how often this process has called ncclCommInitRankConfig, ncclCommShrink and ncclCommRevoke. */
int standin_inits(void) { return atomic_load(&inits); }
int standin_shrinks(void) { return atomic_load(&shrinks); }
int standin_revokes(void) { return atomic_load(&revokes); }
static void say(atomic_int *count, const char *name) {
    atomic_fetch_add(count, 1);
    if (number("STANDIN_NCCL_SAY", 0)) dprintf(STDOUT_FILENO, "%s\n", name);
}

ncclResult_t ncclGetVersion(int *version) { *version = number("STANDIN_NCCL_VERSION", 22703); return SUCCESS; }
const char *ncclGetErrorString(ncclResult_t code) {
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
                                  "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t comm) { (void)comm; return atomic_load(&last_error); }

/* Makes memory for a communicator, and says where it is. */
static int make_shared(char *path, size_t length) {
    int file = memfd_create("standin-nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return 0;
    snprintf(path, length, "/proc/%d/fd/%d", getpid(), file);
    return 1;
}
static struct shared *map_shared(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    struct shared *shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return shared == MAP_FAILED ? NULL : shared;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return make_shared(id->internal, sizeof id->internal) ? SUCCESS : fail(SYSTEM_ERROR, "no memory to share");
}

/* Waits for all ranks, beside the caller. */
static void *meet(void *argument) {
    ncclComm_t comm = argument;
    struct shared *shared = comm->shared;
    int rank = comm->rank;
    if (faulty("init_error", rank, 0)) {
        fail(0, "the stand-in was told to fail");
        atomic_store(&comm->state, SYSTEM_ERROR);
        goto over;
    }
    while (faulty("init_hang", rank, 0) && !comm->aborted) nap(500);
    shared->device[rank] = standin_first_device() + comm->device;
    shared->pid[rank] = getpid();
    atomic_store(&shared->arrived[rank], 1);
    for (int other = 0; other < comm->ranks; other++)
        while (!atomic_load(&shared->arrived[other]) && !comm->aborted) nap(200);
    if (comm->aborted) goto over;
    int state = SUCCESS;
    for (int a = 0; a < comm->ranks; a++)
        for (int b = 0; b < a; b++)
            if (shared->device[a] == shared->device[b]) {
                char text[128];
                snprintf(text, sizeof text, "%s : rank %d and rank %d both on CUDA device %d", 
                         number("STANDIN_NCCL_VERSION", 22703) < 23000 ? "Duplicate GPU detected" : "Two ranks on one GPU", b, a, (int)shared->device[a]);
                state = fail(INVALID_USAGE, text);
            }
    atomic_store(&comm->state, state);
over:
    atomic_fetch_sub(&comm->pending, 1);
    return NULL;
}

static int beside(void *(*run)(void *), ncclComm_t comm) {
    pthread_t thread;
    atomic_fetch_add(&comm->pending, 1);
    if (pthread_create(&thread, NULL, run, comm)) return 0;
    return !pthread_detach(thread);
}

/* The same on the caller's thread, which waits: what a blocking communicator does. */
static ncclResult_t alone(void *(*run)(void *), ncclComm_t comm) {
    atomic_fetch_add(&comm->pending, 1);
    run(comm);
    return comm->aborted ? fail(INTERNAL_ERROR, "the communicator was aborted") : atomic_load(&comm->state);
}

static int is_known(ncclConfig_t *config) {
    return config->magic == 0xcafebeef && config->size >= sizeof *config && config->version >= 21800 && config->traffic == INT_MIN
        && !(config->blocking & ~1);
}

/* A communicator of this process's current device, without memory. */
static ncclComm_t new_comm(int rank, int ranks, ncclConfig_t *config) {
    ncclComm_t made = calloc(1, sizeof *made);
    made->rank = rank, made->ranks = ranks, made->device = standin_current_device();
    made->slow = number("STANDIN_NCCL_SLOW_LAUNCH", 0);
    /* As in the real one the variable goes before the configuration. */
    made->blocking = number("NCCL_COMM_BLOCKING", config->blocking) == 1;
    atomic_store(&made->state, IN_PROGRESS);
    return made;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    say(&inits, __func__);
    if (!is_known(config)) return fail(INVALID_ARGUMENT, "a configuration that the stand-in does not know");
    if (ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks) return fail(INVALID_ARGUMENT, "a rank that the stand-in does not know");
    if (standin_current_device() < 0) return fail(CUDA_ERROR, "no current device");
    struct shared *shared = map_shared(id.internal);
    if (!shared) return fail(SYSTEM_ERROR, "the process of rank 0 is gone");
    ncclComm_t made = new_comm(rank, ranks, config);
    made->shared = shared;
    *comm = made;
    return made->blocking ? alone(meet, made) : beside(meet, made) ? IN_PROGRESS : fail(SYSTEM_ERROR, "no thread");
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    *state = atomic_load(&comm->state);
    return SUCCESS;
}

static size_t size_of(int type) { return (const size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }

static float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023, bits;
    float value;
    if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else return (sign ? -1 : 1) * (float)fraction / 16777216.0f;
    memcpy(&value, &bits, 4);
    return value;
}
static uint16_t to_f16(float value) { /* of the 63488 finite ones the nearest, by halving the distance */
    uint16_t sign = value < 0 ? 0x8000 : 0, low = 0, high = 0x7c00;
    float size = value < 0 ? -value : value;
    if (value != value) return 0x7e00;
    while (high - low > 1) {
        uint16_t middle = (low + high) / 2;
        if (from_f16(middle) <= size) low = middle; else high = middle;
    }
    return sign | (high < 0x7c00 && from_f16(high) - size < size - from_f16(low) ? high : low);
}
static float from_bf16(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define SAME(x) (x)
#define REDUCE_AS(TYPE, WIDE, READ, WRITE)                                                      \
    for (size_t i = 0; i < r->count; i++) {                                                     \
        WIDE all = READ(((TYPE *)r->parts)[i]);                                                 \
        for (int rank = 1; rank < r->ranks; rank++) {                                           \
            WIDE next = READ(((TYPE *)r->parts)[rank * r->count + i]);                          \
            if (r->op == 0 || r->op == 4) all = all + next;                                     \
            else if (r->op == 1) all = all * next;                                              \
            else if (r->op == 2) all = next > all ? next : all;                                 \
            else all = next < all ? next : all;                                                 \
        }                                                                                       \
        if (r->op == 4) all = all / (WIDE)r->ranks;                                             \
        ((TYPE *)r->to)[i] = WRITE(all);                                                        \
    }
static void reduce(struct reduction *r) {
    switch (r->type) {
        case 0: REDUCE_AS(int8_t, int8_t, SAME, SAME) break;
        case 1: REDUCE_AS(uint8_t, uint8_t, SAME, SAME) break;
        case 2: REDUCE_AS(int32_t, int32_t, SAME, SAME) break;
        case 3: REDUCE_AS(uint32_t, uint32_t, SAME, SAME) break;
        case 4: REDUCE_AS(int64_t, int64_t, SAME, SAME) break;
        case 5: REDUCE_AS(uint64_t, uint64_t, SAME, SAME) break;
        case 6: REDUCE_AS(uint16_t, float, from_f16, to_f16) break;
        case 7: REDUCE_AS(float, float, SAME, SAME) break;
        case 8: REDUCE_AS(double, double, SAME, SAME) break;
        case 9: REDUCE_AS(uint16_t, float, from_bf16, to_bf16) break;
    }
}

/* Each product is rounded to the type. */
static void scale(struct scaling *s) {
    for (size_t i = 0; i < s->count; i++)
        switch (s->type) {
            case 6: ((uint16_t *)s->to)[i] = to_f16(from_f16(((uint16_t *)s->from)[i]) * (float)s->factor); break;
            case 7: ((float *)s->to)[i] = ((float *)s->from)[i] * (float)s->factor; break;
            case 8: ((double *)s->to)[i] = ((double *)s->from)[i] * s->factor; break;
            case 9: ((uint16_t *)s->to)[i] = to_bf16(from_bf16(((uint16_t *)s->from)[i]) * (float)s->factor); break;
        }
}

/* Advances each pair's oldest message in each direction. Is anything left? */
static int advance(struct launch *launch) {
    struct shared *shared = launch->comm->shared;
    int busy[2][MOST_RANKS] = {{0}}, left = 0, me = launch->comm->rank;
    for (struct message *m = launch->messages; m; m = m->next) {
        if (m->done > m->bytes) continue;
        left = 1;
        if (busy[m->sends][m->peer]) continue;
        busy[m->sends][m->peer] = 1;
        struct box *box = m->sends ? &shared->box[me][m->peer] : &shared->box[m->peer][me];
        if (atomic_load(&box->full) == m->sends) continue;
        size_t piece = m->bytes - m->done < PIECE ? m->bytes - m->done : PIECE;
        if (m->sends) memcpy(box->data, m->data + m->done, piece); else memcpy(m->data + m->done, box->data, piece);
        atomic_store(&box->full, m->sends);
        m->done += piece;
        /* A message is over with a piece that is not full, which may be empty. */
        if (piece < PIECE) m->done = m->bytes + 1;
    }
    return left;
}

static int is_gone(ncclComm_t comm, int rank) {
    return (rank != comm->rank && atomic_load(&comm->shared->aborted[rank])) || (kill(comm->shared->pid[rank], 0) && errno == ESRCH);
}
static int somebody_is_gone(ncclComm_t comm) {
    for (int rank = 0; rank < comm->ranks; rank++)
        if (is_gone(comm, rank)) return 1;
    return 0;
}

/* A launch, on its stream's thread. */
static void run(void *data) {
    struct launch *launch = data;
    ncclComm_t comm = launch->comm;
    const char *hold = getenv("STANDIN_NCCL_HOLD");
    while (hold && access(hold, F_OK) && !comm->aborted) nap(500);
    for (struct scaling *s = launch->scalings; s; s = s->next) scale(s);
    if (launch->fails) {
        fail(0, "the stand-in was told to fail");
        atomic_store(&comm->state, INTERNAL_ERROR);
    }
    for (int turns = 0; !comm->aborted && (launch->never || launch->fails || advance(launch)); turns++) {
        if (turns > 100) nap(100);
        if (turns % 100 == 99 && getenv("STANDIN_NCCL_REMOTE_ERROR") && somebody_is_gone(comm)) {
            fail(0, "socketProgress: Connection closed by remote peer");
            atomic_store(&comm->state, REMOTE_ERROR);
            while (!comm->aborted) nap(500);
        }
    }
    for (struct reduction *r = launch->reductions, *next; r; r = next) {
        if (!comm->aborted && r->to) reduce(r);
        next = r->next;
        free(r->parts);
        free(r);
    }
    for (struct message *m = launch->messages, *next; m; m = next) { next = m->next; free(m); }
    for (struct scaling *s = launch->scalings, *next; s; s = next) { next = s->next; free(s->to); free(s); }
    atomic_fetch_sub(&comm->pending, 1);
    free(launch);
}

static void post(struct launch *launch, int sends, const char *data, size_t bytes, int peer) {
    struct message *message = malloc(sizeof *message), **at = &launch->messages;
    *message = (struct message){(char *)data, bytes, 0, peer, sends, NULL};
    while (*at) at = &(*at)->next;
    *at = message;
}

/* Receives all ranks' parts, to be reduced into `to`. */
static void collect(struct launch *launch, char *to, size_t count, int type, int op) {
    struct reduction *r = malloc(sizeof *r);
    size_t bytes = count * size_of(type);
    *r = (struct reduction){malloc(bytes * launch->comm->ranks + 1), to, count, type, op, launch->comm->ranks, launch->reductions};
    for (int rank = 0; rank < launch->comm->ranks; rank++) post(launch, 0, r->parts + rank * bytes, bytes, rank);
    launch->reductions = r;
}

static void plan(struct launch *launch, struct call *call) {
    size_t bytes = call->count * size_of(call->type);
    int me = launch->comm->rank, ranks = launch->comm->ranks;
    if (call->scales) { /* The products are made when the stream gets there. */
        struct scaling *s = malloc(sizeof *s);
        size_t count = call->count * (call->kind == REDUCE_SCATTER ? ranks : 1);
        *s = (struct scaling){call->from, malloc(count * size_of(call->type) + 1), count, call->type, call->factor, launch->scalings};
        launch->scalings = s;
        call->from = s->to;
    }
    for (int rank = 0; rank < ranks; rank++) {
        switch (call->kind) {
            case ALL_REDUCE: case ALL_GATHER: post(launch, 1, call->from, bytes, rank); break;
            case REDUCE_SCATTER: post(launch, 1, call->from + rank * bytes, bytes, rank); break;
            case BROADCAST: if (me == call->peer) post(launch, 1, call->from, bytes, rank); break;
            case REDUCE: if (rank == call->peer) post(launch, 1, call->from, bytes, rank); break;
            case SEND: if (rank == call->peer) post(launch, 1, call->from, bytes, rank); break;
            case RECV: if (rank == call->peer) post(launch, 0, call->to, bytes, rank); break;
        }
        if (call->kind == ALL_GATHER) post(launch, 0, call->to + rank * bytes, bytes, rank);
    }
    if (call->kind == ALL_REDUCE || call->kind == REDUCE_SCATTER || (call->kind == REDUCE && me == call->peer))
        collect(launch, call->to, call->count, call->type, call->op);
    if (call->kind == BROADCAST) post(launch, 0, call->to, bytes, call->peer);
}

static ncclResult_t queue(struct launch *launch) {
    return cuLaunchHostFunc(launch->stream, run, launch) ? fail(CUDA_ERROR, "the stream does not belong to the device") : SUCCESS;
}

/* Queues a launch beside the caller; later, as the real one does while it connects ranks. */
static void *queue_later(void *argument) {
    struct launch *launch = argument;
    ncclComm_t comm = launch->comm;
    void *context;
    for (int i = 0; i < comm->slow && !comm->aborted; i++) nap(1000);
    cuDevicePrimaryCtxRetain(&context, comm->device);
    cuCtxPushCurrent_v2(context);
    ncclResult_t code = queue(launch);
    cuCtxPopCurrent_v2(&context);
    /* The call may have failed by now: its error stays. */
    int launching = IN_PROGRESS;
    atomic_compare_exchange_strong(&comm->state, &launching, code);
    atomic_fetch_sub(&comm->pending, 1);
    return NULL;
}

ncclResult_t ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm_t comm) {
    if (atomic_load(&comm->state)) return fail(INVALID_ARGUMENT, "the communicator is in progress, or has failed");
    if (residence != 1 || type < 6 || type > 9) return fail(INVALID_ARGUMENT, "a factor that the stand-in does not know");
    for (int i = 0; i < MOST_OPS; i++) {
        if (comm->ops[i].used) continue;
        comm->ops[i].used = 1;
        comm->ops[i].factor = type == 6 ? from_f16(*(uint16_t *)scalar) : type == 9 ? from_bf16(*(uint16_t *)scalar)
            : type == 7 ? *(float *)scalar : *(double *)scalar;
        *op = FIRST_OP + i;
        return SUCCESS;
    }
    return fail(INVALID_USAGE, "more operations than the stand-in has: were they destroyed?");
}
ncclResult_t ncclRedOpDestroy(int op, ncclComm_t comm) {
    if (op < FIRST_OP || op >= FIRST_OP + MOST_OPS || !comm->ops[op - FIRST_OP].used) return fail(INVALID_ARGUMENT, "no operation");
    comm->ops[op - FIRST_OP].used = 0;
    return SUCCESS;
}

ncclResult_t ncclGroupStart(void) { if (!group_depth++) call_count = 0; return SUCCESS; }
ncclResult_t ncclGroupEnd(void) {
    if (!group_depth) return fail(INVALID_USAGE, "no group was started");
    if (--group_depth || !call_count) return SUCCESS;
    ncclComm_t comm = calls[0].comm;
    int number = comm->launches++;
    if (faulty("launch_error", comm->rank, number)) return fail(CUDA_ERROR, "the stand-in was told to fail");
    if (faulty("launch_hang", comm->rank, number)) {
        atomic_fetch_add(&comm->pending, 1);
        while (!comm->aborted) nap(500);
        atomic_fetch_sub(&comm->pending, 1);
        return fail(INTERNAL_ERROR, "the launch was aborted");
    }
    struct launch *launch = calloc(1, sizeof *launch);
    *launch = (struct launch){comm, calls[0].stream, NULL, NULL, NULL, faulty("hang", comm->rank, number), faulty("error", comm->rank, number)};
    for (int i = 0; i < call_count; i++) plan(launch, &calls[i]);
    atomic_fetch_add(&comm->pending, 1);
    if (comm->blocking || comm->ranks == 1) {
        for (int i = 0; i < comm->slow && !comm->aborted; i++) nap(1000);
        return queue(launch);
    }
    /* As the real one does for a communicator that is not blocking, unless it has one rank. */
    pthread_t thread;
    atomic_fetch_add(&launch_threads, 1);
    atomic_store(&comm->state, IN_PROGRESS);
    atomic_fetch_add(&comm->pending, 1);
    if (pthread_create(&thread, NULL, queue_later, launch)) return fail(SYSTEM_ERROR, "no thread");
    pthread_detach(thread);
    return IN_PROGRESS;
}

static ncclResult_t note(struct call call) {
    ncclComm_t comm = call.comm;
    if (comm->revoked) return fail(INVALID_USAGE, "the communicator was revoked");
    if (!group_depth) return fail(INVALID_USAGE, "the stand-in wants every call in a group");
    if (atomic_load(&comm->state) == IN_PROGRESS) return fail(INVALID_ARGUMENT, "the communicator is in progress");
    if (atomic_load(&comm->state)) return comm->state;
    if (standin_current_device() != comm->device) return fail(INVALID_ARGUMENT, "the current device is not the communicator's");
    if (call_count == 256 || (call_count && (calls[0].comm != comm || calls[0].stream != call.stream)))
        return fail(INVALID_USAGE, "more than the stand-in can do in a group");
    if (call.op >= FIRST_OP && call.op < FIRST_OP + MOST_OPS && comm->ops[call.op - FIRST_OP].used) {
        if (call.type < 6) return fail(INVALID_ARGUMENT, "a factor for integers");
        call.scales = 1, call.factor = comm->ops[call.op - FIRST_OP].factor, call.op = 0;
    }
    if (call.type < 0 || call.type > 9 || call.op < 0 || call.op > 4 || call.peer < 0 || call.peer >= comm->ranks)
        return fail(INVALID_ARGUMENT, "a type, operation or rank that is none");
    int has_all = call.kind == SEND ? call.from != NULL : call.kind == RECV ? call.to != NULL : call.from && call.to;
    if (number("NCCL_CHECK_POINTERS", 0) && !has_all && (call.count || (call.kind != SEND && call.kind != RECV)))
        return fail(INVALID_ARGUMENT, "no address");
    size_t bytes = call.count * size_of(call.type);
    size_t from = call.kind == REDUCE_SCATTER ? bytes * comm->ranks : bytes, to = call.kind == ALL_GATHER ? bytes * comm->ranks : bytes;
    if ((call.from && !standin_has(call.from, from, comm->device)) || (call.to && !standin_has(call.to, to, comm->device)))
        return fail(INVALID_ARGUMENT, "an address that is not the device's");
    if (call.from) call.from = standin_elements(call.from, from, comm->device);
    if (call.to) call.to = standin_elements(call.to, to, comm->device);
    calls[call_count++] = call;
    return SUCCESS;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){ALL_REDUCE, from, to, count, type, op, 0, comm, stream, 0, 0});
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){BROADCAST, from, to, count, type, 0, root, comm, stream, 0, 0});
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){REDUCE, from, to, count, type, op, root, comm, stream, 0, 0});
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){ALL_GATHER, from, to, count, type, 0, 0, comm, stream, 0, 0});
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){REDUCE_SCATTER, from, to, count, type, op, 0, comm, stream, 0, 0});
}
ncclResult_t ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){SEND, from, NULL, count, type, 0, peer, comm, stream, 0, 0});
}
ncclResult_t ncclRecv(void *to, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return note((struct call){RECV, NULL, to, count, type, 0, peer, comm, stream, 0, 0});
}

/* Waits until all ranks have come here, beside the caller. */
static void *finalize(void *argument) {
    ncclComm_t comm = argument;
    while (atomic_load(&comm->pending) > 1 && !comm->aborted) nap(200);
    atomic_store(&comm->shared->finalized[comm->rank], 1);
    for (int rank = 0; rank < comm->ranks; rank++)
        while (!atomic_load(&comm->shared->finalized[rank]) && !comm->aborted) nap(200);
    atomic_store(&comm->state, SUCCESS);
    atomic_fetch_sub(&comm->pending, 1);
    return NULL;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (standin_current_device() != comm->device) return fail(INVALID_ARGUMENT, "the current device is not the communicator's");
    if (atomic_load(&comm->state)) return comm->state;
    atomic_store(&comm->state, IN_PROGRESS);
    if (comm->blocking) return alone(finalize, comm);
    return beside(finalize, comm) ? IN_PROGRESS : fail(SYSTEM_ERROR, "no thread");
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (standin_current_device() != comm->device) return fail(INVALID_ARGUMENT, "the current device is not the communicator's");
    if (!comm->aborted) nap(1000L * number("STANDIN_NCCL_DESTROY_HANG", 0));
    while (atomic_load(&comm->pending)) nap(200);
    munmap(comm->shared, sizeof(struct shared));
    comm->shared = NULL; /* The rest stays, so that a use after this is found. */
    return SUCCESS;
}
static atomic_int aborts;
/* For tests: how many communicators of this process were aborted. */
int standin_aborts(void) { return atomic_load(&aborts); }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    atomic_fetch_add(&aborts, 1);
    if (comm->child && !comm->child->shared) {
        dprintf(STDERR_FILENO, "what a shrink could not make was ended before the communicator that was shrunk\n");
        abort();
    }
    nap(1000L * number("STANDIN_NCCL_ABORT_HANG", 0));
    atomic_store(&comm->shared->aborted[comm->rank], 1);
    atomic_store(&comm->aborted, 1);
    return ncclCommDestroy(comm);
}

/* What the real one calls a revoke: all that runs is ended, and the communicator can be shrunk or aborted, and nothing else. */
static void *quiesce(void *argument) {
    ncclComm_t comm = argument;
    while (atomic_load(&comm->pending) > 1) nap(200);
    atomic_store(&comm->aborted, 0);
    atomic_store(&comm->state, SUCCESS);
    atomic_fetch_sub(&comm->pending, 1);
    return NULL;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    say(&revokes, __func__);
    if (number("STANDIN_NCCL_VERSION", 22703) < 22807) return fail(INVALID_USAGE, "this version has no ncclCommRevoke");
    if (!comm->shared || flags || comm->revoked) return fail(INVALID_ARGUMENT, "it was aborted or revoked before, or the flags are none");
    if (standin_current_device() != comm->device) return fail(INVALID_ARGUMENT, "the current device is not the communicator's");
    comm->revoked = 1;
    atomic_store(&comm->aborted, 1);
    atomic_store(&comm->state, IN_PROGRESS);
    if (comm->blocking) {
        atomic_fetch_add(&comm->pending, 1);
        quiesce(comm);
        return SUCCESS;
    }
    return beside(quiesce, comm) ? IN_PROGRESS : fail(SYSTEM_ERROR, "no thread");
}

struct shrinking { ncclComm_t parent, child, *made; int old_rank[MOST_RANKS]; };

/* Waits for something of a rank that remains. Not if that rank has ended without it, or the parent is aborted. */
static int await(ncclComm_t parent, atomic_int *flag, int old_rank) {
    for (;;) {
        int gone = is_gone(parent, old_rank); /* Before the look: a rank that has done its part may end the parent at once. */
        if (atomic_load(flag)) return 1;
        if (gone || parent->aborted) return 0;
        nap(200);
    }
}

/* Makes the child, beside the caller, as the real one: over the connections of the parent. */
static void *shrink(void *argument) {
    struct shrinking *s = argument;
    ncclComm_t parent = s->parent, child = s->child;
    int me = parent->rank, first = s->old_rank[0], state = REMOTE_ERROR;
    const char *text = "a rank that remains has closed its connection";
    if (faulty("shrink_error", me, 0)) {
        state = SYSTEM_ERROR, text = "the stand-in was told to fail";
        goto over;
    }
    while (faulty("shrink_hang", me, 0) && !parent->aborted) nap(500);
    if (me == first) {
        if (!make_shared(parent->shared->child[first], sizeof parent->shared->child[first])) goto over;
        atomic_store(&parent->shared->has_child[first], 1);
    }
    if (!await(parent, &parent->shared->has_child[first], first)) goto over;
    child->shared = map_shared(parent->shared->child[first]);
    if (!child->shared) goto over;
    child->shared->device[child->rank] = standin_first_device() + child->device;
    child->shared->pid[child->rank] = getpid();
    atomic_store(&child->shared->arrived[child->rank], 1);
    for (int rank = 0; rank < child->ranks; rank++)
        if (!await(parent, &child->shared->arrived[rank], s->old_rank[rank])) goto over;
    state = SUCCESS;
over:
    if (state) fail(state, text);
    atomic_store(&child->state, state);
    parent->child = state && child->shared ? child : NULL;
    if (child->shared) *s->made = child; else free(child);
    free(s);
    atomic_store(&parent->state, state);
    atomic_fetch_sub(&parent->pending, 1);
    return NULL;
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *made, ncclConfig_t *config, int flags) {
    say(&shrinks, __func__);
    if (!parent->shared || parent->shrunk) return fail(INVALID_ARGUMENT, "the communicator was aborted, or shrunk before");
    if (!is_known(config) || flags != 1) return fail(INVALID_ARGUMENT, "a configuration or flag that the stand-in does not know");
    if (!excluded || count < 1 || count >= parent->ranks) return fail(INVALID_ARGUMENT, "nobody is excluded, or all are");
    if (standin_current_device() != parent->device) return fail(INVALID_ARGUMENT, "the current device is not the communicator's");
    if (atomic_load(&parent->state)) return fail(INVALID_ARGUMENT, "the communicator is in progress, or has failed");
    struct shrinking *s = calloc(1, sizeof *s);
    int ranks = 0, own = -1;
    for (int rank = 0; rank < parent->ranks; rank++) {
        int leaves = 0;
        for (int i = 0; i < count; i++) leaves |= excluded[i] == rank;
        if (leaves) continue;
        if (rank == parent->rank) own = ranks;
        s->old_rank[ranks++] = rank;
    }
    if (own < 0 || ranks != parent->ranks - count) {
        free(s);
        return fail(INVALID_ARGUMENT, "an excluded rank has called it, or one is none or twice in the list");
    }
    /* What still runs is ended. */
    atomic_store(&parent->aborted, 1);
    while (atomic_load(&parent->pending)) nap(200);
    atomic_store(&parent->aborted, 0);
    parent->shrunk = 1;
    *made = NULL;
    s->parent = parent, s->made = made, s->child = new_comm(own, ranks, config);
    atomic_store(&parent->state, IN_PROGRESS);
    atomic_fetch_add(&parent->pending, 1);
    if (parent->blocking) {
        shrink(s);
        return atomic_load(&parent->state);
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, shrink, s)) return fail(SYSTEM_ERROR, "no thread");
    pthread_detach(thread);
    return SUCCESS; /* As the real one: only the parent's state says that it is in progress. */
}
