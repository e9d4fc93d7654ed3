// The interface that torch requires of a device: generators, hooks, current device, streams, events.

#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {

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

// Contents move in stream order; the old memory is freed at once, as everywhere.
void resize_storage(c10::StorageImpl& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto kept = std::min(size, storage.nbytes());
  auto memory = device_memory()->allocate(size);
  if (kept) {
    Lock lock(state().mutex);
    auto to = find_block(memory.get()), from = find_block(storage.data());
    auto move = [to = memory.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); };
    enqueue(lock, current_queue(current_device), {move, {to, from}});
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(size);
}

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
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};

struct Event {
  MarkPtr mark;
};

MarkPtr mark_of(void* event) { return event ? static_cast<Event*>(event)->mark : nullptr; }

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

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
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    auto index = checked(device.index());
    return stream_on(device_at(index), current_stream_ids[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_on(device_at(checked(device.index())), 0);
  }
  // From a pool, as in CUDA: the 33rd is the first again.
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Lock lock(state().mutex);
    auto index = checked(device.index());
    auto& last = state().devices[index].last_stream;
    last = last % kStreams + 1;
    return stream_on(device_at(index), last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto index = checked(stream.device_index());
    return stream_on(stream.device(), std::exchange(current_stream_ids[index], stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return query(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(key_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(checked(index));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->mark = mark_now(queue_of(key_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_in_stream(key_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return query(mark_of(event)); }
  void synchronizeEvent(void* event) const override { synchronize(mark_of(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    Lock lock(state().mutex);
    auto first = mark_of(from), last = mark_of(to);
    TORCH_CHECK(first && last && is_reached(first) && is_reached(last),
                "pretend: an event was not recorded or is not finished");
    return last->time_ms - first->time_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory()->recordStream(data, stream);
  }
};

}  // namespace
