// Keeps what CUPTI's activity records say: managed-memory migrations and faults, copies, kernels.
//
// CUPTI is found at run time and its few types are spelled out here, so that this builds without CUDA's headers. The
// offsets are those of CUPTI 13 (cupti_activity.h: CUpti_ActivityUnifiedMemoryCounter3, CUpti_ActivityMemcpy6,
// CUpti_ActivityKernel10); they have not moved since CUDA 11. CUPTI calls from threads of its own, hence C.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MEMCPY = 1, CONCURRENT_KERNEL = 10, UNIFIED_MEMORY_COUNTER = 25 };

typedef struct {
  uint32_t kind;
  uint32_t detail;  // direction of a copy, kind of a counter
  uint64_t value;   // bytes or count; a kernel's nanoseconds
  uint64_t start;   // nanoseconds on CUPTI's clock
  const char *name;
} Record;

typedef struct {
  uint32_t scope, kind, device, enable;
} CounterConfig;

typedef void (*Request)(uint8_t **, size_t *, size_t *);
typedef void (*Complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static int (*register_callbacks)(Request, Complete);
static int (*configure_counters)(CounterConfig *, uint32_t);
static int (*enable_kind)(int);
static int (*disable_kind)(int);
static int (*next_record)(uint8_t *, size_t, uint8_t **);
static int (*flush_all)(uint32_t);
static int (*get_timestamp)(uint64_t *);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Record *records;
static size_t num_records, capacity;
static uint64_t num_lost;

#define BUFFER_BYTES (8u << 20)

static void request(uint8_t **buffer, size_t *size, size_t *max_records) {
  *buffer = aligned_alloc(8, BUFFER_BYTES);
  *size = *buffer ? BUFFER_BYTES : 0;
  *max_records = 0;
}

static uint64_t u64(const uint8_t *record, int offset) {
  uint64_t value;
  memcpy(&value, record + offset, sizeof value);
  return value;
}

static void keep(Record record) {
  if (num_records == capacity) {
    size_t wanted = capacity ? 2 * capacity : 1 << 16;
    Record *grown = realloc(records, wanted * sizeof *grown);
    if (!grown) {
      num_lost++;
      return;
    }
    records = grown;
    capacity = wanted;
  }
  records[num_records++] = record;
}

static void complete(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  uint8_t *record = NULL;
  pthread_mutex_lock(&mutex);
  while (next_record(buffer, valid, &record) == 0) {
    uint32_t kind, counter;
    memcpy(&kind, record, sizeof kind);
    memcpy(&counter, record + 4, sizeof counter);
    if (kind == MEMCPY)
      keep((Record){kind, record[4], u64(record, 8), u64(record, 16), NULL});
    else if (kind == UNIFIED_MEMORY_COUNTER)
      keep((Record){kind, counter, u64(record, 8), u64(record, 16), NULL});
    else if (kind == CONCURRENT_KERNEL)
      keep((Record){kind, 0, u64(record, 24) - u64(record, 16), u64(record, 16), (const char *)u64(record, 104)});
  }
  pthread_mutex_unlock(&mutex);
  free(buffer);
}

// Loads CUPTI. 0, or -1 if the library or a function is missing, or CUPTI's status.
int cupti_trace_load(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!library) return -1;
  struct {
    const char *name;
    void **function;
  } wanted[] = {
      {"cuptiActivityRegisterCallbacks", (void **)&register_callbacks},
      {"cuptiActivityConfigureUnifiedMemoryCounter", (void **)&configure_counters},
      {"cuptiActivityEnable", (void **)&enable_kind},
      {"cuptiActivityDisable", (void **)&disable_kind},
      {"cuptiActivityGetNextRecord", (void **)&next_record},
      {"cuptiActivityFlushAll", (void **)&flush_all},
      {"cuptiGetTimestamp", (void **)&get_timestamp},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    if (!(*wanted[i].function = dlsym(library, wanted[i].name))) return -1;
  return register_callbacks(request, complete);
}

// Begins records of migrations in both directions and of faults on both sides; the driver must be initialized.
int cupti_trace_count_migrations(void) {
  CounterConfig wanted[] = {{2, 1, 0, 1}, {2, 2, 0, 1}, {2, 3, 0, 1}, {2, 4, 0, 1}};
  int status = configure_counters(wanted, 4);
  return status ? status : enable_kind(UNIFIED_MEMORY_COUNTER);
}

int cupti_trace_enable(int kind, int on) { return on ? enable_kind(kind) : disable_kind(kind); }
int cupti_trace_flush(void) { return flush_all(1); }
uint64_t cupti_trace_now(void) {
  uint64_t now = 0;
  return get_timestamp(&now) ? 0 : now;
}

// After a flush, while nothing is launched.
size_t cupti_trace_num(void) { return num_records; }
const Record *cupti_trace_records(void) { return records; }
uint64_t cupti_trace_lost(void) { return num_lost; }
void cupti_trace_clear(void) {
  pthread_mutex_lock(&mutex);
  num_records = 0;
  num_lost = 0;
  pthread_mutex_unlock(&mutex);
}
