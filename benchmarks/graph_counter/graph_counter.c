// Counts CUDA graph and transfer calls of one process at the driver's interface. Linux, LD_PRELOAD.
//
// MLX and the CUDA libraries under it link the runtime statically, so cudaGraphInstantiate is no symbol that could be
// replaced. The static runtime finds every driver function with dlsym("cuGetProcAddress") and that function; both are
// answered here with counting functions in front of the driver's own. With profiling on, each graph launch is placed
// between two events, whose distance is its time on the device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uintptr_t Word;
// All counted functions return a CUresult and take at most six integers or pointers, which travel in registers; a
// caller that passes fewer leaves the rest undefined and the callee ignores them.
typedef Word (*Driver)(Word, Word, Word, Word, Word, Word);

#define COUNTERS(X)                                                                                                  \
  X(graph_instantiations) X(graph_updates) X(graph_updates_failed) X(graph_launches) X(managed_allocs)                \
  X(managed_alloc_bytes) X(device_allocs) X(prefetches) X(htod_copies) X(htod_bytes) X(dtoh_copies) X(dtoh_bytes)     \
  X(undirected_copies) X(undirected_bytes) X(functions_wrapped) X(functions_missed) X(events_dropped)

enum {
#define X(name) C_##name,
  COUNTERS(X)
#undef X
      NUM_COUNTERS
};
static const char *const counter_names[] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
};
// Relaxed throughout: each counter is a number of its own and orders nothing.
static _Atomic uint64_t counters[NUM_COUNTERS];

static void count(int counter, uint64_t amount) {
  atomic_fetch_add_explicit(&counters[counter], amount, memory_order_relaxed);
}

// ---- what is counted -------------------------------------------------------------------------------------------

#define FUNCTIONS(X)                                                                                                 \
  X(cuGraphInstantiate) X(cuGraphInstantiate_v2) X(cuGraphInstantiateWithFlags) X(cuGraphInstantiateWithParams)       \
  X(cuGraphExecUpdate) X(cuGraphExecUpdate_v2) X(cuGraphLaunch) X(cuMemAllocManaged) X(cuMemAllocAsync)               \
  X(cuMemPrefetchAsync) X(cuMemPrefetchAsync_v2) X(cuMemcpyHtoD) X(cuMemcpyHtoD_v2) X(cuMemcpyHtoDAsync)              \
  X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoH) X(cuMemcpyDtoH_v2) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoHAsync_v2)             \
  X(cuMemcpy) X(cuMemcpyAsync)

enum {
#define X(name) F_##name,
  FUNCTIONS(X)
#undef X
      NUM_FUNCTIONS
};
static const char *const function_names[] = {
#define X(name) #name,
    FUNCTIONS(X)
#undef X
};

// Libraries may be given different addresses for one name (per-thread streams, older versions).
#define NUM_ADDRESSES 4
static _Atomic(Driver) drivers[NUM_FUNCTIONS][NUM_ADDRESSES];

static void before_graph_launch(Word stream);
static void after_graph_launch(Word stream);

static Word counted(int function, int address, Word a, Word b, Word c, Word d, Word e, Word f) {
  // Acquire pairs with the release in `wrapped`.
  Driver driver = atomic_load_explicit(&drivers[function][address], memory_order_acquire);
  if (function == F_cuGraphLaunch) before_graph_launch(b);
  Word result = driver(a, b, c, d, e, f);
  int failed = (int)result != 0;
  switch (function) {
    case F_cuGraphInstantiate:
    case F_cuGraphInstantiate_v2:
    case F_cuGraphInstantiateWithFlags:
    case F_cuGraphInstantiateWithParams:
      count(C_graph_instantiations, 1);
      break;
    case F_cuGraphExecUpdate:
    case F_cuGraphExecUpdate_v2:
      count(C_graph_updates, 1);
      if (failed) count(C_graph_updates_failed, 1);
      break;
    case F_cuGraphLaunch:
      after_graph_launch(b);
      count(C_graph_launches, 1);
      break;
    case F_cuMemAllocManaged:
      count(C_managed_allocs, 1);
      count(C_managed_alloc_bytes, b);
      break;
    case F_cuMemAllocAsync:
      count(C_device_allocs, 1);
      break;
    case F_cuMemPrefetchAsync:
    case F_cuMemPrefetchAsync_v2:
      count(C_prefetches, 1);
      break;
    case F_cuMemcpyHtoD:
    case F_cuMemcpyHtoD_v2:
    case F_cuMemcpyHtoDAsync:
    case F_cuMemcpyHtoDAsync_v2:
      count(C_htod_copies, 1);
      count(C_htod_bytes, c);
      break;
    case F_cuMemcpyDtoH:
    case F_cuMemcpyDtoH_v2:
    case F_cuMemcpyDtoHAsync:
    case F_cuMemcpyDtoHAsync_v2:
      count(C_dtoh_copies, 1);
      count(C_dtoh_bytes, c);
      break;
    default:  // cuMemcpy and cuMemcpyAsync, whose direction follows from the addresses
      count(C_undirected_copies, 1);
      count(C_undirected_bytes, c);
  }
  return result;
}

#define WRAPPER(name, address)                                                                                       \
  static Word name##_##address(Word a, Word b, Word c, Word d, Word e, Word f) {                                     \
    return counted(F_##name, address, a, b, c, d, e, f);                                                             \
  }
#define X(name) WRAPPER(name, 0) WRAPPER(name, 1) WRAPPER(name, 2) WRAPPER(name, 3)
FUNCTIONS(X)
#undef X
static const Driver wrappers[NUM_FUNCTIONS][NUM_ADDRESSES] = {
#define X(name) {name##_0, name##_1, name##_2, name##_3},
    FUNCTIONS(X)
#undef X
};

static void *wrapped(const char *name, void *address) {
  for (int function = 0; address && function < NUM_FUNCTIONS; function++) {
    if (strcmp(name, function_names[function])) continue;
    for (int i = 0; i < NUM_ADDRESSES; i++) {
      Driver expected = NULL;
      // Release pairs with the acquire in `counted`.
      if (atomic_compare_exchange_strong_explicit(&drivers[function][i], &expected, (Driver)address,
                                                  memory_order_acq_rel, memory_order_acquire))
        count(C_functions_wrapped, 1);
      else if (expected != (Driver)address)
        continue;
      return (void *)wrappers[function][i];
    }
    count(C_functions_missed, 1);
  }
  return address;
}

// ---- how the driver's functions are found ----------------------------------------------------------------------

typedef int (*GetProcAddressV1)(const char *, void **, int, uint64_t);
typedef int (*GetProcAddressV2)(const char *, void **, int, uint64_t, void *);
typedef void *(*Dlsym)(void *, const char *);

static _Atomic(GetProcAddressV1) get_proc_address_v1;
static _Atomic(GetProcAddressV2) get_proc_address_v2;

static void *found(const char *name, void *address, int version);

static int my_get_proc_address_v1(const char *name, void **pfn, int version, uint64_t flags) {
  int result = atomic_load(&get_proc_address_v1)(name, pfn, version, flags);
  if (result == 0 && name && pfn) *pfn = found(name, *pfn, version);
  return result;
}

static int my_get_proc_address_v2(const char *name, void **pfn, int version, uint64_t flags, void *status) {
  int result = atomic_load(&get_proc_address_v2)(name, pfn, version, flags, status);
  if (result == 0 && name && pfn) *pfn = found(name, *pfn, version);
  return result;
}

// Under the plain name a caller of CUDA 12 or later gets the second version.
static void *found(const char *name, void *address, int version) {
  if (!address || strncmp(name, "cu", 2)) return address;
  if (!strcmp(name, "cuGetProcAddress_v2") || (!strcmp(name, "cuGetProcAddress") && version >= 12000)) {
    atomic_store(&get_proc_address_v2, (GetProcAddressV2)address);
    return (void *)my_get_proc_address_v2;
  }
  if (!strcmp(name, "cuGetProcAddress")) {
    atomic_store(&get_proc_address_v1, (GetProcAddressV1)address);
    return (void *)my_get_proc_address_v1;
  }
  return wrapped(name, address);
}

static Dlsym next_dlsym(void) {
  static _Atomic(Dlsym) cached;
  Dlsym next = atomic_load(&cached);
  const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
  for (int i = 0; !next && i < 3; i++) next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  if (!next) abort();
  atomic_store(&cached, next);
  return next;
}

void *dlsym(void *handle, const char *name) {
  // A tail call: RTLD_NEXT is resolved by who the caller is.
  if (strncmp(name, "cu", 2)) return next_dlsym()(handle, name);
  return found(name, next_dlsym()(handle, name), 0);
}

// ---- device time of graph launches -----------------------------------------------------------------------------

#define MAX_EVENTS 32768
static Word events[MAX_EVENTS][2];
static _Atomic int num_events;
static _Atomic int profiling;
static _Thread_local Word pending;  // the first event of the launch under way

static Word event_call(const char *name, Word a, Word b, Word c) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  Driver function = library ? (Driver)next_dlsym()(library, name) : NULL;
  return function ? function(a, b, c, 0, 0, 0) : 1;
}

static Word recorded(Word stream) {
  Word event = 0;
  if ((int)event_call("cuEventCreate", (Word)&event, 0, 0) || (int)event_call("cuEventRecord", event, stream, 0))
    return 0;
  return event;
}

static void before_graph_launch(Word stream) {
  if (atomic_load(&profiling)) pending = recorded(stream);
}

static void after_graph_launch(Word stream) {
  if (!atomic_load(&profiling) || !pending) return;
  Word end = recorded(stream);
  int index = atomic_fetch_add(&num_events, 1);
  if (end && index < MAX_EVENTS) {
    events[index][0] = pending;
    events[index][1] = end;
  } else {
    count(C_events_dropped, 1);
  }
  pending = 0;
}

// ---- for the program that counts -------------------------------------------------------------------------------

int graph_counter_num(void) { return NUM_COUNTERS; }
const char *graph_counter_name(int counter) { return counter_names[counter]; }
uint64_t graph_counter_value(int counter) {
  return atomic_load_explicit(&counters[counter], memory_order_relaxed);
}

// Call it between steps.
void graph_counter_profile(int on) {
  atomic_store(&num_events, 0);
  atomic_store(&profiling, on);
}

// Milliseconds on the device of the graphs launched since profiling began; -1 if the driver refuses. Waits for them.
double graph_counter_device_ms(void) {
  int last = atomic_load(&num_events);
  if (last > MAX_EVENTS) last = MAX_EVENTS;
  double total = 0;
  for (int i = 0; i < last; i++) {
    float ms = 0;
    if (!events[i][1]) continue;
    if ((int)event_call("cuEventSynchronize", events[i][1], 0, 0)) return -1;
    if ((int)event_call("cuEventElapsedTime", (Word)&ms, events[i][0], events[i][1])) return -1;
    total += ms;
    for (int j = 0; j < 2; j++) event_call("cuEventDestroy_v2", events[i][j], 0, 0);
    events[i][0] = events[i][1] = 0;
  }
  atomic_store(&num_events, 0);
  return total;
}
