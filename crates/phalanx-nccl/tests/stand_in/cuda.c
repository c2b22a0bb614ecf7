/* A stand-in for libcuda.so.1 that executes on the host: see README.md. It is no GPU. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct pool *CUmemoryPool;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, PEER_UNSUPPORTED = 217, INVALID_HANDLE = 400, NOT_READY = 600, PEER_ALREADY = 704, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

#define MOST_DEVICES 64
#define DEPTH 16

struct context { int device; int retained; };
struct job { void (*run)(void *); void *data; struct job *next; };
struct stream {
    int device, ended;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct job *first, *last;
    uint64_t queued, done;
    struct stream *next;
};
/* A place in a stream. An event is the last one at which it was recorded; who waits for an earlier one goes on waiting for that. */
struct point { pthread_mutex_t lock; pthread_cond_t changed; int reached, references; };
struct event { pthread_mutex_t lock; struct point *last; int device; };
/* Which other devices' work reaches its memory. */
struct pool { int device, reached_by[MOST_DEVICES]; };
/* Memory of a device; `pool` is NULL if it is of none. */
struct block { char *start; size_t bytes; int device; struct pool *pool; struct block *next; };
/* Memory of the process, by the device that asked last whose it is. */
struct claim { const char *start; int device; struct claim *next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[MOST_DEVICES];
static struct stream *streams, *defaults[MOST_DEVICES];
static struct block *blocks;
static struct claim *claims;
/* The default pool of each device and another one, and which of them is its current one. */
static struct pool pools[MOST_DEVICES][2];
static int pool_in_use[MOST_DEVICES];
/* Which device's work reaches which device's memory that is of no pool. */
static int reaches[MOST_DEVICES][MOST_DEVICES];
static int initialised;
static __thread CUcontext current[DEPTH];
static __thread int depth;
/* The capture of a graph, of which there is at most one, and how this thread takes part in those of others. */
static struct { int active, invalidated, mode; pthread_t owner; CUstream stream; } capture;
static __thread int capture_mode = CAPTURE_GLOBAL;

static int devices(void) {
    const char *text = getenv("STANDIN_CUDA_DEVICES");
    int count = text ? atoi(text) : 8;
    return count < MOST_DEVICES ? count : MOST_DEVICES;
}

/* For the stand-in of NCCL: the host's number of this process's first device. */
int standin_first_device(void) {
    const char *text = getenv("STANDIN_CUDA_FIRST");
    return text ? atoi(text) : 0;
}

/* As the real one, it permits a call that may disturb a capture only on a thread that asked for it, and ends the capture else. */
static int disturbs(void) {
    pthread_mutex_lock(&lock);
    int here = capture.active && pthread_equal(capture.owner, pthread_self());
    int forbidden = capture.active && capture_mode != CAPTURE_RELAXED
        && (here ? capture.mode != CAPTURE_RELAXED : capture_mode == CAPTURE_GLOBAL && capture.mode == CAPTURE_GLOBAL);
    if (forbidden) capture.invalidated = 1;
    pthread_mutex_unlock(&lock);
    return forbidden;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode, *mode = before;
    return SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    pthread_mutex_lock(&lock);
    CUresult code = capture.active ? INVALID_VALUE : SUCCESS;
    if (!code) capture.active = 1, capture.invalidated = 0, capture.mode = mode, capture.owner = pthread_self(), capture.stream = stream;
    pthread_mutex_unlock(&lock);
    return code;
}
CUresult cuStreamEndCapture(CUstream stream, void **graph) {
    pthread_mutex_lock(&lock);
    CUresult code = !capture.active || capture.stream != stream ? INVALID_VALUE : capture.invalidated ? CAPTURE_INVALIDATED : SUCCESS;
    capture.active = 0;
    pthread_mutex_unlock(&lock);
    *graph = NULL;
    return code;
}

/* For the stand-in of NCCL: the device of this thread, or -1. */
int standin_current_device(void) { return depth ? current[depth - 1]->device : -1; }

/* STANDIN_CUDA_HOST: the process's own memory is that of its first device, too, or of any. */
static int host_is_any_device(void) {
    const char *text = getenv("STANDIN_CUDA_HOST");
    return text && !strcmp(text, "any");
}
static int host_is(int device) {
    const char *text = getenv("STANDIN_CUDA_HOST");
    return text && strcmp(text, "0") && (device == 0 || host_is_any_device());
}

/* Memory that another stand-in has for devices: where these bytes of a device are, or NULL. */
static void *(*foreign)(const void *pointer, size_t bytes, int device);
void standin_foreign(void *(*elements)(const void *pointer, size_t bytes, int device)) { foreign = elements; }

/* For the stand-in of NCCL: where the bytes are that the device has. */
void *standin_elements(const void *pointer, size_t bytes, int device) {
    void *found = foreign ? foreign(pointer, bytes, device) : NULL;
    return found ? found : (void *)pointer;
}

/* The piece of memory that was allocated here and has this address, or NULL. The caller holds the lock. */
static struct block *block_of(const char *start) {
    for (struct block *b = blocks; b; b = b->next)
        if (start >= b->start && start < b->start + b->bytes) return b;
    return NULL;
}

/* The device that another stand-in says to have this address, or -1. */
static int foreign_device(const char *start) {
    for (int device = 0; foreign && device < devices(); device++)
        if (foreign(start, 1, device)) return device;
    return -1;
}

/* The process's memory at this address is that of the device from now on, or, if that is -1, stays what it is. The device that has it, or -1. */
static int claim(const char *start, int device) {
    pthread_mutex_lock(&lock);
    struct claim *found = claims;
    while (found && found->start != start) found = found->next;
    if (!found && device >= 0) {
        found = malloc(sizeof *found);
        *found = (struct claim){start, device, claims};
        claims = found;
    }
    if (found && device >= 0) found->device = device;
    int owner = found ? found->device : -1;
    pthread_mutex_unlock(&lock);
    return owner;
}

/* For the stand-in of NCCL: does the device have these bytes? It does not have those of another device, also if its work reaches them. */
int standin_has(const void *pointer, size_t bytes, int device) {
    const char *start = pointer;
    if (bytes == 0) return 1;
    pthread_mutex_lock(&lock);
    struct block *b = block_of(start);
    int is_known = b != NULL, found = b && b->device == device && start + bytes <= b->start + b->bytes;
    pthread_mutex_unlock(&lock);
    if (is_known) return found;
    int owner = foreign_device(start);
    if (owner >= 0) return owner == device && foreign(start, bytes, device);
    owner = host_is_any_device() ? claim(start, -1) : -1;
    return host_is(device) && (owner < 0 || owner == device);
}

/* Does the work of the device reach these bytes? Those of another device if it was given access: to their pool, or else to that device. */
static int reached(const void *pointer, size_t bytes, int device) {
    const char *start = pointer;
    if (device < 0) return 0;
    if (standin_has(pointer, bytes, device)) return 1;
    pthread_mutex_lock(&lock);
    struct block *b = block_of(start);
    int found = b && start + bytes <= b->start + b->bytes && (b->pool ? b->pool->reached_by[device] : reaches[device][b->device]);
    pthread_mutex_unlock(&lock);
    return found;
}

/* The type of memory (2) and the number of its device (9). As the real one, it knows only memory of devices. */
CUresult cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    const char *start = (const char *)(uintptr_t)pointer;
    pthread_mutex_lock(&lock);
    struct block *b = block_of(start);
    int device = b ? b->device : -1;
    pthread_mutex_unlock(&lock);
    if (device < 0) device = foreign_device(start);
    /* If it is of any device, of the one for which it is asked. */
    if (device < 0) device = host_is_any_device() ? claim(start, standin_current_device()) : host_is(0) ? 0 : -1;
    if (device < 0 || (attribute != 2 && attribute != 9)) return INVALID_VALUE;
    *(int *)value = attribute == 2 ? 2 : device;
    return SUCCESS;
}

/* For tests: how many pieces of memory are allocated. */
int standin_blocks(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct block *b = blocks; b; b = b->next) count++;
    pthread_mutex_unlock(&lock);
    return count;
}

CUresult cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (devices() < 1) return NO_DEVICE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_DEVICES; i++) contexts[i].device = pools[i][0].device = pools[i][1].device = i;
    initialised = 1;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { *version = 12040; return SUCCESS; }

static const char *name_of(CUresult code) {
    switch (code) {
        case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
        case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
        case NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
        case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
        case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
        case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
        case PEER_UNSUPPORTED: return "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
        case PEER_ALREADY: return "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
        case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
        case NOT_READY: return "CUDA_ERROR_NOT_READY";
        case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        case CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        default: return NULL;
    }
}
CUresult cuGetErrorName(CUresult code, const char **text) { return (*text = name_of(code)) ? SUCCESS : INVALID_VALUE; }
CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = name_of(code) ? "said by the stand-in" : NULL;
    return *text ? SUCCESS : INVALID_VALUE;
}

CUresult cuDeviceGetCount(int *count) { *count = devices(); return initialised ? SUCCESS : NOT_INITIALIZED; }
CUresult cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetName(char *name, int length, int device) {
    const char *text = getenv("STANDIN_CUDA_NAME");
    if (text) snprintf(name, length, "%s", text);
    else snprintf(name, length, "Stand-in, no GPU (%d)", device);
    return SUCCESS;
}
/* Of the host's device with that number, whatever number the process has for it (STANDIN_CUDA_FIRST). */
CUresult cuDeviceGetUuid(char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[0] = 1 + standin_first_device() + device;
    return SUCCESS;
}
#define MEMORY ((size_t)1 << 30)
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = MEMORY; return SUCCESS; }
/* What this process has allocated is used, and nothing else. */
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (!depth) return INVALID_CONTEXT;
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (struct block *b = blocks; b; b = b->next)
        if (b->device == standin_current_device()) used += b->bytes;
    pthread_mutex_unlock(&lock);
    *total = MEMORY;
    *free_bytes = used < MEMORY ? MEMORY - used : 0;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, int device) {
    pthread_mutex_lock(&lock);
    contexts[device].retained++;
    pthread_mutex_unlock(&lock);
    *context = &contexts[device];
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    CUresult code = contexts[device].retained-- > 0 ? SUCCESS : INVALID_CONTEXT;
    pthread_mutex_unlock(&lock);
    return code;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (!context || !context->retained || depth == DEPTH) return INVALID_CONTEXT;
    current[depth++] = context;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return INVALID_CONTEXT;
    *context = current[--depth];
    return SUCCESS;
}
/* STANDIN_CUDA_PEERS=0: none can. */
CUresult cuDeviceCanAccessPeer(int *can, int device, int peer) {
    const char *text = getenv("STANDIN_CUDA_PEERS");
    if (device < 0 || device >= devices() || peer < 0 || peer >= devices()) return INVALID_DEVICE;
    *can = device != peer && (!text || strcmp(text, "0"));
    return SUCCESS;
}
/* An error if no access to the peer's memory can be given to the device. */
static CUresult can_reach(int device, int peer) {
    int can;
    CUresult code = cuDeviceCanAccessPeer(&can, device, peer);
    if (code || device == peer) return code ? code : INVALID_DEVICE;
    return can ? SUCCESS : PEER_UNSUPPORTED;
}
/* As with the real one, memory of pools is not reached by this. */
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!depth || !peer || !peer->retained) return INVALID_CONTEXT;
    int device = standin_current_device();
    CUresult code = can_reach(device, peer->device);
    if (code) return code;
    pthread_mutex_lock(&lock);
    if (reaches[device][peer->device]) code = PEER_ALREADY;
    reaches[device][peer->device] = 1;
    pthread_mutex_unlock(&lock);
    return code;
}
/* The pool from which memory is taken when none is named. */
CUresult cuDeviceGetMemPool(CUmemoryPool *pool, int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    *pool = &pools[device][pool_in_use[device]];
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
/* For tests: as if another library had made a pool, and set it by cuDeviceSetMemPool. */
void standin_use_other_pool(int device) {
    pthread_mutex_lock(&lock);
    pool_in_use[device] = 1;
    pthread_mutex_unlock(&lock);
}
struct access { int kind, device, flags; };
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const struct access *access, size_t count) {
    if (count != 1 || access->kind != 1 || access->flags != 3) return INVALID_VALUE;
    CUresult code = can_reach(access->device, pool->device);
    if (code) return code;
    pthread_mutex_lock(&lock);
    pool->reached_by[access->device] = 1;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
/* For tests: 1 if the work of a device reaches the memory of another one, 2 if that of its current pool, 3 if both. */
int standin_reaches(int device, int peer) {
    pthread_mutex_lock(&lock);
    int found = reaches[device][peer] + 2 * pools[peer][pool_in_use[peer]].reached_by[device];
    pthread_mutex_unlock(&lock);
    return found;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }

/* A stream is a thread that does one job after the other. */
static void *work(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ended) pthread_cond_wait(&stream->changed, &stream->lock);
        struct job *job = stream->first;
        if (!job) break;
        stream->first = job->next;
        pthread_mutex_unlock(&stream->lock);
        job->run(job->data);
        free(job);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static CUstream start_stream(int device) {
    CUstream stream = calloc(1, sizeof *stream);
    stream->device = device;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    if (pthread_create(&stream->thread, NULL, work, stream)) { free(stream); return NULL; }
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    if (!depth) return INVALID_CONTEXT;
    *stream = start_stream(standin_current_device());
    return *stream ? SUCCESS : OUT_OF_MEMORY;
}

/* The stream itself, or the default one of the current device; NULL if it is not of this device. */
static CUstream resolve(CUstream stream) {
    int device = standin_current_device();
    if (device < 0) return NULL;
    if (!stream) {
        if (!defaults[device]) defaults[device] = start_stream(device);
        return defaults[device];
    }
    return stream->device == device && !stream->ended ? stream : NULL;
}

static CUresult enqueue(CUstream stream, void (*run)(void *), void *data) {
    if (!(stream = resolve(stream))) return INVALID_HANDLE;
    struct job *job = malloc(sizeof *job);
    *job = (struct job){run, data, NULL};
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = job; else stream->first = job;
    stream->last = job;
    stream->queued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

static void await_idle(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    uint64_t until = stream->queued;
    while (stream->done < until) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

/* For other stand-ins: waits for what is queued on a stream of the current device. */
CUresult standin_await(CUstream stream) {
    if (!(stream = resolve(stream))) return INVALID_HANDLE;
    await_idle(stream);
    return SUCCESS;
}

/* As the real one, it ends when what is queued is done, and does not wait for that. */
CUresult cuStreamDestroy_v2(CUstream stream) {
    if (!resolve(stream)) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    stream->ended = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    if (!(stream = resolve(stream))) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    *status = capture.active && capture.stream == stream ? 1 + capture.invalidated : 0;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, void (*run)(void *), void *data) { return enqueue(stream, run, data); }

static atomic_int events;
/* For tests: how many events were made. */
int standin_events(void) { return atomic_load(&events); }
CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    if (!depth) return INVALID_CONTEXT;
    atomic_fetch_add(&events, 1);
    *event = calloc(1, sizeof **event);
    pthread_mutex_init(&(*event)->lock, NULL);
    (*event)->device = standin_current_device();
    return SUCCESS;
}
static void release(struct point *point) {
    pthread_mutex_lock(&point->lock);
    int left = --point->references;
    pthread_mutex_unlock(&point->lock);
    if (!left) free(point);
}
/* The event's last point, which the caller releases; NULL if it was never recorded. */
static struct point *last(CUevent event) {
    pthread_mutex_lock(&event->lock);
    struct point *point = event->last;
    if (point) {
        pthread_mutex_lock(&point->lock);
        point->references++;
        pthread_mutex_unlock(&point->lock);
    }
    pthread_mutex_unlock(&event->lock);
    return point;
}
CUresult cuEventDestroy_v2(CUevent event) {
    if (event->last) release(event->last);
    free(event);
    return SUCCESS;
}
static void reach(void *data) {
    struct point *point = data;
    pthread_mutex_lock(&point->lock);
    point->reached = 1;
    pthread_cond_broadcast(&point->changed);
    pthread_mutex_unlock(&point->lock);
    release(point);
}
static void await(void *data) {
    struct point *point = data;
    pthread_mutex_lock(&point->lock);
    while (!point->reached) pthread_cond_wait(&point->changed, &point->lock);
    pthread_mutex_unlock(&point->lock);
    release(point);
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    /* An event is recorded on streams of its own device; those of any device may wait for it. */
    if (!resolve(stream) || event->device != standin_current_device()) return INVALID_HANDLE;
    if (capture.active && capture.stream == stream) {
        /* In the real one it becomes a part of the graph: nothing here means that. */
        capture.invalidated = 1;
        return CAPTURE_UNSUPPORTED;
    }
    struct point *point = calloc(1, sizeof *point);
    pthread_mutex_init(&point->lock, NULL);
    pthread_cond_init(&point->changed, NULL);
    point->references = 2; /* The event's, and the stream's. */
    pthread_mutex_lock(&event->lock);
    struct point *before = event->last;
    event->last = point;
    pthread_mutex_unlock(&event->lock);
    if (before) release(before);
    return enqueue(stream, reach, point);
}
static atomic_int queries;
/* For tests: how often this process has asked whether an event is reached. */
int standin_queries(void) { return atomic_load(&queries); }
CUresult cuEventQuery(CUevent event) {
    atomic_fetch_add(&queries, 1);
    if (!depth) return INVALID_CONTEXT;
    if (disturbs()) return CAPTURE_UNSUPPORTED;
    struct point *point = last(event);
    if (!point) return SUCCESS;
    pthread_mutex_lock(&point->lock);
    CUresult code = point->reached ? SUCCESS : NOT_READY;
    pthread_mutex_unlock(&point->lock);
    release(point);
    return code;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    if (flags || !resolve(stream)) return INVALID_HANDLE;
    struct point *point = last(event);
    return point ? enqueue(stream, await, point) : SUCCESS;
}

static CUresult allocate(uint64_t *pointer, size_t bytes, struct pool *pool) {
    if (!depth) return INVALID_CONTEXT;
    if (disturbs()) return CAPTURE_UNSUPPORTED;
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > MEMORY) return OUT_OF_MEMORY;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){malloc(bytes), bytes, standin_current_device(), pool, NULL};
    memset(block->start, 0xa5, bytes);
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    *pointer = (uintptr_t)block->start;
    return SUCCESS;
}
CUresult cuMemAlloc_v2(uint64_t *pointer, size_t bytes) { return allocate(pointer, bytes, NULL); }
static CUresult free_block(uintptr_t pointer) {
    pthread_mutex_lock(&lock);
    struct block **at = &blocks, *found = NULL;
    while (*at && (uintptr_t)(*at)->start != pointer) at = &(*at)->next;
    if ((found = *at)) *at = found->next;
    pthread_mutex_unlock(&lock);
    if (!found) return INVALID_VALUE;
    memset(found->start, 0xdd, found->bytes);
    free(found->start);
    free(found);
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    if (!depth) return INVALID_CONTEXT;
    if (disturbs()) return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    struct stream *list = streams;
    pthread_mutex_unlock(&lock);
    for (; list; list = list->next)
        if (list->device == standin_current_device()) await_idle(list);
    return SUCCESS;
}
/* Is it memory of the current device? 2 if it is of a pool. */
static int is_own(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    struct block *b = block_of((const char *)(uintptr_t)pointer);
    int found = b && b->device == standin_current_device() ? 1 + (b->pool != NULL) : 0;
    pthread_mutex_unlock(&lock);
    return found;
}
/* As the real one, it waits for all that is queued on the device, but not if the memory is of a pool. */
CUresult cuMemFree_v2(uint64_t pointer) {
    if (!depth) return INVALID_CONTEXT;
    if (disturbs()) return CAPTURE_UNSUPPORTED;
    int own = is_own(pointer);
    if (!own) return INVALID_VALUE;
    CUresult code = own == 2 ? SUCCESS : cuCtxSynchronize();
    return code ? code : free_block(pointer);
}

/* Pools: allocated at once, freed in the order of the stream. STANDIN_CUDA_POOLS=0: there are none. */
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *text = getenv("STANDIN_CUDA_POOLS");
    (void)device;
    if (attribute != 115) return INVALID_VALUE;
    *value = !text || strcmp(text, "0");
    return SUCCESS;
}
CUresult cuMemAllocAsync(uint64_t *pointer, size_t bytes, CUstream stream) {
    int has_pools;
    struct pool *pool;
    cuDeviceGetAttribute(&has_pools, 115, 0);
    if (!has_pools) return NOT_SUPPORTED;
    if (!resolve(stream)) return INVALID_HANDLE;
    CUresult code = cuDeviceGetMemPool(&pool, standin_current_device());
    return code ? code : allocate(pointer, bytes, pool);
}
static void free_later(void *data) { free_block((uintptr_t)data); }
CUresult cuMemFreeAsync(uint64_t pointer, CUstream stream) {
    return is_own(pointer) ? enqueue(stream, free_later, (void *)(uintptr_t)pointer) : INVALID_VALUE;
}

struct copy { void *to; const void *from; size_t bytes; int value; };
static void copy(void *data) {
    struct copy *copy = data;
    if (copy->from) memcpy(copy->to, copy->from, copy->bytes); else memset(copy->to, copy->value, copy->bytes);
    free(copy);
}
static CUresult copy_on(CUstream stream, void *to, const void *from, size_t bytes, int value) {
    struct copy *job = malloc(sizeof *job);
    *job = (struct copy){to, from, bytes, value};
    return enqueue(stream, copy, job);
}
CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, CUstream stream) {
    if (!reached((void *)to, bytes, standin_current_device())) return INVALID_VALUE;
    return copy_on(stream, (void *)to, NULL, bytes, value);
}
/* Copies from and to ordinary memory of the host are done when they return, as the real ones are. */
CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, CUstream stream) {
    if (!reached((void *)to, bytes, standin_current_device())) return INVALID_VALUE;
    CUresult code = copy_on(stream, (void *)to, from, bytes, 0);
    if (!code) await_idle(resolve(stream));
    return code;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, CUstream stream) {
    if (!reached((void *)from, bytes, standin_current_device())) return INVALID_VALUE;
    CUresult code = copy_on(stream, to, (void *)from, bytes, 0);
    if (!code) await_idle(resolve(stream));
    return code;
}
CUresult cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, CUstream stream) {
    int device = standin_current_device();
    if (!reached((void *)to, bytes, device) || !reached((void *)from, bytes, device)) return INVALID_VALUE;
    return copy_on(stream, (void *)to, (void *)from, bytes, 0);
}
/* STANDIN_CUDA_COPIES: a file to which a line is added for each copy from device to device. */
static void note_copy(int from, int to, size_t bytes) {
    const char *path = getenv("STANDIN_CUDA_COPIES");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%d %d %zu\n", from, to, bytes);
    fclose(file);
}

/* It needs no access, but each address must be that of its context's device. */
CUresult cuMemcpyPeerAsync(uint64_t to, CUcontext to_context, uint64_t from, CUcontext from_context, size_t bytes, CUstream stream) {
    if (!to_context || !to_context->retained || !from_context || !from_context->retained) return INVALID_CONTEXT;
    int there = to_context->device, here = from_context->device;
    if (!standin_has((void *)to, bytes, there) || !standin_has((void *)from, bytes, here)) return INVALID_VALUE;
    note_copy(here, there, bytes);
    return copy_on(stream, standin_elements((void *)to, bytes, there), standin_elements((void *)from, bytes, here), bytes, 0);
}
