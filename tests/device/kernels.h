// The kernels: CPU kernels over CPU tensors that alias device memory.

#pragma once

#include "backend.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>

namespace {

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
    if (out._is_zerotensor()) return at::zeros(out.sizes(), out.options().device(target));
    auto source = out.is_non_overlapping_and_dense() ? out : out.contiguous();
    auto result = at::empty_strided(source.sizes(), source.strides(),
                                    source.options().device(target).pinned_memory(false));
    if (source.numel()) {
      std::memcpy(result.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    }
    result._set_conj(source.is_conj());
    result._set_neg(source.is_neg());
    return result;
  }
};

// ---------------------------------------------------------------- fallback

// What one call of the fallback knows about its arguments.
struct Call {
  StandIns stand_ins;
  std::string name;
  std::optional<c10::Device> target;  // where new outputs go
  std::optional<c10::Device> seen;    // device of the first tensor with a shape

  bool packs() const { return name == "aten::_pack_padded_sequence"; }

  // CUDA kernels, too, take CPU scalars, CPU indices and CPU lengths.
  bool may_be_on_cpu(const at::Tensor& t, bool is_index) const {
    return t.dim() == 0 || is_index || (packs() && seen);
  }

  void note(const at::Tensor& t, bool is_index) {
    if (on_device(t)) {
      if (!target) target = t.device();
      drain_current(t.device().index());
    } else if (!t.defined() || may_be_on_cpu(t, is_index)) {
      return;
    }
    if (!seen) seen = t.device();
    TORCH_CHECK(*seen == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *seen, " and ", t.device(), "! (in ", name, ")");
  }

  at::Tensor in(const at::Tensor& t, bool is_index = false) {
    note(t, is_index);
    return stand_ins.cpu(t);
  }

  c10::IValue in_value(const c10::IValue& value) {
    if (value.isTensor()) return in(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(in(t));
      return list;
    }
    if (value.isOptionalTensorList()) {  // only indexing takes these
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional<at::Tensor>(in(*t, true)) : std::nullopt);
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
    if (call.packs() && i == first + 1) continue;
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
  Lock lock(state().mutex);
  Copy copy{find_block(to.const_data_ptr()), find_block(from.const_data_ptr()),
            static_cast<char*>(to.mutable_data_ptr()),
            static_cast<const char*>(from.const_data_ptr()), to.nbytes()};
  queue_of(index, current_stream_ids[index]).push_back({std::move(copy), nullptr, nullptr});
}

void count_copy(bool from_device, bool to_device, size_t size) {
  Lock lock(state().mutex);
  state().copied[from_device && to_device ? 2 : from_device ? 1 : 0] += int64_t(size);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  count_copy(on_device(from), on_device(to), to.nbytes());
  auto index = (on_device(to) ? to : from).device().index();
  const auto& host = on_device(to) ? from : to;
  bool async = non_blocking && !on_device(host) && is_pinned(host.const_data_ptr()) &&
      is_plain_copy(from, to);
  if (async) {
    queue_copy(from, to, index);
    return to;
  }
  // No lock from here on: a tensor's reference count may need the interpreter's lock, and another
  // thread may hold that while it waits for ours.
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
  TORCH_CHECK(source.device() == t.device(), "Attempted to set the storage of a tensor on device ",
              t.device(), " to a storage on different device ", source.device());
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
  auto cpu_input = call.in(input), cpu_weight = call.in(weight);
  std::optional<at::Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = call.in(*bias);
  return call.out(at::convolution(cpu_input, cpu_weight, cpu_bias, stride, padding, dilation,
                                  transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Call call;
  call.name = "aten::convolution_backward";
  auto cpu_grad = call.in(grad), cpu_input = call.in(input), cpu_weight = call.in(weight);
  std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(cpu_grad, cpu_input, cpu_weight, bias_size, stride,
                                            padding, dilation, transposed, output_padding, groups,
                                            mask);
  return {call.out(a), call.out(b), call.out(c)};
}

// Attention then takes the same path as on the CPU.
int64_t attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  StandIns stand_ins;
  auto cpu = [&](const at::Tensor& t) {
    return stand_ins.cpu(t).set_requires_grad(t.requires_grad());
  };
  auto cpu_mask = mask && mask->defined() ? std::optional<at::Tensor>(cpu(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(cpu(query), cpu(key), cpu(value), cpu_mask, dropout, causal, scale,
                               grouped);
}

// torch prefers its own composite kernels to a fallback.  Where the CPU has a
// kernel of its own, such as layer_norm, only that one gives equal numbers.
void use_cpu_kernels_over_composites() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  using Key = c10::DispatchKey;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    bool composite = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
    if (!composite || !op->hasKernelForDispatchKey(Key::CPU) ||
        op->hasKernelForDispatchKey(Key::PrivateUse1)) {
      continue;
    }
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
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

}  // namespace
