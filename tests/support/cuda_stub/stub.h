/* A stand-in for libcuda.so.1, over which cuda-python and the UCX of NIXL's wheels run in several processes.
 *
 * Device memory is memfds. A device address is mapped without access, and copies go through a second
 * mapping: code that takes GPU memory for host memory faults, as with a GPU. Calls without a current context,
 * and in a child of a process that has used CUDA, fail as CUDA's do. It shows nothing of speed, of RDMA and
 * dma-buf, and of the order in which a GPU sees writes.
 *
 * devices.c has devices and contexts, memory.c all kinds of memory, copies.c streams, events and copies.
 * Environment variables, by the name after CUDA_STUB_, with defaults:
 *   DEVICES 1, TOTAL_MB 8192, VERSION 13000, NVLINKS 0 (of each device)
 *   RDMA 1, DMABUF 0, FLUSH_OPTIONS 1, WRITES_ORDERING 0: attributes of each device
 *   LOCATION_TYPE, LOCATION_ID: reported of imported memory, instead of what it has
 *   KERNELS 1; 0: no PTX is new enough to be loaded
 *   HOST_REGISTRATION 1; 0: refused
 *   HOOKED_ADDRESSES 1; 0: the address that cuGetProcAddress returns for cuMemMap passes UCX's patch by
 *   LOG: a file, to which calls of interest add a line each */
#ifndef CUDA_STUB_H
#define CUDA_STUB_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* UCX patches the first instructions of some functions. It knows those of code that is not optimized, in a
 * function that calls another. */
#define EXPORT __attribute__((visibility("default"), noinline, optimize("O0", "no-omit-frame-pointer")))
#define ALIAS(name, of) extern __typeof__(of) name __attribute__((alias(#of), visibility("default")))
#define UNUSED __attribute__((unused))

typedef unsigned long long u64;
typedef u64 address_t; /* of device or host memory, as CUdeviceptr */

/* Values of CUresult. */
enum status {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

#define MAX_DEVICES 8
#define UNIT ((size_t)2 << 20) /* granularity of physical memory */

/* One lock for all state below; functions whose comment says so are called with it. */
extern pthread_mutex_t stub_lock;

/* Return an environment variable's number, without its prefix CUDA_STUB_. */
long setting(const char *name, long otherwise);
int num_devices(void);
size_t total_bytes(void);
void log_call(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Whether cuInit was called in this process, and not in its parent alone. */
int is_initialized(void);
/* The current context's device, -1 where none is current. */
int current_device(void);
void *primary_context(int device);

#define REQUIRE_INIT()                                                                                       \
    do {                                                                                                     \
        if (!is_initialized()) return NOT_INITIALIZED;                                                       \
    } while (0)
#define REQUIRE_CONTEXT()                                                                                    \
    do {                                                                                                     \
        REQUIRE_INIT();                                                                                      \
        if (current_device() < 0) return INVALID_CONTEXT;                                                    \
    } while (0)

/* Return where `size` bytes at an address can be touched, and in `num` how many lie side by side there.
 * Host memory is returned as it is; NULL: device memory without access. With the lock. */
char *touchable(address_t at, size_t size, size_t *num);
/* Whether an address is device memory. With the lock. */
int is_device_memory(address_t at);
/* Whether a kernel can touch an address: device memory, or pinned host memory. With the lock. */
int is_reachable(address_t at);
/* Run all copies that were started, as a call that waits for the device does. With the lock. */
void run_all_copies(void);
/* The function that cuMemMap calls. */
int map_memory(address_t at, size_t size, size_t offset, u64 handle, u64 flags);

#endif
