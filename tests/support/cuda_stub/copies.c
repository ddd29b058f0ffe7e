/* Streams, events and copies. A copy runs when an event behind it is queried a second time, or on a wait. */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STREAMS 4096

struct copy {
    address_t to, from;
    size_t width, to_pitch, from_pitch, rows;
};

struct stream {
    struct copy *copies;
    size_t num_started, num_done, capacity;
};

struct event {
    struct stream *stream;
    size_t until; /* of the stream's copies */
    int num_queries;
};

static struct stream null_stream;
static struct stream *streams[MAX_STREAMS] = {&null_stream};

static struct stream *stream_of(void *stream) { return stream ? stream : &null_stream; }

/* --- with the lock */

static int copy_row(address_t to, address_t from, size_t size) {
    while (size) {
        size_t num = size;
        char *destination = touchable(to, num, &num), *source = touchable(from, num, &num);
        if (!destination || !source) return INVALID_VALUE;
        memcpy(destination, source, num);
        to += num;
        from += num;
        size -= num;
    }
    return OK;
}

static void run_copies(struct stream *stream, size_t until) {
    for (; stream->num_done < until; stream->num_done++) {
        struct copy *copy = &stream->copies[stream->num_done];
        for (size_t row = 0; row < copy->rows; row++)
            /* A GPU that touches what is not mapped ends its context; nothing that is tested goes on then. */
            if (copy_row(copy->to + row * copy->to_pitch, copy->from + row * copy->from_pitch, copy->width))
                abort();
    }
}

void run_all_copies(void) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i]) run_copies(streams[i], streams[i]->num_started);
}

static int start(void *where, struct copy copy) {
    struct stream *stream = stream_of(where);
    if (stream->num_started == stream->capacity) {
        stream->capacity = stream->capacity ? 2 * stream->capacity : 256;
        stream->copies = realloc(stream->copies, stream->capacity * sizeof copy);
    }
    stream->copies[stream->num_started++] = copy;
    return OK;
}

/* --- streams and events */

EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    REQUIRE_CONTEXT();
    if (flags > 1) return INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    int i = 0;
    while (i < MAX_STREAMS && streams[i]) i++;
    if (i < MAX_STREAMS) *stream = streams[i] = calloc(1, sizeof(struct stream));
    pthread_mutex_unlock(&stub_lock);
    return i < MAX_STREAMS ? OK : OUT_OF_MEMORY;
}

EXPORT int cuStreamDestroy_v2(void *where) {
    REQUIRE_INIT();
    struct stream *stream = where;
    int status = INVALID_HANDLE;
    pthread_mutex_lock(&stub_lock);
    for (int i = 1; i < MAX_STREAMS; i++)
        if (stream && streams[i] == stream) {
            run_copies(stream, stream->num_started);
            streams[i] = NULL;
            free(stream->copies);
            free(stream);
            status = OK;
            break;
        }
    pthread_mutex_unlock(&stub_lock);
    return status;
}
ALIAS(cuStreamDestroy, cuStreamDestroy_v2);

EXPORT int cuStreamSynchronize(void *where) {
    REQUIRE_CONTEXT();
    struct stream *stream = stream_of(where);
    pthread_mutex_lock(&stub_lock);
    run_copies(stream, stream->num_started);
    pthread_mutex_unlock(&stub_lock);
    return OK;
}

typedef void callback(void *stream, int status, void *data);

EXPORT int cuStreamAddCallback(void *stream, callback *call, void *data, unsigned flags UNUSED) {
    int status = cuStreamSynchronize(stream);
    if (!status) call(stream, OK, data);
    return status;
}

EXPORT int cuEventCreate(void **event, unsigned flags UNUSED) {
    REQUIRE_CONTEXT();
    *event = calloc(1, sizeof(struct event));
    return OK;
}

EXPORT int cuEventRecord(void *event, void *where) {
    REQUIRE_CONTEXT();
    struct stream *stream = stream_of(where);
    pthread_mutex_lock(&stub_lock);
    *(struct event *)event = (struct event){stream, stream->num_started, 0};
    pthread_mutex_unlock(&stub_lock);
    return OK;
}

EXPORT int cuEventQuery(void *which) {
    REQUIRE_INIT();
    struct event *event = which;
    if (!event->stream) return OK;
    if (!event->num_queries++) return NOT_READY;
    pthread_mutex_lock(&stub_lock);
    run_copies(event->stream, event->until);
    pthread_mutex_unlock(&stub_lock);
    return OK;
}

EXPORT int cuEventDestroy_v2(void *event) {
    free(event);
    return OK;
}
ALIAS(cuEventDestroy, cuEventDestroy_v2);

/* --- copies */

static int start_locked(void *stream, struct copy copy) {
    pthread_mutex_lock(&stub_lock);
    int status = start(stream, copy);
    pthread_mutex_unlock(&stub_lock);
    return status;
}

EXPORT int cuMemcpyAsync(address_t to, address_t from, size_t size, void *stream) {
    REQUIRE_CONTEXT();
    return start_locked(stream, (struct copy){to, from, size, 0, 0, 1});
}

EXPORT int cuMemcpyDtoDAsync_v2(address_t to, address_t from, size_t size, void *stream) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    int status = INVALID_VALUE;
    if (is_device_memory(to) && is_device_memory(from))
        status = start(stream, (struct copy){to, from, size, 0, 0, 1});
    pthread_mutex_unlock(&stub_lock);
    log_call("device to device: %zu", size);
    return status;
}
ALIAS(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2);

EXPORT int cuMemcpyHtoD_v2(address_t to, const void *from, size_t size) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    int status = copy_row(to, (address_t)from, size);
    pthread_mutex_unlock(&stub_lock);
    return status;
}
ALIAS(cuMemcpyHtoD, cuMemcpyHtoD_v2);

EXPORT int cuMemcpyBatchAsync_v2(
    const address_t *to,
    const address_t *from,
    const size_t *sizes,
    size_t count,
    void *attributes UNUSED,
    const size_t *attribute_indices UNUSED,
    size_t num_attributes UNUSED,
    void *stream
) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&stub_lock);
    for (size_t i = 0; i < count; i++) start(stream, (struct copy){to[i], from[i], sizes[i], 0, 0, 1});
    pthread_mutex_unlock(&stub_lock);
    return OK;
}
ALIAS(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2);

/* --- the one kernel, copy_rows.cu */

#define PAIRS 2045

struct copy_parameters {
    u64 num_pairs, rows, width, to_pitch, from_pitch;
    address_t to[PAIRS], from[PAIRS];
};

static int modules[MAX_DEVICES], kernels[MAX_DEVICES]; /* their addresses are the handles, one of each context */

/* Take the PTX that declares the parameters that are read here, of a version that CUDA 12.1 knows. */
EXPORT int cuModuleLoadData(void **loaded, const void *image) {
    REQUIRE_CONTEXT();
    char parameters[80];
    const char *format = ".param .align 8 .b8 copy_rows_param_0[%zu]";
    snprintf(parameters, sizeof parameters, format, sizeof(struct copy_parameters));
    if (!setting("KERNELS", 1)) return UNSUPPORTED_PTX_VERSION;
    if (!strstr(image, ".version 8.1\n") || !strstr(image, parameters)) return INVALID_PTX;
    log_call("module loaded");
    *loaded = &modules[current_device()];
    return OK;
}

EXPORT int cuModuleGetFunction(void **function, void *of, const char *name) {
    REQUIRE_CONTEXT();
    if (of != &modules[current_device()]) return INVALID_HANDLE;
    if (strcmp(name, "copy_rows")) return NOT_FOUND;
    *function = &kernels[current_device()];
    return OK;
}

EXPORT int cuLaunchKernel(
    void *function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned shared_bytes,
    void *stream,
    void **arguments,
    void **extra
) {
    REQUIRE_CONTEXT();
    if (function != &kernels[current_device()]) return INVALID_HANDLE;
    if (!grid_x || grid_x > (unsigned)(setting("PROCESSORS", 132) + 1) / 2 || grid_y != 1 || grid_z != 1) return INVALID_VALUE;
    if (block_x != 256 || block_y != 1 || block_z != 1 || shared_bytes || extra) return INVALID_VALUE;
    const struct copy_parameters *p = arguments[0];
    if (!p->num_pairs || p->num_pairs > PAIRS) return INVALID_VALUE;
    log_call("rows copied: %llu pairs", p->num_pairs);
    pthread_mutex_lock(&stub_lock);
    for (u64 i = 0; i < p->num_pairs; i++) {
        struct copy copy = {p->to[i], p->from[i], p->width, p->to_pitch, p->from_pitch, p->rows};
        if (!is_reachable(copy.to) || !is_reachable(copy.from)) abort(); /* as where copies run */
        start(stream, copy);
    }
    pthread_mutex_unlock(&stub_lock);
    return OK;
}
