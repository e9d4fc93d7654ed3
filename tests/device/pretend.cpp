// A pretend accelerator: a PrivateUse1 backend whose "device memory" is host
// memory.  It exists so that CPU tests can see what only a GPU shows: device
// mismatches, device bytes, out of memory, and missing synchronisation.
//
// Work is queued on streams and runs later than its call: when a thread waits
// for it, or before, at a moment drawn by a seed.  The draws respect the order
// in a stream and the waits for events, and nothing else.  With one thread the
// same seed gives the same order.  Tasks run on the thread that makes them run.
//
// Kernels are those of the CPU, over CPU tensors that alias device memory.  The
// meta device gives the shapes of their results at the call.  Where it cannot
// (the result depends on data, or is no tensor, or the operator is not one of
// torch's own), the call synchronises its own stream, and the kernel runs at
// once.  The error of a kernel that ran late is raised by the next
// synchronisation.
//
// Memory holds NaN when it is new, and again when its stream has passed the
// point where it was freed.  Freed blocks are cached for their stream.  Streams
// come from a pool of 32 for each device, as those of CUDA.
//
// It does not pretend these parts of CUDA: the speed of kernels (only whether the device falls behind, and of
// kernels that compute nothing), kernels of one stream beside each other, priorities, the splitting of cached
// blocks, replaying captured work, memory pools of graphs, peer access that
// is off, IPC, and contexts.
//
// This file registers the parts; see state.h, streams.h, maps.h, memory.h,
// backend.h and kernels.h.

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
  m.impl("native_dropout", &dropout);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// Copies see conjugated and negated tensors themselves.  torch would resolve
// them with a copy, and so call this copy again, forever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

void begin_capture_here(int64_t index, bool every_thread) {
  auto device = static_cast<c10::DeviceIndex>(index);
  begin_capture({device, current_stream_ids[device]}, every_thread);
}

TORCH_LIBRARY(pretend_accelerator, m) {
  m.def("begin_capture(int index, bool every_thread) -> ()", &begin_capture_here);
  m.def("end_capture() -> ()", &end_capture);
  m.def("occupy(int index, float milliseconds) -> ()", &occupy);
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

void pretend_seed(uint64_t seed) {
  Lock lock(state().mutex);
  state().random.seed(seed);
}
void pretend_set_slowness(double slowness) {
  Lock lock(state().mutex);
  state().slowness = slowness;
}
void pretend_set_link_speed(double speed) {
  Lock lock(state().mutex);
  state().link_speed = speed;
}
void pretend_work(double milliseconds) { work(milliseconds); }
void pretend_set_memory_limit(int index, int64_t size) {
  Lock lock(state().mutex);
  state().devices[index].limit = size < 0 ? kNoLimit : size_t(size);
}
void pretend_set_pinned_limit(int64_t size) {
  Lock lock(state().mutex);
  state().pinned_limit = size < 0 ? kNoLimit : size_t(size);
}
void pretend_set_registered_limit(int64_t size) {
  Lock lock(state().mutex);
  state().registered_limit = size < 0 ? kNoLimit : size_t(size);
}
void pretend_fail_registrations(int64_t count) {
  Lock lock(state().mutex);
  state().failing_registrations = count;
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
int64_t pretend_registrations() {
  Lock lock(state().mutex);
  return state().registrations;
}
int64_t pretend_registered_bytes() {
  Lock lock(state().mutex);
  return state().registered.current;
}
int64_t pretend_unregistered_in_use() {
  Lock lock(state().mutex);
  return state().unregistered_in_use;
}
int64_t pretend_copied(int kind) {
  Lock lock(state().mutex);
  return state().copied[kind];
}
int64_t pretend_stale_tasks() {
  Lock lock(state().mutex);
  return state().stale_tasks;
}
int64_t pretend_queued_tasks(int index) {
  Lock lock(state().mutex);
  int64_t count = 0;
  for (auto& [turn, queue] : state().busy) {
    if (queue->key.first == index) count += queue->tasks.size();
  }
  return count;
}
void pretend_reset_counters() {
  Lock lock(state().mutex);
  for (auto& count : state().copied) count = 0;
  state().stale_tasks = state().registrations = state().unregistered_in_use = 0;
}
bool pretend_is_capturing(int index) {
  Lock lock(state().mutex);
  return current_queue(static_cast<c10::DeviceIndex>(index)).capturing;
}
int pretend_get_last_error() { return std::exchange(last_error, 0); }
int64_t pretend_forget_unmapped() { return forget_unmapped(); }
void pretend_unregister_all() { unregister_all(); }
bool pretend_watches_maps() { return watches_maps; }
int pretend_register_host(void* data, int64_t size) { return register_host(data, size); }
int pretend_unregister_host(void* data) { return unregister_host(data); }

}  // extern "C"
