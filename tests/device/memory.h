// Device memory, pinned memory and the lazy streams of the pretend accelerator.

#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kNoLimit = size_t{64} << 30;
constexpr size_t kAlignment = 4096;

using c10::CachingAllocator::Stat;

// ------------------------------------------------------------------- state

// A point in a stream's queue that others can wait for.
struct Mark {
  c10::DeviceIndex device;
  c10::StreamId stream;
  bool done = false;
  double time_ms = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

// One allocation, device or pinned host.  Queued copies share ownership, so a
// block that is freed too early is late or poisoned, but never unmapped.
struct Block {
  char* data = nullptr;
  size_t size = 0;
  int device = -1;  // -1: pinned host memory
  c10::StreamId stream = 0;
  std::set<c10::StreamId> used_by;  // from record_stream
  bool dead = false;
  bool foreign = false;  // registered by the user, not ours to free
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

struct Copy {
  BlockPtr to_block, from_block;
  char* to;
  const char* from;
  size_t size;
};

// Exactly one of the three is set.
struct Task {
  std::optional<Copy> copy;
  MarkPtr set, wait;
};

struct FreedBlock {
  BlockPtr block;
  std::vector<MarkPtr> waits;
  bool held;  // record_stream keeps it from being reused
};

struct DeviceState {
  Stat allocated, reserved;
  size_t limit = kNoLimit;
  c10::StreamId last_stream = 0;
  std::map<c10::StreamId, std::deque<Task>> queues;
};

struct State {
  std::recursive_mutex mutex;
  DeviceState devices[kDevices];
  std::map<uintptr_t, BlockPtr> blocks;
  std::vector<FreedBlock> freed;
  Stat pinned;
  size_t pinned_limit = kNoLimit;
  int64_t copied[3] = {0, 0, 0};  // h2d, d2h, d2d
  int64_t stale_copies = 0;
};

// Never destroyed: tensors may be freed while the process exits.
State& state() {
  static State* s = new State();
  return *s;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream_ids[kDevices] = {0, 0};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < kDevices, "pretend: there is no device ",
              int(index), ", only ", kDevices);
  return index < 0 ? current_device : index;
}

c10::Device device_at(int index) {
  return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

// ----------------------------------------------------------------- streams

std::deque<Task>& queue_of(c10::DeviceIndex device, c10::StreamId stream) {
  return state().devices[device].queues[stream];
}

void reap_freed_blocks();

void finish(const MarkPtr& mark) {
  using namespace std::chrono;
  mark->time_ms =
      duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  mark->done = true;
}

// Takes what needs no running off the front of a queue: marks that have been
// reached and waits that are over.  Copies stay, so this forces nothing.
void settle(c10::DeviceIndex device, c10::StreamId stream) {
  auto& queue = queue_of(device, stream);
  while (!queue.empty() && !queue.front().copy) {
    auto task = queue.front();
    if (task.wait) {
      if (!task.wait->done) settle(task.wait->device, task.wait->stream);
      if (!task.wait->done) return;
    } else {
      finish(task.set);
    }
    queue.pop_front();
  }
  reap_freed_blocks();
}

bool is_reached(const MarkPtr& mark) {
  if (mark && !mark->done) settle(mark->device, mark->stream);
  return !mark || mark->done;
}

MarkPtr mark_now(c10::DeviceIndex device, c10::StreamId stream) {
  auto mark = std::make_shared<Mark>(Mark{device, stream});
  settle(device, stream);
  auto& queue = queue_of(device, stream);
  if (queue.empty()) {
    finish(mark);
  } else {
    queue.push_back(Task{std::nullopt, mark, nullptr});
  }
  return mark;
}

void run(const Copy& copy) {
  if (copy.to_block->dead || copy.from_block->dead) {
    ++state().stale_copies;
  }
  std::memmove(copy.to, copy.from, copy.size);
}

// Runs a stream's queue up to `until`, or all of it.
void drain(c10::DeviceIndex device, c10::StreamId stream, const Mark* until = nullptr) {
  Lock lock(state().mutex);
  auto& queue = queue_of(device, stream);
  while (!queue.empty() && !(until && until->done)) {
    Task task = std::move(queue.front());
    queue.pop_front();
    if (task.copy) {
      run(*task.copy);
    } else if (task.wait) {
      // A mark is older than any wait for it, so this cannot go in circles.
      if (!task.wait->done) drain(task.wait->device, task.wait->stream, task.wait.get());
    } else {
      finish(task.set);
      reap_freed_blocks();
    }
  }
}

void drain_current(c10::DeviceIndex device) {
  drain(device, current_stream_ids[device]);
}

void drain_device(c10::DeviceIndex device) {
  Lock lock(state().mutex);
  for (auto& entry : state().devices[device].queues) drain(device, entry.first);
}

// -------------------------------------------------------------- allocation

Block::~Block() {
  if (device < 0) {
    Lock lock(state().mutex);
    state().pinned.decrease(size);
  }
  if (!foreign) {
    std::memset(data, 0xFF, size);
    std::free(data);
  }
}

char* new_memory(size_t size, int fill) {
  size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  TORCH_CHECK(data, "pretend: the machine is out of memory");
  std::memset(data, fill, size);
  return data;
}

BlockPtr find_block(const void* pointer) {
  Lock lock(state().mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = state().blocks.upper_bound(address);
  if (next == state().blocks.begin()) return nullptr;
  auto block = std::prev(next)->second;
  return address < std::prev(next)->first + block->size ? block : nullptr;
}

void retire(const FreedBlock& freed) {
  std::memset(freed.block->data, 0xFF, freed.block->size);
  freed.block->dead = true;
  if (freed.held) state().devices[freed.block->device].reserved.decrease(freed.block->size);
}

bool all_done(const std::vector<MarkPtr>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const MarkPtr& m) { return m->done; });
}

void reap_freed_blocks() {
  auto& freed = state().freed;
  for (size_t i = 0; i < freed.size();) {
    if (all_done(freed[i].waits)) {
      retire(freed[i]);
      freed.erase(freed.begin() + i);
    } else {
      ++i;
    }
  }
}

// Like the CUDA caching allocator: the block may be reused by its own stream
// in queue order, and after what record_stream named has run.  Being reused
// means here that it turns into NaN.
void free_device_block(const BlockPtr& block) {
  auto& device = state().devices[block->device];
  device.allocated.decrease(block->size);
  auto index = static_cast<c10::DeviceIndex>(block->device);
  FreedBlock freed{block, {mark_now(index, block->stream)}, false};
  for (auto stream : block->used_by) {
    freed.waits.push_back(mark_now(index, stream));
    freed.held = freed.held || !freed.waits.back()->done;
  }
  if (!freed.held) device.reserved.decrease(block->size);
  if (all_done(freed.waits)) {
    retire(freed);
  } else {
    state().freed.push_back(std::move(freed));
  }
}

void delete_block(void* context) {
  std::unique_ptr<BlockPtr> block(static_cast<BlockPtr*>(context));
  Lock lock(state().mutex);
  state().blocks.erase(reinterpret_cast<uintptr_t>((*block)->data));
  if ((*block)->device >= 0) free_device_block(*block);
}

c10::DataPtr as_data_ptr(const BlockPtr& block, c10::Device device) {
  state().blocks[reinterpret_cast<uintptr_t>(block->data)] = block;
  return {block->data, new BlockPtr(block), &delete_block, device};
}

// Before giving up CUDA waits for the streams that record_stream named.
void wait_for_held_blocks(c10::DeviceIndex index) {
  auto freed = state().freed;
  for (auto& entry : freed) {
    if (!entry.held || entry.block->device != index) continue;
    for (auto& mark : entry.waits) {
      if (!mark->done) drain(mark->device, mark->stream, mark.get());
    }
  }
}

void check_limit(c10::DeviceIndex index, size_t size) {
  auto& device = state().devices[index];
  auto fits = [&] { return device.reserved.current + size <= device.limit; };
  if (!fits()) wait_for_held_blocks(index);
  TORCH_CHECK_WITH(OutOfMemoryError, fits(), "pretend out of memory. Tried to allocate ",
                   size, " bytes on pretend:", int(index), ", which has a limit of ",
                   device.limit, " bytes and ", device.reserved.current, " in use.");
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    auto index = current_device;
    if (size == 0) return {nullptr, device_at(index)};
    check_limit(index, size);
    auto block = std::make_shared<Block>();
    block->data = new_memory(size, 0xFF);
    block->size = size;
    block->device = index;
    block->stream = current_stream_ids[index];
    state().devices[index].allocated.increase(size);
    state().devices[index].reserved.increase(size);
    return as_data_ptr(block, device_at(index));
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(state().mutex);
    auto block = find_block(data.get());
    if (block && stream.id() != block->stream) block->used_by.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    auto& device = state().devices[checked(index)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.requested_bytes[0] = device.allocated;
    stats.reserved_bytes[0] = stats.active_bytes[0] = device.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    state().devices[checked(index)].allocated.reset_accumulated();
    state().devices[checked(index)].reserved.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    state().devices[checked(index)].allocated.reset_peak();
    state().devices[checked(index)].reserved.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    auto& device = state().devices[checked(index)];
    size_t used = device.reserved.current;
    return {device.limit > used ? device.limit - used : 0, device.limit};
  }
};

// Bytes stay counted until the last queued copy that uses them has run: so
// long the memory really stays locked.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    if (size == 0) return {nullptr, c10::Device(c10::kCPU)};
    TORCH_CHECK(state().pinned.current + size <= state().pinned_limit,
                "pretend: out of pinned host memory. Tried to pin ", size, " bytes");
    auto block = std::make_shared<Block>();
    block->data = new_memory(size, 0xFF);
    block->size = size;
    state().pinned.increase(size);
    return as_data_ptr(block, c10::Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    Lock lock(state().mutex);
    at::HostStats stats;
    stats.allocated_bytes = stats.active_bytes = state().pinned;
    return stats;
  }
  void reset_accumulated_stats() override {
    Lock lock(state().mutex);
    state().pinned.reset_accumulated();
  }
  void reset_peak_stats() override {
    Lock lock(state().mutex);
    state().pinned.reset_peak();
  }
};

// Never destroyed, as the state.
DeviceMemory* device_memory() {
  static auto* memory = new DeviceMemory();
  return memory;
}
PinnedMemory* pinned_memory() {
  static auto* memory = new PinnedMemory();
  return memory;
}

bool is_pinned(const void* pointer) {
  auto block = find_block(pointer);
  return block && block->device < 0;
}

}  // namespace
