// The caching allocator of the devices, and pinned memory.

#pragma once

#include "maps.h"

#include <algorithm>

namespace {

// ----------------------------------------------------------- device memory

Block::~Block() {
  if (device >= 0) return;
  Lock lock(state().mutex);
  state().pinned.decrease(size);
  if (!chunk) {
    state().registered.decrease(size);
  } else {
    std::memset(data, kPoison, size);
  }
}

void give_to_cache(const BlockPtr& block) {
  auto& device = state().devices[block->device];
  device.active.decrease(block->size);
  device.cached[block->stream].emplace(block->chunk->size, block);
  // The same stream may get the memory again at once, as its next work runs later.
  // Until then it holds NaN, for code that still uses it.
  auto poison = [chunk = block->chunk, block] {
    std::memset(chunk->data, kPoison, chunk->size);
    block->dead = true;
  };
  auto& queue = queue_of({static_cast<c10::DeviceIndex>(block->device), block->stream});
  settle(queue);
  if (queue.tasks.empty()) {
    poison();
  } else {
    push(queue, {poison});
  }
}

bool all_reached(const std::vector<MarkPtr>& marks) {
  return std::all_of(marks.begin(), marks.end(), is_reached);
}

void release_held_blocks(c10::DeviceIndex index) {
  auto& held = state().devices[index].held;
  auto over = std::stable_partition(held.begin(), held.end(),
                                    [](auto& each) { return !all_reached(each.waits); });
  std::vector<HeldBlock> released(over, held.end());
  held.erase(over, held.end());
  for (auto& each : released) give_to_cache(each.block);
}

void free_device_block(const BlockPtr& block) {
  auto& device = state().devices[block->device];
  device.allocated.decrease(block->size);
  HeldBlock held{block};
  for (auto key : block->used_by) held.waits.push_back(mark_now(queue_of(key)));
  if (all_reached(held.waits)) {
    give_to_cache(block);
  } else {
    device.held.push_back(std::move(held));
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

// Returns cached memory to the device if its stream has passed the end of its last use.
void release_cached_blocks(c10::DeviceIndex index) {
  auto& device = state().devices[index];
  for (auto& [stream, cached] : device.cached) {
    for (auto it = cached.begin(); it != cached.end();) {
      if (!it->second->dead) {
        ++it;
        continue;
      }
      device.reserved.decrease(it->first);
      it = cached.erase(it);
    }
  }
}

// As cudaFree does, this waits for the device.
void empty_cache(Lock& lock, c10::DeviceIndex index) {
  refuse_in_capture("freeing device memory");
  drain_device(lock, index);
  for (auto& each : std::vector<HeldBlock>(state().devices[index].held)) {
    for (auto& mark : each.waits) drain(lock, queue_of(mark->stream), mark.get());
  }
  release_held_blocks(index);
  drain_device(lock, index);
  release_cached_blocks(index);
}

std::shared_ptr<Chunk> new_chunk(Lock& lock, c10::DeviceIndex index, size_t size) {
  auto& device = state().devices[index];
  if (!current_queue(index).capturing) refuse_in_capture("allocating device memory");
  auto fits = [&] { return size_t(device.reserved.current) + size <= device.limit; };
  if (!fits()) release_cached_blocks(index);
  if (!fits() && !current_queue(index).capturing) empty_cache(lock, index);
  TORCH_CHECK_WITH(OutOfMemoryError, fits(), "pretend out of memory. Tried to allocate ",
                   size, " bytes on pretend:", int(index), ", which has a limit of ",
                   device.limit, " bytes and ", device.reserved.current, " in use.");
  auto chunk = std::make_shared<Chunk>(size);
  device.reserved.increase(size);
  return chunk;
}

// A block is not split, so a cached one serves if it is at most a quarter too large.
std::shared_ptr<Chunk> cached_chunk(c10::DeviceIndex index, size_t size) {
  auto& cached = state().devices[index].cached[current_stream_ids[index]];
  auto found = cached.lower_bound(size);
  if (found == cached.end() || found->first > size + size / 4) return nullptr;
  auto chunk = found->second->chunk;
  cached.erase(found);
  return chunk;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    auto index = current_device;
    if (size == 0) return {nullptr, device_at(index)};
    auto& device = state().devices[index];
    release_held_blocks(index);
    auto block = std::make_shared<Block>();
    block->chunk = cached_chunk(index, size);
    if (!block->chunk) block->chunk = new_chunk(lock, index, size);
    block->data = block->chunk->data;
    block->size = size;
    block->device = index;
    block->stream = current_stream_ids[index];
    device.allocated.increase(size);
    device.active.increase(size);
    return as_data_ptr(block, device_at(index));
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(state().mutex);
    for (int i = 0; i < kDevices; ++i) empty_cache(lock, static_cast<c10::DeviceIndex>(i));
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(state().mutex);
    auto block = find_block(data.get());
    StreamKey key{stream.device_index(), stream.id()};
    if (block && block->device >= 0 && key != StreamKey(block->device, block->stream)) {
      block->used_by.insert(key);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    index = checked(index);
    release_held_blocks(index);
    auto& device = state().devices[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.requested_bytes[0] = device.allocated;
    stats.active_bytes[0] = device.active;
    stats.reserved_bytes[0] = device.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_stat(index, [](Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    each_stat(index, [](Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Lock lock(state().mutex);
    auto& device = state().devices[checked(index)];
    size_t used = device.reserved.current;
    return {device.limit > used ? device.limit - used : 0, device.limit};
  }

 private:
  static void each_stat(c10::DeviceIndex index, void (*change)(Stat&)) {
    Lock lock(state().mutex);
    index = checked(index);
    release_held_blocks(index);
    auto& device = state().devices[index];
    for (auto* stat : {&device.allocated, &device.active, &device.reserved}) change(*stat);
  }
};

// ----------------------------------------------------------- pinned memory

// Bytes stay counted until the last queued copy that uses them has run: so
// long the memory really stays locked.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    if (size == 0) return {nullptr, c10::Device(c10::kCPU)};
    TORCH_CHECK(state().pinned.current + size <= state().pinned_limit,
                "pretend: out of pinned host memory. Tried to pin ", size, " bytes");
    auto chunk = std::make_shared<Chunk>(size);
    state().pinned.increase(size);
    auto block = std::make_shared<Block>();
    block->chunk = chunk;
    block->data = chunk->data;
    block->size = size;
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

// Never destroyed, like the state.
DeviceMemory* device_memory() {
  static auto* memory = new DeviceMemory();
  return memory;
}
PinnedMemory* pinned_memory() {
  static auto* memory = new PinnedMemory();
  return memory;
}

// Address at which the device finds the contents of a block.
void* as_seen(const BlockPtr& block, void* data) {
  if (!block || !block->old) return data;
  return block->old->data + (static_cast<char*>(data) - block->data);
}

bool is_pinned(const void* pointer) {
  auto block = find_block(pointer);
  return block && block->device < 0;
}

// The numbers of CUDA's own errors.
enum { kFine = 0, kInvalidValue = 1, kOutOfMemory = 2, kAlreadyRegistered = 712,
       kNotRegistered = 713, kInCapture = 900 };

bool is_capturing_here() {
  auto& capture = state().capture;
  return capture && (capture->every_thread || capture->thread == std::this_thread::get_id());
}

// A rejected call sets the last error of its thread, as in CUDA: the thread's next kernel launch
// raises it, unless it is read before.
int refused(int code) {
  if (code) last_error = code;
  return code;
}

int pin_in_place(void* data, int64_t size) {
  Lock lock(state().mutex);
  ++state().registrations;
  if (is_capturing_here()) return kInCapture;
  if (!data || size <= 0) return kInvalidValue;
  if (state().failing_registrations > 0) {
    --state().failing_registrations;
    return kOutOfMemory;
  }
  auto next = state().blocks.lower_bound(reinterpret_cast<uintptr_t>(data));
  bool ahead = next != state().blocks.end() &&
      next->first < reinterpret_cast<uintptr_t>(data) + size_t(size);
  if (ahead || find_block(data)) return kAlreadyRegistered;
  if (state().pinned.current + size_t(size) > state().pinned_limit ||
      state().registered.current + size_t(size) > state().registered_limit) {
    return kOutOfMemory;
  }
  state().pinned.increase(size_t(size));
  state().registered.increase(size_t(size));
  auto block = std::make_shared<Block>();
  block->data = static_cast<char*>(data);
  block->size = size_t(size);
  state().blocks[reinterpret_cast<uintptr_t>(data)] = block;
  watch(data, size_t(size));
  return kFine;
}

// CUDA leaves running copies undefined here: they are counted as mistakes, and run now, as the
// caller may unmap the memory next.
int unpin_in_place(void* data) {
  Lock lock(state().mutex);
  if (is_capturing_here()) return kInCapture;
  auto block = find_block(data);
  if (!block || block->chunk || block->device >= 0 || block->data != data) return kNotRegistered;
  bool in_use = block.use_count() > 2;  // ours and that of the table
  if (in_use) ++state().unregistered_in_use;
  for (int i = 0; i < kDevices && in_use; ++i) {
    drain_device(lock, static_cast<c10::DeviceIndex>(i));
  }
  unwatch(data);
  state().blocks.erase(reinterpret_cast<uintptr_t>(data));
  return kFine;
}

// cudaHostRegister and cudaHostUnregister: pin and unpin memory that the caller owns.
int register_host(void* data, int64_t size) { return refused(pin_in_place(data, size)); }
int unregister_host(void* data) { return refused(unpin_in_place(data)); }

// Unregisters leftover memory, so that one test's leak does not fail later tests.
void unregister_all() {
  std::vector<void*> left;
  {
    Lock lock(state().mutex);
    for (auto& [_, block] : state().blocks) {
      if (!block->chunk && block->device < 0) left.push_back(block->data);
    }
  }
  for (void* data : left) unpin_in_place(data);
}

// Treats unmapped memory as if it had been unregistered before.
int64_t forget_unmapped() {
  Lock lock(state().mutex);
  std::erase_if(state().blocks, [](auto& each) { return each.second->old != nullptr; });
  return std::exchange(state().unmapped_registered, 0);
}

}  // namespace
