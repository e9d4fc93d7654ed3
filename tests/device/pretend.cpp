// A pretend accelerator: a PrivateUse1 backend whose "device memory" is host
// memory.  It exists so that CPU tests can see what only a GPU shows: device
// mismatches, exact device bytes, out of memory, and missing synchronisation.
//
// Copies that a GPU would run asynchronously are queued and run only when a
// wait forces them.  Every block is filled with 0xFF (NaN) when it is handed
// out and again when it is given back.  So a missing wait gives a wrong result
// every time, not now and then.
//
// Kernels run at once on the CPU, over CPU tensors that alias device memory.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
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

MarkPtr mark_now(c10::DeviceIndex device, c10::StreamId stream) {
  auto mark = std::make_shared<Mark>(Mark{device, stream});
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

// -------------------------------------------------------------- generators

// torch checks that a generator's device fits the kernel, so this wraps a CPU
// generator, which the fallback hands to the CPU kernel.
struct PretendGenerator final : c10::GeneratorImpl {
  explicit PretendGenerator(c10::DeviceIndex index, at::Generator cpu)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& value) override {
    inner.unsafeGetGeneratorImpl()->set_state(value);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    return new PretendGenerator(device_.index(), inner.clone());
  }
  at::Generator inner;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<PretendGenerator>(checked(index), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return (*all)[checked(index)];
}

at::Generator cpu_generator(const at::Generator& generator) {
  auto* pretend = dynamic_cast<PretendGenerator*>(generator.unsafeGetGeneratorImpl());
  return pretend ? pretend->inner : generator;
}

// ------------------------------------------------------------- hooks, guard

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = checked(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, checked(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    auto block = find_block(data);
    TORCH_CHECK(block && block->device >= 0, "pretend: not a device pointer");
    return device_at(block->device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    drain_current(storage.device().index());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_on(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(std::exchange(current_device, checked(device.index())));
  }
  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    auto index = checked(device.index());
    return stream_on(device_at(index), current_stream_ids[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_on(device_at(checked(device.index())), 0);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Lock lock(state().mutex);
    auto index = checked(device.index());
    return stream_on(device_at(index), ++state().devices[index].last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto index = checked(stream.device_index());
    return stream_on(stream.device(), std::exchange(current_stream_ids[index], stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    return queue_of(stream.device_index(), stream.id()).empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    drain(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    drain_device(checked(index));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->mark = mark_now(stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    if (!mark || mark->done) return;
    bool same = mark->device == stream.device_index() && mark->stream == stream.id();
    if (!same) queue_of(stream.device_index(), stream.id()).push_back({std::nullopt, nullptr, mark});
  }
  bool queryEvent(void* event) const override {
    Lock lock(state().mutex);
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    return !mark || mark->done;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(state().mutex);
    auto mark = event ? static_cast<Event*>(event)->mark : nullptr;
    if (mark && !mark->done) drain(mark->device, mark->stream, mark.get());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    Lock lock(state().mutex);
    auto first = static_cast<Event*>(from)->mark, last = static_cast<Event*>(to)->mark;
    TORCH_CHECK(first && last && first->done && last->done, "pretend: an event has not finished");
    return last->time_ms - first->time_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory()->recordStream(data, stream);
  }
};

// ------------------------------------------------- CPU views of device memory

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

void copy_geometry(const at::Tensor& to, const at::Tensor& from) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(),
                                                  from.storage_offset());
}

// The CPU tensors that stand in for device tensors during one kernel.  Device
// storages and their stand-ins are paired, so that aliasing is kept.
struct StandIns {
  struct Pair {
    c10::Storage device, cpu;
    void* data;
  };
  std::vector<Pair> storages;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // device, cpu

  c10::Storage cpu_storage(const c10::Storage& device) {
    for (auto& pair : storages) {
      if (pair.device.is_alias_of(device)) return pair.cpu;
    }
    auto* data = const_cast<void*>(device.data());
    c10::DataPtr borrowed(data, c10::Device(c10::kCPU));
    c10::Storage cpu(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(borrowed),
                     c10::GetCPUAllocator(), /*resizable=*/true);
    storages.push_back({device, cpu, data});
    return cpu;
  }

  at::Tensor cpu(const at::Tensor& t) {
    if (!on_device(t)) return t;
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        cpu_storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    copy_geometry(result, t);
    result._set_conj(t.is_conj());
    result._set_neg(t.is_neg());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      result.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors.emplace_back(t, result);
    return result;
  }

  // An in-place or out= kernel may have changed the shape, or have moved to a
  // bigger storage, which then is plain CPU memory.
  void write_back() {
    for (auto& [device, cpu] : tensors) {
      bool same = device.sizes() == cpu.sizes() && device.strides() == cpu.strides() &&
          device.storage_offset() == cpu.storage_offset();
      if (same) continue;
      auto* storage = device.storage().unsafeGetStorageImpl();
      if (cpu.storage().data() != device.storage().data()) {
        c10::DeviceGuard guard(device.device());
        at::native::resize_bytes_cpu(storage, cpu.storage().nbytes());
        std::memcpy(storage->mutable_data(), cpu.storage().data(), cpu.storage().nbytes());
      }
      copy_geometry(device, cpu);
    }
  }

  at::Tensor device(const at::Tensor& out, c10::Device target) {
    if (!out.defined()) return out;
    for (auto& [device, cpu] : tensors) {
      if (cpu.is_same(out)) return device;
    }
    for (auto& pair : storages) {
      if (pair.cpu.is_alias_of(out.storage())) return view(pair.device, out);
    }
    return fresh(out, target);
  }

  static at::Tensor view(const c10::Storage& storage, const at::Tensor& out) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(storage),
        c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ADInplaceOrView,
                             c10::DispatchKey::AutogradPrivateUse1}),
        out.dtype());
    copy_geometry(result, out);
    result._set_conj(out.is_conj());
    result._set_neg(out.is_neg());
    return result;
  }

  static at::Tensor fresh(const at::Tensor& out, c10::Device target) {
    auto source = out.is_non_overlapping_and_dense() ? out : out.contiguous();
    auto result = at::empty_strided(source.sizes(), source.strides(),
                                    source.options().device(target).pinned_memory(false));
    if (source.numel()) std::memcpy(result.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    result._set_conj(source.is_conj());
    result._set_neg(source.is_neg());
    return result;
  }
};

// ---------------------------------------------------------------- fallback

// These take CPU arguments beside device ones on CUDA too.
bool may_mix_devices(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index",          "aten::index_put",          "aten::index_put_",
      "aten::_index_put_impl", "aten::_index_put_impl_",  "aten::_unsafe_index",
      "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};
  return names.count(name) > 0;
}

// What one call of the fallback knows about its arguments.
struct Call {
  StandIns stand_ins;
  std::string name;
  bool mix;
  std::optional<c10::Device> target;   // where new outputs go
  std::optional<c10::Device> seen;     // device of the first tensor with a shape

  void note(const at::Tensor& t) {
    if (!t.defined()) return;
    if (on_device(t)) {
      if (!target) target = t.device();
      drain_current(t.device().index());
    } else if (t.dim() == 0 || mix) {
      return;  // CUDA kernels take CPU scalars as well
    }
    if (!seen) seen = t.device();
    bool scalar = t.dim() == 0 && !on_device(t);
    TORCH_CHECK(scalar || *seen == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *seen, " and ", t.device(), "! (in ", name, ")");
  }

  at::Tensor in(const at::Tensor& t) {
    note(t);
    return stand_ins.cpu(t);
  }

  c10::IValue in_value(const c10::IValue& value) {
    if (value.isTensor()) return in(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(in(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional<at::Tensor>(in(*t)) : std::nullopt);
      }
      return list;
    }
    if (value.isGenerator()) return cpu_generator(value.toGenerator());
    if (value.isDevice()) {
      if (value.toDevice().type() == kType) target = device_at(checked(value.toDevice().index()));
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  at::Tensor out(const at::Tensor& t) { return stand_ins.device(t, *target); }

  c10::IValue out_value(const c10::IValue& value) {
    if (value.isTensor()) return out(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(out(t));
      return list;
    }
    return value;
  }
};

bool wants_generator(const c10::Argument& argument) {
  auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  call.name = schema.operator_name().name;
  call.mix = may_mix_devices(call.name);
  auto first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = call.in_value((*stack)[i]);
  }
  if (!call.target) call.target = device_at(current_device);
  for (size_t i = first; i < stack->size(); ++i) {
    if ((*stack)[i].isNone() && wants_generator(schema.arguments()[i - first])) {
      (*stack)[i] = cpu_generator(default_generator(call.target->index()));
    }
  }
  c10::DeviceGuard guard(*call.target);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.stand_ins.write_back();
  first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); ++i) {
    // The batch sizes of a packed sequence live on the CPU, on CUDA as well.
    if (call.name == "aten::_pack_padded_sequence" && i == first + 1) continue;
    (*stack)[i] = call.out_value((*stack)[i]);
  }
}

// ------------------------------------------------------------------ kernels

c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

c10::Device wanted(std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return device_at(device ? checked(device->index()) : current_device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_generic(size, device_memory(), device_keys(),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool> pin) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_strided_generic(size, stride, device_memory(), device_keys(),
                                           c10::dtype_or_default(dtype));
}

// True if one memcpy does it; only then CUDA's copy is asynchronous.
bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  if (from.dtype() != to.dtype() || from.sizes() != to.sizes()) return false;
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) return false;
  if (from.is_contiguous() && to.is_contiguous()) return true;
  return from.strides() == to.strides() && from.is_non_overlapping_and_dense();
}

void queue_copy(const at::Tensor& from, const at::Tensor& to, c10::DeviceIndex index) {
  Copy copy{find_block(to.const_data_ptr()), find_block(from.const_data_ptr()),
            static_cast<char*>(to.mutable_data_ptr()),
            static_cast<const char*>(from.const_data_ptr()), to.nbytes()};
  queue_of(index, current_stream_ids[index]).push_back({std::move(copy), nullptr, nullptr});
}

void count_copy(bool from_device, bool to_device, size_t size) {
  state().copied[from_device && to_device ? 2 : from_device ? 1 : 0] += int64_t(size);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Lock lock(state().mutex);
  count_copy(on_device(from), on_device(to), to.nbytes());
  auto index = (on_device(to) ? to : from).device().index();
  const auto& host = on_device(to) ? from : to;
  bool async = non_blocking && !on_device(host) && is_pinned(host.const_data_ptr()) &&
      is_plain_copy(from, to);
  if (async) {
    queue_copy(from, to, index);
    return to;
  }
  if (on_device(from)) drain_current(from.device().index());
  if (on_device(to)) drain_current(to.device().index());
  StandIns stand_ins;
  stand_ins.cpu(to).copy_(stand_ins.cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& t, c10::Stream stream) {
  device_memory()->recordStream(t.storage().data_ptr(), stream);
}

const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(t.device());
  drain_current(t.device().index());
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size, std::nullopt);
  if (format) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

at::Tensor& set_slice(at::Tensor& t, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                      c10::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kType, "Attempted to set the storage of a tensor on device \"",
              t.device(), "\" to a storage on different device \"", source.device(), "\"");
  c10::DeviceGuard guard(source.device());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  at::native::resize_impl_cpu_(impl, size,
                               stride.data() ? c10::OptionalIntArrayRef(stride) : std::nullopt);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, c10::Storage source) {
  int64_t count = int64_t(source.nbytes() / t.itemsize());
  return set_slice(t, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return set_slice(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& t) {
  c10::DeviceGuard guard(t.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory(), true);
  return set_slice(t, std::move(none), 0, {0}, {});
}

// Lets `parameter.data = tensor` cross between CPU and pretend, as core
// allows it between CPU and CUDA.
bool same_kind_of_tensor(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) {
    return t.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense));
  };
  return dense(a) && dense(b);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  Call call;
  call.name = "aten::convolution";
  call.mix = false;
  auto cpu_input = call.in(input), cpu_weight = call.in(weight);
  auto cpu_bias = bias && bias->defined() ? std::optional<at::Tensor>(call.in(*bias)) : std::nullopt;
  return call.out(at::convolution(cpu_input, cpu_weight, cpu_bias, stride, padding, dilation,
                                  transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Call call;
  call.name = "aten::convolution_backward";
  call.mix = false;
  auto cpu_grad = call.in(grad), cpu_input = call.in(input), cpu_weight = call.in(weight);
  std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(cpu_grad, cpu_input, cpu_weight, bias_size, stride,
                                            padding, dilation, transposed, output_padding, groups, mask);
  return {call.out(a), call.out(b), call.out(c)};
}

void seed_all(int64_t seed) {
  for (int i = 0; i < kDevices; ++i) {
    auto generator = default_generator(static_cast<c10::DeviceIndex>(i));
    generator.set_current_seed(static_cast<uint64_t>(seed));
  }
}

at::Tensor get_rng_state(int64_t index) {
  return default_generator(static_cast<c10::DeviceIndex>(index)).get_state();
}

void set_rng_state(int64_t index, const at::Tensor& value) {
  auto generator = default_generator(static_cast<c10::DeviceIndex>(index));
  generator.set_state(value);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_slice);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("_has_compatible_shallow_copy_type", &same_kind_of_tensor);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY(pretend_accelerator, m) {
  m.def("seed_all(int seed) -> ()", &seed_all);
  m.def("get_rng_state(int index) -> Tensor", &get_rng_state);
  m.def("set_rng_state(int index, Tensor value) -> ()", &set_rng_state);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(kType, device_memory());
  at::setHostAllocator(kType, pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

// ------------------------------------------------- plain functions for ctypes

extern "C" {

void pretend_set_memory_limit(int index, int64_t size) {
  Lock lock(state().mutex);
  state().devices[index].limit = size < 0 ? kNoLimit : size_t(size);
}
void pretend_set_pinned_limit(int64_t size) {
  Lock lock(state().mutex);
  state().pinned_limit = size < 0 ? kNoLimit : size_t(size);
}
int64_t pretend_pinned_bytes() {
  Lock lock(state().mutex);
  return state().pinned.current;
}
int64_t pretend_peak_pinned_bytes() {
  Lock lock(state().mutex);
  return state().pinned.peak;
}
void pretend_reset_peak_pinned() {
  Lock lock(state().mutex);
  state().pinned.reset_peak();
}
int64_t pretend_copied(int kind) {
  Lock lock(state().mutex);
  return state().copied[kind];
}
int64_t pretend_stale_copies() {
  Lock lock(state().mutex);
  return state().stale_copies;
}
int64_t pretend_queued_tasks(int index) {
  Lock lock(state().mutex);
  int64_t count = 0;
  for (auto& entry : state().devices[index].queues) count += int64_t(entry.second.size());
  return count;
}
void pretend_reset_counters() {
  Lock lock(state().mutex);
  for (auto& count : state().copied) count = 0;
  state().stale_copies = 0;
}

// What cudaHostRegister does: pins memory that the caller owns.
int pretend_register_host(void* data, int64_t size) {
  Lock lock(state().mutex);
  bool full = state().pinned.current + size_t(size) > state().pinned_limit;
  if (!data || size <= 0 || full || find_block(data)) return 1;
  auto block = std::make_shared<Block>();
  block->data = static_cast<char*>(data);
  block->size = size_t(size);
  block->foreign = true;
  state().pinned.increase(block->size);
  state().blocks[reinterpret_cast<uintptr_t>(data)] = block;
  return 0;
}

// The caller may unmap the memory next, so queued copies that use it run now.
int pretend_unregister_host(void* data) {
  Lock lock(state().mutex);
  auto block = find_block(data);
  if (!block || !block->foreign || block->data != data) return 1;
  for (int i = 0; i < kDevices; ++i) drain_device(static_cast<c10::DeviceIndex>(i));
  state().blocks.erase(reinterpret_cast<uintptr_t>(data));
  return 0;
}

}  // extern "C"
