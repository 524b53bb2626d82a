// A CUDA driver that writes down what it is asked for. Signatures and structures are those of cuda.h
// (CUDA 13): what a caller passes with another type arrives here as another value.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void *CUmodule, *CUfunction, *CUstream;

typedef union {
    char pad[64];
    struct { unsigned int x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
} CUlaunchAttributeValue;

typedef struct {
    int id;
    char pad[8 - sizeof(int)];
    CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;

static char said[1 << 16];
static const char *refused = "";
static CUresult refusal;
static int times, mode;
static CUdeviceptr next = 1ull << 40;
static int functions;

const char *fake_log(void) { return said; }

// The next so many calls of a function fail.
void fake_refuse(const char *name, CUresult status, int count) {
    refused = strdup(name), refusal = status, times = count;
}

static CUresult status_of(const char *name) {
    return times > 0 && !strcmp(name, refused) ? (--times, refusal) : 0;
}

#define SAY(...) snprintf(said + strlen(said), sizeof said - strlen(said), __VA_ARGS__)
#define CALLED(name, form, ...) \
    SAY(name "(" form ")\n", __VA_ARGS__); \
    CUresult status = status_of(name); \
    if (status) return status

static void say_config(const CUlaunchConfig *c) {
    SAY(" grid %u %u %u block %u %u %u smem %u stream %p", c->gridDimX, c->gridDimY, c->gridDimZ,
        c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream);
    for (unsigned int i = 0; i < c->numAttrs; i++) {
        const CUlaunchAttribute *a = &c->attrs[i];
        if (a->id == 4)
            SAY(" cluster %u %u %u", a->value.clusterDim.x, a->value.clusterDim.y,
                a->value.clusterDim.z);
        else
            SAY(" attribute %d: %d", a->id, a->value.programmaticStreamSerializationAllowed);
    }
    SAY("\n");
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CALLED("cuModuleLoadData", "%.8s, mode %d", (const char *)image, mode);
    *module = (CUmodule)0x7f0012345670;
    return 0;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    CALLED("cuModuleGetFunction", "%p, %s", module, name);
    *function = (CUfunction)(0x7f00abcdef00 + ++functions);
    return 0;
}

CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    CALLED("cuFuncSetAttribute", "%p, %d, %d", function, attribute, value);
    return 0;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    CALLED("cuOccupancyMaxActiveClusters", "%p", function);
    say_config(config);
    *count = 3;
    return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    CALLED("cuLaunchKernelEx", "%p, %llx, %p", function,
           (unsigned long long)*(uint64_t *)parameters[0], (void *)extra);
    say_config(config);
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    CALLED("cuMemAlloc", "%zu, mode %d", size, mode);
    *address = next, next += size;
    return 0;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream) {
    CALLED("cuMemAllocAsync", "%zu, %p", size, stream);
    *address = next, next += size;
    return 0;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    CALLED("cuMemFreeAsync", "%llx, %p", address, stream);
    return 0;
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    CALLED("cuMemsetD8Async", "%llx, %d, %zu, %p", address, value, count, stream);
    return 0;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    CALLED("cuStreamCreate", "%u", flags);
    *stream = (CUstream)0x7f0099999990;
    return 0;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    CALLED("cuStreamDestroy", "%p", stream);
    return 0;
}

CUresult cuStreamSynchronize(CUstream stream) {
    CALLED("cuStreamSynchronize", "%p", stream);
    return 0;
}

CUresult cuThreadExchangeStreamCaptureMode(int *given) {
    CALLED("cuThreadExchangeStreamCaptureMode", "%d", *given);
    int before = mode;
    mode = *given, *given = before;
    return 0;
}

static CUresult capture_info(CUstream stream, int *capture_status, uint64_t *id) {
    CALLED("cuStreamGetCaptureInfo", "%p", stream);
    *capture_status = 1;
    if (id) *id = 1ull << 33;
    return 0;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *capture_status, uint64_t *id, void **graph,
                                   const void **nodes, size_t *count) {
    if (nodes || count) SAY("more than the graph: ");
    if (graph) *graph = (void *)0x7f0055555550;
    return capture_info(stream, capture_status, id);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *capture_status, uint64_t *id, void **graph,
                                   const void **nodes, const void **edges, size_t *count) {
    if (graph) *graph = (void *)0x7f0055555550;
    if (nodes) *nodes = 0;
    if (edges) *edges = 0;
    if (count) *count = 0;
    return capture_info(stream, capture_status, id);
}

CUresult cuUserObjectCreate(void **made, void *value, void (*destroy)(void *), unsigned int references,
                            unsigned int flags) {
    CALLED("cuUserObjectCreate", "%d, %d, %u, %u", value != 0, destroy != 0, references, flags);
    *made = (void *)0x7f0066666660;
    return 0;
}

CUresult cuGraphRetainUserObject(void *graph, void *object, unsigned int count, unsigned int flags) {
    CALLED("cuGraphRetainUserObject", "%p, %p, %u, %u", graph, object, count, flags);
    return 0;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
    case 0: *name = "CUDA_SUCCESS"; return 0;
    case 1: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 209: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; return 0;
    case 701: *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; return 0;
    case 900: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; return 0;
    default: *name = 0; return 1;
    }
}

// By which cuda-python finds functions.
CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuModuleLoadData", cuModuleLoadData},
        {"cuModuleGetFunction", cuModuleGetFunction},
        {"cuFuncSetAttribute", cuFuncSetAttribute},
        {"cuOccupancyMaxActiveClusters", cuOccupancyMaxActiveClusters},
        {"cuLaunchKernelEx", cuLaunchKernelEx},
        {"cuMemAlloc", cuMemAlloc_v2},
        {"cuMemAllocAsync", cuMemAllocAsync},
        {"cuMemFreeAsync", cuMemFreeAsync},
        {"cuMemsetD8Async", cuMemsetD8Async},
        {"cuStreamCreate", cuStreamCreate},
        {"cuStreamDestroy", cuStreamDestroy_v2},
        {"cuStreamSynchronize", cuStreamSynchronize},
        {"cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode},
        {"cuStreamGetCaptureInfo", cuStreamGetCaptureInfo_v3},
        {"cuUserObjectCreate", cuUserObjectCreate},
        {"cuGraphRetainUserObject", cuGraphRetainUserObject},
    };
    *found = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) *found = known[i].function;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
