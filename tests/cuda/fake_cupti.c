// A CUPTI that delivers one record of each kind when it is flushed, laid out as in CUPTI 13. For the test of the trace.
#include <stdint.h>
#include <string.h>

#define PACKED __attribute__((__packed__)) __attribute__((aligned(8)))
typedef struct PACKED {
  uint32_t kind;
  uint8_t copy_kind, src_kind, dst_kind, flags;
  uint64_t bytes, start, end;
  uint32_t others[5];
} Memcpy;
typedef struct PACKED {
  uint32_t kind;
  uint8_t cache_config, shared_config;
  uint16_t registers;
  uint32_t partitioned[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], shared[2];
  uint32_t local[2], correlation;
  int64_t grid_id;
  const char *name;
  uint8_t others[100];
} Kernel;
typedef struct PACKED {
  uint32_t kind, counter_kind;
  uint64_t value, start, end, address;
  uint32_t ids[6];
  uint64_t processors[5];
} Counter;

typedef void (*Request)(uint8_t **, size_t *, size_t *);
typedef void (*Complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static Request request;
static Complete complete;
static int enabled[64];
static int configured;

int cuptiActivityRegisterCallbacks(Request r, Complete c) { return request = r, complete = c, 0; }
int cuptiActivityConfigureUnifiedMemoryCounter(uint32_t (*config)[4], uint32_t count) {
  for (uint32_t i = 0; i < count; i++) configured |= config[i][3] << config[i][1];
  return 0;
}
int cuptiActivityEnable(int kind) {
  if (kind == 25 && configured != 0x1e) return 1;
  return kind == 51 ? 2 : (enabled[kind] = 1, 0);
}
int cuptiActivityDisable(int kind) { return enabled[kind] = 0; }
int cuptiGetTimestamp(uint64_t *now) { return *now = 777, 0; }

static size_t size_of(const uint8_t *record) {
  uint32_t kind;
  memcpy(&kind, record, 4);
  return kind == 1 ? sizeof(Memcpy) : kind == 10 ? sizeof(Kernel) : sizeof(Counter);
}
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record) {
  uint8_t *next = *record ? *record + size_of(*record) : buffer;
  if (next >= buffer + valid) return 12;
  *record = next;
  return 0;
}

int cuptiActivityFlushAll(uint32_t flag) {
  uint8_t *buffer, *at;
  size_t size, most;
  if (!flag || !(enabled[1] | enabled[10] | enabled[25])) return 0;
  request(&buffer, &size, &most);
  at = buffer;
  if (enabled[1]) *(Memcpy *)at = (Memcpy){1, 2, 0, 0, 0, 4096, 100, 101, {0}}, at += sizeof(Memcpy);
  if (enabled[10]) {
    Kernel kernel = {.kind = 10, .registers = 255, .start = 1000, .end = 1250, .grid = {7, 8, 9}, .name = "_Z6decodev"};
    *(Kernel *)at = kernel, at += sizeof kernel;
  }
  if (enabled[25]) *(Counter *)at = (Counter){25, 1, 65536, 200, 210, 0, {0}, {0}}, at += sizeof(Counter);
  complete(0, 0, buffer, size, (size_t)(at - buffer));
  return 0;
}
