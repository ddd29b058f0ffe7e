/* A stand-in for libcudart.so.13, whose symbols NIXL's library links to and never calls here. */
#define EXPORT __attribute__((visibility("default")))
#define NOT_SUPPORTED 801

EXPORT int cudaGetSymbolSize(void) { return NOT_SUPPORTED; }
EXPORT int cudaMalloc(void) { return NOT_SUPPORTED; }
EXPORT int cudaFree(void) { return NOT_SUPPORTED; }
