// A CUDA driver of a few functions, in which a graph launch takes two milliseconds. For the test of the graph counter.
#include <stdint.h>
#include <string.h>

typedef uintptr_t Word;
static int update_result;
static Word now_ms;
static Word times[64];

int cuGraphInstantiateWithFlags(Word *exec, Word graph, Word flags) { return *exec = graph + flags, 0; }
int cuGraphExecUpdate_v2(Word exec, Word graph, void *info) { return (void)exec, (void)graph, (void)info, update_result; }
int cuGraphLaunch(Word exec, Word stream) { return (void)stream, now_ms += 2, exec == 0; }
int cuGraphLaunch_ptsz(Word exec, Word stream) { return (void)stream, now_ms += 2, exec == 0; }
int cuMemAllocManaged(Word *address, Word bytes, unsigned flags) { return *address = bytes + flags, 0; }
int cuMemcpyHtoDAsync_v2(Word to, Word from, Word bytes, Word stream) {
  return (void)to, (void)from, (void)bytes, (void)stream, 0;
}
int cuMemcpyAsync(Word to, Word from, Word bytes, Word stream) {
  return (void)to, (void)from, (void)bytes, (void)stream, 0;
}
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }

int cuEventCreate(Word **event, unsigned flags) {
  static int next;
  return *event = &times[next++], (int)flags;
}
int cuEventRecord(Word *event, Word stream) { return *event = now_ms, (int)stream; }
int cuEventSynchronize(Word *event) { return event == 0; }
int cuEventElapsedTime(float *ms, Word *from, Word *to) { return *ms = (float)(*to - *from), 0; }
int cuEventDestroy_v2(Word *event) { return event == 0; }

int fail_updates(int result) { return update_result = result; }

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, void *status) {
  (void)version, (void)status;
  *address = 0;
  if (!strcmp(name, "cuGraphInstantiate")) *address = (void *)cuGraphInstantiateWithFlags;
  if (!strcmp(name, "cuGraphExecUpdate")) *address = (void *)cuGraphExecUpdate_v2;
  if (!strcmp(name, "cuGraphLaunch")) *address = flags & 2 ? (void *)cuGraphLaunch_ptsz : (void *)cuGraphLaunch;
  if (!strcmp(name, "cuMemAllocManaged")) *address = (void *)cuMemAllocManaged;
  if (!strcmp(name, "cuMemcpyHtoDAsync")) *address = (void *)cuMemcpyHtoDAsync_v2;
  if (!strcmp(name, "cuMemcpyAsync")) *address = (void *)cuMemcpyAsync;
  if (!strcmp(name, "cuDriverGetVersion")) *address = (void *)cuDriverGetVersion;
  return *address == 0;
}
