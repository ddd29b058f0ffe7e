/* Memory: physical allocations, where they are mapped, plain device memory, pinned host memory, and IPC. */
#include "stub.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_ENTRIES 16384
#define FD_HANDLE 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
#define NO_ACCESS (PROT_NONE)
#define ADDRESSES (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

enum kind { PHYSICAL = 1, PLAIN, OPENED_IPC };

struct physical {
    ino_t inode;
    int fd;
    size_t size;
    int device;
    int handle_types;
    int num_holders; /* handles and mappings of this process; 0: the entry is unused */
};

struct mapping {
    address_t at;
    size_t size; /* 0: the entry is unused */
    struct physical *physical;
    enum kind kind;
    int has_access;
    u64 id;
    char *shadow; /* the same memory, mapped with access */
};

struct range {
    address_t at;
    size_t size; /* 0: the entry is unused */
    int is_registered;
};

static struct physical physicals[MAX_ENTRIES];
static struct mapping mappings[MAX_ENTRIES];
static struct range reserved[MAX_ENTRIES], pinned[MAX_ENTRIES];
static u64 num_mapped;
static int num_mappings; /* entries beyond it were never used */

static int unlock_with(int status) {
    pthread_mutex_unlock(&stub_lock);
    return status;
}

/* --- the tables; all with the lock */

static struct mapping *mapping_at(address_t at) {
    for (int i = 0; i < num_mappings; i++)
        if (at - mappings[i].at < mappings[i].size) return &mappings[i];
    return NULL;
}

static struct range *range_at(struct range *table, address_t at) {
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (at - table[i].at < table[i].size) return &table[i];
    return NULL;
}

static int add_range(struct range *table, struct range range) {
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (!table[i].size) {
            table[i] = range;
            return OK;
        }
    return OUT_OF_MEMORY;
}

/* Map a whole allocation a second time, and note where. The addresses are the caller's. */
static int add_mapping(address_t at, size_t size, struct physical *physical, enum kind kind) {
    char *shadow = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, physical->fd, 0);
    if (shadow == MAP_FAILED) return OUT_OF_MEMORY;
    for (int i = 0; i < MAX_ENTRIES; i++) {
        if (mappings[i].size) continue;
        mappings[i] = (struct mapping){at, size, physical, kind, kind != PHYSICAL, ++num_mapped, shadow};
        physical->num_holders++;
        if (i >= num_mappings) num_mappings = i + 1;
        return OK;
    }
    munmap(shadow, size);
    return OUT_OF_MEMORY;
}

static void release(struct physical *physical) {
    if (!--physical->num_holders) close(physical->fd);
}

static void remove_mapping(struct mapping *mapping) {
    munmap(mapping->shadow, mapping->size);
    if (mapping->kind != PHYSICAL) munmap((void *)mapping->at, mapping->size);
    mapping->size = 0;
    release(mapping->physical);
}

static struct physical *physical_of(u64 handle) {
    struct physical *physical = (struct physical *)handle;
    int is_entry = physical >= physicals && physical < physicals + MAX_ENTRIES;
    return is_entry && physical->num_holders ? physical : NULL;
}

/* A memfd's name has what its importers must know. */
static int make_memfd(size_t size, int device, int handle_types) {
    char name[64];
    snprintf(name, sizeof name, "cuda-stub:%d:%zu:%d", device, size, handle_types);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Read such a name from a link in /proc. Returns whether it is one. */
static int describe_link(const char *link, int *device, size_t *size, int *handle_types) {
    char name[128];
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return sscanf(name, "/memfd:cuda-stub:%d:%zu:%d", device, size, handle_types) == 3;
}

/* Return the allocation of a memfd, with one more holder. The descriptor is taken. NULL: it is none. */
static struct physical *hold_fd(int fd) {
    char link[64];
    int device, handle_types;
    size_t size;
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    struct physical *unused = NULL;
    if (describe_link(link, &device, &size, &handle_types) && !fstat(fd, &status)) {
        for (int i = 0; i < MAX_ENTRIES; i++) {
            if (!physicals[i].num_holders) {
                if (!unused) unused = &physicals[i];
            } else if (physicals[i].inode == status.st_ino) {
                close(fd);
                physicals[i].num_holders++;
                return &physicals[i];
            }
        }
    }
    if (!unused) {
        close(fd);
        return NULL;
    }
    *unused = (struct physical){status.st_ino, fd, size, device, handle_types, 1};
    return unused;
}

int is_device_memory(address_t at) { return mapping_at(at) != NULL; }
int is_reachable(address_t at) { return is_device_memory(at) || range_at(pinned, at); }

char *touchable(address_t at, size_t size, size_t *num) {
    struct mapping *mapping = mapping_at(at);
    *num = size;
    if (!mapping) return (char *)at;
    if (!mapping->has_access) {
        log_call("no access: %llx", at);
        return NULL;
    }
    size_t left = mapping->at + mapping->size - at;
    if (left < size) *num = left;
    return mapping->shadow + (at - mapping->at);
}

/* --- physical memory. CUmemAllocationProp and CUmemAccessDesc as cuda.h has them. */

struct properties {
    int type, handle_types, location_type, location_id;
    void *win32;
    unsigned char compression, rdma_capable;
    unsigned short usage;
    unsigned char unused[4];
};
_Static_assert(sizeof(struct properties) == 32, "CUmemAllocationProp");

struct access {
    int location_type, location_id, flags;
};

static int is_on_device(int type, int id) { return type == 1 && id >= 0 && id < num_devices(); }

EXPORT int cuMemGetAllocationGranularity(size_t *unit, const struct properties *wanted, int option) {
    REQUIRE_INIT();
    *unit = UNIT;
    int is_right = wanted->type == 1 && is_on_device(wanted->location_type, wanted->location_id);
    return is_right && option <= 1 ? OK : INVALID_VALUE;
}

EXPORT int cuMemCreate(u64 *handle, size_t size, const struct properties *wanted, u64 flags) {
    REQUIRE_INIT();
    if (!size || size % UNIT || flags || wanted->type != 1) return INVALID_VALUE;
    if (!is_on_device(wanted->location_type, wanted->location_id)) return INVALID_VALUE;
    if (wanted->handle_types & ~FD_HANDLE) return NOT_SUPPORTED;
    if (size >= total_bytes()) return OUT_OF_MEMORY;
    int fd = make_memfd(size, wanted->location_id, wanted->handle_types);
    if (fd < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&stub_lock);
    struct physical *made = hold_fd(fd);
    *handle = (u64)made;
    return unlock_with(made ? OK : OUT_OF_MEMORY);
}

EXPORT int cuMemRelease(u64 handle) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = physical_of(handle);
    if (physical) release(physical);
    return unlock_with(physical ? OK : INVALID_VALUE);
}

EXPORT int cuMemRetainAllocationHandle(u64 *handle, void *at) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct mapping *mapping = mapping_at((address_t)at);
    if (!mapping || mapping->kind != PHYSICAL) return unlock_with(INVALID_VALUE);
    mapping->physical->num_holders++;
    *handle = (u64)mapping->physical;
    return unlock_with(OK);
}

EXPORT int cuMemExportToShareableHandle(void *fd, u64 handle, int type, u64 flags) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = physical_of(handle);
    if (!physical || flags || type != FD_HANDLE || !(physical->handle_types & FD_HANDLE))
        return unlock_with(INVALID_VALUE);
    *(int *)fd = dup(physical->fd); /* inheritable, as the driver's is */
    return unlock_with(OK);
}

EXPORT int cuMemImportFromShareableHandle(u64 *handle, void *fd, int type) {
    REQUIRE_INIT();
    if (type != FD_HANDLE) return INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = hold_fd(fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0));
    *handle = (u64)physical;
    return unlock_with(physical ? OK : INVALID_VALUE);
}

EXPORT int cuMemGetAllocationPropertiesFromHandle(struct properties *found, u64 handle) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = physical_of(handle);
    if (!physical) return unlock_with(INVALID_VALUE);
    memset(found, 0, sizeof *found);
    found->type = 1;
    found->handle_types = physical->handle_types;
    found->location_type = (int)setting("LOCATION_TYPE", 1);
    found->location_id = (int)setting("LOCATION_ID", physical->device);
    return unlock_with(OK);
}

/* --- addresses */

EXPORT int cuMemAddressReserve(address_t *at, size_t size, size_t alignment, u64 hint, u64 flags) {
    REQUIRE_INIT();
    if (!size || size % UNIT || alignment || hint || flags) return INVALID_VALUE;
    char *found = mmap(NULL, size + UNIT, NO_ACCESS, ADDRESSES, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    /* The driver's addresses are multiples of its granularity, mmap's of a page. */
    size_t before = (UNIT - (address_t)found % UNIT) % UNIT;
    if (before) munmap(found, before);
    if (before < UNIT) munmap(found + before + size, UNIT - before);
    *at = (address_t)found + before;
    pthread_mutex_lock(&stub_lock);
    return unlock_with(add_range(reserved, (struct range){*at, size, 0}));
}

EXPORT int cuMemAddressFree(address_t at, size_t size) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct range *range = range_at(reserved, at);
    if (!range || range->at != at || range->size != size) return unlock_with(INVALID_VALUE);
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].size && mappings[i].at - at < size) return unlock_with(INVALID_VALUE);
    range->size = 0;
    munmap((void *)at, size);
    return unlock_with(OK);
}

int map_memory(address_t at, size_t size, size_t offset, u64 handle, u64 flags) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = physical_of(handle);
    struct range *range = range_at(reserved, at);
    if (!physical || size != physical->size || offset || flags) return unlock_with(INVALID_VALUE);
    if (!range || at + size > range->at + range->size || mapping_at(at)) return unlock_with(INVALID_VALUE);
    return unlock_with(add_mapping(at, size, physical, PHYSICAL));
}

EXPORT int cuMemMap(address_t at, size_t size, size_t offset, u64 handle, u64 flags) {
    return map_memory(at, size, offset, handle, flags);
}

EXPORT int cuMemSetAccess(address_t at, size_t size, const struct access *access, size_t count) {
    REQUIRE_INIT();
    if (count != 1 || access->flags != 3 || !is_on_device(access->location_type, access->location_id))
        return INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    size_t num_bytes = 0;
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].size && mappings[i].at - at < size) {
            num_bytes += mappings[i].size;
            mappings[i].has_access = 1;
        }
    return unlock_with(num_bytes == size ? OK : INVALID_VALUE);
}

EXPORT int cuMemUnmap(address_t at, size_t size) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    run_all_copies();
    for (address_t next = at; next < at + size;) {
        struct mapping *mapping = mapping_at(next);
        if (!mapping || mapping->at != next || mapping->kind != PHYSICAL || next + mapping->size > at + size)
            return unlock_with(INVALID_VALUE);
        next += mapping->size;
        remove_mapping(mapping);
    }
    return unlock_with(OK);
}

EXPORT int cuMemGetAddressRange_v2(address_t *base, size_t *size, address_t at) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    struct mapping *mapping = mapping_at(at);
    if (!mapping) return unlock_with(NOT_FOUND);
    if (base) *base = mapping->at;
    if (size) *size = mapping->size;
    return unlock_with(OK);
}
ALIAS(cuMemGetAddressRange, cuMemGetAddressRange_v2);

/* --- plain memory */

static int map_plain(address_t *at, struct physical *physical, enum kind kind) {
    void *found = mmap(NULL, physical->size, NO_ACCESS, ADDRESSES, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *at = (address_t)found;
    return add_mapping(*at, physical->size, physical, kind);
}

static int unmap_plain(address_t at, enum kind kind) {
    pthread_mutex_lock(&stub_lock);
    run_all_copies();
    struct mapping *mapping = mapping_at(at);
    if (!mapping || mapping->at != at || mapping->kind != kind) return unlock_with(INVALID_VALUE);
    remove_mapping(mapping);
    return unlock_with(OK);
}

EXPORT int cuMemAlloc_v2(address_t *at, size_t size) {
    REQUIRE_CONTEXT();
    size_t rounded = (size + UNIT - 1) / UNIT * UNIT;
    if (!size) return INVALID_VALUE;
    int fd = make_memfd(rounded, current_device(), 0);
    if (fd < 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = hold_fd(fd);
    if (!physical) return unlock_with(OUT_OF_MEMORY);
    int status = map_plain(at, physical, PLAIN);
    release(physical); /* what is mapped lives on */
    return unlock_with(status);
}

EXPORT int cuMemFree_v2(address_t at) {
    REQUIRE_CONTEXT();
    return unmap_plain(at, PLAIN);
}

#define UNSUPPORTED(name, ...)                                                                               \
    EXPORT int name(__VA_ARGS__) {                                                                           \
        REQUIRE_INIT();                                                                                      \
        return NOT_SUPPORTED;                                                                                \
    }

/* The forms of CUDA 3.1, whose addresses have 32 bits. UCX hooks them too. */
UNSUPPORTED(cuMemAlloc, unsigned *at UNUSED, unsigned size UNUSED)
UNSUPPORTED(cuMemFree, unsigned at UNUSED)
UNSUPPORTED(cuMemAllocManaged, address_t *at UNUSED, size_t size UNUSED, unsigned flags UNUSED)

/* Return what all processes hold on a device, each allocation once. */
static size_t used_bytes(int device) {
    static ino_t seen[MAX_ENTRIES];
    size_t num_seen = 0, sum = 0;
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && (process = readdir(processes));) {
        char directory[300];
        snprintf(directory, sizeof directory, "/proc/%s/fd", process->d_name);
        DIR *fds = atoi(process->d_name) ? opendir(directory) : NULL;
        for (struct dirent *fd; fds && (fd = readdir(fds));) {
            char link[600];
            int on, handle_types;
            size_t size, i = 0;
            struct stat status;
            snprintf(link, sizeof link, "%s/%s", directory, fd->d_name);
            if (!describe_link(link, &on, &size, &handle_types) || on != device) continue;
            if (stat(link, &status) || num_seen == MAX_ENTRIES) continue;
            while (i < num_seen && seen[i] != status.st_ino) i++;
            if (i < num_seen) continue;
            seen[num_seen++] = status.st_ino;
            sum += size;
        }
        if (fds) closedir(fds);
    }
    if (processes) closedir(processes);
    return sum;
}

EXPORT int cuMemGetInfo_v2(size_t *unused, size_t *total) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    size_t used = used_bytes(current_device());
    *total = total_bytes();
    *unused = used > *total ? 0 : *total - used;
    return unlock_with(OK);
}
ALIAS(cuMemGetInfo, cuMemGetInfo_v2);

/* --- host memory */

EXPORT int cuMemHostAlloc(void **at, size_t size, unsigned flags UNUSED) {
    REQUIRE_CONTEXT();
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    memset(found, 0x55, size); /* nothing promises zeros */
    *at = found;
    pthread_mutex_lock(&stub_lock);
    return unlock_with(add_range(pinned, (struct range){(address_t)found, size, 0}));
}

/* Forget pinned memory that begins at an address. Returns its size, 0 where there is none. With the lock. */
static size_t remove_pinned(void *at, int is_registered) {
    struct range *range = range_at(pinned, (address_t)at);
    if (!range || range->at != (address_t)at || range->is_registered != is_registered) return 0;
    size_t size = range->size;
    range->size = 0;
    return size;
}

EXPORT int cuMemFreeHost(void *at) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    run_all_copies();
    size_t size = remove_pinned(at, 0);
    if (size) munmap(at, size);
    return unlock_with(size ? OK : INVALID_VALUE);
}

EXPORT int cuMemHostRegister_v2(void *at, size_t size, unsigned flags UNUSED) {
    REQUIRE_CONTEXT();
    log_call("host memory registered: %zu", size);
    if (!setting("HOST_REGISTRATION", 1)) return NOT_SUPPORTED;
    pthread_mutex_lock(&stub_lock);
    address_t first = (address_t)at;
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (pinned[i].size && first < pinned[i].at + pinned[i].size && pinned[i].at < first + size)
            return unlock_with(HOST_MEMORY_ALREADY_REGISTERED);
    return unlock_with(add_range(pinned, (struct range){first, size, 1}));
}
ALIAS(cuMemHostRegister, cuMemHostRegister_v2);

EXPORT int cuMemHostUnregister(void *at) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    return unlock_with(remove_pinned(at, 1) ? OK : HOST_MEMORY_NOT_REGISTERED);
}

EXPORT int cuMemHostGetDevicePointer_v2(address_t *device, void *host, unsigned flags UNUSED) {
    REQUIRE_INIT();
    *device = (address_t)host;
    return OK;
}
ALIAS(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2);

/* --- what an address is */

/* Of an address without memory, the call for one attribute fails, and that for several returns zeros. */
static int read_attribute(void *value, int attribute, address_t at, int is_strict) {
    struct mapping *mapping = mapping_at(at);
    int is_host = !mapping && range_at(pinned, at);
    if (!mapping && !is_host && is_strict) return INVALID_VALUE;
    int is_plain = mapping && mapping->kind == PLAIN;
    int device = mapping ? mapping->physical->device : -2;
    int handle_types = mapping && mapping->kind == PHYSICAL ? mapping->physical->handle_types : 0;
    void *context = mapping && mapping->kind != PHYSICAL ? primary_context(device) : NULL;
    switch (attribute) {
    case 1: *(void **)value = context; break;                          /* CONTEXT */
    case 2: *(unsigned *)value = mapping ? 2 : is_host ? 1 : 0; break; /* MEMORY_TYPE: device, host */
    case 3: *(address_t *)value = at; break;                           /* DEVICE_POINTER */
    case 4: *(address_t *)value = is_host ? at : 0; break;             /* HOST_POINTER */
    case 6: *(unsigned *)value = 0; break;                             /* SYNC_MEMOPS */
    case 7: *(u64 *)value = mapping ? mapping->id : 0; break;          /* BUFFER_ID */
    case 8: *(unsigned *)value = 0; break;                             /* IS_MANAGED */
    case 9: *(int *)value = device; break;                             /* DEVICE_ORDINAL */
    case 10: *(int *)value = is_plain; break;                          /* IS_LEGACY_CUDA_IPC_CAPABLE */
    case 11: *(address_t *)value = mapping ? mapping->at : 0; break;   /* RANGE_START_ADDR */
    case 12: *(size_t *)value = mapping ? mapping->size : 0; break;    /* RANGE_SIZE */
    case 13: *(int *)value = mapping != NULL; break;                   /* MAPPED */
    case 14: *(u64 *)value = (u64)handle_types; break;                 /* ALLOWED_HANDLE_TYPES */
    case 15: *(int *)value = 1; break;                                 /* IS_GPU_DIRECT_RDMA_CAPABLE */
    case 17: *(void **)value = NULL; break;                            /* MEMPOOL_HANDLE */
    default: return INVALID_VALUE;
    }
    return OK;
}

EXPORT int cuPointerGetAttribute(void *value, int attribute, address_t at) {
    REQUIRE_INIT();
    pthread_mutex_lock(&stub_lock);
    return unlock_with(read_attribute(value, attribute, at, 1));
}

EXPORT int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, address_t at) {
    REQUIRE_INIT();
    int status = OK;
    pthread_mutex_lock(&stub_lock);
    for (unsigned i = 0; i < count && !status; i++)
        status = read_attribute(values[i], attributes[i], at, 0);
    return unlock_with(status);
}

EXPORT int cuPointerSetAttribute(const void *value UNUSED, int attribute UNUSED, address_t at UNUSED) {
    REQUIRE_INIT();
    return OK;
}

/* --- CUDA IPC, of plain memory: a handle names a descriptor of the process that made it */

#define IPC_MAGIC 0x1bc0ffee

union ipc_handle {
    char bytes[64];
    struct {
        unsigned magic;
        int pid, fd;
    };
};

EXPORT int cuIpcGetMemHandle(union ipc_handle *handle, address_t at) {
    REQUIRE_INIT();
    memset(handle, 0, sizeof *handle);
    pthread_mutex_lock(&stub_lock);
    struct mapping *mapping = mapping_at(at);
    if (!mapping || mapping->kind != PLAIN) return unlock_with(INVALID_VALUE);
    handle->magic = IPC_MAGIC;
    handle->pid = getpid();
    handle->fd = mapping->physical->fd;
    return unlock_with(OK);
}

EXPORT int cuIpcOpenMemHandle_v2(address_t *at, union ipc_handle handle, unsigned flags) {
    REQUIRE_CONTEXT();
    if (handle.magic != IPC_MAGIC || flags != 1) return INVALID_VALUE;
    if (handle.pid == getpid()) return INVALID_CONTEXT; /* as the driver refuses a process's own */
    char link[64];
    snprintf(link, sizeof link, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(link, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    struct physical *physical = hold_fd(fd);
    if (!physical) return unlock_with(INVALID_VALUE);
    int status = map_plain(at, physical, OPENED_IPC);
    release(physical);
    log_call("ipc opened: %zu", physical->size);
    return unlock_with(status);
}
ALIAS(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2);

EXPORT int cuIpcCloseMemHandle(address_t at) {
    REQUIRE_INIT();
    return unmap_plain(at, OPENED_IPC);
}

/* Symbols without which UCX's CUDA part does not load. */
UNSUPPORTED(cuMemPoolDestroy, void)
UNSUPPORTED(cuMemPoolExportPointer, void)
UNSUPPORTED(cuMemPoolExportToShareableHandle, void)
UNSUPPORTED(cuMemPoolImportFromShareableHandle, void)
UNSUPPORTED(cuMemPoolImportPointer, void)
UNSUPPORTED(cuMemPoolSetAccess, void)
UNSUPPORTED(cuMemRangeGetAttribute, void)
