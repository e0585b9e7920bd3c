/* A stand-in for libnvidia-ml.so.1: RTX PRO 6000 Blackwell cards whose numbers move, and faults on demand.
 *
 *   STUB_ADDRESSES       PCI addresses, comma separated (default: eight)
 *   STUB_PID             host pid of a process on every card
 *   STUB_FAULTS          faults, comma separated, from the table below
 *   STUB_FAULTS_FILE     the same in a file that may change while the library is in use
 *   STUB_CALL_LOG        every call's name and card is appended to this file
 *
 * Faults; FIELD is the second argument of CARD() or ENTER() below, CARD an index or * for all:
 *
 *   lost:CARD            every question about the card answers GPU_IS_LOST
 *   withheld:CARD        no handle is given for it: GPU_IS_LOST
 *   gone:CARD            it is not enumerated at all
 *   na:FIELD:CARD        NOT_SUPPORTED
 *   old:FIELD:CARD       FUNCTION_NOT_FOUND, as from an older driver
 *   denied:FIELD:CARD    NO_PERMISSION
 *   hang:FIELD:CARD      the call does not return while this fault stands
 *   xid:CODE:CARD        one Xid event each time the faults are read
 *   slow:MS              every call takes that long
 *   garbage:CARD         process records of another struct version
 *   mismatch nolib unloaded noperm    nvmlInit fails so
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int result;
typedef void *device;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15,
    VERSION_MISMATCH = 18,
};

#define MIB (1024ULL * 1024)
#define MEMORY_TOTAL (97887 * MIB)
#define MEMORY_RESERVED (636 * MIB)
#define POWER_LIMIT_MW 600000
#define MAX_CARDS 32
#define MAX_FAULTS 64
#define ALL (-1)
#define NO_CARD (-2)

/* ---- cards ------------------------------------------------------------------------------------ */

static const char *DEFAULT_ADDRESSES = "0000:01:00.0,0000:21:00.0,0000:41:00.0,0000:61:00.0,"
                                       "0000:81:00.0,0000:a1:00.0,0000:c1:00.0,0000:e1:00.0";
static struct { u32 domain, bus, slot; } cards[MAX_CARDS];
static int card_count;

static int card_of(device handle) { return (int)(intptr_t)handle - 1; }
static device handle_of(int card) { return (device)(intptr_t)(card + 1); }

/* A number between 0 and 1 that differs by card and moves every second. */
static double wave(device handle)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long step = now.tv_sec * 7919 + card_of(handle) * 104729;
    return (double)(step % 100) / 100.0;
}

/* ---- faults ----------------------------------------------------------------------------------- */

enum kind { ANSWER, HANG, XID, SLOW, GONE, WITHHELD, GARBAGE, INIT };
enum shape { PLAIN, NUMBER, CARD_ONLY, FIELD_CARD, NUMBER_CARD };

static const struct kind_row { const char *name; enum kind kind; enum shape shape; result answer; } KINDS[] = {
    {"lost", ANSWER, CARD_ONLY, GPU_IS_LOST},
    {"na", ANSWER, FIELD_CARD, NOT_SUPPORTED},
    {"old", ANSWER, FIELD_CARD, FUNCTION_NOT_FOUND},
    {"denied", ANSWER, FIELD_CARD, NO_PERMISSION},
    {"hang", HANG, FIELD_CARD, OK},
    {"xid", XID, NUMBER_CARD, OK},
    {"slow", SLOW, NUMBER, OK},
    {"gone", GONE, CARD_ONLY, OK},
    {"withheld", WITHHELD, CARD_ONLY, GPU_IS_LOST},
    {"garbage", GARBAGE, CARD_ONLY, OK},
    {"mismatch", INIT, PLAIN, VERSION_MISMATCH},
    {"nolib", INIT, PLAIN, LIBRARY_NOT_FOUND},
    {"unloaded", INIT, PLAIN, DRIVER_NOT_LOADED},
    {"noperm", INIT, PLAIN, NO_PERMISSION},
};

static struct fault { const struct kind_row *row; char field[24]; int card; int number; int spent; } faults[MAX_FAULTS];
static int fault_count;
static struct stat faults_seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int card_argument(const char *text) { return !text ? NO_CARD : *text == '*' ? ALL : atoi(text); }

static void parse_fault(char *text)
{
    char *rest = NULL, *name = strtok_r(text, ": \n", &rest);
    char *first = strtok_r(NULL, ": \n", &rest), *second = strtok_r(NULL, ": \n", &rest);
    for (size_t i = 0; name && i < sizeof KINDS / sizeof *KINDS; i++) {
        if (strcmp(name, KINDS[i].name) || fault_count == MAX_FAULTS)
            continue;
        struct fault *fault = &faults[fault_count++];
        *fault = (struct fault){.row = &KINDS[i], .card = ALL};
        enum shape shape = KINDS[i].shape;
        if (shape == NUMBER || shape == NUMBER_CARD)
            fault->number = first ? atoi(first) : 0;
        if (shape == FIELD_CARD && first)
            snprintf(fault->field, sizeof fault->field, "%s", first);
        if (shape == CARD_ONLY)
            fault->card = card_argument(first);
        if ((shape == FIELD_CARD || shape == NUMBER_CARD) && second)
            fault->card = card_argument(second);
        return;
    }
    if (name)
        fprintf(stderr, "stub: unknown fault %s\n", name);
}

static void parse_faults(const char *text)
{
    char copy[2048], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    fault_count = 0;
    for (char *item = strtok_r(copy, ",\n", &rest); item; item = strtok_r(NULL, ",\n", &rest))
        parse_fault(item);
}

/* Call with the lock held. */
static void refresh_faults(void)
{
    const char *path = getenv("STUB_FAULTS_FILE");
    struct stat now;
    if (!path || stat(path, &now))
        return;
    if (now.st_mtim.tv_sec == faults_seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == faults_seen.st_mtim.tv_nsec &&
        now.st_ino == faults_seen.st_ino && now.st_size == faults_seen.st_size)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    char text[2048];
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    faults_seen = now;
    parse_faults(text);
}

/* Copies the first standing fault of this kind that strikes the field and card. */
static int struck(enum kind kind, const char *field, int card, struct fault *found)
{
    int hit = 0;
    pthread_mutex_lock(&lock);
    refresh_faults();
    for (int i = 0; i < fault_count && !hit; i++) {
        struct fault *fault = &faults[i];
        int here = fault->card == card || (fault->card == ALL && card != NO_CARD) || fault->row->shape == PLAIN ||
                   fault->row->shape == NUMBER || (card == NO_CARD && fault->field[0]);
        if (fault->row->kind == kind && !fault->spent && here &&
            (!fault->field[0] || !field || !strcmp(fault->field, field))) {
            hit = 1;
            fault->spent = kind == XID;
            if (found)
                *found = *fault;
        }
    }
    pthread_mutex_unlock(&lock);
    return hit;
}

static void pause_ms(int ms)
{
    struct timespec time = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&time, NULL);
}

static void record(const char *function, int card)
{
    const char *path = getenv("STUB_CALL_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    fprintf(file, "%s %d\n", function, card);
    fclose(file);
}

/* What every call does first: be counted, be late, hang, or refuse. */
static result enter(const char *function, const char *field, int card)
{
    struct fault fault;
    record(function, card);
    if (struck(SLOW, NULL, card, &fault))
        pause_ms(fault.number);
    while (struck(HANG, field, card, NULL))
        pause_ms(20);
    return struck(ANSWER, field, card, &fault) ? fault.row->answer : OK;
}

#define ENTER(field) do { result r_ = enter(__func__, field, NO_CARD); if (r_) return r_; } while (0)
#define CARD(field) do { result r_ = enter(__func__, field, card_of(handle)); if (r_) return r_; } while (0)

/* ---- the library and its driver --------------------------------------------------------------- */

static void read_addresses(void)
{
    char copy[1024], *rest = NULL;
    const char *addresses = getenv("STUB_ADDRESSES");
    snprintf(copy, sizeof copy, "%s", addresses ? addresses : DEFAULT_ADDRESSES);
    card_count = 0;
    for (char *item = strtok_r(copy, ", ", &rest); item && card_count < MAX_CARDS; item = strtok_r(NULL, ", ", &rest))
        if (sscanf(item, "%x:%x:%x", &cards[card_count].domain, &cards[card_count].bus, &cards[card_count].slot) == 3)
            card_count++;
}

result nvmlInitWithFlags(u32 flags)
{
    struct fault fault;
    (void)flags;
    pthread_mutex_lock(&lock);
    read_addresses();
    if (getenv("STUB_FAULTS") && !fault_count)
        parse_faults(getenv("STUB_FAULTS"));
    pthread_mutex_unlock(&lock);
    ENTER("init");
    return struck(INIT, NULL, NO_CARD, &fault) ? fault.row->answer : OK;
}

result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
result nvmlInit(void) { return nvmlInitWithFlags(0); }
result nvmlShutdown(void) { ENTER("shutdown"); return OK; }

const char *nvmlErrorString(result code)
{
    return code == OK ? "Success" : code == NOT_SUPPORTED ? "Not Supported" : "Stub Error";
}

static result text(char *buffer, u32 length, const char *value)
{
    snprintf(buffer, length, "%s", value);
    return OK;
}

result nvmlSystemGetDriverVersion(char *buffer, u32 length) { ENTER("driver"); return text(buffer, length, "580.95.05"); }
result nvmlSystemGetNVMLVersion(char *buffer, u32 length) { return text(buffer, length, "13.580.95.05"); }
result nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }

/* ---- enumeration ------------------------------------------------------------------------------ */

result nvmlDeviceGetCount_v2(u32 *count)
{
    ENTER("count");
    *count = 0;
    for (int card = 0; card < card_count; card++)
        *count += !struck(GONE, NULL, card, NULL);
    return OK;
}

result nvmlDeviceGetHandleByIndex_v2(u32 index, device *handle)
{
    ENTER("handle");
    for (int card = 0; card < card_count; card++) {
        if (struck(GONE, NULL, card, NULL) || index--)
            continue;
        *handle = handle_of(card);
        return struck(WITHHELD, NULL, card, NULL) ? GPU_IS_LOST : OK;
    }
    return INVALID_ARGUMENT;
}

struct pci { char legacy[16]; u32 domain, bus, slot, id, subsystem; char address[32]; };

result nvmlDeviceGetPciInfo_v3(device handle, struct pci *info)
{
    int card = card_of(handle);
    memset(info, 0, sizeof *info);
    info->domain = cards[card].domain;
    info->bus = cards[card].bus;
    info->slot = cards[card].slot;
    info->id = 0x2bb510de;
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff,
             info->slot & 0xff);
    snprintf(info->address, sizeof info->address, "%08X:%02X:%02X.0", info->domain, info->bus, info->slot);
    return OK;
}

result nvmlDeviceGetHandleByPciBusId_v2(const char *address, device *handle)
{
    u32 domain, bus, slot;
    if (sscanf(address, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return INVALID_ARGUMENT;
    for (int card = 0; card < card_count; card++)
        if (cards[card].domain == domain && cards[card].bus == bus && cards[card].slot == slot)
            return *handle = handle_of(card), OK;
    return NOT_FOUND;
}

result nvmlDeviceGetIndex(device handle, u32 *index) { *index = (u32)card_of(handle); return OK; }
result nvmlDeviceGetMinorNumber(device handle, u32 *minor) { *minor = (u32)card_of(handle); return OK; }

/* ---- one card --------------------------------------------------------------------------------- */

result nvmlDeviceGetName(device handle, char *buffer, u32 length)
{
    CARD("name");
    return text(buffer, length, "NVIDIA RTX PRO 6000 Blackwell Server Edition");
}

result nvmlDeviceGetUUID(device handle, char *buffer, u32 length)
{
    CARD("uuid");
    snprintf(buffer, length, "GPU-%08x-5b1a-4c0e-9d5f-0000000000%02x", card_of(handle) + 0x60000, card_of(handle));
    return OK;
}

struct memory_v1 { u64 total, free, used; };
struct memory_v2 { u32 version; u64 total, reserved, free, used; };

static u64 memory_used(device handle) { return 88000 * MIB + (u64)(wave(handle) * 4000) * MIB; }

result nvmlDeviceGetMemoryInfo(device handle, struct memory_v1 *info)
{
    CARD("memory");
    *info = (struct memory_v1){MEMORY_TOTAL, 0, memory_used(handle) + MEMORY_RESERVED};
    info->free = info->total - info->used;
    return OK;
}

result nvmlDeviceGetMemoryInfo_v2(device handle, struct memory_v2 *info)
{
    CARD("memory");
    CARD("memory2");
    *info = (struct memory_v2){info->version, MEMORY_TOTAL, MEMORY_RESERVED, 0, memory_used(handle)};
    info->free = info->total - info->reserved - info->used;
    return OK;
}

result nvmlDeviceGetBAR1MemoryInfo(device handle, struct memory_v1 *info)
{
    CARD("bar1");
    *info = (struct memory_v1){1ULL << 37, (1ULL << 37) - MIB, MIB};
    return OK;
}

struct rates { u32 gpu, memory; };

result nvmlDeviceGetUtilizationRates(device handle, struct rates *rates)
{
    CARD("utilization");
    *rates = (struct rates){(u32)(60 + 40 * wave(handle)), (u32)(40 * wave(handle))};
    return OK;
}

/* One number that the card tells, under its own name for faults. */
#define NUMBER_OF(function, field, type, expression) \
    result function(device handle, type *value) { CARD(field); *value = (type)(expression); return OK; }
#define NUMBER_BY(function, field, type, expression) \
    result function(device handle, int which, type *value) { CARD(field); (void)which; *value = (type)(expression); return OK; }

NUMBER_BY(nvmlDeviceGetTemperature, "temperature", u32, 55 + 20 * wave(handle))
NUMBER_BY(nvmlDeviceGetTemperatureThreshold, "threshold", u32, which ? 90 : 95)
NUMBER_OF(nvmlDeviceGetPowerUsage, "power", u32, 350000 + 240000 * wave(handle))
NUMBER_OF(nvmlDeviceGetPowerManagementLimit, "limit", u32, POWER_LIMIT_MW)
NUMBER_OF(nvmlDeviceGetEnforcedPowerLimit, "limit", u32, POWER_LIMIT_MW)
NUMBER_BY(nvmlDeviceGetClockInfo, "clock", u32, which == 2 ? 14001 : 1900 + 400 * wave(handle))
NUMBER_BY(nvmlDeviceGetMaxClockInfo, "clock", u32, which == 2 ? 14001 : 2430)
NUMBER_OF(nvmlDeviceGetCurrentClocksEventReasons, "throttle", u64, wave(handle) > 0.8 ? 0x4 : 0x0)
NUMBER_OF(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle", u64, wave(handle) > 0.8 ? 0x4 : 0x0)
NUMBER_BY(nvmlDeviceGetPcieThroughput, "pcie", u32, 2000000 * wave(handle))
NUMBER_OF(nvmlDeviceGetPersistenceMode, "persistence", u32, 1)
NUMBER_OF(nvmlDeviceGetPerformanceState, "pstate", u32, 1)
NUMBER_OF(nvmlDeviceGetComputeMode, "mode", u32, 0)
NUMBER_OF(nvmlDeviceGetDisplayMode, "display", u32, 0)
NUMBER_OF(nvmlDeviceGetDisplayActive, "display", u32, 0)
NUMBER_OF(nvmlDeviceGetCurrPcieLinkGeneration, "link", u32, 5)
NUMBER_OF(nvmlDeviceGetMaxPcieLinkGeneration, "link", u32, 5)
NUMBER_OF(nvmlDeviceGetCurrPcieLinkWidth, "link", u32, 16)
NUMBER_OF(nvmlDeviceGetMaxPcieLinkWidth, "link", u32, 16)
NUMBER_OF(nvmlDeviceGetMaxMigDeviceCount, "mig", u32, 0)
NUMBER_OF(nvmlDeviceIsMigDeviceHandle, "mig", u32, 0)

/* The server card is cooled by its chassis: it has no fan to tell of. */
result nvmlDeviceGetFanSpeed(device handle, u32 *value) { CARD("fan"); (void)value; return NOT_SUPPORTED; }
result nvmlDeviceGetSerial(device handle, char *buffer, u32 length) { CARD("serial"); (void)buffer; (void)length; return NOT_SUPPORTED; }
result nvmlDeviceGetMigMode(device handle, u32 *now, u32 *next) { CARD("mig"); *now = *next = 0; return OK; }

/* Windows has two driver models; Linux answers so. */
result nvmlDeviceGetDriverModel(device handle, u32 *now, u32 *next) { CARD("model"); (void)now; (void)next; return NOT_SUPPORTED; }
result nvmlDeviceGetDriverModel_v2(device handle, u32 *now, u32 *next) { CARD("model"); (void)now; (void)next; return NOT_SUPPORTED; }

static result codec(device handle, u32 *use, u32 *window) { CARD("codec"); *use = 0; *window = 100000; return OK; }
result nvmlDeviceGetEncoderUtilization(device handle, u32 *use, u32 *window) { return codec(handle, use, window); }
result nvmlDeviceGetDecoderUtilization(device handle, u32 *use, u32 *window) { return codec(handle, use, window); }

result nvmlDeviceGetCudaComputeCapability(device handle, int *major, int *minor)
{
    CARD("capability");
    *major = 12;
    *minor = 0;
    return OK;
}

result nvmlDeviceGetTotalEccErrors(device handle, int kind, int counter, u64 *count)
{
    CARD("ecc");
    (void)kind;
    (void)counter;
    *count = 0;
    return OK;
}

/* Replaced by row remapping since Ampere. */
result nvmlDeviceGetRetiredPages(device handle, int cause, u32 *count, u64 *pages)
{
    CARD("retired");
    (void)cause;
    (void)count;
    (void)pages;
    return NOT_SUPPORTED;
}

result nvmlDeviceGetRemappedRows(device handle, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed)
{
    CARD("remapped");
    *corrected = *uncorrected = *pending = *failed = 0;
    return OK;
}

/* ---- processes -------------------------------------------------------------------------------- */

struct process { u32 pid; u64 memory; u32 gpu_instance, compute_instance; };

static result compute_processes(device handle, u32 *count, struct process *found)
{
    CARD("processes");
    const char *pid = getenv("STUB_PID");
    int garbage = struck(GARBAGE, NULL, card_of(handle), NULL);
    u32 room = *count;
    *count = pid || garbage ? 1 : 0;
    if (!*count)
        return OK;
    if (!found || !room)
        return INSUFFICIENT_SIZE;
    *found = (struct process){garbage ? 0xfffffff0u : (u32)atoi(pid), memory_used(handle) - 500 * MIB, ~0u, ~0u};
    return OK;
}

static result no_processes(device handle, u32 *count) { CARD("graphics"); *count = 0; return OK; }

#define PROCESSES(version) \
    result nvmlDeviceGetComputeRunningProcesses##version(device handle, u32 *count, struct process *found) \
    { return compute_processes(handle, count, found); } \
    result nvmlDeviceGetGraphicsRunningProcesses##version(device handle, u32 *count, struct process *found) \
    { (void)found; return no_processes(handle, count); } \
    result nvmlDeviceGetMPSComputeRunningProcesses##version(device handle, u32 *count, struct process *found) \
    { (void)found; return no_processes(handle, count); }

PROCESSES(_v2)
PROCESSES(_v3)

result nvmlDeviceGetProcessUtilization(device handle, void *samples, u32 *count, u64 since)
{
    CARD("samples");
    (void)samples;
    (void)since;
    *count = 0;
    return NOT_FOUND;
}

/* ---- events ----------------------------------------------------------------------------------- */

struct event { device handle; u64 type, data; u32 gpu_instance, compute_instance; };
enum { XID_CRITICAL_ERROR = 0x8 };

result nvmlEventSetCreate(void **set) { ENTER("events"); *set = malloc(1); return OK; }
result nvmlEventSetFree(void *set) { free(set); return OK; }
result nvmlDeviceRegisterEvents(device handle, u64 types, void *set) { CARD("xid"); (void)types; (void)set; return OK; }

result nvmlEventSetWait_v2(void *set, struct event *event, u32 timeout_ms)
{
    struct fault fault;
    (void)set;
    ENTER("wait");
    for (int card = 0; card < card_count; card++) {
        if (!struck(XID, NULL, card, &fault))
            continue;
        *event = (struct event){handle_of(card), XID_CRITICAL_ERROR, (u64)fault.number, ~0u, ~0u};
        return OK;
    }
    pause_ms((int)timeout_ms);
    return TIMEOUT;
}
