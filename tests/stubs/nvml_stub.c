/* A libnvidia-ml.so.1 with scripted GPUs, for the real pynvml to talk to.
 *
 *   cc -shared -fPIC -o libnvidia-ml.so.1 nvml_stub.c
 *
 * NVML_STUB names a text file of `key=value` lines, read again at every call, so that a test
 * can change the machine while it is watched:
 *
 *   init=0                       return code of nvmlInitWithFlags
 *   count=2                      number of GPUs
 *   FUNCTION=3                   every GPU: FUNCTION returns this code
 *   0.FUNCTION=15                GPU 0 only
 *   0.FUNCTION.hang=1            GPU 0: FUNCTION does not return while this line is there
 *   0.name=...  0.total=...      values; see the defaults below
 *   0.compute=PID:BYTES[:GI:CI],...   processes; BYTES -1 is "not available"
 *
 * NVML_STUB_LOG names a file that gets one letter for each start (I) and shutdown (S).
 * Function and struct layouts are those of nvml.h for CUDA 12 and 13.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;

enum { MAX_GPUS = 16, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

static int ids[MAX_GPUS];

static int find(const char *key, char *out, size_t size)
{
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[4096];
    int found = 0;
    size_t n = strlen(key);
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        if (strncmp(line, key, n) == 0 && line[n] == '=') {
            snprintf(out, size, "%s", line + n + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static u64 number(const char *key, u64 otherwise)
{
    char text[64];
    return find(key, text, sizeof text) ? strtoull(text, NULL, 10) : otherwise;
}

static u64 of_gpu(void *gpu, const char *field, u64 otherwise)
{
    char key[128];
    snprintf(key, sizeof key, "%d.%s", (int)((int *)gpu - ids), field);
    return number(key, otherwise);
}

/* Hang and return code of one function on one GPU. */
static int enter(void *gpu, const char *function)
{
    char key[128];
    snprintf(key, sizeof key, "%s.hang", function);
    while (of_gpu(gpu, key, 0))
        usleep(10000);
    return (int)of_gpu(gpu, function, number(function, 0));
}

#define ENTER(gpu)                          \
    do {                                    \
        int code = enter(gpu, __func__);    \
        if (code)                           \
            return code;                    \
    } while (0)

static void log_letter(char letter)
{
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fputc(letter, file);
        fclose(file);
    }
}

static int global(const char *function)
{
    char key[128];
    snprintf(key, sizeof key, "%s.hang", function);
    while (number(key, 0))
        usleep(10000);
    return (int)number(function, 0);
}

int nvmlInitWithFlags(unsigned flags)
{
    int code = global("init");
    (void)flags;
    log_letter('I');
    return code;
}

int nvmlShutdown(void)
{
    log_letter('S');
    return 0;
}

const char *nvmlErrorString(int code)
{
    static char text[64];
    snprintf(text, sizeof text, "Scripted error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int code = global("nvmlDeviceGetCount");
    *count = (unsigned)number("count", 0);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu)
{
    if (index >= MAX_GPUS || index >= number("count", 0))
        return INVALID_ARGUMENT;
    *gpu = &ids[index];
    return enter(*gpu, "nvmlDeviceGetHandleByIndex");
}

static int text_of(void *gpu, const char *field, const char *otherwise, char *out, unsigned size)
{
    char key[128];
    snprintf(key, sizeof key, "%d.%s", (int)((int *)gpu - ids), field);
    if (!find(key, out, size))
        snprintf(out, size, "%s%d", otherwise, (int)((int *)gpu - ids));
    return 0;
}

int nvmlDeviceGetName(void *gpu, char *out, unsigned size)
{
    ENTER(gpu);
    return text_of(gpu, "name", "Stub GPU ", out, size);
}

int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size)
{
    ENTER(gpu);
    return text_of(gpu, "uuid", "GPU-stub-", out, size);
}

struct memory_v1 {
    u64 total, free, used;
};

struct memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo(void *gpu, struct memory_v1 *info)
{
    ENTER(gpu);
    info->total = of_gpu(gpu, "total", 1000);
    info->free = of_gpu(gpu, "free", 300);
    info->used = info->total - info->free;
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *gpu, struct memory_v2 *info)
{
    ENTER(gpu);
    if (info->version != (sizeof *info | 2u << 24))
        return 25;
    info->total = of_gpu(gpu, "total", 1000);
    info->reserved = of_gpu(gpu, "reserved", 100);
    info->free = of_gpu(gpu, "free", 300);
    info->used = info->total - info->reserved - info->free;
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *gpu, unsigned rates[2])
{
    ENTER(gpu);
    rates[0] = (unsigned)of_gpu(gpu, "util", 57);
    rates[1] = (unsigned)of_gpu(gpu, "mem_util", 31);
    return 0;
}

int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out)
{
    ENTER(gpu);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *out = (unsigned)of_gpu(gpu, "temperature", 62);
    return 0;
}

int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out)
{
    ENTER(gpu);
    *out = (unsigned)of_gpu(gpu, "power", 412500);
    return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *out)
{
    ENTER(gpu);
    *out = (unsigned)of_gpu(gpu, "power_limit", 700000);
    return 0;
}

int nvmlDeviceGetClockInfo(void *gpu, int which, unsigned *out)
{
    ENTER(gpu);
    if (which != 1 && which != 2)
        return INVALID_ARGUMENT;
    *out = which == 1 ? (unsigned)of_gpu(gpu, "sm_clock", 1980) : (unsigned)of_gpu(gpu, "mem_clock", 2619);
    return 0;
}

int nvmlDeviceGetPcieThroughput(void *gpu, int which, unsigned *out)
{
    ENTER(gpu);
    *out = which == 0 ? (unsigned)of_gpu(gpu, "pcie_tx", 20) : (unsigned)of_gpu(gpu, "pcie_rx", 50);
    return 0;
}

int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending)
{
    ENTER(gpu);
    *current = *pending = (unsigned)of_gpu(gpu, "mig", 0);
    return 0;
}

struct field_value {
    unsigned field, scope;
    long long timestamp, latency;
    int type, status;
    union {
        u64 ull;
        double d;
    } value;
};

int nvmlDeviceGetFieldValues(void *gpu, int count, struct field_value *values)
{
    int i;
    ENTER(gpu);
    for (i = 0; i < count; i++) {
        values[i].type = 3;
        values[i].status = (int)of_gpu(gpu, "nvlink", NOT_SUPPORTED);
        if (values[i].scope != 0xffffffffu)
            values[i].status = INVALID_ARGUMENT;
        values[i].value.ull = of_gpu(gpu, values[i].field == 139 ? "nvlink_rx" : "nvlink_tx", 0);
    }
    return 0;
}

struct process {
    unsigned pid;
    u64 memory;
    unsigned gpu_instance, compute_instance;
};

static int processes(void *gpu, const char *field, unsigned *count, struct process *out)
{
    char key[64], text[2048], *item, *rest = text;
    unsigned n = 0, room = *count;
    snprintf(key, sizeof key, "%d.%s", (int)((int *)gpu - ids), field);
    if (!find(key, text, sizeof text) || !*text) {
        *count = 0;
        return 0;
    }
    while ((item = strsep(&rest, ","))) {
        unsigned pid = 0, gi = ~0u, ci = ~0u;
        long long memory = -1;
        sscanf(item, "%u:%lld:%u:%u", &pid, &memory, &gi, &ci);
        if (out && n < room)
            out[n] = (struct process){pid, (u64)memory, gi, ci};
        n++;
    }
    *count = n;
    return out && n <= room ? 0 : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, struct process *out)
{
    ENTER(gpu);
    return processes(gpu, "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *gpu, unsigned *count, struct process *out)
{
    ENTER(gpu);
    return processes(gpu, "graphics", count, out);
}
