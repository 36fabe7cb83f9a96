/* A libnvidia-ml.so.1 without a GPU. It answers what the file $NVML_STUB says, read at each call: lines of a key and
   a number. `all 3` answers 3 to everything; `gpu1.lost 15` is the code of each call for device 1; `hang 1` makes each
   call wait until the line is gone. Events come through the FIFO $NVML_STUB.events, eight bytes each: device, XID. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { unsigned id, scope; long long at, latency; unsigned type, code; union { double d; unsigned u; u64 l; } value; } field;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci;
typedef struct { void *device; u64 type, data; unsigned gi, ci; } event;

static int events = -1;

/* The file of the state, or the FIFO; a pod may have files of its own. */
static void find(char *path, size_t size, const char *end) {
    const char *base = getenv("NVML_STUB"), *pod = getenv("UNBROKEN_POD");
    snprintf(path, size, "%s.%s%s", base ? base : "/nonexistent", pod ? pod : "", end);
    if (access(path, F_OK)) snprintf(path, size, "%s%s", base ? base : "/nonexistent", end);
}

static u64 get(const char *key, u64 usual) {
    char path[4096], name[256];
    u64 value, found = usual;
    find(path, sizeof path, "");
    FILE *file = fopen(path, "re");
    if (!file) return usual;
    while (fscanf(file, "%255s %llu", name, &value) == 2)
        if (!strcmp(name, key)) found = value;
    fclose(file);
    return found;
}

static u64 of(void *device, const char *name, u64 usual) {
    char key[300];
    snprintf(key, sizeof key, "gpu%ld.%s", (long)device - 1, name);
    return get(key, usual);
}

static int begin(void *device) {
    while (get("hang", 0)) usleep(20000);
    int code = (int)get("all", 0);
    if (!code && device) code = (int)of(device, "lost", 0);
    return code;
}
#define BEGIN(device) do { int code = begin(device); if (code) return code; } while (0)

int nvmlInit_v2(void) { return (int)get("init", 0); }
int nvmlDeviceGetCount_v2(unsigned *count) { BEGIN(NULL); *count = (unsigned)get("count", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); BEGIN(*device); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) { BEGIN(device); snprintf(uuid, size, "GPU-%04ld", (long)device - 1); return 0; }
int nvmlDeviceGetPciInfo_v3(void *device, pci *info) {
    BEGIN(device);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02lX:00.0", (long)device);
    return 0;
}
int nvmlDeviceGetFieldValues(void *device, int count, field *values) {
    BEGIN(device);
    for (int i = 0; i < count; i++) {
        values[i].code = (unsigned)of(device, "action-code", 0);
        values[i].value.u = (unsigned)of(device, "action", 0);
    }
    return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *good, unsigned *bad, unsigned *pending, unsigned *failed) {
    BEGIN(device);
    *good = *bad = 0;
    *pending = (unsigned)of(device, "pending", 0);
    *failed = (unsigned)of(device, "failed", 0);
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int since, u64 *count) { BEGIN(device); *count = of(device, "ecc", 0); return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons) { BEGIN(device); *reasons = of(device, "throttle", 0); return 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *state) {
    BEGIN(device);
    char name[64];
    if (link >= of(device, "links", 4)) return 2;
    snprintf(name, sizeof name, "link%u", link);
    *state = (unsigned)of(device, name, 1);
    return 0;
}
int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, int kind, u64 *count) { BEGIN(device); *count = of(device, "recoveries", 0); return 0; }

int nvmlEventSetCreate(void **set) {
    BEGIN(NULL);
    char path[4096];
    find(path, sizeof path, ".events");
    if (events < 0) events = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    *set = &events;
    return events < 0 ? 999 : 0;
}
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(void *device, u64 types, void *set) { BEGIN(device); return (int)of(device, "deaf", 0); }
int nvmlEventSetWait_v2(void *set, event *found, unsigned timeout_ms) {
    BEGIN(NULL);
    struct pollfd waits = {events, POLLIN, 0};
    unsigned word[2];
    if (poll(&waits, 1, (int)timeout_ms) <= 0 || read(events, word, sizeof word) != (ssize_t)sizeof word) return 10;
    memset(found, 0, sizeof *found);
    found->device = (void *)(long)(word[0] + 1);
    found->type = 8;
    found->data = word[1];
    return 0;
}
