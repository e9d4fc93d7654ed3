// State of the pretend accelerator: its blocks of memory, its streams, its counters.

#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr int kStreams = 32;  // of each device, beside the default one
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kNoLimit = size_t{64} << 30;
constexpr size_t kAlignment = 4096;
constexpr int kPoison = 0xFF;  // a NaN in every floating-point type

using c10::CachingAllocator::Stat;
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

// Memory of the machine.  All code that may still touch it holds it, so that a
// mistake gives wrong numbers, and never a crash.
struct Chunk {
  explicit Chunk(size_t wanted) : size(wanted) {
    size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    TORCH_CHECK(data, "pretend: the machine is out of memory");
    std::memset(data, kPoison, size);
  }
  Chunk(const Chunk&) = delete;
  ~Chunk() { std::free(data); }
  char* data;
  size_t size;
};

// One allocation: of a device, or pinned memory of the host.
struct Block {
  std::shared_ptr<Chunk> chunk;  // null: the user's own memory, which was registered
  char* data = nullptr;
  size_t size = 0;
  int device = -1;  // -1: pinned host memory
  c10::StreamId stream = 0;
  std::set<StreamKey> used_by;  // from record_stream
  bool dead = false;            // freed, and its own stream has passed that
  std::shared_ptr<Chunk> old;   // the device's copy of registered memory that was unmapped
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

// A point in a stream's queue that others can wait for.
struct Mark {
  StreamKey stream;
  bool done = false;
  bool captured = false;
  double queued_ms = 0, time_ms = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

// Exactly one of `run`, `set` and `wait` is there.
struct Task {
  std::function<void()> run;
  std::vector<BlockPtr> uses;
  MarkPtr set, wait;
  size_t over_link = 0;  // bytes that it copies between host and device
  double queued_ms = 0;
  double lasts_ms = 0;   // where links have a speed; 0: as long as it takes here
};

// Tasks run in order.  The first one stays here while a thread is running it.
struct Queue {
  StreamKey key;
  std::deque<Task> tasks;
  bool running = false;
  bool capturing = false;
  uint64_t turn = 0;  // its key among the busy ones
  double free_at_ms = 0;  // where links have a speed: when the device was done with its work
};

// Freed, but streams that record_stream named are not done with it.
struct HeldBlock {
  BlockPtr block;
  std::vector<MarkPtr> waits;
};

struct DeviceState {
  Stat allocated;  // bytes of live tensors
  Stat active;     // and of held blocks
  Stat reserved;   // and of cached blocks
  size_t limit = kNoLimit;
  c10::StreamId last_stream = 0;
  std::map<c10::StreamId, Queue> queues;
  std::map<c10::StreamId, std::multimap<size_t, BlockPtr>> cached;
  std::vector<HeldBlock> held;
};

struct Capture {
  std::thread::id thread;
  bool every_thread;  // as capture_error_mode="global"
  bool broken = false;
  std::vector<Queue*> queues;  // where it began, then those that joined
  std::vector<MarkPtr> marks;
};

struct State {
  std::recursive_mutex mutex;
  std::condition_variable_any changed;  // some task has ended
  DeviceState devices[kDevices];
  // The queues that are not empty, in the order in which they became so: a seed's draws must
  // not depend on which streams of the pool a test got.
  std::map<uint64_t, Queue*> busy;
  uint64_t turns = 0;
  std::map<uintptr_t, BlockPtr> blocks;
  std::optional<Capture> capture;
  std::exception_ptr error;  // of a task, until a synchronisation raises it
  std::mt19937_64 random{0};
  double slowness = 2;
  double link_speed = 0;  // bytes per second; 0: as fast as this machine copies
  Stat pinned, registered;
  size_t pinned_limit = kNoLimit, registered_limit = kNoLimit;
  int64_t registrations = 0, failing_registrations = 0, unregistered_in_use = 0;
  int64_t unmapped_registered = 0;
  int64_t copied[3] = {0, 0, 0};  // h2d, d2h, d2d
  int64_t stale_tasks = 0;
};

// Never destroyed: tensors may be freed while the process exits.
State& state() {
  static State* s = new State();
  return *s;
}

// Tasks run while the lock is released, so functions that may run some take the lock
// as an argument, and must be the only holder on their thread.
using Lock = std::unique_lock<std::recursive_mutex>;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream_ids[kDevices] = {0, 0};
thread_local int last_error = 0;  // the last rejected call, as for cudaGetLastError

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < kDevices, "pretend: there is no device ",
              int(index), ", only ", kDevices);
  return index < 0 ? current_device : index;
}

c10::Device device_at(int index) {
  return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

BlockPtr find_block(const void* pointer) {
  Lock lock(state().mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = state().blocks.upper_bound(address);
  if (next == state().blocks.begin()) return nullptr;
  auto block = std::prev(next)->second;
  return address < std::prev(next)->first + block->size ? block : nullptr;
}

}  // namespace
