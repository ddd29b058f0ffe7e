/* Devices, contexts, and the calls that find other calls. */
#include "stub.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_DEPTH 64
#define SYNC_MEMOPS 0x80 /* CU_CTX_SYNC_MEMOPS */

struct context {
    int device;
    unsigned flags;
    int num_retained;
};

pthread_mutex_t stub_lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialized_by;
static struct context contexts[MAX_DEVICES];
static __thread struct context *stack[MAX_DEPTH];
static __thread int depth;

long setting(const char *name, long otherwise) {
    char variable[64];
    snprintf(variable, sizeof variable, "CUDA_STUB_%s", name);
    const char *text = getenv(variable);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

int num_devices(void) { return (int)setting("DEVICES", 1); }
size_t total_bytes(void) { return (size_t)setting("TOTAL_MB", 8192) << 20; }

void log_call(const char *format, ...) {
    const char *path = getenv("CUDA_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(file, "%d %s\n", getpid(), line); /* one write, so that processes do not mix their lines */
    fclose(file);
}

int is_initialized(void) { return initialized_by == getpid(); }
int current_device(void) { return depth ? stack[depth - 1]->device : -1; }
void *primary_context(int device) { return &contexts[device]; }
static int is_device(int device) { return device >= 0 && device < num_devices(); }

EXPORT int cuInit(unsigned flags) {
    if (initialized_by && !is_initialized()) {
        log_call("cuInit in a child of a process that uses CUDA");
        return NOT_INITIALIZED;
    }
    initialized_by = getpid();
    for (int i = 0; i < MAX_DEVICES; i++) contexts[i].device = i;
    return flags ? INVALID_VALUE : OK;
}

EXPORT int cuDriverGetVersion(int *version) {
    *version = (int)setting("VERSION", 13000);
    return OK;
}

/* --- devices */

EXPORT int cuDeviceGetCount(int *count) {
    REQUIRE_INIT();
    *count = num_devices();
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    REQUIRE_INIT();
    *device = ordinal;
    return is_device(ordinal) ? OK : INVALID_DEVICE;
}

/* The whole card's, the same for all slices of one: a caller has to take the newer call. */
EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device) {
    REQUIRE_INIT();
    memset(uuid, 0xCD, 16);
    return is_device(device) ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    REQUIRE_INIT();
    memset(uuid, 0xAB, 15);
    uuid[15] = (unsigned char)(0xAB + device);
    return is_device(device) ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
    REQUIRE_INIT();
    snprintf(name, (size_t)length, "stub %d", device);
    return is_device(device) ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    REQUIRE_INIT();
    *bytes = total_bytes();
    return is_device(device) ? OK : INVALID_DEVICE;
}
ALIAS(cuDeviceTotalMem, cuDeviceTotalMem_v2);

EXPORT int cuDeviceGetPCIBusId(char *text, int length, int device) {
    REQUIRE_INIT();
    snprintf(text, (size_t)length, "0000:%02x:00.0", 0x11 + device); /* as nvml.c has them */
    return is_device(device) ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    REQUIRE_INIT();
    if (!is_device(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = (int)setting("PROCESSORS", 132); break;              /* MULTIPROCESSOR_COUNT */
    case 33: *value = 0x11 + device; break;                                /* PCI_BUS_ID */
    case 75: *value = 9; break;                                            /* COMPUTE_CAPABILITY_MAJOR */
    case 41:                                                               /* UNIFIED_ADDRESSING */
    case 102:                                                              /* VIRTUAL_MEMORY_MANAGEMENT */
    case 103: *value = 1; break;                                           /* HANDLE_TYPE_POSIX_FD */
    case 110:                                                              /* RDMA_WITH_CUDA_VMM */
    case 116: *value = (int)setting("RDMA", 1); break;                     /* GPU_DIRECT_RDMA */
    case 117: *value = (int)setting("FLUSH_OPTIONS", 1); break;            /* RDMA_FLUSH_WRITES_OPTIONS */
    case 118: *value = (int)setting("WRITES_ORDERING", 0); break;        /* RDMA_WRITES_ORDERING */
    case 124: *value = (int)setting("DMABUF", 0); break;                   /* DMA_BUF */
    default: *value = 0;
    }
    return OK;
}

EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    REQUIRE_CONTEXT();
    return target || scope != 100 ? INVALID_VALUE : OK; /* of the current context, to the owner */
}

/* --- contexts */

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    REQUIRE_INIT();
    if (!is_device(device)) return INVALID_DEVICE;
    contexts[device].num_retained++;
    *context = &contexts[device];
    return OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    REQUIRE_INIT();
    if (!is_device(device) || !contexts[device].num_retained) return INVALID_CONTEXT;
    contexts[device].num_retained--;
    return OK;
}
ALIAS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    REQUIRE_INIT();
    if (!is_device(device)) return INVALID_DEVICE;
    *flags = contexts[device].flags;
    *is_active = contexts[device].num_retained > 0;
    return OK;
}

EXPORT int cuCtxSetCurrent(void *context) {
    REQUIRE_INIT();
    if (!context) {
        depth -= depth > 0;
    } else {
        depth += !depth;
        stack[depth - 1] = context;
    }
    return OK;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    REQUIRE_INIT();
    if (!context || depth == MAX_DEPTH) return INVALID_VALUE;
    stack[depth++] = context;
    return OK;
}
ALIAS(cuCtxPushCurrent, cuCtxPushCurrent_v2);

EXPORT int cuCtxPopCurrent_v2(void **context) {
    REQUIRE_INIT();
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return OK;
}
ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2);

EXPORT int cuCtxGetCurrent(void **context) {
    REQUIRE_INIT();
    *context = depth ? stack[depth - 1] : NULL;
    return OK;
}

EXPORT int cuCtxGetDevice(int *device) {
    REQUIRE_CONTEXT();
    *device = current_device();
    return OK;
}
ALIAS(cuCtxGetDevice_v2, cuCtxGetDevice);

EXPORT int cuCtxGetFlags(unsigned *flags) {
    REQUIRE_CONTEXT();
    *flags = stack[depth - 1]->flags;
    return OK;
}

EXPORT int cuCtxSetFlags(unsigned flags) {
    REQUIRE_CONTEXT();
    stack[depth - 1]->flags |= flags & SYNC_MEMOPS;
    return OK;
}

EXPORT int cuCtxGetId(void *context, u64 *id) {
    REQUIRE_INIT();
    if (!context && !depth) return INVALID_CONTEXT;
    *id = 100 + (u64)(context ? (struct context *)context : stack[depth - 1])->device;
    return OK;
}

EXPORT int cuCtxSynchronize(void) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    run_all_copies();
    pthread_mutex_unlock(&stub_lock);
    return OK;
}

/* --- names */

EXPORT int cuGetErrorString(int error, const char **text) {
    switch (error) {
    case INVALID_VALUE: *text = "invalid argument"; break;
    case OUT_OF_MEMORY: *text = "out of memory"; break;
    case NOT_INITIALIZED: *text = "initialization error"; break;
    case INVALID_CONTEXT: *text = "invalid device context"; break;
    case UNSUPPORTED_PTX_VERSION: *text = "the provided PTX was compiled with an unsupported toolchain."; break;
    default: *text = "an error of the stand-in";
    }
    return OK;
}

EXPORT int cuGetErrorName(int error, const char **text) {
    *text = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OF_THE_STUB";
    return OK;
}

/* As the driver does, return the newest form of a call that the version has. */
EXPORT int cuGetProcAddress_v2(
    const char *name, void **function, int version, u64 flags UNUSED, int *status
) {
    Dl_info here;
    char newer[160];
    *function = NULL;
    dladdr((void *)cuInit, &here);
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    if (version >= 3020) *function = dlsym(library, newer);
    if (!*function) *function = dlsym(library, name);
    if (!strcmp(name, "cuMemMap") && !setting("HOOKED_ADDRESSES", 1)) *function = (void *)map_memory;
    dlclose(library);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
ALIAS(cuGetProcAddress, cuGetProcAddress_v2);
