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
//
// This file registers the parts; see memory.h, backend.h and kernels.h.

#include "backend.h"
#include "kernels.h"
#include "memory.h"

#include <ATen/native/DispatchStub.h>
#include <torch/library.h>

namespace {

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

// Copies see conjugated and negated tensors themselves.  torch would resolve
// them with a copy, and so call this copy again, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
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
  use_cpu_kernels_over_composites();
  return true;
}();

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

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
