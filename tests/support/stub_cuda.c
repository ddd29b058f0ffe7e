/* A stand-in for libcuda.so.1: the calls of kvxferd/memory/cuda.py over memfds and mmap.
 *
 * It shows that those calls have the right names, the right number and order of arguments, and results of the
 * shape that the code expects of cuda-python. It shows nothing of CUDA itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define OK 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NOT_READY 600
#define UNIT (64 << 10)
#define TOTAL (8ull << 30)
#define MOST 4096
#define ALIAS(made, of) extern __typeof__(of) made __attribute__((alias(#of)))

typedef unsigned long long u64;
typedef struct { int type, handle_types, location_type, location_id; } Prop; /* as far as it is used */

struct memory { ino_t inode; int fd; size_t size; int holders; };
struct mapping { u64 at; size_t size; struct memory *memory; };
struct pending { u64 to, from; size_t size, to_pitch, from_pitch, rows; };
struct stream { struct pending copies[16 * MOST]; int count, done; };
struct event { struct stream *stream; int until, asked; };

static struct memory memories[MOST];
static struct mapping mappings[MOST], reserved[MOST];
static int context = 1, is_ready, depth;

static struct memory *memory_of_fd(int fd) {
    struct stat status;
    struct memory *unused = 0;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode) || !status.st_size) return 0;
    for (int i = 0; i < MOST; i++) {
        if (memories[i].holders && memories[i].inode == status.st_ino) return &memories[i];
        if (!memories[i].holders && !unused) unused = &memories[i];
    }
    *unused = (struct memory){status.st_ino, dup(fd), status.st_size, 0};
    return unused;
}
static void let_go(struct memory *memory) {
    if (!--memory->holders) close(memory->fd);
}
static struct mapping *find(struct mapping *table, u64 at) {
    for (int i = 0; i < MOST; i++)
        if (table[i].size && at >= table[i].at && at < table[i].at + table[i].size) return &table[i];
    return 0;
}
static int keep(struct mapping *table, struct mapping one) {
    for (int i = 0; i < MOST; i++)
        if (!table[i].size) { table[i] = one; return OK; }
    return OUT_OF_MEMORY;
}

int cuInit(unsigned flags) { is_ready = 1; return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return is_ready ? OK : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : OK; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 0xCD, 16); return device; } /* the whole card's */
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0xAB, 16); return device; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "stub", length); return device; }
int cuDeviceTotalMem(size_t *bytes, int device) { *bytes = TOTAL; return device; }
ALIAS(cuDeviceTotalMem_v2, cuDeviceTotalMem);
static int number_in(const char *name, int otherwise) { const char *text = getenv(name); return text ? atoi(text) : otherwise; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 117) *value = number_in("STUB_FLUSH_OPTIONS", 1);    /* GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS */
    else if (attribute == 118) *value = number_in("STUB_WRITES_ORDERING", 0); /* GPU_DIRECT_RDMA_WRITES_ORDERING */
    else if (attribute == 116 || attribute == 124) *value = number_in("STUB_RDMA", 1); /* RDMA, dma-buf */
    else if (attribute == 11) *value = 0x7fffffff;                        /* MAX_PITCH */
    else *value = attribute > 0;
    return device;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) { return target || scope != 100 ? INVALID_VALUE : depth ? OK : 201; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return device; }
int cuCtxSetCurrent(void *ctx) { depth = depth ? depth : 1; return ctx == &context ? OK : INVALID_VALUE; }
int cuCtxPushCurrent(void *ctx) { depth++; return ctx == &context ? OK : INVALID_VALUE; }
ALIAS(cuCtxPushCurrent_v2, cuCtxPushCurrent);
int cuCtxPopCurrent(void **ctx) { *ctx = &context; return depth-- > 0 ? OK : 201; }
ALIAS(cuCtxPopCurrent_v2, cuCtxPopCurrent);
int cuGetErrorString(int error, const char **text) { *text = error == 1 ? "invalid argument" : error == 2 ? "out of memory" : "an error"; return OK; }
int cuGetErrorName(int error, const char **text) { *text = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : "?"; return OK; }

int cuPointerGetAttribute(void *value, int attribute, u64 at) {
    struct mapping *mapping = find(mappings, at);
    if (!mapping) return INVALID_VALUE;
    if (attribute == 9) *(int *)value = 0;                        /* device ordinal */
    else if (attribute == 14) *(u64 *)value = mapping->memory ? 1 : 0; /* allowed handle types */
    else return INVALID_VALUE;
    return OK;
}
int cuMemGetAllocationGranularity(size_t *unit, const Prop *prop, int option) {
    *unit = UNIT;
    return prop->type == 1 && prop->location_type == 1 && !prop->location_id && option <= 1 ? OK : INVALID_VALUE;
}
int cuMemCreate(u64 *handle, size_t size, const Prop *prop, u64 flags) {
    if (size % UNIT || !size || prop->handle_types != 1 || flags) return INVALID_VALUE;
    if (size > TOTAL - UNIT) return OUT_OF_MEMORY;
    int fd = memfd_create("stub-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    struct memory *memory = memory_of_fd(fd);
    close(fd);
    memory->holders++;
    *handle = (u64)memory;
    return OK;
}
int cuMemRelease(u64 handle) { let_go((struct memory *)handle); return OK; }
int cuMemRetainAllocationHandle(u64 *handle, void *at) {
    struct mapping *mapping = find(mappings, (u64)at);
    if (!mapping || !mapping->memory) return INVALID_VALUE;
    mapping->memory->holders++;
    *handle = (u64)mapping->memory;
    return OK;
}
int cuMemExportToShareableHandle(void *fd, u64 handle, int type, u64 flags) {
    *(int *)fd = dup(((struct memory *)handle)->fd);
    return type == 1 && !flags ? OK : INVALID_VALUE;
}
int cuMemImportFromShareableHandle(u64 *handle, void *fd, int type) {
    struct memory *memory = type == 1 ? memory_of_fd((int)(intptr_t)fd) : 0;
    if (!memory) return INVALID_VALUE;
    memory->holders++;
    *handle = (u64)memory;
    return OK;
}
int cuMemGetAllocationPropertiesFromHandle(Prop *prop, u64 handle) {
    const char *type = getenv("STUB_LOCATION_TYPE"), *id = getenv("STUB_LOCATION_ID");
    prop->type = prop->handle_types = 1;
    prop->location_type = type ? atoi(type) : 1;
    prop->location_id = id ? atoi(id) : 0;
    return handle ? OK : INVALID_VALUE;
}
int cuMemGetAddressRange(u64 *base, size_t *size, u64 at) {
    struct mapping *mapping = find(mappings, at);
    if (!mapping) return INVALID_VALUE;
    *base = mapping->at;
    *size = mapping->size;
    return OK;
}
ALIAS(cuMemGetAddressRange_v2, cuMemGetAddressRange);
int cuMemAddressReserve(u64 *at, size_t size, size_t alignment, u64 hint, u64 flags) {
    void *found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED || alignment || hint || flags) return INVALID_VALUE;
    *at = (u64)found;
    return keep(reserved, (struct mapping){*at, size, 0});
}
int cuMemAddressFree(u64 at, size_t size) {
    struct mapping *range = find(reserved, at);
    if (!range || range->at != at || range->size != size || find(mappings, at)) return INVALID_VALUE;
    range->size = 0;
    return munmap((void *)at, size) ? INVALID_VALUE : OK;
}
int cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
    struct memory *memory = (struct memory *)handle;
    struct mapping *range = find(reserved, at);
    if (!range || at + size > range->at + range->size || find(mappings, at)) return INVALID_VALUE;
    if (size != memory->size || offset || flags) return INVALID_VALUE;
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) return INVALID_VALUE;
    memory->holders++;
    return keep(mappings, (struct mapping){at, size, memory});
}
int cuMemSetAccess(u64 at, size_t size, const int *access, size_t count) {
    if (count != 1 || access[0] != 1 || access[1] != 0 || !find(mappings, at)) return INVALID_VALUE;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
int cuMemUnmap(u64 at, size_t size) {
    struct mapping *mapping = find(mappings, at);
    if (!mapping || mapping->at != at || mapping->size != size) return INVALID_VALUE;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    mapping->size = 0;
    let_go(mapping->memory);
    return OK;
}
int cuMemAlloc(u64 *at, size_t size) {
    void *found = depth > 0 ? mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    *at = (u64)found;
    return found == MAP_FAILED ? 201 : keep(mappings, (struct mapping){*at, size, 0});
}
ALIAS(cuMemAlloc_v2, cuMemAlloc);
int cuMemFree(u64 at) {
    struct mapping *mapping = find(mappings, at);
    if (!mapping || mapping->memory || depth < 1) return INVALID_VALUE;
    munmap((void *)at, mapping->size);
    mapping->size = 0;
    return OK;
}
ALIAS(cuMemFree_v2, cuMemFree);
int cuMemGetInfo(size_t *unused, size_t *total) {
    size_t used = 0;
    for (int i = 0; i < MOST; i++) used += memories[i].holders ? memories[i].size : 0;
    *total = TOTAL;
    *unused = TOTAL - used;
    return depth > 0 ? OK : 201;
}
ALIAS(cuMemGetInfo_v2, cuMemGetInfo);

int cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    *at = malloc(size);
    memset(*at, 0x55, size); /* nobody promises zeros */
    return flags == 1 ? OK : INVALID_VALUE;
}
int cuMemFreeHost(void *at) { free(at); return OK; }
int cuStreamCreate(void **stream, unsigned flags) {
    *stream = calloc(1, sizeof(struct stream));
    return flags == 1 ? OK : INVALID_VALUE;
}
int cuStreamDestroy(void *stream) { free(stream); return OK; }
ALIAS(cuStreamDestroy_v2, cuStreamDestroy);
int cuMemcpyAsync(u64 to, u64 from, size_t size, void *where) {
    struct stream *stream = where;
    if (stream->count == 16 * MOST) return OUT_OF_MEMORY;
    stream->copies[stream->count++] = (struct pending){to, from, size, 0, 0, 1};
    return OK;
}
/* As cuda.h declares them, 64-bit. */
struct copy_2d { size_t from_x, from_y; int from_type; void *from_host; u64 from; void *from_array; size_t from_pitch;
    size_t to_x, to_y; int to_type; void *to_host; u64 to; void *to_array; size_t to_pitch; size_t width, height; };
struct copy_3d { size_t from_x, from_y, from_z, from_lod; int from_type; void *from_host; u64 from; void *from_array, *r0;
    size_t from_pitch, from_height; size_t to_x, to_y, to_z, to_lod; int to_type; void *to_host; u64 to; void *to_array, *r1;
    size_t to_pitch, to_height; size_t width, height, depth; };
static int copy_rows(struct stream *stream, u64 to, u64 from, size_t to_pitch, size_t from_pitch, size_t width, size_t height) {
    size_t most = 0x7fffffff;
    int refused = number_in("STUB_PITCH_MULTIPLE", 1); /* as a device that wants pitches of cuMemAllocPitch */
    if (!width || !height || to_pitch < width || from_pitch < width || to_pitch > most || from_pitch > most) return INVALID_VALUE;
    if (to_pitch % refused || from_pitch % refused) return INVALID_VALUE;
    if (stream->count == 16 * MOST) return OUT_OF_MEMORY;
    stream->copies[stream->count++] = (struct pending){to, from, width, to_pitch, from_pitch, height};
    return OK;
}
int cuMemcpy2DAsync(const struct copy_2d *c, void *stream) {
    if (c->from_type != 2 || c->to_type != 2 || c->from_x || c->from_y || c->to_x || c->to_y) return INVALID_VALUE;
    if (!find(mappings, c->to) || !find(mappings, c->from)) return INVALID_VALUE;
    return copy_rows(stream, c->to, c->from, c->to_pitch, c->from_pitch, c->width, c->height);
}
ALIAS(cuMemcpy2DAsync_v2, cuMemcpy2DAsync);
int cuMemcpy3DAsync(const struct copy_3d *c, void *stream) {
    if (c->from_type != 2 || c->to_type != 2 || c->from_x || c->from_y || c->from_z || c->to_x || c->to_y || c->to_z) return INVALID_VALUE;
    if (c->from_height < c->height || c->to_height < c->height || !c->depth || c->from_lod || c->to_lod) return INVALID_VALUE;
    for (size_t plane = 0; plane < c->depth; plane++) {
        int status = copy_rows(stream, c->to + plane * c->to_height * c->to_pitch, c->from + plane * c->from_height * c->from_pitch,
            c->to_pitch, c->from_pitch, c->width, c->height);
        if (status) return status;
    }
    return OK;
}
ALIAS(cuMemcpy3DAsync_v2, cuMemcpy3DAsync);
static void run(struct stream *stream, int until) {
    for (; stream->done < until; stream->done++) {
        struct pending copy = stream->copies[stream->done];
        for (size_t row = 0; row < copy.rows; row++)
            memcpy((void *)(copy.to + row * copy.to_pitch), (void *)(copy.from + row * copy.from_pitch), copy.size);
    }
}
int cuStreamSynchronize(void *stream) { run(stream, ((struct stream *)stream)->count); return OK; }
int cuEventCreate(void **event, unsigned flags) {
    *event = calloc(1, sizeof(struct event));
    return flags == 2 ? OK : INVALID_VALUE;
}
int cuEventRecord(void *event, void *stream) {
    *(struct event *)event = (struct event){stream, ((struct stream *)stream)->count, 0};
    return OK;
}
int cuEventQuery(void *which) {
    struct event *event = which;
    if (!event->asked++) return NOT_READY;
    run(event->stream, event->until);
    return OK;
}
int cuEventDestroy(void *event) { free(event); return OK; }
ALIAS(cuEventDestroy_v2, cuEventDestroy);

int cuGetProcAddress_v2(const char *name, void **found, int version, u64 flags, int *status) {
    char versioned[128];
    *found = dlsym(RTLD_DEFAULT, name);
    int is_newer = !strcmp(name, "cuDeviceGetUuid") && version >= 11040; /* as the driver chooses by version */
    if (!*found || is_newer) {
        strncpy(versioned, name, sizeof versioned - 4);
        versioned[sizeof versioned - 4] = 0;
        *found = dlsym(RTLD_DEFAULT, strcat(versioned, "_v2"));
    }
    if (status) *status = *found ? 0 : 1;
    return *found || version < 0 || flags > 64 ? OK : 500;
}
