/* A stand-in for libnvidia-ml.so.1: as much as tells UCX whether a GPU has active NVLinks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))
#define NOT_SUPPORTED 3

struct pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

struct field_value {
    unsigned field, scope;
    long long timestamp, latency;
    int type, status;
    union {
        double as_double;
        unsigned as_unsigned;
        unsigned long long as_u64;
    } value;
};

static unsigned setting(const char *name, unsigned otherwise) {
    const char *text = getenv(name);
    return text && *text ? (unsigned)atoi(text) : otherwise;
}

EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = setting("CUDA_STUB_DEVICES", 1);
    return 0;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return 0;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + (unsigned)(unsigned long)device;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02x:00.0", info->bus);
    return 0;
}

/* UCX asks for one field, the number of NVLinks. */
EXPORT int nvmlDeviceGetFieldValues(void *device UNUSED, int count, struct field_value *values) {
    for (int i = 0; i < count; i++) {
        values[i].status = 0;
        values[i].type = 1; /* unsigned */
        values[i].value.as_unsigned = setting("CUDA_STUB_NVLINKS", 0);
    }
    return 0;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(
    void *device UNUSED, unsigned link UNUSED, struct pci_info *info
) {
    memset(info, 0, sizeof *info);
    return 0;
}

EXPORT int nvmlDeviceGetGpuFabricInfo(void *device UNUSED, void *info UNUSED) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device UNUSED, void *info UNUSED) { return NOT_SUPPORTED; }
EXPORT const char *nvmlErrorString(int error UNUSED) { return "an error of the stand-in"; }
